"""States of an optimizer belong to positions: a replica whose parameters stand in another order takes none of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from quorum_threads import Gate, lighthouse, make_manager, run_replicas
from state_equality import exact

from ft_transport import CheckpointStore, HTTPTransport, TransportSettings
from manager import HealFailedError, Manager, RegistryError, StateManager, StateMismatchError
from manager.state.registry import StateRegistry

_TIMEOUT = timedelta(seconds=20)
_ORDERS = r"position 1 of group 0 on they are model\.c, model\.b here and model\.b, model\.c there"

Names = Callable[[torch.nn.Module], list[Any]]


def named(*names: str) -> Names:
    return lambda model: [model.get_parameter(name) for name in names]


def named_pairs(*names: str) -> Names:
    return lambda model: [(name, model.get_parameter(name)) for name in names]


class Model(torch.nn.Module):
    """Three parameters of one shape, which nothing but their names tells apart."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, torch.nn.Parameter(torch.ones(3)))

    def forward(self, drawn: torch.Tensor) -> torch.Tensor:
        return (self.a * drawn + self.b * drawn**2 + self.c * drawn**3).sum()


class Replica:
    def __init__(
        self,
        manager: StateManager,
        parameters: Names,
        *,
        names: tuple[str, ...] = ("a", "b", "c"),
        has_model: bool = True,
    ) -> None:
        self.manager = manager
        self.model = Model(*names)
        self.optimizer = torch.optim.SGD(parameters(self.model), lr=0.1, momentum=0.9)
        if has_model:
            manager.register("model", self.model)
        manager.register("optimizer", self.optimizer)

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            step = self.manager.current_step()
            self.manager.start_step(step)
            self.optimizer.zero_grad()
            self.model(torch.arange(1.0, 4.0)).backward()
            self.optimizer.step()
            self.manager.load_state_dict({"step": step + 1})

    def snapshot(self) -> str:
        self.manager.snapshot(self.manager.current_step()).result(_TIMEOUT.total_seconds())
        return self.manager.metadata()


@pytest.fixture
def replica() -> Iterator[Callable[..., Replica]]:
    with ExitStack() as managers:

        def make(parameters: Names, *, store: CheckpointStore | None = None, **options: Any) -> Replica:
            transport: HTTPTransport[Any] = HTTPTransport(
                _TIMEOUT, settings=TransportSettings(host="127.0.0.1", advertise="127.0.0.1")
            )
            manager = Manager(checkpoint_transport=transport, timeout=_TIMEOUT, checkpoint_store=store)
            managers.callback(manager.shutdown)
            return Replica(manager, parameters, **options)

        yield make


def test_the_state_of_a_peer_with_another_order_is_refused_before_a_byte_lands(
    replica: Callable[..., Replica],
) -> None:
    peer, ours = replica(named("a", "b", "c")), replica(named("a", "c", "b"))
    peer.train(2)
    ours.train(1)
    before = exact(ours.manager.replica_state())
    address = peer.snapshot()
    with pytest.raises(StateMismatchError, match=_ORDERS):
        ours.manager.recover(address)
    with pytest.raises(RegistryError, match="in the same order"):
        ours.manager.load(peer.manager.replica_state())
    assert exact(ours.manager.replica_state()) == before
    ours.train(1)


def test_a_checkpoint_of_another_order_is_refused(replica: Callable[..., Replica], tmp_path: Path) -> None:
    first = replica(named("a", "b", "c"), store=CheckpointStore(tmp_path))
    first.train(2)
    first.manager.save(wait=True)
    other = replica(named("c", "b", "a"), store=CheckpointStore(tmp_path, read_only=True))
    with pytest.raises(RegistryError, match="'optimizer' in the same order; from position 0 of group 0 on"):
        other.manager.resume()
    again = replica(named("a", "b", "c"), store=CheckpointStore(tmp_path, read_only=True))
    assert again.manager.resume() is not None
    assert exact(again.manager.replica_state()) == exact(first.manager.replica_state())


