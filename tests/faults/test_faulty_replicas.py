"""A replica that spoils every step by errors of its own leaves after a few, and the others train on without it."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from quorum_threads import Gate, lighthouse, make_manager, run_replicas

from manager import CommitFailedError, Manager, ReplicaFaultError
from manager.collectives.gloo import GlooProcessGroup

pytestmark = pytest.mark.usefixtures("quorum_ready")

NUM_HEALTHY = 2
SPOILT_FROM = 3
WITHIN_S = 20.0
"""The others commit again: heartbeats run out after one second here."""
CONNECT_TIMEOUT = timedelta(seconds=5)
"""The most that it costs the others if one aborts while they connect: gloo lets one of them wait for another."""

Spoil = Callable[[Manager], None]


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse(min_replicas=NUM_HEALTHY) as at:
        yield at


def _step(manager: Manager, tensor: torch.Tensor, spoil: Spoil | None = None) -> bool:
    manager.start_quorum()
    if spoil is not None:
        spoil(manager)
    manager.allreduce(tensor).wait()
    return manager.should_commit()


def _manager(address: str, name: str) -> Manager:
    manager = make_manager(address, name, min_replica_size=NUM_HEALTHY, connect_timeout=CONNECT_TIMEOUT)
    manager.register("model", torch.nn.Linear(2, 2))
    return manager


def _train_beside(address: str, faulty: Callable[[Manager], None]) -> tuple[list[int], float]:
    """Train two replicas beside a third that does what ``faulty`` does.

    Returns:
        How many steps of each healthy one were not committed, and the longest time between two commits.
    """
    gate = Gate()
    last_steps: list[int] = []
    all_there = threading.Barrier(NUM_HEALTHY + 1)

    def healthy(name: str) -> Callable[[], tuple[int, float]]:
        def run() -> tuple[int, float]:
            manager = _manager(address, name)
            num_refused, longest_s, num_alone = 0, 0.0, 0
            try:
                all_there.wait(WITHIN_S)
                committed_s = time.monotonic()
                while manager.current_step() < min(last_steps, default=math.inf):
                    if _step(manager, torch.ones(8)):
                        longest_s = max(longest_s, time.monotonic() - committed_s)
                        committed_s = time.monotonic()
                        num_alone += gate.is_open("over") and manager.num_participants() == NUM_HEALTHY
                        if num_alone == 5:
                            # The other one counts on its own, and has begun at most one step more.
                            last_steps.append(manager.current_step() + 2)
                    else:
                        num_refused += 1
                    assert time.monotonic() - committed_s < WITHIN_S, "nothing is committed any more"
                return num_refused, longest_s
            finally:
                manager.shutdown()

        return run

    def third() -> tuple[int, float]:
        manager = _manager(address, "faulty")
        try:
            all_there.wait(WITHIN_S)
            while manager.current_step() < SPOILT_FROM:
                _step(manager, torch.ones(8))
            faulty(manager)
            return 0, 0.0
        finally:
            gate.open("over")
            manager.shutdown()

    outcomes = run_replicas(third, *(healthy(f"healthy {number}") for number in range(NUM_HEALTHY)))[1:]
    return [num_refused for num_refused, _ in outcomes], max(longest_s for _, longest_s in outcomes)


def _until_it_leaves(spoil: Spoil) -> tuple[Callable[[Manager], None], list[str]]:
    told: list[str] = []

    def spoil_all(manager: Manager) -> None:
        while True:
            _step(manager, torch.ones(8), spoil)

    def run(manager: Manager) -> None:
        with pytest.raises(ReplicaFaultError) as caught:
            spoil_all(manager)
        assert isinstance(caught.value, CommitFailedError)
        told.append(str(caught.value))

    return run, told


def test_one_whose_own_code_fails_at_every_step_leaves_with_its_errors(address: str) -> None:
    faulty, told = _until_it_leaves(lambda manager: manager.report_error(OSError("the data loader found no file")))
    num_refused, longest_s = _train_beside(address, faulty)
    assert told[0].count("OSError: the data loader found no file") == 3
    assert "end this process, correct the cause, and start the process again" in told[0]
    # It may still have been the one that healed at the first steps.
    assert max(num_refused) <= 4
    assert longest_s < WITHIN_S


def test_one_that_has_no_descriptors_for_a_process_group_leaves_and_stalls_nobody(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = GlooProcessGroup.check_descriptors
    exhausted: list[int] = []

    def checked(world_size: int) -> None:
        if threading.get_ident() in exhausted:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        check(world_size)

    monkeypatch.setattr(GlooProcessGroup, "check_descriptors", staticmethod(checked))

    def spoil(manager: Manager) -> None:
        # The quorum is formed on this thread after a step that failed, and on its own one before.
        loop: Any = manager._loop
        exhausted[:] = [threading.get_ident(), loop._executor.submit(threading.get_ident).result(WITHIN_S)]
        loop.membership.process_group.abort()

    faulty, told = _until_it_leaves(spoil)
    _, longest_s = _train_beside(address, faulty)
    assert told[0].count("Too many open files") == 3
    assert longest_s < WITHIN_S


def test_failures_that_come_from_others_make_nobody_leave(address: str) -> None:
    """What a failed future or collective reports may be a peer's fault."""

    def faulty(manager: Manager) -> None:
        for _ in range(5):
            failed: torch.futures.Future[int] = torch.futures.Future()
            failed.set_exception(RuntimeError("a collective of a library"))
            assert not _step(manager, torch.ones(8), lambda own, failed=failed: own.wrap_future(failed, 0).wait())
        for error in (TimeoutError("slow"), RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer")):
            for _ in range(3):
                assert not _step(manager, torch.ones(8), lambda own, error=error: own.report_error(error))

    _train_beside(address, faulty)
