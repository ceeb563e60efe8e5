"""What a loop forgets to register, or sets on one replica alone, is refused or found by name before replicas differ."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from quorum_threads import LONG_S, make_manager, run_replicas
from quorum_threads import Trainer as BaseTrainer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR, StepLR

from manager import HyperparametersDivergedError, Manager, RegistryError

pytestmark = pytest.mark.usefixtures("quorum_ready")

NUM_STEPS = 10


# ------------------------------------------------------------------------------------- refused by the first quorum


class Parts:
    """A model, an optimizer of it, and a manager that nothing is registered with yet."""

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.kept: list[object] = []

    def register(self, **others: Any) -> None:
        for key, value in {"model": self.model, "optimizer": self.optimizer, **others}.items():
            self.manager.register(key, value)
        self.manager.attach(self.optimizer)


@pytest.fixture
def parts(address: str) -> Iterator[Parts]:
    manager = make_manager(address, "replica_0")
    yield Parts(manager)
    manager.shutdown()


def _scheduler(parts: Parts) -> None:
    parts.kept.append(CosineAnnealingLR(parts.optimizer, 100))
    parts.register()


def _schedulers_of_a_registered_optimizer(parts: Parts) -> None:
    first, second = LinearLR(parts.optimizer), StepLR(parts.optimizer, 3)
    parts.kept.append(SequentialLR(parts.optimizer, [first, second], milestones=[5]))
    parts.manager.register("model", parts.model)
    parts.manager.register("optimizer", parts.optimizer)


def _optimizer(parts: Parts) -> None:
    parts.manager.register("model", parts.model)


def _second_optimizer(parts: Parts) -> None:
    parts.optimizer = torch.optim.AdamW(parts.model[0].parameters())
    parts.kept.append(torch.optim.SGD(parts.model[1].parameters(), lr=0.1))
    parts.register()


def _attached_optimizer(parts: Parts) -> None:
    parts.manager.register("model", parts.model)
    parts.manager.attach(parts.optimizer)


def _model_of_an_attached_optimizer(parts: Parts) -> None:
    parts.manager.register("optimizer", parts.optimizer)
    parts.manager.attach(parts.optimizer)


def _module_of_a_registered_optimizer(parts: Parts) -> None:
    parts.manager.register("model", parts.model[0])
    parts.manager.register("optimizer", parts.optimizer)


class Wrapper:
    """An optimizer wrapper or a scheduler of the user's own, with a state that looks like torch's."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)

    def state_dict(self) -> dict[str, Any]:
        return {"param_groups": [], "last_epoch": 0, **{key: each.state_dict() for key, each in vars(self).items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, each in vars(self).items():
            each.load_state_dict(state[key])


def _model_in_a_function_that_copies(parts: Parts) -> None:
    def state() -> dict[str, Any]:
        model = {name: tensor.clone() for name, tensor in parts.model.state_dict().items()}
        return {"model": model, "optimizer": parts.optimizer.state_dict()}

    parts.manager.register_state_dict_fn("everything", lambda state: None, state)
    parts.manager.attach(parts.optimizer)


def _beside_a_wrapped_optimizer(parts: Parts) -> None:
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in parts.model)
    parts.kept.append(second)
    parts.manager.register("model", parts.model)
    parts.manager.register("optimizer", Wrapper(optimizer=first))


def _scheduler_beside_a_wrapped_optimizer(parts: Parts) -> None:
    parts.kept.append(CosineAnnealingLR(parts.optimizer, 100))
    parts.register(wrapper=Wrapper(optimizer=torch.optim.SGD([torch.zeros(1)], lr=0.1)))


@pytest.mark.parametrize(
    ("set_up", "named"),
    [
        (lambda parts: None, r"got none; call manager.register\('model', model\)"),
        (_attached_optimizer, r"the attached optimizer 0 \(AdamW\)"),
        (_model_of_an_attached_optimizer, r"parameter 0 of group 0 \[3, 3\] of the attached AdamW"),
        (_scheduler, "CosineAnnealingLR, which sets the learning rates of the attached AdamW"),
        (_schedulers_of_a_registered_optimizer, "LinearLR and SequentialLR and StepLR, .* of the registered AdamW"),
        (_optimizer, "AdamW, an optimizer of 4 parameters of 'model'"),
        (_second_optimizer, "SGD, an optimizer of 2 parameters of 'model'"),
        (_module_of_a_registered_optimizer, r"parameter 2 of group 0 \[1, 3\] of the registered AdamW"),
    ],
)
def test_what_is_forgotten_is_refused_by_the_first_quorum(
    parts: Parts, set_up: Callable[[Parts], None], named: str
) -> None:
    set_up(parts)
    with pytest.raises(RegistryError, match=named):
        parts.manager.start_quorum()


@pytest.mark.parametrize(
    ("set_up", "named"),
    [
        (_model_in_a_function_that_copies, "parameter 0 of group 0 [3, 3] of the attached AdamW"),
        (_beside_a_wrapped_optimizer, "SGD, an optimizer of 2 parameters of 'model'"),
        (_scheduler_beside_a_wrapped_optimizer, "CosineAnnealingLR, which sets the learning rates"),
    ],
)
def test_a_part_that_a_users_object_may_return_is_a_warning(
    parts: Parts, set_up: Callable[[Parts], None], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    set_up(parts)
    parts.manager.start_quorum()
    assert parts.manager.should_commit()
    assert named in caplog.text
    assert "optimizer 0" not in caplog.text


def _wrapped_optimizer(parts: Parts) -> None:
    parts.manager.register("model", parts.model)
    parts.manager.register("optimizer", Wrapper(inner=parts.optimizer))


def _wrapped_scheduler(parts: Parts) -> None:
    parts.register(schedule=Wrapper(scheduler=StepLR(parts.optimizer, 3)))


def _registered_scheduler(parts: Parts) -> None:
    first, second = LinearLR(parts.optimizer), StepLR(parts.optimizer, 3)
    parts.register(scheduler=SequentialLR(parts.optimizer, [first, second], milestones=[5]))


def _scheduler_in_a_function(parts: Parts) -> None:
    scheduler = StepLR(parts.optimizer, 3)
    parts.kept.append(scheduler)
    parts.register()
    parts.manager.register_state_dict_fn(
        "rest", lambda state: scheduler.load_state_dict(state["lr"]), lambda: {"lr": scheduler.state_dict()}
    )


def _scheduler_that_is_gone(parts: Parts) -> None:
    StepLR(parts.optimizer, 3)
    parts.register()


def _optimizer_in_a_function(parts: Parts) -> None:
    optimizer = parts.optimizer
    parts.manager.register("model", parts.model)
    parts.manager.register_state_dict_fn(
        "rest", lambda state: optimizer.load_state_dict(state[0]), lambda: [optimizer.state_dict()]
    )


def _no_optimizer(parts: Parts) -> None:
    """Parameters may be stepped by hand."""
    parts.optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    parts.manager.register("model", parts.model)


def _frozen_parameters(parts: Parts) -> None:
    parts.model[1].requires_grad_(False)
    parts.kept.append(parts.optimizer)
    parts.optimizer = torch.optim.AdamW(parts.model[0].parameters())
    parts.register()


def _optimizer_made_anew(parts: Parts) -> None:
    parts.kept.append(parts.optimizer)
    parts.optimizer = torch.optim.SGD(parts.model.parameters(), lr=0.1)
    parts.register()


def _thrown_away_in_a_cycle(parts: Parts) -> None:
    """The collector has not come by yet."""
    trainer: dict[str, object] = {
        "optimizer": torch.optim.AdamW(parts.model.parameters()),
        "scheduler": StepLR(parts.optimizer, 3),
    }
    trainer["callback"] = trainer
    del trainer
    parts.optimizer = torch.optim.AdamW(parts.model[0].parameters())
    parts.register()


def _local_optimizer(parts: Parts) -> None:
    parts.manager.register("model", parts.model)
    parts.manager.register("optimizer", parts.optimizer)
    other = torch.optim.SGD([*parts.model[1].parameters()], lr=0.1)
    parts.kept.append(other)
    parts.manager.register("other", other, scope="local")


@pytest.mark.parametrize(
    "set_up",
    [
        _wrapped_optimizer,
        _wrapped_scheduler,
        _thrown_away_in_a_cycle,
        _local_optimizer,
        _registered_scheduler,
        _scheduler_in_a_function,
        _scheduler_that_is_gone,
        _optimizer_in_a_function,
        _no_optimizer,
        _frozen_parameters,
        _optimizer_made_anew,
    ],
)
def test_what_is_not_forgotten_is_not_missed(
    parts: Parts, set_up: Callable[[Parts], None], caplog: pytest.LogCaptureFixture
) -> None:
    set_up(parts)
    parts.manager.start_quorum()
    assert parts.manager.should_commit()
    assert not [record for record in caplog.records if "registered" in record.getMessage()]


def test_averaged_gradients_belong_to_what_is_registered(parts: Parts) -> None:
    parts.register()
    forgotten = torch.nn.Linear(3, 7)
    parts.manager.start_quorum()
    parts.model(torch.randn(4, 3)).square().mean().backward()
    forgotten(torch.randn(4, 3)).square().mean().backward()
    for parameter in [*parts.model.parameters(), *forgotten.parameters()]:
        parts.manager.allreduce(parameter.grad)
    with pytest.raises(RegistryError, match=r"a parameter \[7, 3\], whose gradient is averaged; a parameter \[7\]"):
        parts.manager.should_commit()


def test_other_tensors_may_be_reduced(parts: Parts, caplog: pytest.LogCaptureFixture) -> None:
    parts.register()
    held_by_a_function = torch.nn.Linear(3, 7)
    parts.manager.register_state_dict_fn("rest", lambda state: None, held_by_a_function.state_dict)
    parts.manager.start_quorum()
    held_by_a_function(torch.randn(4, 3)).square().mean().backward()
    for tensor in [torch.zeros(2), held_by_a_function.weight.grad, held_by_a_function.bias.grad.clone()]:
        parts.manager.allreduce(tensor)
    assert parts.manager.should_commit()
    assert not [record for record in caplog.records if "registered" in record.getMessage()]


# --------------------------------------------------------------------------- found in the quorum after the first step


class Trainer(BaseTrainer):
    """A replica with a schedule that it may make another use of than the others."""

    def __init__(
        self,
        address: str,
        name: str,
        beginning: threading.Barrier,
        **flags: Any,
    ) -> None:
        torch.manual_seed(3)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **flags)
        super().__init__(address, name, model, optimizer, min_replica_size=2)
        self.scheduler: LRScheduler = StepLR(optimizer, 1, gamma=0.5)
        self.manager.register("scheduler", self.scheduler)
        self.beginning = beginning
        self.after_start: Callable[[int], None] = lambda step: None
        self.after_step: Callable[[int], None] = lambda step: self.scheduler.step()
        self.states: dict[int, tuple[torch.Tensor, float]] = {}

    def run(self) -> dict[int, tuple[torch.Tensor, float]]:
        """Train to the end; returns the weights and the learning rate at each step."""
        try:
            self.beginning.wait(LONG_S)
            while self.manager.current_step() < NUM_STEPS:
                if self.step():
                    self.after_step(self.manager.current_step() - 1)
            return self.states
        finally:
            self.manager.shutdown()

    def started(self) -> None:
        self.manager.wait_quorum()
        step = self.manager.current_step()
        if self.manager.is_participating():
            self.states[step] = self.model.weight.detach().clone(), self.optimizer.param_groups[0]["lr"]
        self.after_start(step)

    def backward(self) -> None:
        self.model(torch.randn(8, 4)).square().mean().backward()


def assert_equal(states: list[dict[int, tuple[torch.Tensor, float]]], steps: range = range(NUM_STEPS)) -> None:
    for step in steps:
        (weights, lr), *others = [each[step] for each in states if step in each]
        assert others
        assert all(torch.equal(weights, other) and lr == other_lr for other, other_lr in others), f"step {step}"


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname in ("ERROR", "WARNING")]


