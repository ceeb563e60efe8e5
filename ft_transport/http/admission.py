"""Who has a place among a server's connections, and who loses it where there is no further one.

A connection is a newcomer until it has shown that it belongs to the job; in a server without a secret, until its first
request. Newcomers never take more than a part of the places, those of one address a part of that, and none keeps its
place for longer than seconds. Where there are too many, the next one goes in and another newcomer goes out: first who
has asked for nothing, and of those who came first. So whoever opens connections without end competes with others of its
kind, and a genuine peer, which asks at once, is a newcomer for an instant. Where all places are taken, and not by a
crowd of newcomers, those go who have been idle for longest between two requests.

Nothing here knows sockets: a place is given back when its connection has ended, however it is made.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

NEWCOMER_S: Final = 10.0
"""How long a connection may take for a whole first request that shows that it belongs here."""
_IPV6_SITE_BITS: Final = 64
"""One host has all addresses of a network of this size (RFC 7421); they count as one."""


@dataclass(slots=True, eq=False)
class Place:
    """The place of one connection.

    Attributes:
        address: Of the peer, as ``client_of`` gives it.
        entered_s: When it came, by the clock of its `Admission`.
        end: Ends the connection, at once or soon. Whoever makes the connection sets it.
        is_authenticated: Whether it has shown that it belongs to the job.
        is_ending: Whether its connection was told to end.
        has_left: Whether it has ended.
        paid: Gives back what its connection has cost, if anything, see ``http.strangers``.
        num_requests: How many have come on it, of those that count there.
        claims: Whether it has said something that strangers do not know: other newcomers go before it.
    """

    address: str
    entered_s: float
    end: Callable[[], object]
    is_authenticated: bool = False
    is_ending: bool = False
    has_left: bool = False
    paid: Callable[[], object] | None = None
    num_requests: int = 0
    claims: bool = False

    def pay_back(self) -> bool:
        """Gives back what the connection has cost; whether it had cost anything."""
        paid, self.paid = self.paid, None
        if paid is not None:
            paid()
        return paid is not None


class _Queues:
    """Places by address, each address's in the order in which they came."""

    def __init__(self) -> None:
        self._by_address: dict[str, dict[Place, None]] = {}
        self._num_places = 0

    def __len__(self) -> int:
        return self._num_places

    def num_of(self, address: str) -> int:
        return len(self._by_address.get(address, ()))

    def add(self, place: Place) -> None:
        of_address = self._by_address.setdefault(place.address, {})
        self._num_places += place not in of_address
        of_address[place] = None

    def discard(self, place: Place) -> None:
        of_address = self._by_address.get(place.address)
        if of_address is not None and place in of_address:
            del of_address[place]
            self._num_places -= 1
            if not of_address:
                del self._by_address[place.address]

    def first_of(self, address: str) -> Place | None:
        return next(iter(self._by_address.get(address, ())), None)

    def first_of_crowd(self) -> Place | None:
        """Of the address that has most: who comes in a crowd does not drive out who comes alone."""
        crowd = max(self._by_address.values(), key=len, default=None)
        return next(iter(crowd)) if crowd is not None else None

    def all(self) -> list[Place]:
        return [place for places in self._by_address.values() for place in places]


