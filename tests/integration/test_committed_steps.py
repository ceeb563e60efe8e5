"""A replica that did not make exactly the step that was committed heals, and what cannot work is refused by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from quorum_threads import LONG_S, lighthouse, make_manager, new_store, run_replicas

from manager import LockTimeoutError, Manager, ManagerError, QuorumError, WorldSizeMode

pytestmark = pytest.mark.usefixtures("quorum_ready")

NUM_STEPS = 8


class Trainer:
    """Two parameters, each with an optimizer of its own, and a manager; equal on all replicas but for what they see."""

    def __init__(self, address: str, name: str, **keywords: Any) -> None:
        torch.manual_seed(len(name) + ord(name[-1]))
        self.model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 1)})
        self.optimizers = [
            torch.optim.AdamW(self.model["a"].parameters()),
            torch.optim.SGD(self.model["b"].parameters(), lr=0.1, momentum=0.9),
        ]
        self.manager = make_manager(address, name, **keywords)
        self.manager.register("model", self.model)
        for index, optimizer in enumerate(self.optimizers):
            self.manager.register(f"optimizer_{index}", optimizer)
        self.manager.attach(*self.optimizers)
        self.states: dict[int, torch.Tensor] = {}

    def compute(self) -> None:
        """Everything of a step up to its commit."""
        self.manager.start_quorum()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.states[self.manager.current_step()] = torch.cat([each.detach().flatten() for each in self.parameters()])
        self.model["b"](self.model["a"](torch.randn(4, 3))).square().mean().backward()
        for parameter in self.parameters():
            self.manager.allreduce(parameter.grad)

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.model.parameters())

    def step(self) -> None:
        self.compute()
        if self.manager.should_commit():
            for optimizer in self.optimizers:
                optimizer.step()

    def run(self, misstep: Callable[[Trainer], None] | None = None, at: int = 3) -> dict[int, torch.Tensor]:
        """Train to the last step; once, at the step ``at``, in another way."""
        try:
            while self.manager.current_step() < NUM_STEPS:
                if misstep is not None and self.manager.current_step() == at:
                    misstep(self)
                    misstep = None
                else:
                    self.step()
            self.manager.start_quorum()
            self.manager.wait_quorum()
            self.states[NUM_STEPS] = torch.cat([each.detach().flatten() for each in self.parameters()])
            return self.states
        finally:
            self.manager.shutdown()


def assert_equal(states: list[dict[int, torch.Tensor]], *, from_step: int) -> None:
    for step in range(from_step, NUM_STEPS + 1):
        assert all(torch.equal(states[0][step], other[step]) for other in states[1:]), f"they differ at step {step}"


def skip_everything(trainer: Trainer) -> None:
    trainer.compute()
    assert trainer.manager.should_commit()


def skip_one(trainer: Trainer) -> None:
    skip_everything(trainer)
    trainer.optimizers[0].step()


def step_one_twice(trainer: Trainer) -> None:
    skip_one(trainer)
    with pytest.raises(ManagerError, match="one step of AdamW for each should_commit"):
        trainer.optimizers[0].step()


def fail_in_the_middle(trainer: Trainer) -> None:
    skip_one(trainer)
    hook = trainer.optimizers[1].register_step_pre_hook(_raise)
    with pytest.raises(MemoryError):
        trainer.optimizers[1].step()
    hook.remove()


def _raise(*_arguments: object) -> None:
    raise MemoryError("no memory")


@pytest.mark.parametrize("misstep", [skip_everything, skip_one, step_one_twice, fail_in_the_middle])
def test_a_replica_that_did_not_make_the_committed_step_heals(
    address: str, misstep: Callable[[Trainer], None], caplog: pytest.LogCaptureFixture
) -> None:
    states = run_replicas(
        Trainer(address, "replica_0", min_replica_size=2).run,
        lambda: Trainer(address, "replica_1", min_replica_size=2).run(misstep),
    )
    assert_equal(states, from_step=5)
    assert all(states[0][step].isfinite().all() for step in states[0])
    (told,) = [each for each in map(str, _messages(caplog)) if "expected each attached optimizer" in each]
    assert "replica_1:" in told.split()[1]
    assert "['replica_0:" in told
    assert "made other steps; the minority heals" in told


def _messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_step_that_all_replicas_skip_alike_costs_nothing(address: str, caplog: pytest.LogCaptureFixture) -> None:
    # As a gradient scaler does that has found an infinity. Nothing shows that this is one.
    states = run_replicas(
        *(
            lambda name=name: Trainer(address, name, min_replica_size=2).run(skip_everything)  # type: ignore[misc]
            for name in ("replica_0", "replica_1")
        )
    )
    assert_equal(states, from_step=1)
    assert torch.equal(states[0][4], states[0][3])
    assert not torch.equal(states[0][5], states[0][4])
    told = [each for each in _messages(caplog) if "expected each attached optimizer" in each]
    assert len(told) == 2
    assert all("all replicas made the same steps" in each and "every_commit=False" in each for each in told)


@pytest.fixture
def alone(address: str) -> Iterator[Trainer]:
    trainer = Trainer(address, "replica_0")
    yield trainer
    trainer.manager.shutdown()


def test_a_step_that_calls_its_superclass_counts_once(alone: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    """torch runs the hooks of a step for the superclass's, too."""

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    own = Own(alone.optimizers[1].param_groups)
    alone.manager.register("own", own)
    alone.manager.attach(own)
    alone.optimizers.append(own)
    alone.run()
    assert "expected each attached optimizer" not in caplog.text


