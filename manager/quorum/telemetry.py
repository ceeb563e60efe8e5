"""Watches the loop of one replica: profiler spans under torchft's names, and reports of long waits.

``torch.profiler.record_function`` costs microseconds even without a profiler; a span here then costs nothing.
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
    """Decorate a function so that each call is a `span`."""

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
    """Return whether a profiler may run; torch's own compiler uses the same check."""
    return profiler._is_profiler_enabled


@dataclass(slots=True, kw_only=True)
class _Wait:
    stalled_s: float
    what: str
    missing: Callable[[], str] | None
    thread_id: int


class StallWatch:
    """Watches the waits of one manager on its own thread, which starts with the first wait.

    Args:
        after_s: A wait longer than this many seconds is a stall, reported once.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        # Changed by single operations without a lock, which a handler's exception could leave locked.
        self._waits: dict[int, _Wait] = {}
        self._keys = itertools.count()
        self._starting = threading.Lock()
        self._thread: SafeThread | None = None
        self._closed = SafeEvent()

    @contextmanager
    def waiting(
        self, what: str, *, missing: Callable[[], str] | None = None, thread_id: int | None = None
    ) -> Iterator[None]:
        """Watch the body of the ``with`` block.

        Args:
            what: Describes replica, step and wait.
            missing: Describes the missing replicas, if known; called on the watch's thread.
            thread_id: The thread whose stack to show; the calling one by default.
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
        # This interval finds each stall after at most 1.5 times its limit.
        while not self._closed.wait(self._after_s / 2):
            now_s = time.monotonic()
            for wait in list(self._waits.values()):
                if wait.stalled_s <= now_s:
                    wait.stalled_s = now_s + _IDLE_S
                    self._tell(wait)

    def _tell(self, wait: _Wait) -> None:
        missing = wait.missing() if wait.missing is not None else ""
        logger.warning(
            "%s: nothing for %.1f s%s; %s", wait.what, self._after_s, f"; {missing}" if missing else "", _stack(wait)
        )


def _stack(wait: _Wait) -> str:
    frame = sys._current_frames().get(wait.thread_id)
    if frame is None:
        return "its thread has ended"
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stack = "".join(traceback.format_stack(frame)).rstrip()
    return f"thread {names.get(wait.thread_id, '?')!r} is at:\n{stack}"
