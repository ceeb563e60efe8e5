"""Makes every optimizer step a write section of the state lock, which is closed even if the step fails.

``Optimizer.step`` runs pre-step hooks, the update and post-step hooks, but the post-step hooks only if the update
succeeds. A pre-step hook opens the section, and a post-step hook closes it. If the step fails, a wrapper around the
instance's ``step`` closes every section that the thread has opened since ``step`` began. Such a section may be that of
a `StateLock.disallow` in another pre-step hook (torchft's LocalSGD or DiLoCo).

Flags on LocalSGD and DiLoCo objects of torchft show which of them are guarded (``manager.local_updates``).
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from types import MethodType, TracebackType
from typing import Any, Final

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from manager.errors import ManagerError
from manager.state.lock import Section, StateLock


class StateObserver:
    """Base class for observers of a replica's state and its optimizers. The methods do nothing.

    The thread that changes the state calls them.
    """

    def before_change(self, is_optimizer_step: bool) -> None:
        """Called when a write section has opened, before the first change."""

    def replaced(self) -> None:
        """Called before a load replaces the state."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Called before the optimizer opens its write section. An error here prevents the step."""

    def stepped(self, optimizer: Optimizer) -> None:
        """Called after a successful update, inside the write section. An error here is raised by ``step()``."""

    def step_failed(self, optimizer: Optimizer, error: BaseException) -> None:
        """Called after an error inside the write section. The update may be incomplete."""

    def other_gradients(self, optimizer: Optimizer) -> None:
        """Called after a step whose closure replaced the averaged gradients with other gradients."""


class OptimizerAttachment:
    """The optimizers of one `attach_optimizers` call. `remove`, or the end of a ``with`` block, detaches them."""

    def __init__(self, lock: StateLock, guards: list[_Guard]) -> None:
        self._lock = lock
        self._guards = guards

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The attached optimizers; empty after `remove`."""
        return tuple(guard.optimizer for guard in self._guards)

    def remove(self) -> None:
        """Detach all optimizers; a second call does nothing. After an error, they stay attached.

        Waits for readers of the state, which rely on the attachment, and for a step on another thread.

        Raises:
            ManagerError: A hook or closure called this inside a step of one of the optimizers.
            LockTimeoutError: Other threads held the lock until the deadline.
            LockOrderError: The calling thread has an open read section.
        """
        for guard in self._guards:
            guard.refuse_inside_step()
        if self._guards:
            self._lock.acquire_write("detaching optimizers").release()
        while self._guards:
            self._guards[-1].remove()
            self._guards.pop()

    def __enter__(self) -> OptimizerAttachment:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def attach_optimizers(lock: StateLock, optimizers: Iterable[Optimizer], observer: StateObserver) -> OptimizerAttachment:
    """Make every ``step()`` of the optimizers a write section of the lock.

    An optimizer may be attached several times: its sections nest. It may be attached before or after the construction
    of a learning rate scheduler for it. It can be pickled and copied; copies are not attached.

    Args:
        lock: The lock around the state. ``step()`` waits up to the lock's default deadline, and raises its errors.
        optimizers: The optimizers to attach.
        observer: Notified before and after each step.

    Returns:
        The attachment. The optimizers stay attached even without a reference to the attachment.

    Raises:
        TypeError: An object in ``optimizers`` is no optimizer. No optimizer is attached then.
    """
    attached = list(optimizers)
    for optimizer in attached:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"expected torch optimizers to attach, got {type(optimizer).__name__}")
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            # torchft's OptimizerWrapper has the methods of an optimizer, but not the attributes.
            raise TypeError(
                f"expected optimizers that run step hooks, got {type(optimizer).__name__}, which runs none; attach the "
                "optimizer inside that wrapper, before or after wrapping it: manager.attach(wrapper.optim)"
            )
    return OptimizerAttachment(lock, [_Guard(lock, optimizer, observer) for optimizer in attached])


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.sections: list[Section] = []
        self.num_begun = 0
        self.num_inside = 0


class _Guard:
    """The hooks and the wrapped ``step`` of one optimizer in one attachment."""

    def __init__(self, lock: StateLock, optimizer: Optimizer, observer: StateObserver) -> None:
        self._lock = lock
        self.optimizer = optimizer
        self._observer = observer
        self._what = f"optimizer step of {type(optimizer).__name__}"
        self._per_thread = _PerThread()
        self._is_removed = False
        self._hooks: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._open_section),
            optimizer.register_step_post_hook(self._close_section),
        ]
        # The ``step`` that a scheduler or an earlier attachment has set on the instance; ``None`` without one.
        self._previous: Callable[..., Any] | None = vars(optimizer).get("step")
        self._method = self._wrap_step(optimizer)
        vars(optimizer)["step"] = self._method

    def refuse_inside_step(self) -> None:
        if self._per_thread.num_inside or self._per_thread.sections:
            # Without its post-step hook, the step would not release the lock, and readers would wait for ever.
            raise ManagerError(
                f"expected remove() to be called between two steps, but a hook or closure called it inside "
                f"{self._what}; call remove() after step() has returned"
            )

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._is_removed = True
        attributes = vars(self.optimizer)
        # If other code has wrapped this guard's ``step`` since, that ``step`` stays and only passes calls on.
        if attributes.get("step") is self._method:
            if self._previous is None:
                del attributes["step"]
            else:
                attributes["step"] = self._previous

    def _wrap_step(self, optimizer: Optimizer) -> MethodType:
        """Return the guarded ``step``, as a bound method: schedulers set a mark on ``step.__func__``."""
        inner = self._previous if self._previous is not None else type(optimizer).step

        @functools.wraps(getattr(inner, "__func__", inner))
        def step(stepping: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self._is_removed:
                return self._step_unguarded(stepping, args, kwargs)
            lock = self._lock
            mark = lock.mark()
            num_begun = self._per_thread.num_begun
            num_inside = self._per_thread.num_inside
            has_closure = bool(args or kwargs.get("closure"))
            gradients = _gradients_of(stepping) if has_closure else ()
            try:
                self._per_thread.num_inside = num_inside + 1
                result = self._step_unguarded(stepping, args, kwargs)
                if has_closure and _have_changed(gradients, stepping):
                    self._observer.other_gradients(stepping)
                return result
            except BaseException as error:
                if self._per_thread.num_begun > num_begun:
                    self._observer.step_failed(stepping, error)
                try:
                    lock.close_sections_opened_since(mark)
                except BaseException:
                    # A signal handler raised during the first try. This one skips sections that are closed already.
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
        self._observer.before_step(optimizer)
        self._per_thread.sections.append(self._lock.acquire_write(self._what, stepping=optimizer))
        self._per_thread.num_begun += 1

    def _close_section(self, optimizer: Optimizer, *_hook_arguments: Any) -> None:
        # If the optimizer's ``step`` calls its superclass's ``step``, torch runs the hooks twice, nested.
        if len(self._per_thread.sections) == 1:
            self._observer.stepped(optimizer)
        self._per_thread.sections.pop().release()

    def _forget_closed_sections(self) -> None:
        self._per_thread.sections[:] = [section for section in self._per_thread.sections if section.is_open]


def has_foreign_hooks(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has step hooks besides those of its attachments."""
    hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    return not all(isinstance(getattr(hook, "__self__", None), _Guard) for hook in hooks)


