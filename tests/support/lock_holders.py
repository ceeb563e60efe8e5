"""Who holds the lock of a manager, as the public error says."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from manager import LockHolder, LockTimeoutError, StateManager


def holders_of(manager: StateManager) -> tuple[LockHolder, ...]:
    """Every open section, as another thread is told that wants to write at once."""

    def look() -> tuple[LockHolder, ...]:
        try:
            with manager.writing("a look", timedelta(0)):
                return ()
        except LockTimeoutError as error:
            return error.holders

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(look).result()
