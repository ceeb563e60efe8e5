"""Releases a manager's resources if its constructor fails, or if it is garbage-collected without ``shutdown``.

Nothing here may refer to the manager, which refers to the model: closers refer only to the owners of threads.
"""

from __future__ import annotations

import _thread
import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from types import FrameType
from typing import Any, Final, ParamSpec, TypeVar

from ft_transport.runtime.signal_safe import ThreadRefusedError
from ft_transport.runtime.threads import ExecutorClosedError, SafeExecutor
from manager.errors import ManagerClosedError, ManagerError

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

_OURS: Final = ("manager.", "ft_transport.")
_SHUT_DOWN: Final = "expected a manager that runs, this one was shut down; make another one"
_PROGRAMS: Final = ("manager.demo",)
"""Modules of this package that use it as a user does."""


def ends_what_it_owns(constructor: Callable[P, None]) -> Callable[P, None]:
    """Make a constructor that raises shut down the transport and close the store of its keyword arguments.

    Callers often construct both inside the call and could not end them otherwise. A transport that serves another
    manager's state stays open.
    """

    @functools.wraps(constructor)
    def construct(*arguments: P.args, **keywords: P.kwargs) -> None:
        transport: Any = keywords.get("checkpoint_transport")
        store: Any = keywords.get("checkpoint_store")
        # An argument that is no transport belongs to the caller.
        is_owned_elsewhere = getattr(transport, "is_owned", True)
        try:
            constructor(*arguments, **keywords)
        except BaseException:
            from ft_transport import CheckpointStore  # noqa: PLC0415 - slow; imported after a failure only

            if isinstance(store, CheckpointStore):
                store.close()
            if not is_owned_elsewhere:
                transport.serve_fresh(None)
                transport.shutdown()
            raise

    return construct


class Usability:
    """Allows the use of an object until its shutdown, and only in the process that made it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.is_shut_down = False

    def is_of_parent(self) -> bool:
        """Return whether this process is a fork of the one that made the object; its threads do not run here."""
        return os.getpid() != self._pid

    def require(self) -> None:
        """Refuse a call that would wait for ever.

        Raises:
            ManagerClosedError: The object was shut down, or this is a forked child.
        """
        self.require_process()
        if self.is_shut_down:
            raise ManagerClosedError(_SHUT_DOWN)

    def require_process(self) -> None:
        """Refuse a call that would wait for a thread of the parent process.

        Raises:
            ManagerClosedError: This is a forked child.
        """
        if self.is_of_parent():
            raise ManagerClosedError(
                f"expected a manager of this process ({os.getpid()}), got one of process {self._pid}, which forked "
                "this one: a manager works only in the process that made it; make another one here"
            )


class OwnedExecutor(SafeExecutor):
    """A `SafeExecutor` that refuses jobs with the manager's errors."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Let a thread call ``fn``.

        Raises:
            ManagerClosedError: A signal handler has shut the manager down.
            ManagerError: The system has no further thread.
        """
        try:
            return super().submit(fn, *args, **kwargs)
        except ExecutorClosedError as error:
            raise ManagerClosedError(_SHUT_DOWN) from error
        except ThreadRefusedError as error:
            raise ManagerError(f"expected a further thread ({self.name}): {error}") from error


class Unclosed:
    """Closes the resources of an object that is garbage-collected without a shutdown, and logs a warning.

    Args:
        owner: The object.
        closers: Close its resources; called in reverse order. They must not refer to the owner.
    """

    def __init__(self, owner: object, closers: Iterable[Callable[[], object]]) -> None:
        self._closers = list(closers)
        self._finalizer = weakref.finalize(owner, _end, type(owner).__name__, self._closers, os.getpid())
        # The end of the process ends its threads.
        self._finalizer.atexit = False

    def add(self, close: Callable[[], object]) -> None:
        """Add a closer, to be called before earlier ones. It must not refer to the owner."""
        self._closers.append(close)

    def forget(self) -> None:
        """Disable this object: the owner is shut down."""
        self._finalizer.detach()


def interrupts_own_call() -> bool:
    """Return whether the calling function's caller is a signal handler that interrupted code of these packages.

    A handler runs on the main thread and interrupts it anywhere. The interrupted code may hold locks until the handler
    returns, so a handler that waits for another thread that needs one of them would deadlock.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    frame: FrameType | None = sys._getframe(1).f_back
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_OURS) and not name.startswith(_PROGRAMS):
            return True
        frame = frame.f_back
    return False


def _end(name: str, closers: list[Callable[[], object]], pid: int) -> None:
    if os.getpid() != pid:
        return  # A forked child has a copy, without its threads.
    # The garbage collector calls this anywhere, even while this thread holds a lock of threading or logging.
    _thread.start_new_thread(_end_on_thread, (name, closers))


def _end_on_thread(name: str, closers: list[Callable[[], object]]) -> None:
    logger.warning("a %s was dropped without shutdown; its threads, sockets and snapshots are ended now", name)
    for close in reversed(closers):
        try:
            close()
        except Exception:
            logger.exception("ending what a dropped %s has left failed", name)
