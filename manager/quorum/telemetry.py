"""Makes the loop of one replica observable: profiler spans under torchft's names, and log messages about long waits.

Without a profiler a `span` costs nothing, unlike ``torch.profiler.record_function``, which costs microseconds.
"""

from __future__ import annotations

import functools
import itertools
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch.autograd import profiler

from ft_transport.runtime.signal_safe import SafeEvent, SafeThread

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)

_PREFIX: Final = "torchft::manager::"
_NOTHING: Final = nullcontext()
_IDLE_S: Final = 3600.0


def span(name: str) -> AbstractContextManager[Any]:
    """Return a context manager that shows up as ``torchft::manager::<name>`` in a profile."""
    return torch.profiler.record_function(_PREFIX + name) if _is_profiled() else _NOTHING


def spanned(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that makes each call of a function a `span`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not _is_profiled():
                return function(*args, **kwargs)
            with span(name):
                return function(*args, **kwargs)

        return call

    return decorate


def _is_profiled() -> bool:
    """Return whether a profiler may be running. torch's own compiler uses the same check."""
    return profiler._is_profiler_enabled


@dataclass(slots=True, kw_only=True)
class _Wait:
    stalled_s: float
    what: str
    missing: Callable[[], str] | None
    thread_id: int


class StallWatch:
    """Logs each wait of one manager that takes too long, from a thread of its own that starts with the first wait.

    Args:
        after_s: Length of a wait, in seconds, after which it is logged. Each wait is logged once.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        # Changed without a lock, by atomic operations: an exception of a signal handler could leave a lock locked.
        self._waits: dict[int, _Wait] = {}
        self._keys = itertools.count()
        self._starting = threading.Lock()
        self._thread: SafeThread | None = None
        self._closed = SafeEvent()

    @contextmanager
    def waiting(
        self, what: str, *, missing: Callable[[], str] | None = None, thread_id: int | None = None
    ) -> Iterator[None]:
        """Treat the body of the ``with`` block as a wait.

        Args:
            what: The replica, its step and what it waits for, as the start of the log message.
            missing: Returns a description of the missing replicas; called on the thread of this object.
            thread_id: The thread whose stack the message shows. Default: the calling thread.
        """
        wait = _Wait(
            stalled_s=time.monotonic() + self._after_s,
            what=what,
            missing=missing,
            thread_id=thread_id if thread_id is not None else threading.get_ident(),
        )
        key = next(self._keys)
        try:
            self._waits[key] = wait
            if self._thread is None:
                self._start()
            yield
        finally:
            self._waits.pop(key, None)

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._closed.is_set():
                thread = SafeThread(target=self._run, name="ft-transport-stall-watch", daemon=True)
                thread.start()
                self._thread = thread

    def close(self) -> None:
        """End the thread."""
        with self._starting:
            self._closed.set()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        # With this interval, a wait is logged after at most 1.5 times ``after_s``.
        while not self._closed.wait(self._after_s / 2):
            now_s = time.monotonic()
            for wait in list(self._waits.values()):
                if wait.stalled_s <= now_s:
                    wait.stalled_s = now_s + _IDLE_S
                    self._log(wait)

    def _log(self, wait: _Wait) -> None:
        missing = wait.missing() if wait.missing is not None else ""
        logger.warning(
            "%s for more than %.1f s%s; %s", wait.what, self._after_s, f"; {missing}" if missing else "", _stack(wait)
        )


def _stack(wait: _Wait) -> str:
    frame = sys._current_frames().get(wait.thread_id)
    if frame is None:
        return "the waiting thread has ended"
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stack = "".join(traceback.format_stack(frame)).rstrip()
    return f"thread {names.get(wait.thread_id, '?')!r} is at:\n{stack}"