def test_without_a_majority_all_stop_before_they_step_and_name_both_values(address: str) -> None:
    beginning = threading.Barrier(2)

    def run(name: str, *, forgets: bool) -> tuple[str, dict[int, tuple[torch.Tensor, float]]]:
        trainer = Trainer(address, name, beginning)
        if forgets:
            trainer.after_step = lambda step: None
        with pytest.raises(HyperparametersDivergedError) as caught:
            trainer.run()
        assert caught.value.step == 1
        return str(caught.value), trainer.states

    (first, states), (second, others) = run_replicas(
        lambda: run("replica_0", forgets=False), lambda: run("replica_1", forgets=True)
    )
    assert first == second
    assert "optimizer.param_groups.0.lr is 0.05 on replica_0:" in first
    assert "and 0.1 on replica_1:" in first
    assert set(states) == set(others) == {0}, "no step was made with them"


def test_the_minority_is_named_and_heals(address: str, caplog: pytest.LogCaptureFixture) -> None:
    """As after an interruption between the optimizer's step and the scheduler's."""
    beginning = threading.Barrier(3)
    trainers = [Trainer(address, f"replica_{index}", beginning) for index in range(3)]
    trainers[2].after_step = lambda step: None if step == 4 else trainers[2].scheduler.step()
    assert_equal(run_replicas(*(trainer.run for trainer in trainers)))
    told = errors(caplog)
    assert any("['replica_2:" in each and "lr is 0.003125 on replica_0:" in each for each in told)
    assert any("0.00625 on replica_2:" in each and each.endswith("and this replica heals") for each in told)


