"""What a manager has to end: where its constructor is refused, and where it is dropped without ``shutdown``.

Nothing here may keep the manager alive, and with it the model: what ends threads knows the threads' owners alone.
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

from ft_transport.runtime.handler_safety import ExecutorClosedError, SafeExecutor, ThreadRefusedError
from manager.errors import ManagerClosedError, ManagerError

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

_OURS: Final = ("manager.", "ft_transport.")
_SHUT_DOWN: Final = "expected a manager that runs, this one was shut down; make another one"
_PROGRAMS: Final = ("manager.demo",)
"""Programs of ours that call the packages as a user does."""


def ends_what_it_owns(constructor: Callable[P, None]) -> Callable[P, None]:
    """Let a constructor that raises shut down the transport, and close the store, that it was given by keyword.

    Callers make them in the call, as a rule, and have no other way to end them. A transport that serves another
    manager's state stays as it is.
    """

    @functools.wraps(constructor)
    def construct(*arguments: P.args, **keywords: P.kwargs) -> None:
        transport: Any = keywords.get("checkpoint_transport")
        store: Any = keywords.get("checkpoint_store")
        # Anything else than a transport is not ours to end.
        is_owned_elsewhere = getattr(transport, "is_owned", True)
        try:
            constructor(*arguments, **keywords)
        except BaseException:
            from ft_transport import CheckpointStore  # noqa: PLC0415 - takes time that only a failure may take

            if isinstance(store, CheckpointStore):
                store.close()
            if not is_owned_elsewhere:
                transport.serve_fresh(None)
                transport.shutdown()
            raise

    return construct


class Usability:
    """Says until when an object may be used: until its shutdown, in the process that made it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.is_shut_down = False

    def is_of_parent(self) -> bool:
        """Whether this process was forked from the one that made the object: none of its threads runs here."""
        return os.getpid() != self._pid

    def require(self) -> None:
        """Refuse a call that nothing would ever answer.

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
    """Ends what belongs to an object that was dropped without being shut down, and says so in the log.

    Args:
        owner: The object.
        closers: End what belongs to it, the last first. They must not refer to the owner.
    """

    def __init__(self, owner: object, closers: Iterable[Callable[[], object]]) -> None:
        self._closers = list(closers)
        self._finalizer = weakref.finalize(owner, _end, type(owner).__name__, self._closers, os.getpid())
        # A process that ends takes its threads with it.
        self._finalizer.atexit = False

    def add(self, close: Callable[[], object]) -> None:
        """Have ``close`` called, before those that came earlier. It must not refer to the owner."""
        self._closers.append(close)

    def forget(self) -> None:
        """Do nothing any more: the owner is shut down."""
        self._finalizer.detach()


def interrupts_own_call() -> bool:
    """Whether the caller of the calling function runs on top of code of these packages.

    A handler runs on the main thread, wherever that is at the moment. Locks that the interrupted code holds are free
    only when the handler has returned: to wait for another thread that needs one of them would be a deadlock.
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
    # The collector calls this anywhere, also where this very thread holds a lock of threading or logging.
    _thread.start_new_thread(_end_on_thread, (name, closers))


def _end_on_thread(name: str, closers: list[Callable[[], object]]) -> None:
    logger.warning("a %s was dropped without shutdown; its threads, sockets and snapshots are ended now", name)
    for close in reversed(closers):
        try:
            close()
        except Exception:
            logger.exception("ending what a dropped %s has left failed", name)
