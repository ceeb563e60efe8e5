"""Which silences count: what the native threads did meanwhile decides."""

from __future__ import annotations

import ctypes
import threading
from datetime import timedelta

import pytest

from manager.quorum.heartbeat import Heartbeat, MissedHeartbeats, Sign

TIMEOUT_S = 5.0
RUNS_PER_S = 40


class World:
    """A clock, and native threads that run as long as the process does."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.num_runs: int | None = 7
        self.missed_heartbeats = MissedHeartbeats(TIMEOUT_S, 0.1, lambda: self.num_runs, lambda: self.now_s)

    def run(self, seconds: float) -> None:
        self.now_s += seconds
        if self.num_runs is not None:
            self.num_runs += round(seconds * RUNS_PER_S)

    def stop(self, seconds: float) -> None:
        self.now_s += seconds

    def beat(self, num_times: int = 4) -> None:
        for _ in range(num_times):
            self.run(1.0)
            self.missed_heartbeats.note(self.missed_heartbeats.now())


@pytest.fixture
def world() -> World:
    world = World()
    world.beat()
    return world


def test_signs_in_short_order_ask_the_kernel_once(world: World) -> None:
    first = world.missed_heartbeats.now()
    world.missed_heartbeats.note(first)
    world.run(0.01 * TIMEOUT_S / 2)
    assert world.missed_heartbeats.now() is first
    world.run(0.01 * TIMEOUT_S)
    assert world.missed_heartbeats.now() == Sign(world.now_s, world.num_runs)


def test_a_gil_that_was_held_for_long_is_no_lapse(world: World) -> None:
    world.run(20.0)
    assert world.missed_heartbeats.count() == 0


def test_a_process_that_was_stopped_for_long_has_lapsed_once(world: World) -> None:
    world.stop(TIMEOUT_S)
    assert world.missed_heartbeats.count() == 1
    assert world.missed_heartbeats.count() == 1
    world.beat()
    assert world.missed_heartbeats.count() == 1


def test_a_short_stop_is_no_lapse(world: World) -> None:
    world.stop(TIMEOUT_S - 0.5)
    assert world.missed_heartbeats.count() == 0


def test_a_stop_while_the_gil_was_held_is_a_lapse(world: World) -> None:
    world.run(8.0)
    world.stop(TIMEOUT_S + 0.5)
    world.run(8.0)
    assert world.missed_heartbeats.count() == 1


def test_a_stop_is_found_by_the_next_sign_of_life_too(world: World) -> None:
    world.stop(TIMEOUT_S)
    world.missed_heartbeats.note(world.missed_heartbeats.now())
    assert world.missed_heartbeats.count() == 1


def test_an_answer_that_comes_after_a_stop_does_not_hide_it(world: World) -> None:
    sent = world.missed_heartbeats.now()
    world.stop(TIMEOUT_S)
    world.missed_heartbeats.note(sent)
    assert world.missed_heartbeats.count() == 1


def test_a_lighthouse_that_was_out_of_reach_has_missed_the_signs(world: World) -> None:
    world.run(2.0)
    world.missed_heartbeats.note_failure()
    world.run(TIMEOUT_S)
    assert world.missed_heartbeats.count() == 1


def test_without_evidence_a_silence_is_a_lapse(world: World) -> None:
    world.num_runs = None
    world.run(TIMEOUT_S)
    assert world.missed_heartbeats.count() == 1


def test_before_the_native_threads_have_been_measured_their_usual_rate_is_assumed() -> None:
    world = World()
    world.run(TIMEOUT_S)
    assert world.missed_heartbeats.count() == 0
    world.stop(TIMEOUT_S)
    assert world.missed_heartbeats.count() == 1


_PR_SET_NAME = 15


class LateName:
    """A thread like those of torchft that names itself only when it is asked to."""

    def __init__(self) -> None:
        self._asked, self._named, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._asked.wait(60)
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"torchft-0", 0, 0, 0)
        self._named.set()
        self._ended.wait(60)

    def name(self) -> None:
        self._asked.set()
        assert self._named.wait(60)

    def shutdown(self) -> None:
        self._ended.set()
        self._thread.join()


def test_threads_that_name_themselves_late_are_counted() -> None:
    started: list[LateName] = []

    def start() -> LateName:
        started.append(LateName())
        return started[0]

    heartbeat = Heartbeat(
        start=start,
        beat=lambda timeout: None,
        name="replica a",
        interval=timedelta(seconds=0.1),
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    try:
        started[0].name()
        assert heartbeat.num_runs() is not None
    finally:
        heartbeat.close()