def test_a_replica_that_goes_on_to_differ_leaves_and_the_others_go_on(address: str) -> None:
    beginning = threading.Barrier(3)
    trainers = [Trainer(address, f"replica_{index}", beginning) for index in range(3)]
    trainers[2].after_step = lambda step: None

    def leave() -> dict[int, tuple[torch.Tensor, float]]:
        with pytest.raises(
            HyperparametersDivergedError, match=r"param_groups\.0\.lr is .* on replica_0.* on replica_2"
        ):
            trainers[2].run()
        return trainers[2].states

    states = run_replicas(trainers[0].run, trainers[1].run, leave)
    assert_equal(states[:2])
    assert max(states[2]) < NUM_STEPS - 1


def test_what_may_differ_is_not_compared(address: str, caplog: pytest.LogCaptureFixture) -> None:
    """Kernels, and rates that a loop sets from the step, also where an attempt failed before it set them."""
    beginning = threading.Barrier(2)
    trainers = [
        Trainer(address, "replica_0", beginning, foreach=True),
        Trainer(address, "replica_1", beginning, foreach=False),
    ]
    failed: list[int] = []
    for index, trainer in enumerate(trainers):
        trainer.after_step = lambda step: None

        def set_rate(step: int, trainer: Trainer = trainer, index: int = index) -> None:
            if index == 1 and step == 4 and not failed:
                failed.append(step)
                # An interruption before the rate is set for this attempt.
                trainer.manager.report_error(RuntimeError("spoilt"))
                return
            trainer.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)

        trainer.after_start = set_rate
    states = run_replicas(*(trainer.run for trainer in trainers))
    assert all(torch.equal(states[0][step][0], states[1][step][0]) for step in range(5))
    assert failed
    assert not [each for each in errors(caplog) if "hyperparameters" in each]
