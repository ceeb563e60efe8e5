"""Leases of snapshots, and slots among the receivers, for clients that have authenticated themselves.

A lease keeps a snapshot in the cache between the requests of one fetch (see ``snapshot_cache``). It begins with a
request, or, for a receiver that waits for a future step, when that snapshot comes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from ft_transport.errors import PeerNotReadyError

Client: TypeAlias = tuple[str, str]
"""A receiver: its address and its name. Its connections count as one, and so do the ranks of one replica."""

_KEPT_S: Final = 1.0
"""How long a receiver keeps its slot without a request: the next one usually comes within milliseconds."""
_RETRY_AFTER_S: Final = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """A reader of a snapshot. Any thread may call its functions.

    Attributes:
        is_closed: Returns whether the reader's connection is closed, which ends its lease. Also identifies the reader:
            each distinct function has one lease.
        cut_off: Ends the connection, and calls its argument when no more bytes can reach the reader; returns at once.
            ``None`` for a reader of this process, which is never cut off.
    """

    is_closed: Callable[[], bool] = lambda: False
    cut_off: Callable[[Callable[[], None]], None] | None = None


@dataclass(slots=True, eq=False)
class Lease:
    """A reader's requests of one snapshot that are in progress, and the time until which it may ask again."""

    reader: Reader
    num_readings: int = 0
    until_s: float = 0.0

    def is_over(self, now_s: float) -> bool:
        """Whether the reader no longer keeps the snapshot."""
        return not self.num_readings and (self.until_s <= now_s or self.reader.is_closed())


@dataclass(slots=True, eq=False)
class Wait:
    """A reader that waits for a step: without an end while its request is in progress."""

    reader: Reader
    step: int
    until_s: float = math.inf


class StepWaiters:
    """At most one step for each reader. Not thread-safe: the cache's lock protects it."""

    def __init__(self) -> None:
        self._waits: dict[Callable[[], bool], Wait] = {}

    def begin(self, step: int, reader: Reader, *, now_s: float) -> Wait:
        """Note that a reader waits for a step, in place of the step that it waited for before."""
        # Without this, entries of closed connections would stay for ever.
        self._waits = {
            name: wait for name, wait in self._waits.items() if wait.until_s > now_s and not wait.reader.is_closed()
        }
        wait = self._waits[reader.is_closed] = Wait(reader, step)
        return wait

    def come(self, step: int, *, now_s: float, lease_s: float) -> dict[Callable[[], bool], Lease]:
        """Remove the readers that wait for a step, and return their leases: without an end if a request waits now."""
        come = {name: wait for name, wait in self._waits.items() if wait.step == step and wait.until_s > now_s}
        for name in come:
            del self._waits[name]
        return {
            name: Lease(wait.reader, until_s=math.inf if wait.until_s == math.inf else now_s + lease_s)
            for name, wait in come.items()
        }


@dataclass(slots=True)
class _Place:
    num_answers: int = 0
    idle_since_s: float = 0.0


class ClientLimit:
    """The slots of receivers. Used only on the server's event loop.

    Args:
        max_clients: Maximum number of receivers; ``None`` for any number.
        clock: Monotonic seconds.
    """

    def __init__(self, max_clients: int | None, clock: Callable[[], float]) -> None:
        self._max_clients = max_clients
        self._clock = clock
        self._places: dict[Client, _Place] = {}

    @contextlib.contextmanager
    def serving(self, client: Client) -> Iterator[None]:
        """Reserve a slot for the receiver while a response is sent, and for a moment after the last one.

        Raises:
            PeerNotReadyError: All slots are taken.
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
                    f"expected a place among the receivers, {max_clients} others are sent data (max_clients)",
                    retry_after_s=_RETRY_AFTER_S,
                )
            self._places[client] = _Place()
        return self._places[client]
