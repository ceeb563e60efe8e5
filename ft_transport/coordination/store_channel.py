"""Keys of a store of ``torch.distributed``: set, set once, wait; every wait polls until a deadline.

A wait in the store itself can be neither interrupted nor abandoned, and blocks its connection for other threads. A
`StoreCaller` decides how the store is called: directly for a store that ``torch.distributed`` has connected to
(`DirectStore`), on the thread of a cached connection for any other (``coordination.store_connections``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, Protocol, TypeVar

from ft_transport.errors import RankGoneError
from ft_transport.runtime.deadline import Deadline

T = TypeVar("T")

AT_ONCE: Final = timedelta(0)
"""The timeout of a wait that polls once."""

_SHORTEST_PAUSE_S: Final = 0.0002
_LONGEST_PAUSE_S: Final = 0.05
_PAUSE_SHARE: Final = 0.05
"""Share of its time by which a wait may take longer: a long wait polls seldom, beside the training thread."""


class StoreCaller(Protocol):
    """Calls functions with a store."""

    def call(self, function: Callable[[Any], T], timeout: timedelta, *, may_repeat: bool = True) -> T:
        """Calls ``function`` with the store.

        Args:
            function: Receives the store.
            timeout: For the store to answer.
            may_repeat: Whether ``function`` may run a second time if the connection turns out to be broken.

        Raises:
            DeadlineExceededError: The store did not answer in time.
            RankGoneError: The store does not answer.
            Exception: Any error of ``function``.
        """


class DirectStore:
    """A `StoreCaller` that calls a store on the caller's own thread, which saves a switch between threads.

    Meant for the store of ``torch.distributed``, whose process the trainer's own collectives need too: timeouts do not
    apply.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def call(self, function: Callable[[Any], T], timeout: timedelta, *, may_repeat: bool = True) -> T:
        """Call ``function``; see `StoreCaller.call`."""
        del timeout, may_repeat
        try:
            return function(self._store)
        except RuntimeError as error:  # DistError and its like
            raise RankGoneError(f"expected the key-value store of torch.distributed to answer: {error}") from error


class Pacing:
    """The pauses of one wait, which polls less often the longer it takes.

    Args:
        longest_s: The longest pause, in seconds.
    """

    def __init__(self, longest_s: float = _LONGEST_PAUSE_S) -> None:
        self._began_s = time.monotonic()
        self._longest_s = longest_s

    def pause(self, at_most_s: float) -> None:
        """Sleep before the next poll, for at most ``at_most_s``."""
        share_s = _PAUSE_SHARE * (time.monotonic() - self._began_s)
        time.sleep(min(max(_SHORTEST_PAUSE_S, share_s), self._longest_s, at_most_s))


class StoreChannel:
    """The keys of one store. Any thread may call it, one after the other. All methods raise as `StoreCaller.call`.

    Args:
        caller: Calls the store.
    """

    def __init__(self, caller: StoreCaller) -> None:
        self._caller = caller

    def call(self, function: Callable[[Any], T], timeout: timedelta, *, may_repeat: bool = True) -> T:
        """Call ``function``; see `StoreCaller.call`."""
        return self._caller.call(function, timeout, may_repeat=may_repeat)

    def set(self, key: str, value: str | bytes, timeout: timedelta) -> None:
        """Set a key, and make sure that the store still answers."""

        def set_and_see(store: Any) -> None:
            store.set(key, value)
            # A store does not answer to `set`; only this call shows that it is still there.
            store.check([key])

        self.call(set_and_see, timeout)

    def post(self, key: str, value: str | bytes, timeout: timedelta) -> None:
        """Set a key without waiting; if the store died, only the next call notices."""
        self.call(lambda store: store.set(key, value), timeout)

    def set_once(self, key: str, value: str, timeout: timedelta, *, remove: Sequence[str] = ()) -> bytes:
        """Set a key unless it is set already, and remove others. Return the value of the key."""

        def set_and_remove(store: Any) -> bytes:
            stored = bytes(store.compare_set(key, "", value))
            for each in remove:
                store.delete_key(each)
            return stored

        return self.call(set_and_remove, timeout)

    def replace(self, key: str, old: str, new: str, timeout: timedelta) -> None:
        """Set a key if it has the old value."""
        self.call(lambda store: store.compare_set(key, old, new), timeout)

    def add(self, key: str, number: int, timeout: timedelta) -> int:
        """Add to a counter, and return its new value."""
        return int(self.call(lambda store: store.add(key, number), timeout, may_repeat=False))

    def remove(self, key: str, timeout: timedelta) -> None:
        """Delete a key."""
        self.call(lambda store: store.delete_key(key), timeout)

    def missing(self, keys: Sequence[str], timeout: timedelta) -> list[str]:
        """Return the keys that are not set."""
        return self.call(lambda store: [key for key in keys if not store.check([key])], timeout)

    def get(
        self,
        keys: Sequence[str],
        timeout: timedelta,
        *,
        unless: Sequence[str] = (),
        answer_timeout: timedelta = timedelta(0),
    ) -> list[bytes] | None:
        """Wait until all keys are set. Return their values, or ``None`` if they are not.

        Args:
            keys: The keys to wait for; at least one.
            timeout: For the keys to be set; `AT_ONCE` to poll once.
            unless: If one of these is set, the wait ends. Keys that were set before it are still found.
            answer_timeout: For the store to answer, if that is longer: a busy machine may need more than a short
                timeout.
        """
        deadline = Deadline.after(timeout)
        pacing = Pacing()

        def values(store: Any) -> list[bytes] | None:
            return [bytes(store.get(key)) for key in keys] if store.check(list(keys)) else None

        def look(store: Any) -> list[bytes] | None:
            found = values(store)
            if found is None and any(store.check([key]) for key in unless):
                # Since the first poll, the keys may have been set, and then one that ends the wait.
                found = values(store) or []
            return found

        while True:
            found = self.call(look, max(answer_timeout, deadline.cap(timeout)))
            if found is not None or deadline.is_over():
                return found or None
            pacing.pause(deadline.cap(timeout).total_seconds())
