"""Replicas under a real Lighthouse that are killed, stopped and started again, and a Lighthouse that is.

What every test here checks at the end: all that any replica ever held under one step number was the same, bit for bit.
"""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from programs import Program
from replica_fleet import Event, ReplicaFleet

pytest.importorskip("torchft")

NAMES = ("a", "b", "c")
LONG_S = 60.0


_SERVE = """
import sys
from torchft.coordination import LighthouseServer
server = LighthouseServer(
    bind=sys.argv[1], min_replicas=1, quorum_tick_ms=20, join_timeout_ms=10_000, heartbeat_timeout_ms=1000
)
print("ready", flush=True)
sys.stdin.read()
"""


class LighthouseProcess:
    """torchft's own server, at one address however often it is started."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._bind = f"127.0.0.1:{probe.getsockname()[1]}"
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"http://{self._bind}"

    def start(self) -> None:
        self._process = Program(
            [sys.executable, "-c", _SERVE, self._bind], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        # A replica takes less time to start, and would not wait as long.
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@pytest.fixture
def lighthouse() -> Iterator[LighthouseProcess]:
    server = LighthouseProcess()
    server.start()
    yield server
    server.kill()


@pytest.fixture
def new_fleet(tmp_path: Path, lighthouse: LighthouseProcess) -> Iterator[Callable[..., ReplicaFleet]]:
    """Starts replicas, waits until all of them train, and compares all that they held in the end."""
    fleets: list[ReplicaFleet] = []

    def start(*arguments: str, names: tuple[str, ...] = NAMES) -> ReplicaFleet:
        fleet = ReplicaFleet(tmp_path, lighthouse.address, "--step-s", "0.05", "--timeout-s", "2", *arguments)
        fleets.append(fleet)
        for name in names:
            fleet.start(name)
        fleet.wait_for("all replicas to train", lambda: min(map(fleet.newest_step_of, names)) >= 3, LONG_S)
        return fleet

    yield start
    for fleet in fleets:
        fleet.close()


def all_pass(fleet: ReplicaFleet, step: int, names: tuple[str, ...] = NAMES) -> None:
    fleet.wait_for(
        f"{names} to pass step {step}", lambda: all(fleet.newest_step_of(name) > step for name in names), LONG_S
    )


def check_history(fleet: ReplicaFleet) -> None:
    assert fleet.newest_step() > 0
    differing = {step: digests for step, digests in fleet.digests().items() if len(digests) > 1}
    assert not differing
    for start, history in fleet.histories.items():
        assert history.committed == sorted(set(history.committed)), f"{start} committed a step twice, or went back"
    # What was committed was never lost: no step number is missing between the first and the last that somebody held.
    steps = fleet.digests()
    assert sorted(steps) == list(range(min(steps), max(steps) + 1))


def test_killed_replicas_come_back_and_heal(new_fleet: Callable[..., ReplicaFleet]) -> None:
    fleet = new_fleet()
    before = fleet.newest_step()
    fleet.kill("b")
    all_pass(fleet, before, ("a", "c"))
    fleet.start("b")
    all_pass(fleet, before + 5)
    events = [event for event in fleet.events if event.name == "b" and event.event == "boundary"]
    healed = next(event for event in events if event.start == events[-1].start)
    assert healed.fields["step"] > before
    # The learning rate of that step, and the data position of its own.
    same_step = [event for event in fleet.events if event.fields.get("step") == healed.fields["step"]]
    rates = {event.fields["lr"] for event in same_step if event.event == "boundary"}
    assert len(rates) == 1
    assert rates != {0.01}
    assert healed.fields["drawn"] == 0
    # Two at once heal from the third.
    before = fleet.newest_step()
    fleet.kill("a")
    fleet.kill("c")
    fleet.start("a")
    fleet.start("c")
    all_pass(fleet, before + 5)
    check_history(fleet)


def test_replicas_go_on_after_one_was_stopped_for_long_and_after_the_lighthouse_was_killed(
    new_fleet: Callable[..., ReplicaFleet], lighthouse: LighthouseProcess
) -> None:
    fleet = new_fleet()
    for name in ("b", "a"):
        before = fleet.newest_step()
        fleet.stop(name)
        others = tuple(other for other in NAMES if other != name)
        all_pass(fleet, before + 5, others)
        before = fleet.newest_step()
        fleet.resume(name)
        all_pass(fleet, before + 5)
    for _ in range(2):
        before = fleet.newest_step()
        lighthouse.kill()
        fleet.run_for(1.0)
        lighthouse.start()
        all_pass(fleet, before + 5)
    check_history(fleet)


def test_a_killed_replica_that_leaves_children_is_missed_at_once(new_fleet: Callable[..., ReplicaFleet]) -> None:
    # The others have to wait for b.
    fleet = new_fleet("--timeout-s", "20", "--leave-children", names=("a",))
    fleet.start("b", "--step-s", "1")

    def is_waited_for() -> bool:
        """Whether a is in a collective that b has not come to yet; the quorum before it needs both of them."""
        reducing = [each.fields["step"] for each in fleet.events if (each.name, each.event) == ("a", "reducing")]
        return len(reducing) > 1 and fleet.newest_step_of("b") == reducing[-1]

    fleet.wait_for("a to wait for b", is_waited_for, LONG_S)
    killed_s = time.monotonic()
    fleet.kill("b")

    def is_alone(event: Event) -> bool:
        is_commit = (event.name, event.event, event.fields.get("participants")) == ("a", "committed", 1)
        return is_commit and event.at_s > killed_s

    fleet.wait_for("a to go on alone", lambda: any(map(is_alone, fleet.events)), LONG_S)
    # It waits for the other's heartbeat to run out, and neither for the collective's timeout nor for the children.
    assert next(filter(is_alone, fleet.events)).at_s - killed_s < 10.0
    check_history(fleet)


def test_a_replica_that_is_killed_during_a_transfer(new_fleet: Callable[..., ReplicaFleet]) -> None:
    """The receiver, and then the source."""
    fleet = new_fleet("--width", "1024", names=("a", "b"))
    before = fleet.newest_step()

    def sources() -> list[str]:
        """The address of the source of each transfer that has begun."""
        return [event.fields["source"] for event in fleet.events if event.event == "receiving"]

    for num_before in range(2):
        fleet.start("c", "--receive-bytes-per-s", "40e6")
        fleet.wait_for("the transfer to begin", lambda num=num_before: len(sources()) > num, LONG_S)  # type: ignore[misc]
        if num_before == 0:
            fleet.kill("c")
    ready = {event.fields["address"]: event.name for event in fleet.events if event.event == "ready"}
    source = ready[sources()[-1]]
    fleet.kill(source)
    fleet.start(source)
    all_pass(fleet, before + 5)
    check_history(fleet)


@pytest.mark.parametrize(
    "num_kills",
    [
        pytest.param(6, id="6", marks=pytest.mark.slow),
        pytest.param(25, id="25", marks=[pytest.mark.long, pytest.mark.timeout(600)]),
    ],
)
def test_chaos(new_fleet: Callable[..., ReplicaFleet], num_kills: int) -> None:
    """Kills at random moments, often before the replica that was killed last is back."""
    fleet = new_fleet()
    chance = random.Random(num_kills)
    for _ in range(num_kills):
        fleet.run_for(chance.uniform(0.0, 1.5))
        # What one that was killed had begun alone is gone with it.
        # Read once: threads note new steps meanwhile.
        newest = {name: fleet.newest_step_of(name) for name in NAMES}
        # One that has the state stays alive: it is nowhere else.
        kept = chance.choice([name for name in NAMES if newest[name] == max(newest.values())])
        others = [name for name in NAMES if name != kept]
        victims = chance.sample(others, chance.choice([1, 1, 2]))
        for name in victims:
            fleet.kill(name)
        for name in victims:
            fleet.start(name)
    all_pass(fleet, fleet.newest_step() + 10)
    check_history(fleet)