@dataclass(slots=True, eq=False)
class Admission:
    """Gives places to connections. Belongs to the server's event loop.

    Args:
        max_connections: No more are open at any moment.
        clock: Monotonic seconds.
    """

    max_connections: int
    clock: Callable[[], float]
    _open: set[Place] = field(default_factory=set)
    _waiting: _Queues = field(default_factory=_Queues)
    _asking: _Queues = field(default_factory=_Queues)
    _idle: _Queues = field(default_factory=_Queues)
    _num_of_address: dict[str, int] = field(default_factory=dict)
    _num_ending: int = 0

    @property
    def num_open(self) -> int:
        """Connections that have a place, also those that are about to lose it."""
        return len(self._open)

    @property
    def has_newcomers(self) -> bool:
        """Whether `end_overdue` may have something to do later."""
        return bool(len(self._waiting) + len(self._asking))

    @property
    def has_room(self) -> bool:
        """Whether a place is free."""
        return len(self._open) < self.max_connections

    @property
    def is_full(self) -> bool:
        """Whether every place is taken by somebody who is being served."""
        return len(self._open) >= self.max_connections and not self._num_ending

    @property
    def max_newcomers(self) -> int:
        """Places that are never for those who have shown that they belong here."""
        return max(1, self.max_connections // 2)

    @property
    def max_newcomers_of_address(self) -> int:
        """How many of these one address may have."""
        return max(1, self.max_connections // 4)

    @property
    def max_of_address(self) -> int:
        """How many places one address may have in all: those of the ranks of a host, and not everything."""
        return self.max_connections - self.max_connections // 4

    def make_room(self) -> bool:
        """Whether one more connection may be accepted now.

        If not, somebody was told to go and a place will be free in a moment, or `is_full`.
        """
        if len(self._open) >= self.max_connections and not self._num_ending:
            self._end(self._dispensable())
        return self.has_room

    def enter(self, address: str, end: Callable[[], object]) -> Place | None:
        """Gives a place to a connection that was accepted after `make_room`.

        Args:
            address: Of the peer, as `client_of` gives it.
            end: See `Place`.

        Returns:
            The place, to be given back with `leave`; ``None`` if this address has as many as one may have, and uses
            all of them.
        """
        num_newcomers = self._waiting.num_of(address) + self._asking.num_of(address)
        if num_newcomers >= self.max_newcomers_of_address:
            self._end(self._newcomer_of(address))
        elif len(self._waiting) + len(self._asking) >= self.max_newcomers:
            self._end(self._newcomer_of_crowd())
        elif self._num_of_address.get(address, 0) >= self.max_of_address:
            victim = self._dispensable_of(address)
            if victim is None:
                return None
            self._end(victim)
        place = Place(address, self.clock(), end)
        self._open.add(place)
        self._waiting.add(place)
        self._num_of_address[address] = self._num_of_address.get(address, 0) + 1
        return place

    def asks(self, place: Place) -> None:
        """A whole request of a newcomer has come: others lose their places before it does, until it is answered."""
        if not place.is_ending:
            self._waiting.discard(place)
            self._asking.add(place)

    def authenticated(self, place: Place) -> None:
        """Its connection has shown that it belongs to the job. May be called with each request."""
        if not place.is_authenticated:
            place.is_authenticated = True
            self._waiting.discard(place)
            self._asking.discard(place)

    @contextlib.contextmanager
    def serving(self, place: Place) -> Iterator[None]:
        """While one of its requests is being answered; who belongs to the job isn't told to go then."""
        if place.is_authenticated:
            self._idle.discard(place)
        else:
            self.asks(place)
        try:
            yield
        finally:
            if not place.is_ending and place in self._open:
                self._asking.discard(place)
                asking = self._asking if place.claims else self._waiting
                (self._idle if place.is_authenticated else asking).add(place)

    @contextlib.contextmanager
    def waiting(self, place: Place) -> Iterator[None]:
        """While a request that is being answered waits for its peer: that's as good as no request."""
        if place.is_authenticated and not place.is_ending:
            self._idle.add(place)
        try:
            yield
        finally:
            self._idle.discard(place)

    def leave(self, place: Place) -> None:
        """Its connection has ended. May be called twice."""
        if place not in self._open:
            return
        self._open.remove(place)
        place.has_left = True
        # It leads back to the place, and training loops run with the cyclic collector off.
        place.end = _nothing
        if place.is_ending:
            self._num_ending -= 1
        else:
            self._stop_counting(place)

    def end_overdue(self) -> None:
        """Ends the connections that have taken too long to show that they belong here."""
        overdue_s = self.clock() - NEWCOMER_S
        for place in [*self._waiting.all(), *self._asking.all()]:
            if place.entered_s <= overdue_s:
                self._end(place)

    def _dispensable(self) -> Place | None:
        # Without a few newcomers nobody would ever get in beside those who have asked once and keep their places.
        has_many = len(self._waiting) + len(self._asking) > self.max_newcomers // 2
        newcomer, idle = self._newcomer_of_crowd(), self._idle.first_of_crowd()
        return newcomer or idle if has_many else idle or newcomer

    def _dispensable_of(self, address: str) -> Place | None:
        num_newcomers = self._waiting.num_of(address) + self._asking.num_of(address)
        newcomer, idle = self._newcomer_of(address), self._idle.first_of(address)
        return newcomer or idle if num_newcomers > self.max_newcomers_of_address // 2 else idle or newcomer

    def _newcomer_of(self, address: str) -> Place | None:
        return self._waiting.first_of(address) or self._asking.first_of(address)

    def _newcomer_of_crowd(self) -> Place | None:
        return self._waiting.first_of_crowd() or self._asking.first_of_crowd()

    def _end(self, place: Place | None) -> None:
        if place is None:
            return
        self._stop_counting(place)
        place.is_ending = True
        self._num_ending += 1
        place.end()

    def _stop_counting(self, place: Place) -> None:
        self._waiting.discard(place)
        self._asking.discard(place)
        self._idle.discard(place)
        left = self._num_of_address[place.address] - 1
        if left:
            self._num_of_address[place.address] = left
        else:
            del self._num_of_address[place.address]


@functools.lru_cache(maxsize=1024)
def client_of(host: str) -> str:
    """The address of a peer as it counts: IPv4 also where it comes as IPv6, else the peer's IPv6 network."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    if address.is_link_local or address.is_loopback:
        return str(address)
    return str(ipaddress.ip_network((address, _IPV6_SITE_BITS), strict=False))


def _nothing() -> None:
    pass
