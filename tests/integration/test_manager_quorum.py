"""The fault-tolerant loop, replica by replica: roles, healing, errors, commits. Real Lighthouse, gloo and HTTP."""

from __future__ import annotations

import inspect
import json
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from programs import run
from quorum_threads import LONG_S, TIMEOUT, Gate, lighthouse, loopback_transport, make_manager, new_store, run_replicas
from state_equality import exact
from torch.optim.lr_scheduler import StepLR

from ft_transport import ConfigurationError
from manager import (
    CommitFailedError,
    HealFailedError,
    Manager,
    ManagerError,
    QuorumError,
    StateTornError,
    WorldSizeMode,
)

pytestmark = pytest.mark.usefixtures("quorum_ready")


class Replica:
    """One weight, trained with the gradient that it is given, so that every average can be told by hand."""

    def __init__(self, address: str, name: str, *, weight: float = 0.0, **keywords: Any) -> None:
        self.weight = torch.nn.Parameter(torch.full((4,), weight))
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        self.scheduler = StepLR(self.optimizer, step_size=1, gamma=0.5)
        self.local = {"position": 0}
        self.manager = make_manager(address, name, **keywords)
        self.manager.register_state_dict_fn("weight", self._load_weight, lambda: {"weight": self.weight.detach()})
        self.manager.register("optimizer", self.optimizer)
        self.manager.register("scheduler", self.scheduler)
        self.manager.register_state_dict_fn("position", self.local.update, lambda: dict(self.local), scope="local")
        self.manager.attach(self.optimizer)

    def _load_weight(self, state: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            self.weight.copy_(state["weight"])

    def step(self, gradient: float, *, spoil: Callable[[], object] = lambda: None) -> bool:
        self.manager.start_quorum()
        self.local["position"] += 1
        self.weight.grad = torch.full((4,), gradient)
        self.manager.allreduce(self.weight.grad).wait()
        spoil()
        committed = self.manager.should_commit()
        if committed:
            self.optimizer.step()
            self.scheduler.step()
        return committed

    def commit(self, gradient: float) -> None:
        """Step until it is committed: a machine under load may miss a deadline once."""
        assert any(self.step(gradient) for _ in range(5)), str(self.manager.errored())

    def state(self) -> Any:
        return exact(self.manager.replica_state())

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.shutdown()


def together(address: str, *bodies: Callable[[Callable[..., Replica]], Any]) -> list[Any]:
    """Run one replica per body; each makes it with the function it is given, and it is shut down in the end.

    Nobody leaves before all are done: who leaves breaks up collectives that others have not finished.
    """
    leaving = threading.Barrier(len(bodies))

    def run(index: int, body: Callable[[Callable[..., Replica]], Any]) -> Any:
        made: list[Replica] = []

        def make(**keywords: Any) -> Replica:
            made.append(Replica(address, f"replica_{index}", weight=float(index), **keywords))
            return made[-1]

        try:
            outcome = body(make)
            with suppress(threading.BrokenBarrierError):
                leaving.wait(LONG_S)
            return outcome
        finally:
            leaving.abort()
            for replica in made:
                replica.manager.shutdown()

    return run_replicas(*(lambda index=index, body=body: run(index, body) for index, body in enumerate(bodies)))


def test_gradients_are_averaged_and_the_first_replicas_weights_count() -> None:
    def train(make: Callable[..., Replica], gradient: float) -> tuple[Any, ...]:
        replica = make(min_replica_size=2)
        replica.commit(gradient)
        manager = replica.manager
        return (
            replica.weight.tolist(), manager.current_step(), manager.batches_committed(), manager.num_participants(),
            manager.participating_rank(), manager.is_participating(), manager.errored(),
        )  # fmt: skip

    with lighthouse(min_replicas=2) as address:
        first, second = together(address, lambda make: train(make, 1.0), lambda make: train(make, 3.0))
    assert first == ([-2.0] * 4, 1, 2, 2, 0, True, None)
    assert second == ([-2.0] * 4, 1, 2, 2, 1, True, None)


@pytest.mark.parametrize("is_async", [True, False])
def test_a_late_replica_gets_state_learning_rate_and_counters_but_keeps_its_own(address: str, is_async: bool) -> None:
    gate = Gate()

    def early(make: Callable[..., Replica]) -> Any:
        replica = make(use_async_quorum=is_async)
        for _ in range(3):
            replica.commit(1.0)
        gate.open("three steps")
        while replica.manager.num_participants() < 2:
            replica.commit(1.0)
        return replica.state()

    def late(make: Callable[..., Replica]) -> Any:
        gate.wait("three steps")
        replica = make(use_async_quorum=is_async)
        replica.local["position"] = 70
        replica.commit(1.0)
        assert replica.local == {"position": 71}
        assert replica.manager.current_step() >= 4
        assert replica.optimizer.param_groups[0]["lr"] == 0.5 ** replica.manager.current_step()
        return replica.state()

    states = together(address, early, late)
    assert states[0] == states[1]


def test_spares_contribute_zeros_and_hold_the_state() -> None:
    def train(make: Callable[..., Replica]) -> Any:
        replica = make(min_replica_size=2, world_size_mode=WorldSizeMode.FIXED_WITH_SPARES)
        replica.commit(2.0)
        return replica.weight.tolist(), replica.manager.participating_rank(), replica.manager.batches_committed()

    with lighthouse(min_replicas=3) as address:
        outcomes = together(address, train, train, train)
    assert outcomes == [([-2.0] * 4, 0, 2), ([-2.0] * 4, 1, 2), ([-2.0] * 4, None, 2)]


def test_one_that_saw_an_error_alone_falls_behind_and_heals() -> None:
    def train(make: Callable[..., Replica], index: int) -> Any:
        replica = make(min_replica_size=2)
        replica.commit(1.0)

        def spoil() -> None:
            # The other one's collective has to be over: this one ends the connections.
            gate.open(f"reduced {index}")
            gate.wait(f"reduced {1 - index}")
            if index:
                replica.manager.report_error(RuntimeError("bad gradient"))

        second = replica.step(1.0, spoil=spoil)
        step = replica.manager.current_step()
        while replica.manager.current_step() < 4:
            replica.step(1.0)
        return second, step, replica.state()

    gate = Gate()
    with lighthouse(min_replicas=2) as address:
        first, second = together(address, lambda make: train(make, 0), lambda make: train(make, 1))
    assert first[:2] == (True, 2)
    assert second[:2] == (False, 1)
    assert first[2] == second[2]


def test_an_error_before_the_collective_frees_the_others_at_once() -> None:
    def train(make: Callable[..., Replica], index: int) -> Any:
        replica = make(min_replica_size=2)
        replica.commit(1.0)
        replica.manager.start_quorum()
        replica.manager.wait_quorum()
        if index == 1:
            replica.manager.report_error(RuntimeError("out of memory"))
        gradient = torch.ones(4)
        assert replica.manager.allreduce(gradient).wait() is False
        assert not replica.manager.should_commit()
        error = replica.manager.errored()
        assert error is not None
        assert isinstance(error.original_exception, RuntimeError)
        replica.commit(1.0)
        return replica.state()

    with lighthouse(min_replicas=2) as address:
        first, second = together(address, lambda make: train(make, 0), lambda make: train(make, 1))
    assert first == second


def test_too_few_replicas_do_not_commit_and_give_up_after_max_retries(address: str) -> None:
    with Replica(address, "a", min_replica_size=2, max_retries=1) as replica:
        assert not replica.step(1.0)
        with pytest.raises(CommitFailedError, match=r"2 times in a row.*at least 2 replicas, got 1"):
            replica.step(1.0)
        assert replica.manager.current_step() == 0


def test_a_quorum_that_does_not_come_is_an_error_in_time() -> None:
    with lighthouse(min_replicas=2) as address:
        short = timedelta(seconds=0.5)
        keywords: dict[str, Any] = {"quorum_timeout": short, "timeout": short, "connect_timeout": short}
        with Replica(address, "a", quorum_retries=1, **keywords) as replica:
            with pytest.raises(QuorumError, match=r"got none in 1\.\d s, asked 2 times"):
                replica.manager.start_quorum()
            with pytest.raises(QuorumError):
                replica.manager.wait_quorum()


def test_log_records_of_a_lighthouse_that_ended_keep_no_connection(caplog: pytest.LogCaptureFixture) -> None:
    second = timedelta(seconds=1)
    with lighthouse() as address:
        manager = make_manager(address, "a", quorum_timeout=second, connect_timeout=second, timeout=second)
        manager.register_state_dict_fn("part", lambda part: None, dict)
        manager.start_quorum()
        manager.should_commit()
    manager.start_quorum()
    with pytest.raises(QuorumError):
        manager.wait_quorum()
    manager.shutdown()
    # The check for leftovers runs while `caplog` still has the records.
    assert "asking again" in caplog.text


def test_a_replica_that_cannot_be_healed_stops_with_the_reasons(address: str) -> None:
    gate = Gate()

    def healthy(make: Callable[..., Replica]) -> Any:
        replica = make()
        for _ in range(2):
            replica.step(1.0)
        gate.open("two steps")
        while not gate.is_open("gave up"):
            replica.step(1.0)
        # It goes on without the one that gave up.
        while not replica.step(1.0):
            pass
        return replica.manager.num_participants()

    def broken(make: Callable[..., Replica]) -> Any:
        gate.wait("two steps")
        replica = make()
        # What is loaded is not what was sent.
        replica.manager._state.registry.replace("weight", lambda: {"weight": torch.zeros(4)}, is_stable=False)
        with pytest.raises(HealFailedError, match=r"failed 3 times.*replica_0.*bytes differ in .*weight") as caught:
            replica.manager.start_quorum()
        with suppress(StateTornError):
            replica.optimizer.step()
            pytest.fail("part of a state was trained on")
        replica.manager.shutdown()
        gate.open("gave up")
        return len(caught.value.reasons)

    assert together(address, healthy, broken) == [1, 3]


def test_a_load_that_changes_what_it_takes_can_be_allowed(address: str) -> None:
    from manager import ManagerConfig

    gate = Gate()

    def healthy(make: Callable[..., Replica]) -> Any:
        replica = make()
        replica.step(1.0)
        gate.open("a step")
        while replica.manager.num_participants() < 2:
            replica.step(1.0)

    def lossy(make: Callable[..., Replica]) -> Any:
        gate.wait("a step")
        config = ManagerConfig(
            replica_id="lossy", lighthouse_addr=address, verify_heal=False, timeout=TIMEOUT, quorum_timeout=TIMEOUT
        )
        manager = Manager(config=config, checkpoint_transport=loopback_transport())
        try:
            for key in ("weight", "optimizer", "scheduler"):
                manager.register_state_dict_fn(key, lambda state: None, dict)
            manager.start_quorum()
            manager.allreduce(torch.zeros(4))
            assert manager.should_commit()
        finally:
            manager.shutdown()

    together(address, healthy, lossy)


def test_without_healing_who_is_behind_takes_no_part(address: str) -> None:
    gate = Gate()

    def ahead(make: Callable[..., Replica]) -> Any:
        replica = make(use_async_quorum=False)
        replica.step(1.0)
        gate.open("ahead")
        while not gate.is_open("refused"):
            replica.step(1.0)
            assert replica.manager.num_participants() == 1

    def behind(make: Callable[..., Replica]) -> Any:
        gate.wait("ahead")
        replica = make(use_async_quorum=False)
        replica.manager.start_quorum(allow_heal=False)
        gate.open("refused")
        assert "this replica is behind step" in str(replica.manager.errored())
        assert replica.manager.participating_rank() is None
        gradient = torch.ones(4)
        assert not replica.manager.allreduce(gradient).wait()
        assert not replica.manager.should_commit()
        # The other one would wait for it in a quorum.
        replica.manager.shutdown()
        return replica.weight.tolist()

    assert together(address, ahead, behind) == [None, [1.0] * 4]


def test_integers_are_not_averaged_and_sums_are_not_divided() -> None:
    def train(make: Callable[..., Replica]) -> Any:
        from torch.distributed import ReduceOp

        replica = make(min_replica_size=2)
        replica.manager.start_quorum()
        with pytest.raises(ValueError, match=r"floating-point.*int64"):
            replica.manager.allreduce(torch.ones(2, dtype=torch.int64))
        total = torch.ones(2, dtype=torch.int64)
        future = replica.manager.allreduce(total, reduce_op=ReduceOp.SUM).get_future()
        chained = future.then(lambda done: done.value()[0] + 1)
        # should_commit waits for what nobody waited for.
        assert replica.manager.should_commit()
        return total.tolist(), int(chained.wait()), future.done()

    with lighthouse(min_replicas=2) as address:
        assert together(address, train, train) == [([2, 2], 3, True)] * 2


class _Reconfigurable:
    """Stands in for the process groups of torchft since 2026, after ``get_reconfigure_handle`` and ``reconfigure`` in
    its process_group.py, on one of an earlier version."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._store: Any = None
        self._id = str(id(self))

    def set_rank_info(self, *_info: Any) -> None: ...

    def get_reconfigure_handle(self) -> str:
        self._store = self._store or new_store()
        return json.dumps({"id": self._id, "store": f"127.0.0.1:{self._store.port}"})

    def reconfigure(self, opts: Any) -> Any:
        peers = [json.loads(handle) for handle in opts.handles]
        rank = [peer["id"] for peer in peers].index(self._id)
        self._group.configure(f"{peers[0]['store']}/{opts.uuid}", "replica", rank, len(peers))

        class Done:
            def wait(self, timeout: timedelta) -> bool:
                del timeout
                return True

        return Done()

    def __getattr__(self, name: str) -> Any:
        if name == "configure":
            raise AttributeError(name)
        return getattr(self._group, name)


@pytest.mark.parametrize("is_reconfigurable", [False, True], ids=["as it is", "reconfigurable"])
def test_a_process_group_of_torchft_can_be_passed_in(is_reconfigurable: bool) -> None:
    from torchft.process_group import ProcessGroupGloo

    def train(make: Callable[..., Replica]) -> Any:
        group: Any = ProcessGroupGloo(timeout=TIMEOUT)
        if is_reconfigurable and hasattr(group, "configure"):
            group = _Reconfigurable(group)
        replica = make(pg=group, min_replica_size=2)
        for _ in range(2):
            replica.commit(1.0)
        return replica.state()

    with lighthouse(min_replicas=2) as address:
        first, second = together(address, train, train)
    assert first == second


def test_ranks_of_a_replica_commit_together_and_heal_from_their_like() -> None:
    stores = [new_store() for _ in range(2)]
    gate = Gate()

    def rank_of(address: str, replica: int, rank: int) -> Any:
        keywords: dict[str, Any] = {"rank": rank, "store": stores[replica], "min_replica_size": 2}
        # Each rank has a part of its own.
        with Replica(address, f"replica_{replica}", weight=10.0 * replica + rank, **keywords) as trainer:
            trainer.commit(1.0)
            first = trainer.weight.tolist()

            def spoil() -> None:
                gate.open(f"reduced {replica} {rank}")
                gate.wait(f"reduced {1 - replica} {rank}")
                if (replica, rank) == (1, 1):
                    trainer.manager.report_error(RuntimeError("one rank"))

            committed = trainer.step(1.0, spoil=spoil)
            while trainer.manager.current_step() < 4:
                trainer.step(1.0)
            return first, committed, trainer.state()

    with lighthouse(min_replicas=2) as address:
        outcomes = run_replicas(
            *(
                lambda replica=replica, rank=rank: rank_of(address, replica, rank)
                for replica in range(2)
                for rank in range(2)
            )
        )
    assert [first for first, _, _ in outcomes] == [[-1.0] * 4, [0.0] * 4] * 2
    # The rank that saw no error agrees with the one that did.
    assert [committed for _, committed, _ in outcomes] == [True, True, False, False]
    assert outcomes[0][2] == outcomes[2][2]
    assert outcomes[1][2] == outcomes[3][2]
    assert outcomes[0][2] != outcomes[1][2]


def test_an_address_that_leads_nowhere_is_found_at_the_start(address: str) -> None:
    with pytest.raises(ConfigurationError, match="to reach this transport at its advertised address"):
        make_manager(address, "a", checkpoint_transport=loopback_transport(advertise="127.0.0.2"))


def test_calls_out_of_order_say_what_is_missing(address: str) -> None:
    with Replica(address, "a") as replica:
        assert replica.manager.num_participants() == 0
        assert replica.manager.participating_rank() is None
        for call in (replica.manager.wait_quorum, replica.manager.should_commit):
            with pytest.raises(ManagerError, match="expected a call of start_quorum before this call"):
                call()
    with pytest.raises(ManagerError, match="give Manager min_replica_size"):
        Manager().start_quorum()


def test_methods_and_arguments_are_torchfts() -> None:
    from torchft.manager import Manager as Upstream

    for name in (
        "start_quorum", "wait_quorum", "allreduce", "should_commit", "report_error", "errored", "current_step",
        "batches_committed", "num_participants", "participating_rank", "is_participating", "state_dict",
        "load_state_dict", "allow_state_dict_read", "disallow_state_dict_read", "shutdown", "wrap_future",
        "set_state_dict_fns",
    ):  # fmt: skip
        ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (Manager, Upstream))
        assert list(ours.parameters) == list(theirs.parameters), name
    ours_first = list(inspect.signature(Upstream.register_state_dict_fn).parameters)
    assert list(inspect.signature(Manager.register_state_dict_fn).parameters)[: len(ours_first)] == ours_first
    accepted = {*inspect.signature(Manager.__init__).parameters, *_keywords()}
    assert set(inspect.signature(Upstream.__init__).parameters) <= accepted


def _keywords() -> set[str]:
    from manager.config import TorchftKeywords

    return set(TorchftKeywords.__annotations__)


def test_without_torchft_only_a_quorum_is_missing() -> None:
    program = """
import sys
sys.modules["torchft"] = None
from manager import LighthouseUnavailableError, Manager
from ft_transport import HTTPTransport
with_lock = Manager()
with with_lock.writing():
    pass
try:
    Manager(min_replica_size=1)
except LighthouseUnavailableError as error:
    print(error)
"""
    done = run([sys.executable, "-c", program], timeout=60)
    assert "pip install 'ft-transport[torchft]'" in done.stdout, done.stderr


def test_each_event_is_one_line_with_replica_and_step(address: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "manager")
    with Replica(address, "a") as replica:
        name = replica.manager.replica_id()
        replica.step(1.0)
        replica.step(1.0, spoil=lambda: replica.manager.report_error(RuntimeError("bad")))
    lines = [record.getMessage() for record in caplog.records]
    for pattern in (
        "connected to the Lighthouse",
        "step 0: process group 1-",
        "step 1: committed with 1 participants",
        "step 1: this step will not be committed: RuntimeError: bad",
        "step 1: not committed, failed attempt 1:",
    ):
        matching = [line for line in lines if pattern in line]
        assert len(matching) == 1, (pattern, lines)
        assert f"replica {name}" in matching[0]
        assert "\n" not in matching[0]
