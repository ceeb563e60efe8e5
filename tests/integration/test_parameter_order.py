"""States of an optimizer travel by position: a receiver takes over the sender's order of parameters, or refuses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from quorum_threads import beside, loopback_transport, make_manager
from state_equality import exact

from ft_transport import CheckpointStore
from manager import HealFailedError, Manager, RegistryError, StateManager, StateMismatchError
from manager.state.parameter_order import parameter_names
from manager.state.registry import StateRegistry

_TIMEOUT = timedelta(seconds=20)
_TAKEN_OVER = "'optimizer' were in another order"
_ELEMENTWISE = [
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
]

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


def sgd(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def lbfgs(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.01)


def _functions(
    optimizer: torch.optim.Optimizer, model: Model | None
) -> tuple[Callable[[Any], None], Callable[[], dict[str, Any]]]:
    def load(state: dict[str, Any]) -> None:
        optimizer.load_state_dict(state["optimizer"])
        if model is not None:
            model.load_state_dict(state["model"])

    def state_dict() -> dict[str, Any]:
        models = {} if model is None else {"model": model.state_dict()}
        return {**models, "optimizer": optimizer.state_dict()}

    return load, state_dict


class Replica:
    def __init__(
        self,
        manager: StateManager,
        parameters: Names,
        *,
        names: tuple[str, ...] = ("a", "b", "c"),
        has_model: bool = True,
        by_function: bool = False,
        optimizer: Callable[[list[Any]], torch.optim.Optimizer] = sgd,
    ) -> None:
        self.manager = manager
        self.model = Model(*names)
        self.optimizer = optimizer(parameters(self.model))
        if has_model:
            manager.register("model", self.model)
        if by_function:
            load, state_dict = _functions(self.optimizer, None if has_model else self.model)
            manager.register_state_dict_fn("optimizer", load, state_dict)
        else:
            manager.register("optimizer", self.optimizer)

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            step = self.manager.current_step()
            self.manager.start_step(step)
            self.optimizer.step(self.loss)
            self.manager.load_state_dict({"step": step + 1})

    def loss(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(torch.arange(1.0, 4.0))
        loss.backward()
        return loss

    def snapshot(self) -> str:
        self.manager.snapshot(self.manager.current_step()).result(_TIMEOUT.total_seconds())
        return self.manager.metadata()

    def by_name(self) -> dict[str, Any]:
        """Each parameter with its state, whatever their order."""
        named = sorted(self.model.named_parameters())
        return {name: exact([each.detach(), dict(self.optimizer.state.get(each, {}))]) for name, each in named}


@pytest.fixture
def replica() -> Iterator[Callable[..., Replica]]:
    with ExitStack() as managers:

        def make(parameters: Names, *, store: CheckpointStore | None = None, **options: Any) -> Replica:
            manager = Manager(checkpoint_transport=loopback_transport(), timeout=_TIMEOUT, checkpoint_store=store)
            managers.callback(manager.shutdown)
            return Replica(manager, parameters, **options)

        yield make


@pytest.mark.parametrize("way", ["recover", "load"])
def test_a_receiver_takes_over_the_order_of_a_peer(
    replica: Callable[..., Replica], caplog: pytest.LogCaptureFixture, way: str
) -> None:
    peer, ours = replica(named("a", "b", "c")), replica(named("c", "a", "b"))
    peer.train(2)
    ours.train(1)
    parameters = ours.optimizer.param_groups[0]["params"]
    momenta = {name: ours.optimizer.state[each]["momentum_buffer"] for name, each in ours.model.named_parameters()}
    for _ in range(2):
        if way == "recover":
            ours.manager.recover(peer.snapshot())
        else:
            ours.manager.load(deepcopy(peer.manager.replica_state()))
        assert ours.by_name() == peer.by_name()
        assert exact(ours.manager.replica_state()) == exact(peer.manager.replica_state())
        for each in (peer, ours):
            each.train(5)
        assert ours.by_name() == peer.by_name()
    assert ours.optimizer.param_groups[0]["params"] is parameters
    for name, each in ours.model.named_parameters():
        kept = ours.optimizer.state[each]["momentum_buffer"].data_ptr() == momenta[name].data_ptr()
        assert kept or way == "load", "each tensor stays that of its parameter"
    assert caplog.text.count(_TAKEN_OVER) == 1


def test_another_order_in_a_checkpoint_is_taken_over(replica: Callable[..., Replica], tmp_path: Path) -> None:
    first = replica(named("a", "b", "c"), store=CheckpointStore(tmp_path))
    first.train(2)
    first.manager.save(wait=True)
    for order in ("cba", "abc"):
        again = replica(named(*order), store=CheckpointStore(tmp_path, read_only=True))
        assert again.manager.resume() is not None
        assert again.by_name() == first.by_name()
        assert exact(again.manager.replica_state()) == exact(first.manager.replica_state())
        again.train(1)


def groups_of(*groups: str) -> Names:
    return lambda model: [{"params": [model.get_parameter(name) for name in group]} for group in groups]


@pytest.mark.parametrize(
    ("theirs", "ours", "reason"),
    [
        (named("a", "b", "c"), named("a", "d", "b"), "group 0 has model.d only here and model.c only at the sender"),
        (groups_of("ab", "cd"), groups_of("cd", "ab"), "group 0 has model.c, model.d only here and model.a, model.b"),
        (groups_of("ab", "c"), groups_of("bac"), "the optimizer has 1 groups here and 2 at the sender"),
        (named("a", "b"), named("b", "a"), "LBFGS may store an order of parameters in its other attributes"),
    ],
)
def test_an_order_that_cannot_be_taken_over_is_refused_before_a_byte_lands(
    replica: Callable[..., Replica], tmp_path: Path, theirs: Names, ours: Names, reason: str
) -> None:
    options = {"names": ("a", "b", "c", "d"), "optimizer": lbfgs if "LBFGS" in reason else sgd}
    peer = replica(theirs, store=CheckpointStore(tmp_path), **options)
    other = replica(ours, store=CheckpointStore(tmp_path, read_only=True), **options)
    peer.train(2)
    other.train(1)
    before = exact(other.manager.replica_state())
    peer.manager.save(wait=True)
    with pytest.raises(StateMismatchError, match=reason):
        other.manager.recover(peer.snapshot())
    with pytest.raises(RegistryError, match=reason):
        other.manager.resume()
    with pytest.raises(RegistryError, match=reason):
        other.manager.load(peer.manager.replica_state())
    assert exact(other.manager.replica_state()) == before
    other.train(1)


@pytest.mark.parametrize("kind", _ELEMENTWISE)
def test_torchs_optimizers_go_on_alike_in_another_order(replica: Callable[..., Replica], kind: str) -> None:
    optimizer = partial(vars(torch.optim)[kind], lr=0.01)
    peer, ours = replica(named(*"abc"), optimizer=optimizer), replica(named(*"bca"), optimizer=optimizer)
    peer.train(2)
    ours.manager.recover(peer.snapshot())
    assert ours.by_name() == peer.by_name()
    for each in (peer, ours):
        each.train(3)
    assert ours.by_name() == peer.by_name()


def test_a_checkpoint_without_names_is_loaded(
    replica: Callable[..., Replica], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = replica(named("a", "b", "c"), store=CheckpointStore(tmp_path))
    first.train(2)
    with monkeypatch.context() as earlier:
        earlier.setattr("manager.state.parameter_order.parameter_names", lambda _registry: {})
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
    other.manager.recover(address)
    assert exact(other.optimizer.state_dict()) == exact(peer.optimizer.state_dict())
    for name in "abc":
        theirs, ours = (each.optimizer.state[each.model.get_parameter(name)] for each in (peer, other))
        assert exact(dict(ours)) == exact(dict(theirs))
    assert other.optimizer.param_groups[0]["param_names"] == ["a", "b", "c"]
    wrapped = replica(
        lambda model: [(f"module.{name}", each) for name, each in model.named_parameters()], has_model=False
    )
    wrapped.manager.recover(address)
    assert exact(wrapped.optimizer.state_dict()) == exact(peer.optimizer.state_dict())


@pytest.mark.parametrize("has_model", [True, False], ids=["with a registered model", "with a model of the function"])
def test_optimizers_of_functions_take_over_the_order_too(replica: Callable[..., Replica], *, has_model: bool) -> None:
    peer, other = (replica(named(*order), by_function=True, has_model=has_model) for order in ("abc", "cab"))
    for each in (peer, other):
        each.train(2)
    other.manager.recover(peer.snapshot())
    assert other.by_name() == peer.by_name()
    for each in (peer, other):
        each.train(1)
    assert other.by_name() == peer.by_name()


def test_names_that_only_the_sender_has_make_no_difference(replica: Callable[..., Replica]) -> None:
    peer, other = replica(named("a", "b", "c")), Model("a", "b", "c")
    peer.train(2)
    optimizer = sgd([other.a, other.b, other.c])

    def load(state: dict[str, Any]) -> None:
        optimizer.load_state_dict(state)

    def state_dict() -> dict[str, Any]:
        return optimizer.state_dict()

    manager = StateManager(checkpoint_transport=loopback_transport(), timeout=_TIMEOUT)
    try:
        manager.register("model", other)
        manager.register_state_dict_fn("optimizer", load, state_dict)
        manager.recover(peer.snapshot())
        assert exact(optimizer.state_dict()) == exact(peer.optimizer.state_dict())
    finally:
        manager.shutdown()


def test_an_optimizer_of_a_function_that_keeps_its_order_is_a_warning(
    replica: Callable[..., Replica], caplog: pytest.LogCaptureFixture
) -> None:
    peer, other = (replica(named(*order), by_function=True, optimizer=lbfgs) for order in ("abc", "cab"))
    peer.train(1)
    other.manager.recover(peer.snapshot())
    assert "the optimizer that 'optimizer' loads are not in the order of the received state" in caplog.text
    assert "LBFGS may store an order of parameters in its other attributes" in caplog.text


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
    plain = parameter_names(registry)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, torch.nn.Linear))
    assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_parameters())
    assert parameter_names(registry) == plain


def join(address: str, parameters: Names, *, num_steps: int = 5) -> tuple[list[bool], dict[int, Any], Any]:
    """Have a newcomer join a replica that trains.

    Returns:
        Whether the healthy replica committed each step; its parameters and states by step; and the newcomer's last
        step, parameters and states, or its error.
    """

    def replica_of(name: str, parameters: Names) -> Replica:
        each = Replica(make_manager(address, name), parameters, names=("a", "b", "c", "d"))
        each.manager.attach(each.optimizer)
        return each

    def step(each: Replica) -> bool:
        assert isinstance(each.manager, Manager)
        each.manager.start_quorum()
        each.loss()
        each.manager.average_gradients(each.optimizer)
        is_committed = each.manager.should_commit()
        if is_committed:
            each.optimizer.step()
        return is_committed

    def train() -> None:
        committed.append(step(healthy))
        states[healthy.manager.current_step()] = healthy.by_name()

    def newcomer() -> Any:
        each = replica_of("newcomer", parameters)
        try:
            assert all(step(each) for _ in range(num_steps + 1))
            return each.manager.current_step(), each.by_name()
        except HealFailedError as error:
            return error
        finally:
            each.manager.shutdown()

    committed: list[bool] = []
    states: dict[int, Any] = {}
    healthy = replica_of("healthy", named("a", "b", "c"))
    try:
        outcome = beside(train, newcomer)
    finally:
        healthy.manager.shutdown()
    return committed, states, outcome


def test_a_newcomer_takes_over_the_order_and_stays_equal(address: str, caplog: pytest.LogCaptureFixture) -> None:
    committed, states, (step, newcomer) = join(address, named("c", "a", "b"))
    assert all(committed)
    assert newcomer == states[step]
    assert caplog.text.count(_TAKEN_OVER) == 1


def test_a_newcomer_with_other_parameters_is_refused_in_the_quorum(address: str) -> None:
    committed, _, error = join(address, named("b", "a", "d"))
    assert all(committed)
    assert "optimizer (parameters).model.d is in param_groups.0 here and missing there" in str(error)
