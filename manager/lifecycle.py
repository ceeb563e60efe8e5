"""Releases a manager's resources if its constructor fails, or if the manager is garbage-collected without ``shutdown``.

No object of this module may refer to the manager. Such a reference would keep the manager and its model in memory.
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
"""Modules of this package that call the manager as a user's program does."""


def ends_what_it_owns(constructor: Callable[P, None]) -> Callable[P, None]:
    """Decorate a constructor: if it raises, the decorator closes its ``checkpoint_transport`` and ``checkpoint_store``.

    Callers often create both inside the constructor call, and then have no variable to close them with. A transport
    that serves another manager's state stays open.
    """

    @functools.wraps(constructor)
    def construct(*arguments: P.args, **keywords: P.kwargs) -> None:
        transport: Any = keywords.get("checkpoint_transport")
        store: Any = keywords.get("checkpoint_store")
        # If the argument is not a transport, the caller closes it.
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
    """Refuses calls on an object after its shutdown, and in a process that was forked after the object was made."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.is_shut_down = False

    def is_of_parent(self) -> bool:
        """Return whether a parent process made the object. If so, the object's threads do not run in this process."""
        return os.getpid() != self._pid

    def require(self) -> None:
        """Raise if the object is unusable, so that the caller does not wait for ever.

        Raises:
            ManagerClosedError: The object was shut down, or this is a forked child.
        """
        self.require_process()
        if self.is_shut_down:
            raise ManagerClosedError(_SHUT_DOWN)

    def require_process(self) -> None:
        """Raise in a forked child, where a call would wait for a thread that runs only in the parent process.

        Raises:
            ManagerClosedError: This is a forked child.
        """
        if self.is_of_parent():
            raise ManagerClosedError(
                f"expected a manager of this process ({os.getpid()}), got one of process {self._pid}, which forked "
                "this one: a manager works only in the process that made it; make another one here"
            )


class OwnedExecutor(SafeExecutor):
    """A `SafeExecutor` whose `submit` raises errors of the manager."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call ``fn`` on a thread of this executor.

        Raises:
            ManagerClosedError: A signal handler has shut the manager down.
            ManagerError: The operating system refuses another thread.
        """
        try:
            return super().submit(fn, *args, **kwargs)
        except ExecutorClosedError as error:
            raise ManagerClosedError(_SHUT_DOWN) from error
        except ThreadRefusedError as error:
            raise ManagerError(f"expected to start a thread ({self.name}): {error}") from error


class Unclosed:
    """Closes the resources of an object that is garbage-collected without a shutdown, and logs a warning.

    Args:
        owner: The object.
        closers: Functions that close the owner's resources, called in reverse order. They must not refer to the owner.
    """

    def __init__(self, owner: object, closers: Iterable[Callable[[], object]]) -> None:
        self._closers = list(closers)
        self._finalizer = weakref.finalize(owner, _end, type(owner).__name__, self._closers, os.getpid())
        # At the end of the process, the threads end anyway.
        self._finalizer.atexit = False

    def add(self, close: Callable[[], object]) -> None:
        """Add a function that is called before all earlier closers. It must not refer to the owner."""
        self._closers.append(close)

    def forget(self) -> None:
        """Stop watching the owner. Call this when the owner is shut down in the ordinary way."""
        self._finalizer.detach()


def interrupts_own_call() -> bool:
    """Return whether the calling function runs in a signal handler that interrupted ``manager`` or ``ft_transport``.

    A handler runs on the main thread and interrupts it anywhere. The interrupted code may hold locks until the handler
    returns. If the handler waited for another thread that needs one of these locks, both threads would deadlock.
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
        return  # The resources belong to the parent process.
    # The garbage collector may call this function while the current thread holds a lock of threading or logging.
    _thread.start_new_thread(_end_on_thread, (name, closers))


def _end_on_thread(name: str, closers: list[Callable[[], object]]) -> None:
    logger.warning("a %s was dropped without shutdown; closing its threads, sockets and snapshots now", name)
    for close in reversed(closers):
        try:
            close()
        except Exception:
            logger.exception("could not close a resource of a %s that was dropped without shutdown", name)
