"""The holders of a lock, and checks whether another thread can acquire it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TypeVar

from manager import LockHolder, LockTimeoutError, StateManager
from manager.state.lock import StateLock

T = TypeVar("T")

_NOW = timedelta(0)


def elsewhere(function: Callable[[], T]) -> T:
    """Call the function on another thread; return or raise the outcome."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def holders_of(manager: StateManager) -> tuple[LockHolder, ...]:
    """Return the open sections that the public error lists, which another thread gets that tries to write."""
    return _holders_against(lambda: manager.writing("a look", _NOW)) or ()


def can_read(lock: StateLock | StateManager) -> bool:
    """Whether another thread can read at once."""
    read = lock.read if isinstance(lock, StateLock) else lock.reading
    return _holders_against(lambda: read("a look", _NOW)) is None


def can_write(lock: StateLock) -> bool:
    """Whether another thread can write at once."""
    return _holders_against(lambda: lock.write("a look", _NOW)) is None


def _holders_against(section: Callable[[], AbstractContextManager[object]]) -> tuple[LockHolder, ...] | None:
    """Return the holders of the lock if another thread cannot open the section at once, else ``None``."""

    def enter() -> tuple[LockHolder, ...] | None:
        try:
            with section():
                return None
        except LockTimeoutError as error:
            return error.holders

    return elsewhere(enter)
