"""Replicas that reduce different tensors commit nothing, and name what each of them reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from quorum_threads import Gate, make_manager, run_replicas
from torch import nn

from manager import (
    GlooProcessGroup,
    Manager,
    ManagerError,
    ReductionMismatchError,
    ReplicaFaultError,
    StatesDivergedError,
)
from manager.errors import UnfinishedReductionError

pytestmark = pytest.mark.usefixtures("quorum_ready")


class Trainer:
    """A replica with two parameters of one shape and one of another."""

    def __init__(self, address: str, index: int, **keywords: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.ParameterList([torch.ones(4), torch.ones(4), torch.ones(6)])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125)
        self.manager = make_manager(address, f"replica_{index}", **keywords)
        self.manager.register("model", self.model)
        self.manager.register("optimizer", self.optimizer)
        self.manager.attach(self.optimizer)

    def step(self, order: list[int], *, value: float = 1.0) -> bool:
        """One step that reduces the gradients in this order."""
        self.manager.start_quorum()
        for parameter in self.model:
            parameter.grad = torch.full_like(parameter, value)
        works = [self.manager.allreduce(self.model[index].grad) for index in order]  # type: ignore[arg-type]
        for work in works:
            work.wait()
        is_committed = self.manager.should_commit()
        if is_committed:
            self.optimizer.step()
        return is_committed

    def values(self) -> list[list[float]]:
        return [each.tolist() for each in self.model]


@pytest.fixture
def trainers(address: str) -> Iterator[Callable[..., list[Trainer]]]:
    """Makes trainers under one Lighthouse, all of which take part from the first step on."""
    made: list[Trainer] = []

    def make(num: int, *, is_opaque: bool = False, **keywords: Any) -> list[Trainer]:
        for index in range(num):
            own = {"pg": Opaque(), "use_async_quorum": False} if is_opaque else {}
            made.append(Trainer(address, index, **{"min_replica_size": num, **own, **keywords}))
        return made

    yield make
    for trainer in made:
        trainer.manager.shutdown()


def together(trainers: list[Trainer], *plans: list[int]) -> list[bool]:
    """One step on all of them, each with a plan of its own."""
    return run_replicas(
        *(lambda trainer=trainer, plan=plan: trainer.step(plan) for trainer, plan in zip(trainers, plans, strict=True))
    )


def mismatch(trainer: Trainer) -> ReductionMismatchError:
    reported = trainer.manager.errored()
    assert reported is not None
    error = reported.original_exception
    assert isinstance(error, ReductionMismatchError), error
    return error


@pytest.mark.parametrize(
    ("other", "position", "named"),
    [
        ([1, 0, 2], 0, ("parameter 0 float32[4] avg", "parameter 1 float32[4] avg")),
        ([0, 2, 1], 1, ("parameter 1 float32[4] avg", "parameter 2 float32[6] avg")),
        ([0, 1], 2, ("parameter 2 float32[6] avg", "nothing further")),
        ([], 0, ("parameter 0 float32[4] avg", "nothing further")),
    ],
    ids=["another order", "another size", "one fewer", "none"],
)
def test_a_step_with_different_reductions_is_committed_nowhere(
    trainers: Callable[..., list[Trainer]], other: list[int], position: int, named: tuple[str, str]
) -> None:
    both = trainers(2)
    assert together(both, [0, 1, 2], [0, 1, 2]) == [True, True]
    before = both[0].values()
    assert together(both, [0, 1, 2], other) == [False, False]
    for trainer in both:
        error = mismatch(trainer)
        assert error.position == position
        assert tuple(what for _, what in error.reductions) == named
        assert "replica_0" in str(error)
        assert "replica_1" in str(error)
        assert trainer.values() == before
    assert together(both, [0, 1, 2], [0, 1, 2]) == [True, True]
    assert both[0].values() == both[1].values()


def test_two_replicas_that_never_agree_end_with_the_reason(trainers: Callable[..., list[Trainer]]) -> None:
    both = trainers(2)

    def train(trainer: Trainer, order: list[int]) -> str:
        assert [trainer.step(order) for _ in range(2)] == [False, False]
        with pytest.raises(ReplicaFaultError) as raised:
            trainer.step(order)
        return str(raised.value)

    first, second = run_replicas(lambda: train(both[0], [0, 1, 2]), lambda: train(both[1], [1, 0, 2]))
    assert first == second
    assert "manager.average_gradients(model)" in first


def test_the_one_that_differs_from_most_leaves_and_the_others_train_on(
    trainers: Callable[..., list[Trainer]],
) -> None:
    three = trainers(3, min_replica_size=2)

    def meet(trainer: Trainer) -> None:
        while trainer.manager.num_participants() < 3:
            trainer.step([0, 1, 2])

    def lone() -> None:
        trainer = three[2]
        meet(trainer)
        assert [trainer.step([2, 1, 0]) for _ in range(2)] == [False, False]
        with pytest.raises(ReplicaFaultError, match="parameter 2"):
            trainer.step([2, 1, 0])
        trainer.manager.shutdown()

    def usual(trainer: Trainer) -> int:
        meet(trainer)
        refused = []
        while trainer.manager.num_participants() != 2 or refused[-1:] != [True]:
            refused.append(trainer.step([0, 1, 2]))
        return refused.count(False)

    outcome = run_replicas(lambda: usual(three[0]), lambda: usual(three[1]), lone)
    assert outcome == [3, 3, None]
    assert three[0].values() == three[1].values()


def test_a_tensor_without_a_name_may_stand_for_a_gradient(trainers: Callable[..., list[Trainer]]) -> None:
    both = trainers(2)

    def train(trainer: Trainer, is_missing: bool) -> list[float]:
        trainer.manager.start_quorum()
        parameter = trainer.model[0]
        parameter.grad = None if is_missing else torch.full_like(parameter, 2.0)
        reduced = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        trainer.manager.allreduce(reduced).wait()
        assert trainer.manager.should_commit()
        parameter.grad = reduced.detach()
        trainer.optimizer.step()
        return parameter.tolist()

    first, second = run_replicas(lambda: train(both[0], False), lambda: train(both[1], True))
    assert first == second == [1.0 - 0.125] * 4


class Opaque:
    """A process group of another kind: what its members reduce is compared in the next quorum alone."""

    def __init__(self) -> None:
        self._group = GlooProcessGroup()
        self.configure = self._group.configure
        self.allreduce = self._group.allreduce
        self.abort = self._group.abort
        self.errored = self._group.errored
        self.shutdown = self._group.shutdown


def test_another_process_group_is_compared_in_the_next_quorum(trainers: Callable[..., list[Trainer]]) -> None:
    both = trainers(2, is_opaque=True)
    assert together(both, [0, 1, 2], [1, 0, 2]) == [True, True]

    def go_on(trainer: Trainer) -> None:
        with pytest.raises(StatesDivergedError, match="the tensors that were averaged in it differ"):
            trainer.step([0, 1, 2])

    run_replicas(*(partial(go_on, trainer) for trainer in both))


def test_most_heal_the_one_whose_process_group_reduced_something_else(trainers: Callable[..., list[Trainer]]) -> None:
    three = trainers(3, is_opaque=True)
    assert together(three, [0, 1, 2], [0, 1, 2], [1, 0, 2]) == [True] * 3
    assert together(three, [0, 1, 2], [0, 1, 2], [0, 1, 2]) == [True] * 3
    assert three[0].values() == three[1].values() == three[2].values()


@pytest.fixture
def alone(trainers: Callable[..., list[Trainer]]) -> Trainer:
    return trainers(1)[0]


def begun(trainer: Trainer) -> torch.Tensor:
    """Begin to reduce a gradient, and return it."""
    trainer.manager.start_quorum()
    for parameter in trainer.model:
        parameter.grad = torch.ones_like(parameter)
    gradient = trainer.model[0].grad
    assert gradient is not None
    trainer.manager.allreduce(gradient)
    return gradient


@pytest.mark.parametrize("what", ["clipped", "replaced", "freed"])
def test_a_gradient_that_is_used_before_it_is_there_refuses_the_step(alone: Trainer, what: str) -> None:
    begun(alone)
    match what:
        case "clipped":
            nn.utils.clip_grad_norm_(alone.model.parameters(), 0.1)
        case "replaced":
            alone.model[0].grad = torch.ones(4)
        case _:
            alone.optimizer.zero_grad()
    with pytest.raises(UnfinishedReductionError, match=r"call \.wait\(\) on the result of allreduce before you clip"):
        alone.manager.should_commit()
    assert alone.manager.current_step() == 0
    # After the reduction it may change as it likes.
    for _ in range(2):
        begun(alone)
        for work in [alone.manager.allreduce(alone.model[2].grad)]:  # type: ignore[arg-type]
            work.wait()
        nn.utils.clip_grad_norm_([alone.model[2]], 0.1)
        assert alone.manager.should_commit()
        alone.optimizer.step()


def test_a_tensor_is_reduced_once_at_a_time(alone: Trainer) -> None:
    gradient = begun(alone)
    with pytest.raises(UnfinishedReductionError, match="for the second time in this step"):
        alone.manager.allreduce(gradient)
    assert alone.manager.should_commit()
    alone.optimizer.step()
    alone.manager.start_quorum()
    for _ in range(2):
        alone.manager.allreduce(gradient).wait()
    assert alone.manager.should_commit()


def test_a_step_is_committed_once(alone: Trainer) -> None:
    begun(alone)
    assert alone.manager.should_commit()
    with pytest.raises(ManagerError, match="expected start_quorum before should_commit"):
        alone.manager.should_commit()
    assert alone.manager.current_step() == 1


def test_a_step_is_not_committed_after_a_start_quorum_that_raised(
    alone: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(alone)

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("the Lighthouse has gone")

    with monkeypatch.context() as broken:
        broken.setattr(alone.manager._loop._formation.structures, "check_registered", fail)  # type: ignore[union-attr]
        with pytest.raises(ConnectionError):
            alone.manager.start_quorum()
    with pytest.raises(ManagerError, match="start_quorum again if it raised"):
        alone.manager.should_commit()
    assert alone.manager.current_step() == 0
    assert alone.step([0, 1, 2])


def test_nothing_is_compared_with_a_replica_that_fails_after_its_last_reduction(
    trainers: Callable[..., list[Trainer]],
) -> None:
    gate, both = Gate(), trainers(2)

    def reduce(trainer: Trainer) -> Manager:
        trainer.manager.start_quorum()
        trainer.manager.allreduce(torch.ones(3)).wait()
        return trainer.manager

    def healthy() -> bool:
        manager = reduce(both[0])
        gate.open("reduced")
        return manager.should_commit()

    def failing() -> bool:
        manager = reduce(both[1])
        gate.wait("reduced")
        manager.report_error(RuntimeError("bad loss"))
        return manager.should_commit()

    assert run_replicas(healthy, failing) == [True, False]


def test_a_replica_that_is_interrupted_while_others_end_the_step_heals_in_the_next_one(
    trainers: Callable[..., list[Trainer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = trainers(2)
    assert together(both, [0, 1, 2], [0, 1, 2]) == [True, True]
    group: Any = both[1].manager._loop.membership.process_group  # type: ignore[union-attr]

    def interrupted(_: object) -> str:
        monkeypatch.undo()
        raise KeyboardInterrupt

    def train(trainer: Trainer) -> bool:
        return trainer.step([0, 1, 2]) and trainer.step([0, 1, 2])

    def stumble(trainer: Trainer) -> bool:
        with pytest.raises(KeyboardInterrupt):
            trainer.step([0, 1, 2])
        return trainer.step([0, 1, 2])

    monkeypatch.setattr(group, "compare_step", interrupted)
    assert run_replicas(lambda: train(both[0]), lambda: stumble(both[1])) == [True, True]
    assert both[0].values() == both[1].values()
    assert both[1].manager.current_step() == 3


def test_what_a_step_without_commit_reduced_is_not_compared_later(trainers: Callable[..., list[Trainer]]) -> None:
    def train(trainer: Trainer, is_failing: bool) -> bool:
        trainer.manager.start_quorum()
        if is_failing:
            trainer.manager.report_error(RuntimeError("a bad batch"))
        trainer.manager.allreduce(torch.ones(5))
        assert not trainer.manager.should_commit()
        return trainer.step([0, 1, 2]) and trainer.step([0, 1, 2])

    both = trainers(2, is_opaque=True)
    assert run_replicas(lambda: train(both[0], False), lambda: train(both[1], True)) == [True, True]


def test_a_reduction_after_the_commit_spoils_no_step_when_members_change(address: str) -> None:
    gate = Gate()

    def train(trainer: Trainer) -> list[bool]:
        committed = []
        while trainer.manager.num_participants() < 3:
            committed.append(trainer.step([0, 1, 2]))
            trainer.manager.allreduce(torch.ones(1)).wait()  # a metric
            if trainer.manager.num_participants() == 2:
                gate.open("two")
        trainer.manager.shutdown()
        return committed

    def late() -> list[bool]:
        gate.wait("two")
        return train(Trainer(address, 2))

    early = [Trainer(address, index) for index in (0, 1)]
    outcome = run_replicas(lambda: train(early[0]), lambda: train(early[1]), late)
    assert all(all(each) for each in outcome)


def test_gradients_that_were_replaced_in_a_step_are_no_other_parameters(alone: Trainer) -> None:
    """Two phases in one step, as a GAN has them: the gradients of the first are freed before the second."""
    for _ in range(20):
        alone.manager.start_quorum()
        for first in (0, 2):
            for parameter in alone.model:
                parameter.grad = torch.ones_like(parameter)
            for index in (first, first - 1):
                alone.manager.allreduce(alone.model[index].grad).wait()  # type: ignore[arg-type]
            alone.optimizer.zero_grad()
        for parameter in alone.model:
            parameter.grad = torch.ones_like(parameter)
        assert alone.manager.should_commit()
        alone.optimizer.step()


def test_gradients_that_share_one_buffer_are_reduced_together(trainers: Callable[..., list[Trainer]]) -> None:
    both = trainers(2)

    def train(trainer: Trainer, value: float) -> list[float]:
        trainer.manager.start_quorum()
        flat = torch.full((8,), value)
        for parameter, part in zip(trainer.model[:2], flat.split(4), strict=True):
            parameter.grad = part
        for work in [trainer.manager.allreduce(each.grad) for each in trainer.model[:2]]:  # type: ignore[arg-type]
            work.wait()
        assert trainer.manager.should_commit()
        trainer.optimizer.step()
        return flat.tolist()

    assert run_replicas(lambda: train(both[0], 1.0), lambda: train(both[1], 3.0)) == [[2.0] * 8] * 2
