"""An overflow on one replica: all skip the step alike, and a loop in which they would not is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quorum_threads import LONG_S, let_join_at_once, lighthouse, make_manager, run_replicas

from manager import Manager, ManagerError, RegistryError

pytestmark = pytest.mark.usefixtures("quorum_ready")

MIN_REPLICAS = 2

NUM_STEPS = 8
OVERFLOW = 4
SCALE = 1024.0


def _register(trainer: Trainer) -> None:
    trainer.manager.register("scaler", trainer.scaler)


class Trainer:
    """A replica with a scaler, whose gradients may overflow at one step."""

    def __init__(
        self, address: str, name: str, *, register: Callable[[Trainer], None] = _register, **keywords: Any
    ) -> None:
        torch.manual_seed(ord(name[-1]))
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        self.manager: Manager = make_manager(address, name, min_replica_size=2, **keywords)
        self.manager.register("model", self.model)
        self.manager.register("optimizer", self.optimizer)
        register(self)
        self.manager.attach(self.optimizer)
        self.at_boundary: Callable[[int], None] = lambda step: None
        self.is_bucketed = False
        self.num_wanted = 0
        self.at_quorum: Callable[[], object] = lambda: None
        self.states: dict[int, tuple[torch.Tensor, float]] = {}

    def run(self, *, overflows: bool = False, is_late: bool = True) -> dict[int, tuple[torch.Tensor, float]]:
        """Train until so many replicas as wanted have committed a step together; return weights and scale at each step.

        Args:
            overflows: Whether a gradient is infinite at one step.
            is_late: Whether gradients are unscaled after they are averaged, as they should be.
        """
        manager, scaler, optimizer, model = self.manager, self.scaler, self.optimizer, self.model
        has_met = False
        try:
            while manager.current_step() < NUM_STEPS or not has_met:
                self.at_boundary(manager.current_step())
                manager.start_quorum()
                manager.wait_quorum()
                self.at_quorum()
                step = manager.current_step()
                if manager.is_participating():
                    self.states[step] = model.weight.detach().clone(), scaler.get_scale()
                optimizer.zero_grad()
                loss = model(torch.randn(8, 4)).square().mean()
                scaler.scale(loss * (torch.inf if overflows and step == OVERFLOW else 1.0)).backward()
                if self.is_bucketed:
                    # Something else than a gradient comes first.
                    manager.allreduce(loss.detach().clone()).wait()
                if not is_late:
                    scaler.unscale_(optimizer)
                if self.is_bucketed:
                    manager.average_gradients(model)
                else:
                    for parameter in model.parameters():
                        manager.allreduce(parameter.grad)
                if manager.should_commit():
                    if is_late:
                        scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    scaler.step(optimizer)
                    scaler.update()
                    has_met = has_met or manager.num_participants() >= self.num_wanted
            return self.states
        finally:
            manager.shutdown()


def assert_equal(*states: dict[int, tuple[torch.Tensor, float]]) -> None:
    for step in range(NUM_STEPS):
        (weights, scale), *others = [each[step] for each in states if step in each]
        assert others
        assert weights.isfinite().all()
        assert all(torch.equal(weights, other) and scale == other_scale for other, other_scale in others), step


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelname in ("WARNING", "ERROR")]


def _in_a_function(trainer: Trainer) -> None:
    scaler = trainer.scaler
    trainer.manager.register_state_dict_fn(
        "rest", lambda state: scaler.load_state_dict(state["scaler"]), lambda: {"scaler": scaler.state_dict()}
    )


@pytest.mark.parametrize("register", [_register, _in_a_function])
def test_an_overflow_on_one_replica_skips_the_step_on_all_without_a_warning(
    address: str, register: Callable[[Trainer], None], caplog: pytest.LogCaptureFixture
) -> None:
    states = run_replicas(
        lambda: Trainer(address, "replica_0", register=register).run(),
        lambda: Trainer(address, "replica_1", register=register).run(overflows=True),
    )
    assert_equal(*states)
    before, skipped, after = (states[0][step] for step in (OVERFLOW, OVERFLOW + 1, OVERFLOW + 2))
    assert torch.equal(before[0], skipped[0])
    assert not torch.equal(skipped[0], after[0])
    assert (before[1], skipped[1], after[1]) == (SCALE, SCALE / 2, SCALE / 2)
    assert not [each for each in told(caplog) if "step" in each and "Lighthouse" not in each]


@pytest.mark.parametrize("is_bucketed", [False, True], ids=["one by one", "in buckets"])
def test_gradients_that_are_unscaled_before_they_are_averaged_are_refused(address: str, is_bucketed: bool) -> None:
    # The first to be refused ends: not before the other one has healed from it.
    together = threading.Barrier(2)

    def run(name: str, *, overflows: bool) -> dict[int, tuple[torch.Tensor, float]]:
        trainer = Trainer(address, name)
        trainer.is_bucketed = is_bucketed
        trainer.at_quorum = lambda: together.wait(LONG_S)
        with pytest.raises(ManagerError, match=r"still scaled.*average gradients first, and call scaler\.unscale_"):
            trainer.run(overflows=overflows, is_late=False)
        return trainer.states

    states = run_replicas(lambda: run("replica_0", overflows=False), lambda: run("replica_1", overflows=True))
    assert all(set(each) == {0} for each in states)


def test_one_gradient_that_is_unscaled_is_refused_as_many_are() -> None:
    with lighthouse() as address:
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        manager = make_manager(address, "replica_0")
        manager.register("weight", torch.nn.ParameterList([weight]))
        manager.register("optimizer", optimizer)
        manager.register("scaler", scaler)
        manager.attach(optimizer)
        manager.start_quorum()
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)
        with pytest.raises(ManagerError, match="still scaled"):
            manager.average_gradients([weight])
        manager.shutdown()


def test_a_scaler_that_is_turned_off_needs_no_place_in_the_state(address: str) -> None:
    def run(name: str) -> dict[int, tuple[torch.Tensor, float]]:
        trainer = Trainer(address, name, register=lambda _: None)
        trainer.scaler = torch.amp.GradScaler("cpu", enabled=False)
        return trainer.run()

    first, second = run_replicas(lambda: run("replica_0"), lambda: run("replica_1"))
    assert torch.equal(first[NUM_STEPS - 1][0], second[NUM_STEPS - 1][0])


def test_other_tensors_may_be_reduced_after_the_gradients_are_unscaled(address: str) -> None:
    def run(name: str) -> int:
        trainer = Trainer(address, name)
        manager, scaler = trainer.manager, trainer.scaler
        try:
            manager.start_quorum()
            scaler.scale(trainer.model(torch.randn(8, 4)).square().mean()).backward()
            for parameter in trainer.model.parameters():
                assert manager.allreduce(parameter.grad).wait()
            scaler.unscale_(trainer.optimizer)
            manager.allreduce(torch.zeros(1))
            with pytest.raises(ManagerError, match="still scaled"):
                manager.allreduce(trainer.model.weight.grad)
            assert manager.should_commit()
            scaler.step(trainer.optimizer)
            scaler.update()
            return manager.current_step()
        finally:
            leaving.wait(LONG_S)
            manager.shutdown()

    leaving = threading.Barrier(2)
    assert run_replicas(lambda: run("replica_0"), lambda: run("replica_1")) == [1, 1]


def _nothing(trainer: Trainer) -> None: ...


def _as_local(trainer: Trainer) -> None:
    trainer.manager.register("scaler", trainer.scaler, scope="local")


@pytest.mark.parametrize("register", [_nothing, _as_local])
def test_a_scaler_that_nobody_registered_is_refused_at_its_first_step(
    address: str, register: Callable[[Trainer], None]
) -> None:
    def run(name: str) -> Any:
        trainer = Trainer(address, name, register=register)
        with pytest.raises(RegistryError, match=r"GradScaler, which steps AdamW: register\('scaler', scaler\)"):
            trainer.run()
        return trainer.states

    states = run_replicas(lambda: run("replica_0"), lambda: run("replica_1"))
    assert all(set(each) == {0} for each in states)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_newcomer_has_the_scale_and_names_a_source_that_is_not_finite(
    address: str, is_damaged: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_join_at_once(monkeypatch, "replica_2")
    first, second = Trainer(address, "replica_0"), Trainer(address, "replica_1")
    is_begun, has_joined = threading.Event(), threading.Event()

    def wait_for_the_newcomer(step: int, trainer: Trainer) -> None:
        if step == OVERFLOW + 2:
            if is_damaged:
                with torch.no_grad(), trainer.manager.writing():
                    trainer.model.bias[0] = torch.nan
            is_begun.set()
            assert has_joined.wait(LONG_S)

    def join() -> dict[int, tuple[torch.Tensor, float]]:
        assert is_begun.wait(LONG_S)
        # The others wait for it from here on.
        late = Trainer(address, "replica_2")
        late.num_wanted = 3
        has_joined.set()
        return late.run()

    for trainer in (first, second):
        trainer.num_wanted = 3
        trainer.at_boundary = lambda step, trainer=trainer: wait_for_the_newcomer(step, trainer)  # type: ignore[misc]
    states = run_replicas(first.run, lambda: second.run(overflows=True), join)
    named = [each for each in told(caplog) if "contains NaN or infinity in model.bias" in each]
    if is_damaged:
        assert any("that replica_" in each and "replica_2:" in each for each in named)
    else:
        assert_equal(*states)
        assert all(scale == SCALE / 2 for _, scale in states[2].values())
        assert not named
