"""A signal handler that raises anywhere in a call of the training thread: the next call of its kind is right."""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from interruptions import HandlerError, Interruption, at_every_place
from quorum_threads import loopback_transport

from ft_transport import CheckpointStore, Publisher, StoreSettings, TransportError
from ft_transport.runtime.children import delaying_forks
from ft_transport.telemetry.recorder import current
from manager import ManagerError, StateManager

NUM_SAMPLES = int(os.environ.get("FT_TRANSPORT_INTERRUPTIONS", "8"))
"""By hand, some thousands: every place."""
SECOND = timedelta(seconds=10)
AT_ONCE_S = 4.0

Call = tuple[Callable[[], object], Callable[[], None]]
"""A call that is interrupted, and a check that the next one is right."""


def save(held: ExitStack, root: Path) -> Call:
    store = held.enter_context(CheckpointStore(root, keep=2, settings=StoreSettings(timeout=SECOND)))
    steps = itertools.count(1)

    def save_next() -> None:
        store.save(next(steps), {"weight": torch.ones(3)}, local={"seed": 1})

    def check() -> None:
        step = next(steps)
        store.save(step, {"weight": torch.full((3,), float(step))}).result(SECOND)
        assert store.load(step).state["weight"].tolist() == [step] * 3

    return save_next, check


def load(held: ExitStack, root: Path) -> Call:
    store = held.enter_context(CheckpointStore(root, settings=StoreSettings(timeout=SECOND)))
    store.save(1, {"weight": torch.ones(3)}, wait=True)
    into = {"weight": torch.zeros(3)}

    def check() -> None:
        into["weight"].zero_()
        store.load(into=into)
        assert into["weight"].tolist() == [1.0] * 3

    return lambda: store.load(into=into), check


def publish(held: ExitStack, root: Path) -> Call:
    publisher = held.enter_context(Publisher([], root, policy="best_effort", timeout=SECOND))
    versions = itertools.count(1)

    def publish_next() -> None:
        publisher.publish(next(versions), {"weight": torch.ones(3)})

    def check() -> None:
        assert publisher.publish(next(versions), {"weight": torch.ones(3)}).report(SECOND).is_final

    return publish_next, check


def manager_save(held: ExitStack, root: Path) -> Call:
    store = held.enter_context(CheckpointStore(root, keep=2, settings=StoreSettings(timeout=SECOND)))
    manager = StateManager(checkpoint_transport=loopback_transport(), timeout=SECOND, checkpoint_store=store)
    held.callback(manager.shutdown)
    weight = torch.zeros(3)
    manager.register_state_dict_fn("weight", lambda part: weight.copy_(part["weight"]), lambda: {"weight": weight})
    steps = itertools.count(1)

    def save_next() -> None:
        manager.start_step(next(steps))
        manager.save()

    def check() -> None:
        step = next(steps)
        manager.start_step(step)
        manager.save().result(SECOND)
        assert store.latest() == step

    return save_next, check


def resume(held: ExitStack, root: Path) -> Call:
    _, check_saved = manager_save(held, root)
    check_saved()
    store = held.enter_context(CheckpointStore(root, read_only=True, settings=StoreSettings(timeout=SECOND)))
    manager = StateManager(timeout=SECOND, checkpoint_store=store)
    held.callback(manager.shutdown)
    weight = torch.ones(3)
    manager.register_state_dict_fn("weight", lambda part: weight.copy_(part["weight"]), lambda: {"weight": weight})

    def check() -> None:
        weight.fill_(5.0)
        manager.resume()
        assert weight.tolist() == [0.0] * 3

    return manager.resume, check


@pytest.fixture(params=[save, load, publish, resume])
def call(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Call]:
    before = _descriptors()
    with ExitStack() as held:
        yield request.param(held, tmp_path)
    gc.collect()
    held_memory = [target for _, target in _descriptors() - before if "memfd" in target]
    assert not held_memory, "of snapshots that an interrupted call has dropped"
    # Nobody closes the number that a handler takes from ``os.open`` before it is stored.
    for descriptor, target in _descriptors() - before:
        if target.startswith(str(tmp_path)):
            os.close(descriptor)


def _descriptors() -> set[tuple[int, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that listed the folder
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return found


def _num_places(call: Callable[[], object]) -> int:
    with Interruption(1 << 40) as interruption:
        call()
    return interruption.num_passed


@pytest.mark.timeout(60 if NUM_SAMPLES < 100 else 3600)
def test_the_next_one_is_right(call: Call) -> None:
    interrupted, check = call

    def check_all() -> None:
        assert current() is None
        check()

    interrupted()
    check_all()
    every = max(1, _num_places(interrupted) // NUM_SAMPLES)
    # What a handler raises while the ranks agree is one rank's failure, and all of them raise that.
    at_every_place(
        interrupted, check_all, at_least=50, every=every, errors=(HandlerError, TransportError, ManagerError)
    )


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_an_interrupted_section_delays_no_later_fork() -> None:
    def enter() -> None:
        with delaying_forks():
            pass

    def check() -> None:
        begin = time.monotonic()
        child = os.fork()
        if not child:
            os._exit(0)
        took = time.monotonic() - begin
        os.waitpid(child, 0)
        assert took < AT_ONCE_S

    at_every_place(enter, check, at_least=10)
