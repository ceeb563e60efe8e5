"""Attached optimizers hold the lock while they step, and never longer."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from lock_holders import can_write
from torch.optim.lr_scheduler import StepLR

from manager.errors import LockOrderError, LockTimeoutError, ManagerError, StateTornError
from manager.state.lock import StateLock
from manager.state.optimizer_guard import StateObserver, attach_optimizers


@pytest.fixture
def lock() -> StateLock:
    return StateLock(timeout=timedelta(seconds=20))


def _optimizer(kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return kind([parameter], lr=0.1)  # type: ignore[call-arg]


def _value(optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[0]["params"][0].detach()[0])


def _fail() -> float:
    raise RuntimeError("out of memory")


class _Steps(StateObserver):
    """Counts steps that succeeded."""

    num = 0

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self.num += 1


def _watch(lock: StateLock, optimizer: torch.optim.Optimizer) -> list[tuple[str, ...]]:
    """Write down who holds the lock in each step, seen from a hook that runs after those registered so far."""
    seen: list[tuple[str, ...]] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(tuple(holder.what for holder in lock.holders())))
    return seen


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_step_is_a_write_section(lock: StateLock, kind: type[torch.optim.Optimizer]) -> None:
    optimizer = _optimizer(kind)
    steps = _Steps()
    attach_optimizers(lock, [optimizer], steps)
    seen = _watch(lock, optimizer)
    optimizer.step()
    optimizer.step()
    assert seen == [(f"optimizer step of {kind.__name__}",)] * 2
    assert _value(optimizer) < 1
    assert steps.num == 2
    assert can_write(lock)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_failed_step_closes_what_it_opened(lock: StateLock, error: type[BaseException]) -> None:
    optimizer = _optimizer()
    attach_optimizers(lock, [optimizer], StateObserver())
    optimizer.register_step_pre_hook(lambda *_: lock.disallow())

    def fail() -> float:
        lock.acquire_write("by the closure")
        raise error

    with pytest.raises(error):
        optimizer.step(fail)
    assert lock.is_read_allowed
    assert lock.holders() == ()
    assert can_write(lock)
    lock.allow()
    optimizer.step()


def test_failed_step_leaves_what_was_open_before(lock: StateLock) -> None:
    optimizer = _optimizer()
    attach_optimizers(lock, [optimizer], StateObserver())
    lock.disallow()
    with lock.write("outer"):
        with pytest.raises(RuntimeError):
            optimizer.step(_fail)
        assert len(lock.holders()) == 2
        assert not lock.is_read_allowed
    lock.allow()
    assert can_write(lock)


@pytest.mark.parametrize("fails_first", [True, False])
def test_failing_hook_of_somebody_else(lock: StateLock, fails_first: bool) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("hook")

    optimizer = _optimizer()
    if fails_first:
        optimizer.register_step_post_hook(fail)
    attach_optimizers(lock, [optimizer], StateObserver())
    if not fails_first:
        optimizer.register_step_pre_hook(fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="hook"):
            optimizer.step()
        assert can_write(lock)


def test_step_waits_for_a_reader_and_raises_on_the_deadline() -> None:
    lock = StateLock(timeout=timedelta(milliseconds=50))
    optimizer = _optimizer()
    steps = _Steps()
    attach_optimizers(lock, [optimizer], steps)
    section = lock.acquire_read("copy", detached=True)
    with pytest.raises(LockTimeoutError, match=r"write \('optimizer step of SGD'\).*'copy'"):
        optimizer.step()
    assert _value(optimizer) == 1
    section.release()
    optimizer.step()
    assert steps.num == 1
    with lock.read("look"), pytest.raises(LockOrderError):
        optimizer.step()


def test_check_before_the_step_runs_without_the_lock_and_can_refuse(lock: StateLock) -> None:
    optimizer = _optimizer()
    held: list[bool] = []

    class Observer(StateObserver):
        def before_step(self, optimizer: torch.optim.Optimizer) -> None:
            held.append(lock.write_owned())
            if len(held) == 2:
                raise StateTornError(step=3, reason="the source died")

    attach_optimizers(lock, [optimizer], Observer())
    optimizer.step()
    value = _value(optimizer)
    with pytest.raises(StateTornError):
        optimizer.step()
    assert held == [False, False]
    assert _value(optimizer) == value
    assert can_write(lock)


def test_end_of_the_step_is_told_while_the_section_is_open(lock: StateLock) -> None:
    optimizer = _optimizer()
    seen: list[tuple[bool, float]] = []

    class Observer(StateObserver):
        def stepped(self, optimizer: torch.optim.Optimizer) -> None:
            seen.append((lock.write_owned(), _value(optimizer)))

    attach_optimizers(lock, [optimizer], Observer())
    optimizer.step()
    with pytest.raises(RuntimeError):
        optimizer.step(_fail)
    assert seen == [(True, pytest.approx(0.9))]


def test_error_at_the_end_of_the_step_releases(lock: StateLock) -> None:
    optimizer = _optimizer()

    class Observer(StateObserver):
        def stepped(self, optimizer: torch.optim.Optimizer) -> None:
            raise RuntimeError("event")

    attach_optimizers(lock, [optimizer], Observer())
    with pytest.raises(RuntimeError, match="event"):
        optimizer.step()
    assert can_write(lock)


def test_several_optimizers_and_one_inside_another(lock: StateLock) -> None:
    outer, inner = _optimizer(), _optimizer(torch.optim.AdamW)
    steps = _Steps()
    attach_optimizers(lock, [outer, inner], steps)
    inner.register_step_post_hook(lambda *_: depths.append(len(lock.holders())))
    depths: list[int] = []

    def closure() -> float:
        inner.step()
        return 0.0

    outer.step(closure)
    assert depths == [1]
    assert steps.num == 2
    assert can_write(lock)

    def failing_closure() -> float:
        with pytest.raises(RuntimeError):
            inner.step(_fail)
        assert len(lock.holders()) == 1
        return 0.0

    outer.step(failing_closure)
    assert can_write(lock)


def test_closure_is_evaluated_inside_the_section(lock: StateLock) -> None:
    parameter = torch.nn.Parameter(torch.full((3,), 4.0))
    optimizer = torch.optim.LBFGS([parameter])
    attach_optimizers(lock, [optimizer], StateObserver())
    owned: list[bool] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        owned.append(lock.write_owned())
        return loss

    loss = optimizer.step(closure)
    assert float(loss.detach()) == pytest.approx(48.0)
    assert len(owned) > 1
    assert all(owned)
    assert can_write(lock)


def test_signature_of_step_is_kept(lock: StateLock) -> None:
    optimizer = _optimizer()
    before = inspect.signature(optimizer.step)
    with attach_optimizers(lock, [optimizer], StateObserver()):
        assert inspect.signature(optimizer.step) == before


@pytest.mark.parametrize("scheduler_comes_first", [True, False])
def test_scheduler_before_or_after(lock: StateLock, scheduler_comes_first: bool) -> None:
    optimizer = _optimizer()
    make_scheduler: Callable[[], StepLR] = lambda: StepLR(optimizer, 1, gamma=0.5)  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = make_scheduler() if scheduler_comes_first else None
        attachment = attach_optimizers(lock, [optimizer], StateObserver())
        seen = _watch(lock, optimizer)
        scheduler = scheduler or make_scheduler()
        optimizer.step()
        scheduler.step()
        another = make_scheduler()
        optimizer.step()
        another.step()
        with pytest.raises(RuntimeError):
            optimizer.step(_fail)
        assert can_write(lock)
        assert [len(holders) for holders in seen] == [1, 1, 1]
        attachment.remove()
        value = _value(optimizer)
        optimizer.step()
        scheduler.step()
    assert _value(optimizer) < value
    assert seen[-1] == ()


def test_removal_restores_step_and_can_be_repeated(lock: StateLock) -> None:
    optimizer = _optimizer()
    hooks = dict(optimizer._optimizer_step_pre_hooks), dict(optimizer._optimizer_step_post_hooks)
    steps = _Steps()
    with attach_optimizers(lock, [optimizer], steps) as attachment:
        assert "step" in vars(optimizer)
        optimizer.step()
    assert "step" not in vars(optimizer)
    assert (dict(optimizer._optimizer_step_pre_hooks), dict(optimizer._optimizer_step_post_hooks)) == hooks
    attachment.remove()
    optimizer.step()
    assert steps.num == 1


@pytest.mark.parametrize("place", ["pre hook", "earlier pre hook", "closure", "post hook"])
def test_removal_inside_the_step_is_refused_and_holds_nothing(lock: StateLock, place: str) -> None:
    optimizer = _optimizer()
    refused: list[str] = []

    def detach() -> float:
        with pytest.raises(ManagerError, match=r"between two steps.*inside optimizer step of SGD") as error:
            attachment.remove()
        refused.append(str(error.value))
        return 0.0

    def hook(*_arguments: object) -> None:
        detach()

    if place == "earlier pre hook":
        optimizer.register_step_pre_hook(hook)
    attachment = attach_optimizers(lock, [optimizer], StateObserver())
    if place == "pre hook":
        optimizer.register_step_pre_hook(hook)
    if place == "post hook":
        optimizer.register_step_post_hook(hook)
    optimizer.step(detach) if place == "closure" else optimizer.step()
    assert len(refused) == 1
    assert _value(optimizer) == pytest.approx(0.9)
    assert attachment.optimizers == (optimizer,)
    assert lock.holders() == ()
    assert can_write(lock)
    attachment.remove()
    assert attachment.optimizers == ()


@pytest.mark.parametrize("removed_first", [0, 1])
def test_attached_twice_nests(lock: StateLock, removed_first: int) -> None:
    optimizer = _optimizer()
    attachments = [
        attach_optimizers(lock, [optimizer], StateObserver()),
        attach_optimizers(lock, [optimizer], StateObserver()),
    ]
    seen = _watch(lock, optimizer)
    optimizer.step()
    with pytest.raises(RuntimeError):
        optimizer.step(_fail)
    assert can_write(lock)
    attachments[removed_first].remove()
    optimizer.step()
    with pytest.raises(RuntimeError):
        optimizer.step(_fail)
    assert can_write(lock)
    attachments[1 - removed_first].remove()
    optimizer.step()
    assert [len(holders) for holders in seen] == [2, 2, 1, 1, 0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_attached_optimizer_can_be_copied_and_the_copy_is_not_attached(
    lock: StateLock, copied: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]
) -> None:
    optimizer = _optimizer(torch.optim.AdamW)
    steps = _Steps()
    attach_optimizers(lock, [optimizer], steps)
    optimizer.step()
    twin = copied(optimizer)
    twin.param_groups[0]["params"][0].grad = torch.ones(3)
    twin.step()
    assert steps.num == 1
    assert _value(twin) < _value(optimizer)


def test_what_is_no_optimizer_is_refused_before_anything_is_attached(lock: StateLock) -> None:
    optimizer = _optimizer()
    with pytest.raises(TypeError, match="got Linear"):
        attach_optimizers(lock, [optimizer, torch.nn.Linear(1, 1)], StateObserver())  # type: ignore[list-item]
    assert "step" not in vars(optimizer)
