"""Steps with gradients that nobody averaged: a closure's own, and those that an optimizer differentiates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from quorum_threads import lighthouse, make_manager, run_replicas

from manager import StatesDivergedError

pytestmark = pytest.mark.usefixtures("quorum_ready")

_SAID = "they are compared after this step"


class Trainer:
    """A replica that gives its optimizer a closure; closed by the test."""

    def __init__(self, address: str, index: int, num: int, kind: type[torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.index = index
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = kind(self.model.parameters(), lr=0.125)
        self.manager = make_manager(address, f"replica_{index}", min_replica_size=num)
        self.manager.register("model", self.model)
        self.manager.register("optimizer", self.optimizer)
        self.manager.attach(self.optimizer)

    def backward(self, seed: int, *, create_graph: bool = False) -> torch.Tensor:
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(batch).square().mean()
        loss.backward(create_graph=create_graph)  # type: ignore[no-untyped-call]
        return loss

    def step(
        self, closure: Callable[[], torch.Tensor] | None, *, create_graph: bool = False, is_averaged: bool = True
    ) -> None:
        self.manager.start_quorum()
        self.backward(self.index, create_graph=create_graph)
        if is_averaged:
            self.manager.average_gradients(self.model)
        if self.manager.should_commit():
            self.optimizer.step(closure)  # type: ignore[arg-type]

    def steps(self, seed: int, num: int = 4) -> list[list[float]]:
        for _ in range(num):
            self.step(partial(self.backward, seed))
        return [each.tolist() for each in self.model.parameters()]


@pytest.fixture
def trainers() -> Iterator[Callable[..., list[Trainer]]]:
    made: list[Trainer] = []
    with lighthouse() as address:

        def make(num: int, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> list[Trainer]:
            made.extend(Trainer(address, index, num, kind) for index in range(num))
            return made

        yield make
        for trainer in made:
            trainer.manager.shutdown()


def test_a_closure_with_a_batch_of_its_own_ends_before_the_next_step(trainers: Callable[..., list[Trainer]]) -> None:
    def train(trainer: Trainer) -> int:
        with pytest.raises(StatesDivergedError, match="model"):
            trainer.steps(seed=trainer.index)
        return trainer.manager.current_step()

    assert run_replicas(*(partial(train, trainer) for trainer in trainers(2))) == [1, 1]


def test_a_closure_with_a_batch_that_all_share_trains_on(
    trainers: Callable[..., list[Trainer]], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = run_replicas(*(partial(trainer.steps, seed=7) for trainer in trainers(2, torch.optim.LBFGS)))
    assert first == second
    assert caplog.text.count(_SAID) == 2  # once on each


def test_a_replica_alone_may_compute_in_its_closure(
    trainers: Callable[..., list[Trainer]], caplog: pytest.LogCaptureFixture
) -> None:
    [trainer] = trainers(1)
    trainer.steps(seed=0)
    trainer.step(lambda: torch.zeros(()))
    assert _SAID not in caplog.text


def test_gradients_that_nobody_averages_end_before_the_next_step(trainers: Callable[..., list[Trainer]]) -> None:
    def train(trainer: Trainer) -> int:
        trainer.step(None, is_averaged=False)
        with pytest.raises(StatesDivergedError, match="model"):
            trainer.step(None, is_averaged=False)
        return trainer.manager.current_step()

    assert run_replicas(*(partial(train, trainer) for trainer in trainers(2))) == [1, 1]


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_gradients_that_an_optimizer_may_differentiate_have_the_states_compared(
    trainers: Callable[..., list[Trainer]], caplog: pytest.LogCaptureFixture
) -> None:
    both = trainers(2)
    run_replicas(*(partial(trainer.step, None, create_graph=True) for trainer in both))
    for trainer in both:
        trainer.optimizer.zero_grad()  # the graph holds the gradients, and they hold it
    assert caplog.text.count(_SAID) == 2
    assert "create_graph=True" in caplog.text
