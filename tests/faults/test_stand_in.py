"""Nobody waits for a dead replica, nor for one that has left: a real Lighthouse would wait for half a minute."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from quorum_threads import Gate, lighthouse, make_manager, run_replicas
from replica_fleet import ReplicaFleet

from ft_transport.cli.keepers import find_keepers
from manager import Manager
from manager.errors import QuorumTimeoutError
from manager.quorum.members import read_status

pytestmark = [
    pytest.mark.usefixtures("quorum_ready"),
    pytest.mark.skipif(sys.platform != "linux", reason="the keeper needs Linux"),
]

LONG_S = 60.0
HEARTBEAT_MS = 30_000
SOON_S = 10.0
"""Much less than the heartbeat timeout, and much more than the others need."""


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse(heartbeat_timeout_ms=HEARTBEAT_MS) as found:
        yield found


@contextmanager
def training(directory: Path, address: str) -> Iterator[ReplicaFleet]:
    """Three replicas that train."""
    started = ReplicaFleet(directory, address, "--step-s", "0.05", "--timeout-s", "5")
    try:
        for name in "abc":
            started.start(name)
        all_pass(started, 2, "abc")
        yield started
    finally:
        started.close()


@pytest.fixture
def fleet(tmp_path: Path, address: str) -> Iterator[ReplicaFleet]:
    with training(tmp_path, address) as started:
        yield started


def keeper_of(trainer: int) -> int | None:
    """The process id of a process's keeper."""
    return next((each.pid for each in find_keepers() if each.trainer_pid == trainer), None)


def all_pass(fleet: ReplicaFleet, step: int, names: str, timeout_s: float = LONG_S) -> None:
    fleet.wait_for(
        f"{names} to pass step {step}", lambda: all(fleet.newest_step_of(name) > step for name in names), timeout_s
    )


def step(manager: Manager) -> int:
    """Make a step, and return how many replicas took part."""
    manager.start_quorum()
    assert manager.should_commit()
    return manager.num_participants()


def newest_id_of(fleet: ReplicaFleet, name: str) -> str:
    return str([each.fields["replica"] for each in fleet.events if (each.event, each.name) == ("ready", name)][-1])


def check_states(fleet: ReplicaFleet) -> None:
    differing = {step: digests for step, digests in fleet.digests().items() if len(digests) > 1}
    assert not differing


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_death_costs_the_others_no_heartbeat_timeout(fleet: ReplicaFleet, address: str, kind: signal.Signals) -> None:
    dead_id = newest_id_of(fleet, "b")
    victim = fleet.processes.pop("b")
    victim.send_signal(kind)
    victim.wait()
    # Steps that began before the death do not count.
    all_pass(fleet, fleet.newest_step() + 5, "ac", SOON_S)
    status = read_status(address)
    assert status is not None
    assert dead_id in dict(status.silent)
    assert len(status.alive) == 2
    # The restarted process takes the id over, so that nobody waits for the dead one later either.
    fleet.start("b")
    all_pass(fleet, fleet.newest_step() + 20, "abc")
    assert newest_id_of(fleet, "b") == dead_id
    commits = [each.at_s for each in fleet.events if (each.event, each.name) == ("committed", "a")]
    assert max(later - earlier for earlier, later in itertools.pairwise(commits)) < SOON_S
    check_states(fleet)


def test_two_die_at_once_and_one_comes_back_twice(fleet: ReplicaFleet) -> None:
    first_ids = {name: newest_id_of(fleet, name) for name in "abc"}
    fleet.kill("b")
    fleet.kill("c")
    all_pass(fleet, fleet.newest_step() + 5, "a", SOON_S)
    for _ in range(2):
        fleet.start("b")
        all_pass(fleet, fleet.newest_step() + 5, "ab")
        assert newest_id_of(fleet, "b") == first_ids["b"]
        fleet.kill("b")
        all_pass(fleet, fleet.newest_step() + 5, "a", SOON_S)
    # It dies before it has asked for a quorum: the keeper goes on.
    fleet.start("c")
    fleet.wait_for("c to be ready", lambda: newest_id_of(fleet, "c") == first_ids["c"], LONG_S)
    fleet.kill("c")
    all_pass(fleet, fleet.newest_step() + 5, "a", SOON_S)
    fleet.start("b")
    fleet.start("c")
    all_pass(fleet, fleet.newest_step() + 10, "abc")
    check_states(fleet)


