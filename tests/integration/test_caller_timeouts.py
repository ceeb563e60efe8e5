"""The timeout that a caller gives bounds the call, whoever is missing: real Lighthouse, real stores, real gloo."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import pytest
import torch
from quorum_threads import lighthouse, make_manager, new_store, run_replicas

from ft_transport.runtime.deadline import Deadline
from manager import Manager, QuorumTimeoutError
from manager.quorum.decision import Decision
from manager.quorum.process_group import QuorumProcessGroup

pytestmark = [pytest.mark.usefixtures("quorum_ready"), pytest.mark.timeout(60)]

BRIEF = timedelta(milliseconds=10)
SLACK_S = 0.5


@pytest.fixture
def ranks(address: str) -> Iterator[list[Manager]]:
    """The two ranks of one replica, alone in its job."""
    store = new_store()
    make = partial(make_manager, address, "replica_0", store=store, has_part=True)
    managers = run_replicas(lambda: make(rank=0), lambda: make(rank=1))
    yield managers
    for manager in managers:
        manager.shutdown()


@contextmanager
def bounded(timeout: timedelta) -> Iterator[None]:
    start_s = time.monotonic()
    yield
    assert time.monotonic() - start_s < timeout.total_seconds() + SLACK_S


def commit_one_step(managers: list[Manager]) -> None:
    def step(manager: Manager) -> None:
        manager.start_quorum()
        assert manager.should_commit()

    run_replicas(*(lambda manager=manager: step(manager) for manager in managers))


@pytest.mark.parametrize("calling", [0, 1])
def test_a_quorum_without_a_rank_ends_in_time(ranks: list[Manager], calling: int) -> None:
    with bounded(BRIEF), pytest.raises(QuorumTimeoutError, match=rf"rank {1 - calling} of this replica"):
        ranks[calling].start_quorum(timeout=BRIEF)


@pytest.mark.parametrize("calling", [0, 1])
def test_a_quorum_in_the_background_without_a_rank_ends_in_time(ranks: list[Manager], calling: int) -> None:
    commit_one_step(ranks)
    with bounded(BRIEF):
        ranks[calling].start_quorum(timeout=BRIEF)
        with pytest.raises(QuorumTimeoutError, match=rf"rank {1 - calling} of this replica"):
            ranks[calling].wait_quorum()


@pytest.mark.parametrize("calling", [0, 1])
def test_a_commit_without_a_rank_ends_in_time(ranks: list[Manager], calling: int) -> None:
    run_replicas(*(manager.start_quorum for manager in ranks))
    with bounded(BRIEF), pytest.raises(QuorumTimeoutError, match=rf"rank {1 - calling} of this replica"):
        ranks[calling].should_commit(timeout=BRIEF)


def test_a_commit_does_not_wait_longer_for_a_quorum_in_the_background(ranks: list[Manager]) -> None:
    commit_one_step(ranks)
    longer = timedelta(seconds=1)
    ranks[0].start_quorum(timeout=longer)
    with (
        bounded(BRIEF),
        pytest.raises(QuorumTimeoutError, match="expected the quorum to be formed within the caller's"),
    ):
        ranks[0].should_commit(timeout=BRIEF)
    with bounded(BRIEF), pytest.raises(QuorumTimeoutError, match="expected the quorum of the previous step"):
        ranks[0].start_quorum(timeout=BRIEF)
    with bounded(longer), pytest.raises(QuorumTimeoutError, match="rank 1 of this replica"):
        ranks[0].wait_quorum()


@contextmanager
def pair() -> Iterator[list[Manager]]:
    with lighthouse(min_replicas=2) as address:
        managers = [make_manager(address, name, min_replica_size=2, has_part=True) for name in "ab"]
        try:
            yield managers
        finally:
            for manager in managers:
                manager.shutdown()


def test_a_quorum_without_another_replica_ends_in_time() -> None:
    with pair() as (first, _), bounded(BRIEF), pytest.raises(QuorumTimeoutError):
        first.start_quorum(timeout=BRIEF)


def test_a_commit_does_not_wait_longer_for_a_collective() -> None:
    with pair() as managers:
        run_replicas(*(manager.start_quorum for manager in managers))
        # The other one never comes.
        managers[0].allreduce(torch.ones(1))
        with bounded(BRIEF):
            assert not managers[0].should_commit(timeout=BRIEF)


def test_process_groups_are_met_within_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quorum was formed, and then a member does not come to the process group."""
    configure = QuorumProcessGroup.configure
    with pair() as (first, second):

        def configure_first(
            self: QuorumProcessGroup, decision: Decision, deadline: Deadline, *, replica_id: str
        ) -> float:
            is_first = replica_id == first.replica_id()
            return configure(self, decision, deadline, replica_id=replica_id) if is_first else 0.0

        monkeypatch.setattr(QuorumProcessGroup, "configure", configure_first)

        def lag() -> bool:
            second.start_quorum()
            return True

        def start() -> bool:
            with bounded(timedelta(seconds=1)):
                first.start_quorum(timeout=timedelta(seconds=1))
            return first.errored() is not None

        assert run_replicas(start, lag) == [True, True]
