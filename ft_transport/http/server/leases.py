"""Leases, which keep a snapshot in the cache for a receiver, and the limit on the number of receivers.

A lease keeps a snapshot between the requests of one fetch (``snapshot_cache``). The lease begins with the
receiver's request; if the receiver waits for a future step, it begins when the snapshot of that step arrives.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from ft_transport.errors import PeerNotReadyError

Client: TypeAlias = tuple[str, str]
"""Address and replica name of a receiver. All connections with the same pair count as one receiver, as do the ranks of
a replica on one host.
"""

_KEPT_S: Final = 1.0
"""How long a receiver keeps its slot without a request. The next request usually arrives within milliseconds."""
_RETRY_AFTER_S: Final = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """A reader of a snapshot, such as a receiver's connection. Any thread may call its functions.

    Attributes:
        is_closed: Returns whether the reader's connection is closed, which ends the reader's lease. The function object
            also identifies the reader: two readers have two function objects.
        cut_off: Closes the reader's connection and returns at once; calls its argument when no more bytes can reach the
            reader. ``None`` for a reader within this process, which is never cut off.
    """

    is_closed: Callable[[], bool] = lambda: False
    cut_off: Callable[[Callable[[], None]], None] | None = None


@dataclass(slots=True, eq=False)
class Lease:
    """The lease of one reader for one snapshot.

    Attributes:
        reader: The reader.
        num_readings: Number of the reader's requests in progress.
        until_s: Time at which the lease ends if no request is in progress.
    """

    reader: Reader
    num_readings: int = 0
    until_s: float = 0.0

    def is_over(self, now_s: float) -> bool:
        """Whether the lease no longer keeps the snapshot in the cache."""
        return not self.num_readings and (self.until_s <= now_s or self.reader.is_closed())


@dataclass(slots=True, eq=False)
class Wait:
    """A reader that waits for a step.

    Attributes:
        reader: The reader.
        step: The step for which the reader waits.
        until_s: Time at which the wait ends; infinite while the reader's request is in progress.
    """

    reader: Reader
    step: int
    until_s: float = math.inf


class StepWaiters:
    """The readers that wait for a future step, each for one step. Not thread-safe: the cache's lock protects it."""

    def __init__(self) -> None:
        self._waits: dict[Callable[[], bool], Wait] = {}

    def begin(self, step: int, reader: Reader, *, now_s: float) -> Wait:
        """Record that a reader waits for a step, and forget an earlier step of this reader."""
        # Removes the entries of closed connections, which nothing else removes.
        self._waits = {
            name: wait for name, wait in self._waits.items() if wait.until_s > now_s and not wait.reader.is_closed()
        }
        wait = self._waits[reader.is_closed] = Wait(reader, step)
        return wait

    def grant_leases(self, step: int, *, now_s: float, lease_s: float) -> dict[Callable[[], bool], Lease]:
        """Remove the readers that wait for a step that has arrived, and return a lease for each of them.

        A lease has no end yet if the reader's request is still in progress.
        """
        granted = {name: wait for name, wait in self._waits.items() if wait.step == step and wait.until_s > now_s}
        for name in granted:
            del self._waits[name]
        return {
            name: Lease(wait.reader, until_s=math.inf if wait.until_s == math.inf else now_s + lease_s)
            for name, wait in granted.items()
        }


@dataclass(slots=True)
class _Place:
    num_answers: int = 0
    idle_since_s: float = 0.0


class ClientLimit:
    """Limits the number of receivers to which the server sends data. Used only on the server's event loop.

    Args:
        max_clients: Maximum number of receivers; ``None`` for any number.
        clock: Returns monotonic seconds.
    """

    def __init__(self, max_clients: int | None, clock: Callable[[], float]) -> None:
        self._max_clients = max_clients
        self._clock = clock
        self._places: dict[Client, _Place] = {}

    @contextlib.contextmanager
    def serving(self, client: Client) -> Iterator[None]:
        """Reserve a slot for the receiver while a response is sent, and for a moment after its last response.

        Raises:
            PeerNotReadyError: Other receivers occupy all slots.
        """
        if self._max_clients is None:
            yield
            return
        place = self._place_of(client, self._max_clients)
        place.num_answers += 1
        try:
            yield
        finally:
            place.num_answers -= 1
            place.idle_since_s = self._clock()

    def _place_of(self, client: Client, max_clients: int) -> _Place:
        if client not in self._places:
            if len(self._places) >= max_clients:
                before_s = self._clock() - _KEPT_S
                for each, place in list(self._places.items()):
                    if not place.num_answers and place.idle_since_s <= before_s:
                        del self._places[each]
            if len(self._places) >= max_clients:
                raise PeerNotReadyError(
                    f"the server already sends to {max_clients} receivers, the limit (max_clients); try again later",
                    retry_after_s=_RETRY_AFTER_S,
                )
            self._places[client] = _Place()
        return self._places[client]