def _gradients_of(optimizer: Optimizer) -> tuple[tuple[torch.Tensor | None, int], ...]:
    gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    return tuple((each, each._version if each is not None else 0) for each in gradients)


def _have_changed(gradients: tuple[tuple[torch.Tensor | None, int], ...], optimizer: Optimizer) -> bool:
    now = _gradients_of(optimizer)
    return len(now) != len(gradients) or any(
        new is not old or new_version != old_version
        for (old, old_version), (new, new_version) in zip(gradients, now, strict=True)
    )


logger = logging.getLogger(__name__)

_LOCAL_UPDATES: Final = "torchft.local_sgd"
GUARD_FLAG: Final = "_ft_transport_guard"
"""Attribute of a guarded LocalSGD or DiLoCo of torchft."""
_SELDOM_FLAG: Final = "_ft_transport_steps_seldom"


def flag_seldom(optimizers: Iterable[Optimizer]) -> None:
    """Flag optimizers that step only at rare synchronizations. Their tensors do not change in between."""
    for optimizer in optimizers:
        setattr(optimizer, _SELDOM_FLAG, True)


def often_stepping(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Return the optimizers that step in every training step: those without the flag of `flag_seldom`."""
    return [optimizer for optimizer in optimizers if not hasattr(optimizer, _SELDOM_FLAG)]


def local_updates_of(optimizer: Optimizer) -> Iterator[Any]:
    """Yield the LocalSGD and DiLoCo objects of torchft that count the optimizer's steps.

    Such an optimizer steps more often than the replica commits.
    """
    # A wrapper may have the class of an optimizer, but not its attributes.
    for hook in getattr(optimizer, "_optimizer_step_post_hooks", {}).values():
        owner = getattr(hook, "__self__", None)
        if type(owner).__module__ == _LOCAL_UPDATES:
            yield owner


def warn_of_unguarded(optimizers: Iterable[Optimizer]) -> None:
    """Warn once about each LocalSGD or DiLoCo object of torchft that counts an optimizer's steps and is not guarded."""
    for optimizer in optimizers:
        for owner in local_updates_of(optimizer):
            if hasattr(owner, GUARD_FLAG):
                continue
            kind = type(owner).__name__
            logger.warning(
                "torchft's %s changes the model outside the lock when it synchronizes, and a snapshot that is taken "
                "meanwhile may mix two steps; after making it, call manager.%s(manager, ...)",
                kind,
                "guard_local_sgd" if kind == "LocalSGD" else "guard_diloco",
            )
            setattr(owner, GUARD_FLAG, "not guarded, and a warning was logged")
