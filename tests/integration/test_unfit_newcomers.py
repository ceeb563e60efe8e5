"""A newcomer that could not load the state is told so by name, and costs the others no step and no snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from quorum_threads import SHORT, TIMEOUT, Gate, lighthouse, make_manager, run_replicas

from ft_transport import HTTPTransport, TransportSettings
from manager import HealFailedError, Manager, ManagerError, QuorumError
from manager.quorum.members import read_status

pytest.importorskip("torchft")

pytestmark = pytest.mark.usefixtures("quorum_ready")


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse() as at:
        yield at


class Trainer:
    def __init__(
        self, address: str, name: str, *, width: int = 4, token: str | None = None, min_replica_size: int = 1
    ) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Linear(width, 1))
        self.bank = torch.nn.Module()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        settings = TransportSettings(host="127.0.0.1", advertise="127.0.0.1", token=token)
        self.transport: HTTPTransport[Any] = HTTPTransport(TIMEOUT, settings=settings)
        self.manager: Manager = make_manager(
            address, name, checkpoint_transport=self.transport, timeout=SHORT, min_replica_size=min_replica_size
        )
        self.manager.register("model", self.model)
        self.manager.register("optimizer", self.optimizer)
        self.manager.attach(self.optimizer)

    def step(self) -> bool:
        self.manager.start_quorum()
        self.optimizer.zero_grad()
        self.model(torch.ones(3, 2)).square().mean().backward()
        for parameter in self.model.parameters():
            self.manager.allreduce(parameter.grad)
        is_committed = self.manager.should_commit()
        if is_committed:
            self.optimizer.step()
        return is_committed


def beside_a_healthy_replica(
    address: str, newcomer: Callable[[], Any], healthy_token: str | None = None
) -> tuple[Any, list[bool], int]:
    """Returns what the newcomer does, which steps were committed meanwhile, and how many snapshots were taken."""
    gate = Gate()

    def train() -> tuple[list[bool], int]:
        trainer = Trainer(address, "healthy", token=healthy_token)
        try:
            committed = [trainer.step(), trainer.step()]
            gate.open("trains")
            while not gate.is_open("over"):
                committed.append(trainer.step())
            return committed, trainer.transport.server.newest_sequence()
        finally:
            trainer.manager.shutdown()

    def join() -> Any:
        gate.wait("trains")
        try:
            return newcomer()
        finally:
            gate.open("over")

    (committed, num_snapshots), outcome = run_replicas(train, join)
    return outcome, committed, num_snapshots


def refused(address: str, **keywords: Any) -> str:
    trainer = Trainer(address, "newcomer", **keywords)
    try:
        with pytest.raises(
            HealFailedError, match="failed once: no further attempt can succeed: the state of healthy:"
        ) as caught:
            trainer.step()
        return str(caught.value)
    finally:
        trainer.manager.shutdown()


def test_other_shapes_are_named_and_cost_the_others_nothing(address: str) -> None:
    told, committed, num_snapshots = beside_a_healthy_replica(address, lambda: refused(address, width=5))
    assert "model.0.weight is float32 [5, 2] here and float32 [4, 2] there" in told
    assert all(committed)
    assert num_snapshots == 0


def test_another_key_is_named_and_costs_the_others_nothing(address: str) -> None:
    def other() -> str:
        trainer = Trainer(address, "newcomer")
        trainer.manager.register_state_dict_fn("more", lambda _: None, dict)
        try:
            with pytest.raises(HealFailedError) as caught:
                trainer.step()
            return str(caught.value)
        finally:
            trainer.manager.shutdown()

    told, committed, num_snapshots = beside_a_healthy_replica(address, other)
    assert "registered only here: ['more'], only there: []" in told
    assert all(committed)
    assert num_snapshots == 0


@pytest.mark.parametrize(("token", "healthy_token"), [(None, "right"), ("guessed", "right"), ("right", None)])
def test_another_token_costs_the_others_nothing(address: str, token: str | None, healthy_token: str | None) -> None:
    def stranger() -> str:
        trainer = Trainer(address, "newcomer", token=token)
        try:
            with pytest.raises(QuorumError, match="expected replicas with the same job token") as caught:
                trainer.step()
            return str(caught.value)
        finally:
            trainer.manager.shutdown()

    told, committed, num_snapshots = beside_a_healthy_replica(address, stranger, healthy_token=healthy_token)
    assert "healthy:" in told
    assert "right" not in told
    assert all(committed)
    assert num_snapshots == 0


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"width": 5, "token": "right"}, "model.0.weight is float32"),
        ({"min_replica_size": 2, "token": "right"}, "same rules"),
        ({}, "same job token"),
    ],
    ids=["another state", "other rules", "no token"],
)
def test_the_lighthouse_hears_nothing_of_a_newcomer_that_is_refused(
    address: str, keywords: dict[str, Any], named: str
) -> None:
    """It waits for whatever it has heard until the heartbeats have run out, and with it all replicas."""

    def newcomer() -> list[str]:
        trainer = Trainer(address, "newcomer", **keywords)
        try:
            with pytest.raises(ManagerError, match=named):
                trainer.step()
            status = read_status(address, 1.0)
            assert status is not None
            return [*status.alive, *(name for name, _ in status.silent)]
        finally:
            trainer.manager.shutdown()

    heard, committed, _ = beside_a_healthy_replica(address, newcomer, "right")
    assert [name.partition(":")[0] for name in heard] == ["healthy"]
    assert all(committed)


def test_a_state_that_has_changed_since_the_first_step_is_looked_at_once_more(address: str) -> None:
    """Neither replica registers anything anew, so neither knows by itself that it looks different now."""
    gate = Gate()

    def change(trainer: Trainer) -> None:
        trainer.model[0].register_buffer("seen", torch.ones(1))

    def train() -> None:
        trainer = Trainer(address, "healthy")
        try:
            trainer.step()
            change(trainer)
            gate.open("changed")
            while not gate.is_open("healed"):
                trainer.step()
        finally:
            trainer.manager.shutdown()

    def join() -> int:
        gate.wait("changed")
        trainer = Trainer(address, "newcomer")
        change(trainer)
        try:
            while not trainer.step():
                pass
            gate.open("healed")
            return trainer.manager.current_step()
        finally:
            gate.open("healed")
            trainer.manager.shutdown()

    _, step = run_replicas(train, join)
    assert step > 1


def _with_another_group(trainer: Trainer) -> None:
    more = torch.nn.Linear(1, 1)
    trainer.model.add_module("more", more)
    trainer.optimizer.add_param_group({"params": list(more.parameters())})


def _with_a_longer_buffer(trainer: Trainer) -> None:
    trainer.bank.seen = torch.zeros(len(trainer.bank.seen) + 1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_with_another_group, "model.more.weight is missing here"),
        (_with_a_longer_buffer, r"bank.seen is float32 \[1\] here and float32 \[2\] there"),
    ],
)
def test_what_a_replica_looks_like_is_known_at_the_next_boundary(
    address: str, change: Callable[[Trainer], None], named: str
) -> None:
    """A newcomer of the old form is refused before it is sent anything, and no step fails for it."""
    gate = Gate()

    def with_bank(trainer: Trainer) -> Trainer:
        trainer.bank = torch.nn.Module()
        trainer.bank.register_buffer("seen", torch.zeros(1))
        trainer.manager.register("bank", trainer.bank)
        return trainer

    def train() -> list[bool]:
        trainer = with_bank(Trainer(address, "healthy"))
        try:
            assert trainer.step()
            change(trainer)
            committed = [trainer.step()]
            gate.open("changed")
            while not gate.is_open("over"):
                committed.append(trainer.step())
            return committed
        finally:
            trainer.manager.shutdown()

    def join() -> None:
        gate.wait("changed")
        trainer = with_bank(Trainer(address, "newcomer"))
        try:
            with pytest.raises(HealFailedError, match=f"failed once: no further attempt can succeed: .*{named}"):
                trainer.step()
        finally:
            gate.open("over")
            trainer.manager.shutdown()

    committed, _ = run_replicas(train, join)
    assert committed is not None
    assert all(committed)


def test_nobody_waits_for_the_process_of_a_newcomer_that_was_refused(address: str) -> None:
    """It is silent from the refusal on, however long its process takes to end."""
    gate = Gate()

    def train() -> None:
        trainer = Trainer(address, "healthy")
        try:
            trainer.step()
            gate.open("trains")
            while not gate.is_open("refused"):
                trainer.step()
            for _ in range(3):
                assert trainer.step()
            gate.open("goes on")
        finally:
            trainer.manager.shutdown()

    def join() -> None:
        gate.wait("trains")
        trainer = Trainer(address, "newcomer", width=5)
        try:
            with pytest.raises(HealFailedError):
                trainer.step()
            gate.open("refused")
            gate.wait("goes on")
        finally:
            gate.open("refused")
            trainer.manager.shutdown()

    run_replicas(train, join)
