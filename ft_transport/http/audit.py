"""Who fetched what: one line for each receiver and fetch, in the logger ``ft_transport.audit``, at level INFO.

A fetch is many requests over several connections. They are one as long as they come from one address (and replica, if
it says which it is), are for one snapshot, and one of the connections is open. A delta is a fetch of its own, of no
snapshot, from the step that it is applied to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ft_transport.errors import escape_peer_text
from ft_transport.http.admission import Place

logger = logging.getLogger("ft_transport.audit")

_MAX_FETCHES: Final = 1024
_MAX_NAME_CHARACTERS: Final = 64


class FetchKey(NamedTuple):
    """What makes requests one fetch."""

    address: str
    replica: str
    step: int
    snapshot_id: str


@dataclass(slots=True)
class _Fetch:
    began_s: float
    ended_s: float
    outcome: str = ""
    num_requests: int = 0
    num_bytes: int = 0
    routes: dict[str, None] = field(default_factory=dict)
    places: set[Place] = field(default_factory=set)


class Audit:
    """Sums up requests, and logs a fetch when its last connection has ended. Belongs to the server's event loop.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._fetches: dict[FetchKey, _Fetch] = {}
        # An ended fetch's keys stay with its connections, of which there are few.
        self._keys_of: dict[Place, set[FetchKey]] = {}

    def note(self, place: Place, key: FetchKey, *, route: str, num_bytes: int, began_s: float, outcome: str) -> None:
        """One request has been answered, as far as it was.

        Args:
            place: Of its connection.
            key: What it belongs to; the replica's name as it came.
            route: Which part of the snapshot was asked for.
            num_bytes: Of the body, given to the system.
            began_s: When, by the clock.
            outcome: How it ended.
        """
        if not logger.isEnabledFor(logging.INFO):
            return
        fetch = self._fetches.get(key)
        if fetch is None:
            if len(self._fetches) >= _MAX_FETCHES:
                self._end(next(iter(self._fetches)))
            fetch = self._fetches[key] = _Fetch(began_s, began_s)
        fetch.ended_s = self._clock()
        fetch.outcome = outcome
        fetch.num_requests += 1
        fetch.num_bytes += num_bytes
        fetch.routes[route] = None
        if not place.has_left:
            fetch.places.add(place)
            self._keys_of.setdefault(place, set()).add(key)
        elif not fetch.places:
            self._end(key)

    def left(self, place: Place) -> None:
        """A connection has ended."""
        for key in self._keys_of.pop(place, ()):
            fetch = self._fetches.get(key)
            if fetch is not None:
                fetch.places.discard(place)
                if not fetch.places:
                    self._end(key)

    def close(self) -> None:
        """Logs what has not ended."""
        for key in tuple(self._fetches):
            self._end(key)

    def _end(self, key: FetchKey) -> None:
        fetch = self._fetches.pop(key)
        logger.info(
            "fetch peer=%s replica=%s step=%d snapshot=%s routes=%s requests=%d bytes=%d seconds=%.3f end=%s",
            key.address,
            escape_peer_text(key.replica, max_characters=_MAX_NAME_CHARACTERS) or "-",
            key.step,
            key.snapshot_id,
            ",".join(fetch.routes),
            fetch.num_requests,
            fetch.num_bytes,
            fetch.ended_s - fetch.began_s,
            fetch.outcome,
        )
