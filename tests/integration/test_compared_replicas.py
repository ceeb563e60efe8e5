"""Replicas compare their states: one that differs is found, named and healed; without a majority all of them stop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from quorum_threads import LONG_S, new_store, run_replicas
from quorum_threads import Trainer as BaseTrainer

from manager import StatesDivergedError

pytestmark = pytest.mark.usefixtures("quorum_ready")

NUM_STEPS = 14
EVERY = 4


class Trainer(BaseTrainer):
    """A replica, or one rank of it.

    Args:
        beginning: Where it waits for the others: two that are all the Lighthouse knows of may make all their steps
            before the third has come, which can then commit none.
    """

    def __init__(
        self, address: str, name: str, beginning: threading.Barrier, *, width: int = 64, **keywords: Any
    ) -> None:
        self.beginning = beginning
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1))
        super().__init__(address, name, model, torch.optim.AdamW(model.parameters()), **keywords)
        self.states: dict[int, torch.Tensor] = {}

    def flip(self) -> None:
        """One bit of one number, as a bad memory module does."""
        with torch.no_grad():
            # Not the last bit: a number that an update carries past a power of two is rounded, and may lose it again.
            self.model[2].weight.view(torch.int32)[0, 17] ^= 1 << 12

    def started(self) -> None:
        self.manager.wait_quorum()
        parameters = [each.detach().flatten() for each in self.model.parameters()]
        self.states[self.manager.current_step()] = torch.cat(parameters)

    def backward(self) -> None:
        # Each replica's own data: the statistics of BatchNorm differ, and are not compared.
        self.model(torch.randn(8, 4)).square().mean().backward()

    def run(self, before_step: Callable[[Trainer, int], None] = lambda trainer, step: None) -> dict[int, torch.Tensor]:
        try:
            self.beginning.wait(LONG_S)
            while self.manager.current_step() < NUM_STEPS:
                before_step(self, self.manager.current_step())
                self.step()
            return self.states
        finally:
            self.manager.shutdown()


def flip_at(flipped_step: int) -> Callable[[Trainer, int], None]:
    done: list[int] = []

    def flip(trainer: Trainer, step: int) -> None:
        if step == flipped_step and not done:
            done.append(step)
            trainer.flip()

    return flip


def differing_steps(states: list[dict[int, torch.Tensor]]) -> list[int]:
    common = set.intersection(*(set(each) for each in states))
    return sorted(step for step in common if any(not torch.equal(states[0][step], each[step]) for each in states[1:]))


def test_one_flipped_bit_is_found_named_and_healed(address: str, caplog: pytest.LogCaptureFixture) -> None:
    beginning = threading.Barrier(3)
    names, keywords = (f"replica_{at}" for at in range(3)), {"min_replica_size": 2, "compare_every": EVERY}
    trainers = [Trainer(address, name, beginning, **keywords) for name in names]
    states = run_replicas(trainers[0].run, trainers[1].run, lambda: trainers[2].run(flip_at(5)))
    found = differing_steps(states)
    assert 5 in found
    assert max(found) < 5 + EVERY, "healed within as many steps as lie between two comparisons"
    assert NUM_STEPS - 1 in states[2]
    told = [message for message in caplog.messages if "differs" in message]
    assert any("['replica_2:" in each and "this replica heals" in each for each in told)
    assert all("at step 8 differs" in each for each in told), "equal states are left alone"


def test_a_value_that_no_tensor_shows_yet_is_found_named_and_healed(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a scheduler: what it has set in the optimizer is compared in each quorum."""
    ends: list[object] = []
    schedulers: dict[str, Any] = {}
    beginning = threading.Barrier(3)

    def change(trainer: Trainer, step: int) -> None:
        if step == 5:
            schedulers["replica_2"].own = 1.0
        ends[:] = [schedulers["replica_2"].own]

    def run(name: str, before_step: Callable[[Trainer, int], None]) -> None:
        trainer = Trainer(address, name, beginning, min_replica_size=2, compare_every=EVERY)
        schedulers[name] = scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1000)
        scheduler.own = 0.0
        trainer.manager.register("scheduler", scheduler)
        trainer.run(before_step)

    run_replicas(
        lambda: run("replica_0", lambda trainer, step: None),
        lambda: run("replica_1", lambda trainer, step: None),
        lambda: run("replica_2", change),
    )
    assert ends == [0.0]
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert any("['replica_2:" in each and "at step 8 differs" in each for each in told)


def test_one_flipped_bit_on_one_rank_is_found_where_ranks_hold_parts_of_different_shapes(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    beginning = threading.Barrier(6)
    stores = [new_store() for _ in range(3)]

    def run(number: int, rank: int) -> dict[int, torch.Tensor]:
        keywords = {"width": 32 + 32 * rank, "compare_every": EVERY, "rank": rank, "store": stores[number]}
        trainer = Trainer(address, f"replica_{number}", beginning, **keywords)
        return trainer.run(flip_at(5) if (number, rank) == (2, 1) else lambda trainer, step: None)

    states = run_replicas(*(partial(run, number, rank) for number in range(3) for rank in range(2)))
    assert differing_steps(states[0::2]) == []
    found = differing_steps(states[1::2])
    assert 5 in found
    assert max(found) < 5 + EVERY
    assert any("['replica_2:" in record.getMessage() for record in caplog.records if record.levelname == "ERROR")


def test_a_single_comparison_needs_no_setting(address: str) -> None:
    def compare(trainer: Trainer, step: int) -> None:
        if step == 7:
            trainer.manager.compare_replicas()

    def compare_and_flip(trainer: Trainer, step: int) -> None:
        flip(trainer, step)
        compare(trainer, step)

    flip = flip_at(5)
    beginning = threading.Barrier(3)
    states = run_replicas(
        lambda: Trainer(address, "replica_0", beginning, min_replica_size=2).run(compare),
        lambda: Trainer(address, "replica_1", beginning, min_replica_size=2).run(compare),
        lambda: Trainer(address, "replica_2", beginning, min_replica_size=2).run(compare_and_flip),
    )
    assert max(differing_steps(states)) in (7, 8)


def test_without_a_majority_all_stop_and_name_the_tensors(address: str) -> None:
    beginning = threading.Barrier(2)

    def run(name: str, before_step: Callable[[Trainer, int], None]) -> tuple[str, ...]:
        trainer = Trainer(address, name, beginning, min_replica_size=2, compare_every=EVERY)
        with pytest.raises(StatesDivergedError, match=r"no majority of them agrees: .*2\.weight") as caught:
            trainer.run(before_step)
        assert caught.value.step == 8
        return caught.value.tensors

    first, second = run_replicas(
        lambda: run("replica_0", lambda trainer, step: None), lambda: run("replica_1", flip_at(7))
    )
    assert first == second
    # One bit at step 7; by step 8 whatever it had a part in.
    assert any(path.startswith("user.model.2.weight ") for path in first)
    assert not any("running" in path for path in first)
