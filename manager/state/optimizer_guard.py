"""Optimizers that take the state lock by themselves, and give it back whatever happens.

``Optimizer.step`` runs hooks before and after the update, but the later ones only if the update succeeds. So the hooks
take and release a write section, and a guard around ``step`` of the instance closes, when ``step`` fails, whatever
the thread has opened since it was entered: our section, and a `StateLock.disallow` that another pre-step hook (of
torchft's LocalSGD or DiLoCo) made.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import MethodType, TracebackType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from manager.errors import ManagerError
from manager.state.lock import Section, StateLock

# Enough for percentiles over a window of steps, and a bound for a run of a year.
_MAX_WAITS = 10_000


class OptimizerAttachment:
    """What `attach_optimizers` did, so that it can be undone. Also a context manager that undoes it.

    Attributes:
        waits_s: Seconds that each of the last 10,000 pre-step hooks waited for the lock, the newest last. Appended
            to by the stepping threads.
    """

    def __init__(self, lock: StateLock, guards: list[_Guard], waits_s: deque[float]) -> None:
        """For `attach_optimizers` alone."""
        self._lock = lock
        self._guards = guards
        self.waits_s = waits_s

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers that are attached by it at present."""
        return tuple(guard.optimizer for guard in self._guards)

    def remove(self) -> None:
        """Detach all optimizers; a second call does nothing.

        A reader at that moment relies on them being attached, so this waits for the reader, and for a step that another
        thread makes.

        Raises:
            ManagerError: A hook or closure calls this inside a step of one of the optimizers; they stay attached.
            LockTimeoutError: Others held the lock until the deadline; the optimizers stay attached.
            LockOrderError: This thread holds the lock for reading; the optimizers stay attached.
        """
        for guard in self._guards:
            guard.refuse_inside_step()
        if self._guards:
            self._lock.acquire_write("detaching optimizers").release()
        while self._guards:
            self._guards[-1].remove()
            self._guards.pop()

    def __enter__(self) -> OptimizerAttachment:
        """Return itself."""
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Detach all optimizers."""
        self.remove()


def attach_optimizers(
    lock: StateLock,
    optimizers: Iterable[Optimizer],
    *,
    before_step: Callable[[Optimizer], None] | None = None,
    on_step_end: Callable[[Optimizer], None] | None = None,
    on_step_failed: Callable[[Optimizer, BaseException], None] | None = None,
    on_other_gradients: Callable[[Optimizer], None] | None = None,
) -> OptimizerAttachment:
    """Make every ``step()`` of the optimizers a write section of the lock.

    An optimizer may be attached several times (the sections nest), before or after a learning rate scheduler was
    made for it, and keeps being picklable and copyable; a copy is not attached.

    Args:
        lock: The lock around the state; its default deadline applies, and ``step()`` raises its errors.
        optimizers: The optimizers; they are kept alive until they are detached.
        before_step: Called on the stepping thread before the lock is taken. If it raises, there is no step.
        on_step_end: Called on the stepping thread after a successful update while the section is still open, e.g. to
            record a device event that readers wait for. If it raises, ``step()`` does, and the section is closed.
        on_step_failed: Called on the stepping thread with what ``step()`` raised once its section was open: the update
            may have been made in part. What is raised before, a timeout of the lock included, has changed nothing.
        on_other_gradients: Called on the stepping thread after a ``step(closure)`` whose closure changed the gradients.

    Returns:
        The handle; who drops it leaves the optimizers attached.

    Raises:
        TypeError: Something in ``optimizers`` is no optimizer; nothing has been attached then.
    """
    attached = list(optimizers)
    for optimizer in attached:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"expected torch optimizers to attach, got {type(optimizer).__name__}")
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            # Of torchft's OptimizerWrapper nothing but the methods is an optimizer's.
            raise TypeError(
                f"expected optimizers that run step hooks, got {type(optimizer).__name__}, which does not; attach the "
                "optimizer inside it, before or after it is wrapped: manager.attach(wrapper.optim)"
            )
    waits_s: deque[float] = deque(maxlen=_MAX_WAITS)
    guards = [
        _Guard(
            lock,
            optimizer,
            before_step=before_step,
            on_step_end=on_step_end,
            on_step_failed=on_step_failed,
            on_other_gradients=on_other_gradients,
            waits_s=waits_s,
        )
        for optimizer in attached
    ]
    return OptimizerAttachment(lock, guards, waits_s)


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.sections: list[Section] = []
        self.num_begun = 0
        self.num_inside = 0


class _Guard:
    """One attachment of one optimizer."""

    def __init__(
        self,
        lock: StateLock,
        optimizer: Optimizer,
        *,
        before_step: Callable[[Optimizer], None] | None,
        on_step_end: Callable[[Optimizer], None] | None,
        on_step_failed: Callable[[Optimizer, BaseException], None] | None,
        on_other_gradients: Callable[[Optimizer], None] | None,
        waits_s: deque[float],
    ) -> None:
        self._lock = lock
        self.optimizer = optimizer
        self._before_step = before_step
        self._on_step_end = on_step_end
        self._on_step_failed = on_step_failed
        self._on_other_gradients = on_other_gradients
        self._waits_s = waits_s
        self._what = f"optimizer step of {type(optimizer).__name__}"
        self._per_thread = _PerThread()
        self._is_removed = False
        self._hooks: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._open_section),
            optimizer.register_step_post_hook(self._close_section),
        ]
        # What a scheduler, or an earlier attachment, has put on the instance; None where step is the class's own.
        self._previous: Callable[..., Any] | None = vars(optimizer).get("step")
        self._method = self._wrap_step(optimizer)
        vars(optimizer)["step"] = self._method

    def refuse_inside_step(self) -> None:
        if self._per_thread.num_inside or self._per_thread.sections:
            # The hook that gives the lock back would be removed as well, and readers would wait for ever.
            raise ManagerError(
                f"expected the optimizers to be detached between two steps, got remove() inside {self._what}, from a "
                "hook or closure; call remove() when step() has returned"
            )

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._is_removed = True
        attributes = vars(self.optimizer)
        # Where somebody wrapped the guard meanwhile, it stays underneath and only passes the call on.
        if attributes.get("step") is self._method:
            if self._previous is None:
                del attributes["step"]
            else:
                attributes["step"] = self._previous

    def _wrap_step(self, optimizer: Optimizer) -> MethodType:
        """Return a bound method: schedulers take ``step.__func__``, and look on it for the mark they leave."""
        inner = self._previous if self._previous is not None else type(optimizer).step

        @functools.wraps(getattr(inner, "__func__", inner))
        def step(stepping: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self._is_removed:
                return self._step_unguarded(stepping, args, kwargs)
            lock = self._lock
            mark = lock.mark()
            num_begun = self._per_thread.num_begun
            num_inside = self._per_thread.num_inside
            has_closure = bool(args or kwargs.get("closure")) and self._on_other_gradients is not None
            gradients = _gradients_of(stepping) if has_closure else ()
            try:
                self._per_thread.num_inside = num_inside + 1
                result = self._step_unguarded(stepping, args, kwargs)
                if has_closure and self._on_other_gradients is not None and _have_changed(gradients, stepping):
                    self._on_other_gradients(stepping)
                return result
            except BaseException as error:
                if self._on_step_failed is not None and self._per_thread.num_begun > num_begun:
                    self._on_step_failed(stepping, error)
                try:
                    lock.close_sections_opened_since(mark)
                except BaseException:
                    # A handler broke in again; what has been closed already is skipped.
                    lock.close_sections_opened_since(mark)
                    raise
                finally:
                    self._forget_closed_sections()
                raise
            finally:
                self._per_thread.num_inside = num_inside

        return MethodType(step, optimizer)

    def _step_unguarded(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._previous is not None:
            return self._previous(*args, **kwargs)
        return type(optimizer).step(optimizer, *args, **kwargs)

    def _open_section(self, optimizer: Optimizer, *_hook_arguments: Any) -> None:
        if self._before_step is not None:
            self._before_step(optimizer)
        start_s = time.monotonic()
        self._per_thread.sections.append(
            self._lock.acquire_write(self._what, is_optimizer_step=True, stepping=optimizer)
        )
        self._per_thread.num_begun += 1
        self._waits_s.append(time.monotonic() - start_s)

    def _close_section(self, optimizer: Optimizer, *_hook_arguments: Any) -> None:
        # torch runs the hooks once more for a `step` of the superclass that the optimizer's own one calls.
        if self._on_step_end is not None and len(self._per_thread.sections) == 1:
            self._on_step_end(optimizer)
        self._per_thread.sections.pop().release()

    def _forget_closed_sections(self) -> None:
        self._per_thread.sections[:] = [section for section in self._per_thread.sections if section.is_open]


def _gradients_of(optimizer: Optimizer) -> tuple[tuple[torch.Tensor | None, int], ...]:
    gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    return tuple((each, each._version if each is not None else 0) for each in gradients)


def _have_changed(gradients: tuple[tuple[torch.Tensor | None, int], ...], optimizer: Optimizer) -> bool:
    now = _gradients_of(optimizer)
    return len(now) != len(gradients) or any(
        new is not old or new_version != old_version
        for (old, old_version), (new, new_version) in zip(gradients, now, strict=True)
    )