def test_a_checkpoint_without_names_is_loaded(
    replica: Callable[..., Replica], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = replica(named("a", "b", "c"), store=CheckpointStore(tmp_path))
    first.train(2)
    with monkeypatch.context() as earlier:
        earlier.setattr("manager.state.registry.StateRegistry.parameter_names", lambda _registry: {})
        first.manager.save(wait=True)
    again = replica(named("a", "b", "c"), store=CheckpointStore(tmp_path, read_only=True))
    assert again.manager.resume() is not None
    assert exact(again.optimizer.state_dict()) == exact(first.optimizer.state_dict())


def test_where_no_module_is_registered_the_optimizers_own_names_are_compared(
    replica: Callable[..., Replica],
) -> None:
    peer = replica(named_pairs("a", "b", "c"), has_model=False)
    peer.train(1)
    address = peer.snapshot()
    other = replica(named_pairs("b", "a", "c"), has_model=False)
    with pytest.raises(StateMismatchError, match="position 0 of group 0 on they are b, a, c here and a, b, c there"):
        other.manager.recover(address)
    wrapped = replica(
        lambda model: [(f"module.{name}", each) for name, each in model.named_parameters()], has_model=False
    )
    wrapped.manager.recover(address)
    assert exact(wrapped.optimizer.state_dict()) == exact(peer.optimizer.state_dict())


def test_modules_in_another_order_are_equal_by_name(replica: Callable[..., Replica]) -> None:
    peer = replica(named("a", "b", "c"))
    ours = replica(named("a", "b", "c"), names=("c", "a", "b"))
    peer.train(2)
    ours.train(1)
    ours.manager.recover(peer.snapshot())
    for each in (peer, ours):
        each.train(1)
    for name, parameter in peer.model.named_parameters():
        assert torch.equal(parameter, ours.model.get_parameter(name))
        assert exact(peer.optimizer.state[parameter]) == exact(ours.optimizer.state[ours.model.get_parameter(name)])


def test_what_wraps_submodules_changes_no_order() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    registry = StateRegistry()
    optimizer = torch.optim.AdamW(model.parameters())
    registry.register_object("model", model)
    registry.register_object("optimizer", optimizer)
    plain = registry.parameter_names()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, torch.nn.Linear))
    assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_parameters())
    assert registry.parameter_names() == plain


@pytest.mark.usefixtures("quorum_ready")
def test_a_newcomer_with_another_order_is_refused_in_the_quorum() -> None:
    pytest.importorskip("torchft")
    gate = Gate()
    with lighthouse() as address:

        def step(manager: Manager, each: Replica) -> bool:
            manager.start_quorum()
            each.optimizer.zero_grad()
            each.model(torch.arange(1.0, 4.0)).backward()
            for parameter in each.model.parameters():
                manager.allreduce(parameter.grad).wait()
            is_committed = manager.should_commit()
            if is_committed:
                each.optimizer.step()
            return is_committed

        def train() -> list[bool]:
            manager = make_manager(address, "healthy")
            try:
                each = Replica(manager, named("a", "b", "c"))
                manager.attach(each.optimizer)
                committed = [step(manager, each)]
                gate.open("trains")
                while not gate.is_open("over"):
                    committed.append(step(manager, each))
                return committed
            finally:
                manager.shutdown()

        def join() -> str:
            gate.wait("trains")
            manager = make_manager(address, "newcomer")
            try:
                each = Replica(manager, named("b", "a", "c"))
                manager.attach(each.optimizer)
                with pytest.raises(HealFailedError) as caught:
                    step(manager, each)
                return str(caught.value)
            finally:
                manager.shutdown()
                gate.open("over")

        results: list[Any] = run_replicas(train, join)
    assert all(results[0])
    assert "optimizer (order of parameters).param_groups.0.params.0 is model.b here and model.a there" in results[1]