def test_a_killed_keeper_is_replaced(fleet: ReplicaFleet) -> None:
    trainer = fleet.processes["b"].pid
    fleet.wait_for("a keeper", lambda: keeper_of(trainer) is not None, LONG_S)
    keeper = keeper_of(trainer)
    assert keeper is not None
    os.kill(keeper, signal.SIGKILL)
    fleet.wait_for("another keeper", lambda: keeper_of(trainer) not in {keeper, None}, LONG_S)
    # It gets its duty right after its start.
    all_pass(fleet, fleet.newest_step() + 5, "abc")
    fleet.kill("b")
    all_pass(fleet, fleet.newest_step() + 5, "ac", SOON_S)


def test_a_replica_that_dies_with_its_keeper_is_missed_by_its_heartbeats(tmp_path: Path) -> None:
    with lighthouse(heartbeat_timeout_ms=1000) as address, training(tmp_path, address) as fleet:
        fleet.wait_for("a keeper", lambda: keeper_of(fleet.processes["b"].pid) is not None, LONG_S)
        keeper = keeper_of(fleet.processes["b"].pid)
        assert keeper is not None
        os.kill(keeper, signal.SIGKILL)
        fleet.kill("b")
        all_pass(fleet, fleet.newest_step() + 5, "ac")
        check_states(fleet)


def test_a_keeper_asks_no_lighthouse_that_was_restarted(tmp_path: Path) -> None:
    """The request would make the new Lighthouse wait for a replica that it had forgotten."""
    with lighthouse(heartbeat_timeout_ms=HEARTBEAT_MS) as address, training(tmp_path, address) as fleet:
        fleet.wait_for("a keeper", lambda: keeper_of(fleet.processes["b"].pid) is not None, LONG_S)
        dead_id, keeper = newest_id_of(fleet, "b"), keeper_of(fleet.processes["b"].pid)
        fleet.kill("b")
        all_pass(fleet, fleet.newest_step() + 3, "ac", SOON_S)
    assert keeper is not None
    with lighthouse(port=urlsplit(address).port or 0, heartbeat_timeout_ms=HEARTBEAT_MS):
        deadline_s = time.monotonic() + SOON_S
        while Path(f"/proc/{keeper}/fd/3").exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        status = read_status(address)
        assert status is not None
        assert dead_id not in {*status.alive, *dict(status.silent)}


def test_a_replica_that_leaves_is_not_waited_for_and_may_come_back(address: str) -> None:
    gate = Gate()

    def stay() -> float:
        manager = make_manager(address, "a", has_part=True)
        try:
            while step(manager) < 2:
                pass
            gate.open("together")
            gate.wait("b has left")
            began_s = time.monotonic()
            assert [step(manager) for _ in range(3)][-1] == 1
            alone_s = time.monotonic() - began_s
            gate.open("alone")
            while step(manager) < 2:
                pass
            return alone_s
        finally:
            manager.shutdown()

    def leave() -> tuple[str, str]:
        manager = make_manager(address, "b", has_part=True)
        while step(manager) < 2:
            pass
        first = manager.replica_id()
        gate.wait("together")
        manager.shutdown()
        gate.open("b has left")
        gate.wait("alone")
        manager = make_manager(address, "b", has_part=True)
        try:
            while step(manager) < 2:
                pass
            return first, manager.replica_id()
        finally:
            manager.shutdown()

    alone_s, (first, second) = run_replicas(stay, leave)
    assert alone_s < SOON_S
    assert first == second


def test_the_quorum_waits_for_others_if_too_few_are_left() -> None:
    gate = Gate()

    def stay(address: str) -> None:
        manager = make_manager(address, "a", min_replica_size=2, has_part=True)
        try:
            manager.start_quorum()
            assert manager.should_commit()
            gate.open("together")
            gate.wait("b has left")
            manager.start_quorum(timeout=timedelta(seconds=1))
            with pytest.raises(QuorumTimeoutError, match="only have 1 participants"):
                manager.wait_quorum()
        finally:
            manager.shutdown()

    def leave(address: str) -> None:
        manager = make_manager(address, "b", min_replica_size=2, has_part=True)
        manager.start_quorum()
        assert manager.should_commit()
        gate.wait("together")
        manager.shutdown()
        gate.open("b has left")

    with lighthouse(min_replicas=2, heartbeat_timeout_ms=HEARTBEAT_MS) as address:
        run_replicas(partial(stay, address), partial(leave, address))
