"""Makes optimizers take the state lock in each step, and release it whatever happens.

``Optimizer.step`` runs hooks before and after the update, but the later ones only if the update succeeds. So the hooks
open and release a write section, and a guard around the instance's ``step`` cleans up when ``step`` fails: it closes
every section that the thread has opened since ``step`` began, including a `StateLock.disallow` of another pre-step hook
(torchft's LocalSGD or DiLoCo). Flags tell guarded LocalSGD and DiLoCo objects from unguarded ones.
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


class StepObserver:
    """Receives the steps of attached optimizers, on the stepping thread. The methods here do nothing."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Called before the optimizer takes the lock; may raise to refuse the step."""

    def stepped(self, optimizer: Optimizer) -> None:
        """Called after a successful update, inside the section. If it raises, ``step()`` raises the same error."""

    def step_failed(self, optimizer: Optimizer, error: BaseException) -> None:
        """Called after an error inside the section: the update may be partial."""

    def other_gradients(self, optimizer: Optimizer) -> None:
        """Called after a step whose closure changed the gradients."""


class OptimizerAttachment:
    """The optimizers of one `attach_optimizers` call; `remove`, or the end of a ``with`` block, detaches them."""

    def __init__(self, lock: StateLock, guards: list[_Guard]) -> None:
        """Private to `attach_optimizers`."""
        self._lock = lock
        self._guards = guards

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers of this attachment; none after `remove`."""
        return tuple(guard.optimizer for guard in self._guards)

    def remove(self) -> None:
        """Detach all optimizers; a second call does nothing.

        A present reader relies on the attachment, so this waits for readers, and for another thread's step.

        Raises:
            ManagerError: A hook or closure called this inside a step of one of the optimizers; they stay attached.
            LockTimeoutError: Other threads held the lock until the deadline; the optimizers stay attached.
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
    lock: StateLock, optimizers: Iterable[Optimizer], observer: StepObserver | None = None
) -> OptimizerAttachment:
    """Make every ``step()`` of the optimizers a write section of the lock.

    An optimizer may be attached several times (its sections nest), before or after the construction of a learning rate
    scheduler for it. It stays picklable and copyable; copies are not attached.

    Args:
        lock: The lock around the state; its default deadline applies, and ``step()`` raises its errors.
        optimizers: The optimizers; the attachment refers to them until they are detached.
        observer: Receives the steps; by default nobody does.

    Returns:
        The attachment. The optimizers stay attached without a reference to it.

    Raises:
        TypeError: An object in ``optimizers`` is no optimizer; none of them is attached then.
    """
    attached = list(optimizers)
    for optimizer in attached:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"expected torch optimizers to attach, got {type(optimizer).__name__}")
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            # torchft's OptimizerWrapper has an optimizer's methods and nothing else of it.
            raise TypeError(
                f"expected optimizers that run step hooks, got {type(optimizer).__name__}, which does not; attach the "
                "optimizer inside it, before or after it is wrapped: manager.attach(wrapper.optim)"
            )
    return OptimizerAttachment(lock, [_Guard(lock, optimizer, observer or StepObserver()) for optimizer in attached])


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.sections: list[Section] = []
        self.num_begun = 0
        self.num_inside = 0


class _Guard:
    """One attachment of one optimizer."""

    def __init__(self, lock: StateLock, optimizer: Optimizer, observer: StepObserver) -> None:
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
        # The instance's ``step`` of a scheduler or an earlier attachment; None if the class's own applies.
        self._previous: Callable[..., Any] | None = vars(optimizer).get("step")
        self._method = self._wrap_step(optimizer)
        vars(optimizer)["step"] = self._method

    def refuse_inside_step(self) -> None:
        if self._per_thread.num_inside or self._per_thread.sections:
            # This would remove the hook that releases the lock, and readers would wait for ever.
            raise ManagerError(
                f"expected the optimizers to be detached between two steps, got remove() inside {self._what}, from a "
                "hook or closure; call remove() when step() has returned"
            )

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._is_removed = True
        attributes = vars(self.optimizer)
        # If other code has wrapped the guard meanwhile, the guard stays and only passes calls on.
        if attributes.get("step") is self._method:
            if self._previous is None:
                del attributes["step"]
            else:
                attributes["step"] = self._previous

    def _wrap_step(self, optimizer: Optimizer) -> MethodType:
        """Return a bound method: schedulers read ``step.__func__`` and leave a mark on it."""
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
                    # Another exception of a handler; sections that are closed already are skipped.
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
        # If the optimizer's ``step`` calls its superclass's ``step``, torch runs the hooks for both.
        if len(self._per_thread.sections) == 1:
            self._observer.stepped(optimizer)
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


logger = logging.getLogger(__name__)

_LOCAL_UPDATES: Final = "torchft.local_sgd"
GUARD_FLAG: Final = "_ft_transport_guard"
"""Attribute of a guarded LocalSGD or DiLoCo of torchft."""
_SELDOM_FLAG: Final = "_ft_transport_steps_seldom"


def flag_seldom(optimizers: Iterable[Optimizer]) -> None:
    """Flag optimizers that step only at rare synchronisations: their tensors stay unchanged in between."""
    for optimizer in optimizers:
        setattr(optimizer, _SELDOM_FLAG, True)


def often_stepping(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Return the optimizers that step in every training step."""
    return [optimizer for optimizer in optimizers if not hasattr(optimizer, _SELDOM_FLAG)]


def local_updates_of(optimizer: Optimizer) -> Iterator[Any]:
    """Yield torchft's LocalSGD and DiLoCo objects that count the optimizer's steps, which need not follow commits."""
    # A wrapper may be an optimizer by its class alone.
    for hook in getattr(optimizer, "_optimizer_step_post_hooks", {}).values():
        owner = getattr(hook, "__self__", None)
        if type(owner).__module__ == _LOCAL_UPDATES:
            yield owner


def warn_of_unguarded(optimizers: Iterable[Optimizer]) -> None:
    """Warn once of each LocalSGD or DiLoCo of torchft that steps an attached optimizer without a guard."""
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
            setattr(owner, GUARD_FLAG, "none, and that has been said")
