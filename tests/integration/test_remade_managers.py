"""Managers that are made again in the same process wait for nothing of an earlier one, and believe none of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from quorum_threads import LONG_S, lighthouse, make_manager, new_store, run_replicas
from torch.distributed import TCPStore

from ft_transport.coordination.store import StoreChannel
from manager import Manager, QuorumError
from manager.quorum.rank_exchange import RankExchange
from manager.quorum.replica_identity import Incarnation

pytestmark = [pytest.mark.usefixtures("quorum_ready"), pytest.mark.timeout(60)]


_FORGETS_AFTER_MS = 60_000
"""Until then the Lighthouse would have a quorum wait for a manager that is gone."""


class Ranks:
    """The two ranks of one replica, as often as they are made."""

    def __init__(self, address: str, store: TCPStore) -> None:
        self._address = address
        self._store = store
        self.managers: list[Manager] = []

    def make(self, rank: int, **keywords: Any) -> Manager:
        manager = make_manager(self._address, "replica_0", rank=rank, store=self._store, has_part=True, **keywords)
        self.managers.append(manager)
        return manager

    def step(self, manager: Manager, *, fails: bool = False) -> bool:
        manager.start_quorum()
        manager.wait_quorum()
        if fails:
            manager.report_error(RuntimeError("for the test"))
        return manager.should_commit()

    def lead(self, first: Manager, second: Manager, *, fails: bool) -> list[bool]:
        return run_replicas(lambda: self.step(first, fails=fails), lambda: self.step(second))


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with lighthouse(heartbeat_timeout_ms=200) as address:
        ranks = Ranks(address, new_store())
        yield ranks
        for manager in ranks.managers:
            manager.shutdown()
    del ranks._store


def when_rank_1_has_looked(patch: pytest.MonkeyPatch) -> threading.Event:
    """Tells when rank 1 has seen what the store has of rank 0."""
    has_looked = threading.Event()
    get = StoreChannel.get

    def get_and_tell(
        self: StoreChannel, keys: Sequence[str], timeout: timedelta, **keywords: Any
    ) -> list[bytes] | None:
        values = get(self, keys, timeout, **keywords)
        has_looked.set()
        return values

    patch.setattr(StoreChannel, "get", get_and_tell)
    return has_looked


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "abandoned"])
def test_ranks_of_a_remade_replica_decide_together(
    ranks: Ranks, is_closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = run_replicas(lambda: ranks.make(0), lambda: ranks.make(1))
    assert ranks.lead(earlier[0], earlier[1], fails=True) == [False, False]
    if is_closed:
        for manager in earlier:
            manager.shutdown()
    else:
        # Rank 0 has died: nobody tells the store.
        with monkeypatch.context() as patch:
            for told_by in (RankExchange, Incarnation):
                patch.setattr(told_by, "close", lambda self: None)
            earlier[0].shutdown()
    has_looked = when_rank_1_has_looked(monkeypatch)

    def make_later() -> Manager:
        assert has_looked.wait(LONG_S)
        return ranks.make(0)

    first, second = run_replicas(make_later, lambda: ranks.make(1))
    assert first.replica_id() == second.replica_id() != earlier[0].replica_id()
    assert ranks.lead(first, second, fails=False) == [True, True]


def test_a_rank_that_is_remade_alone_says_that_rank_0_was_not(ranks: Ranks) -> None:
    _, alone = run_replicas(lambda: ranks.make(0), lambda: ranks.make(1))
    alone.shutdown()
    with pytest.raises(QuorumError, match=r"rank 1: expected rank 0 of this replica to start .* earlier starts"):
        ranks.make(1, timeout=timedelta(seconds=0.3))


def make(address: str, name: str, value: float) -> tuple[Manager, dict[str, torch.Tensor]]:
    manager = make_manager(address, name)
    state = {"weight": torch.full((2,), value)}
    manager.register_state_dict_fn("part", state.update, lambda: dict(state))
    return manager, state


def step(manager: Manager) -> bool:
    manager.start_quorum()
    value = torch.ones(1)
    manager.allreduce(value).wait()
    return manager.should_commit() and value.item() == 1.0


def test_the_second_of_two_managers_gets_its_quorum_at_once() -> None:
    with lighthouse(heartbeat_timeout_ms=_FORGETS_AFTER_MS) as address:
        ids = []
        for _ in range(3):
            manager, _ = make(address, "replica_0", 1.0)
            assert step(manager)
            assert step(manager)
            ids.append(manager.replica_id())
            manager.shutdown()
    assert len(set(ids)) == 1


def test_managers_that_live_at_the_same_time_have_different_names(address: str) -> None:
    managers = [make(address, "replica_0", 1.0)[0] for _ in range(2)]
    assert managers[0].replica_id() != managers[1].replica_id()
    for manager in managers:
        manager.shutdown()
        # Twice: its name is given back once.
        manager.shutdown()


def test_a_replica_that_comes_back_at_once_heals_in_another_process_group() -> None:
    with lighthouse(min_replicas=2, heartbeat_timeout_ms=_FORGETS_AFTER_MS) as address:
        staying, kept = make(address, "staying", 1.0)
        leaving, _ = make(address, "leaving", 2.0)
        try:
            assert run_replicas(lambda: step(staying), lambda: step(leaving)) == [True, True]
            kept["weight"] = torch.full((2,), 3.0)
            leaving.shutdown()
            leaving, received = make(address, "leaving", 4.0)
            last_steps = [1_000_000]

            def stay() -> None:
                # It may train alone before the other one is back.
                while staying.current_step() < last_steps[-1]:
                    step(staying)

            def come_back() -> None:
                step(leaving)
                last_steps.append(leaving.current_step() + 3)
                while leaving.current_step() < last_steps[-1]:
                    step(leaving)

            run_replicas(stay, come_back)
        finally:
            staying.shutdown()
            leaving.shutdown()
    assert received["weight"].tolist() == [3.0, 3.0]