def test_a_lock_timeout_before_the_step_changes_nothing(address: str) -> None:
    trainer = Trainer(address, "replica_0", timeout=timedelta(milliseconds=300))
    try:
        trainer.compute()
        assert trainer.manager.should_commit()
        trainer.optimizers[0].step()
        with trainer.manager.reading():
            failures: list[BaseException] = []

            def step_elsewhere() -> None:
                try:
                    trainer.optimizers[1].step()
                except LockTimeoutError as error:
                    failures.append(error)

            stepping = threading.Thread(target=step_elsewhere)
            stepping.start()
            stepping.join(LONG_S)
        assert failures
        trainer.optimizers[1].step()
        trainer.step()
        assert trainer.manager.current_step() == 2
    finally:
        trainer.manager.shutdown()


# ------------------------------------------------------------------------------------------------- several ranks


def run_ranks(address: str, name: str, misstep: Callable[[Trainer], None] | None) -> list[dict[int, torch.Tensor]]:
    """A replica of two ranks, each of which trains a part of its own; the second may take a misstep."""
    store = new_store()
    return run_replicas(
        *(
            lambda rank=rank: Trainer(address, name, min_replica_size=2, rank=rank, store=store).run(  # type: ignore[misc]
                misstep if rank == 1 else None
            )
            for rank in range(2)
        )
    )


def test_ranks_of_a_replica_heal_together_and_cost_the_healthy_one_nothing(address: str) -> None:
    (healthy, other) = run_replicas(
        lambda: run_ranks(address, "replica_0", None), lambda: run_ranks(address, "replica_1", fail_in_the_middle)
    )
    for rank in range(2):
        assert_equal([healthy[rank], other[rank]], from_step=5)


# ------------------------------------------------------------------------------------------------- refused by name


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        ({"min_replica_size": 2}, "min_replica_size=2"),
        ({"world_size_mode": WorldSizeMode.FIXED_WITH_SPARES}, "world_size_mode=FIXED_WITH_SPARES"),
        ({"init_sync": False}, "init_sync=False"),
    ],
)
def test_replicas_with_other_rules_are_refused_on_all_of_them(rules: dict[str, Any], named: str) -> None:
    def start(address: str, name: str, keywords: dict[str, Any]) -> str:
        trainer = Trainer(address, name, **keywords)
        try:
            with pytest.raises(QuorumError, match="same rules") as caught:
                trainer.step()
            return str(caught.value)
        finally:
            trainer.manager.shutdown()

    with lighthouse(min_replicas=2) as address:
        told = run_replicas(lambda: start(address, "replica_0", {}), lambda: start(address, "replica_1", rules))
    assert all(named in each and "replica_1" in each for each in told)


def test_a_step_without_a_commit_is_refused_before_it_changes_anything(alone: Trainer) -> None:
    alone.compute()
    before = [parameter.detach().clone() for parameter in alone.parameters()]
    with pytest.raises(ManagerError, match=r"expected should_commit\(\) to return True before AdamW.step\(\)"):
        alone.optimizers[0].step()
    alone.manager.report_error(RuntimeError("spoilt"))
    assert not alone.manager.should_commit()
    with pytest.raises(ManagerError, match="the step was not committed"):
        alone.optimizers[0].step()
    assert all(map(torch.equal, before, alone.parameters()))
    alone.step()


def test_optimizers_by_turns_are_attached_as_such(alone: Trainer) -> None:
    free = torch.optim.SGD(alone.model["a"].parameters(), lr=0.1)
    alone.manager.register("free", free)
    alone.manager.attach(free, every_commit=False)
    free.step()
    alone.step()
    alone.step()
    free.step()
    free.step()
    alone.step()
    assert alone.manager.current_step() == 3


def test_steps_of_a_manager_without_a_quorum_do_not_mix_with_a_quorum(alone: Trainer) -> None:
    with pytest.raises(ManagerError, match="expected start_quorum at the step boundary, got start_step"):
        alone.manager.start_step(0)
    manager = Manager()
    manager.start_step(5)
    with pytest.raises(ManagerError, match="call start_step at each step boundary"):
        manager.start_quorum()
    manager.start_step(5)
    with pytest.raises(ManagerError, match="expected start_step with a step of at least 5"):
        manager.start_step(3)
    manager.load_state_dict({"step": 2})
    manager.start_step(3)
    manager.shutdown()
