"""Connection slots of a server, and which connection loses its slot when all are taken.

A connection is a newcomer until it has authenticated itself as a member of the job; in a server without a secret, until
its first request. Newcomers never take more than a part of the slots, newcomers of one address a part of that, and a
newcomer keeps its slot for seconds at most. When there are too many newcomers, the next one evicts another: first one
that has sent no request, the oldest first. So a client that opens connections without end competes with other
newcomers, and a genuine peer, which sends its request at once, is a newcomer for an instant. When all slots are taken,
but not by a crowd of newcomers, the server closes the connections that have been idle for longest between two requests.

This module knows no sockets: a slot returns when its connection ends, over TLS or not.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

NEWCOMER_S: Final = 10.0
"""Deadline for a complete first request that authenticates the connection."""
_IPV6_SITE_BITS: Final = 64
"""Prefix length of the network that one host owns (RFC 7421); its addresses count as one."""


@dataclass(slots=True, eq=False)
class Slot:
    """The slot of one connection.

    Attributes:
        address: The peer's address, as `client_of` returns it.
        entered_s: When the connection was accepted, by the clock of its `ConnectionSlots`.
        end: Closes the connection, at once or soon. Set by the code that makes the connection.
        is_authenticated: Whether the connection has authenticated itself as a member of the job.
        is_ending: Whether the connection is being closed.
        has_left: Whether the connection has ended.
        paid: Refunds the connection's charge, if there was one; see ``http.server.rate_limits``.
        num_requests: Number of its requests that ``http.server.rate_limits`` counts.
        claims: Whether it claims to be a member's, see ``http.server.listener``: other newcomers are evicted first.
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
        """Refund the connection's charge; return whether there was one."""
        paid, self.paid = self.paid, None
        if paid is not None:
            paid()
        return paid is not None


class _Queues:
    """Slots by address; those of each address in the order of arrival."""

    def __init__(self) -> None:
        self._by_address: dict[str, dict[Slot, None]] = {}
        self._num_slots = 0

    def __len__(self) -> int:
        return self._num_slots

    def num_of(self, address: str) -> int:
        return len(self._by_address.get(address, ()))

    def add(self, slot: Slot) -> None:
        of_address = self._by_address.setdefault(slot.address, {})
        self._num_slots += slot not in of_address
        of_address[slot] = None

    def discard(self, slot: Slot) -> None:
        of_address = self._by_address.get(slot.address)
        if of_address is not None and slot in of_address:
            del of_address[slot]
            self._num_slots -= 1
            if not of_address:
                del self._by_address[slot.address]

    def first_of(self, address: str) -> Slot | None:
        return next(iter(self._by_address.get(address, ())), None)

    def first_of_crowd(self) -> Slot | None:
        """Return the oldest slot of the address with the most: a lone client is not evicted for a crowd."""
        crowd = max(self._by_address.values(), key=len, default=None)
        return next(iter(crowd)) if crowd is not None else None

    def all(self) -> list[Slot]:
        return [slot for slots in self._by_address.values() for slot in slots]


@dataclass(slots=True, eq=False)
class ConnectionSlots:
    """Gives slots to connections. Used only on the server's event loop.

    Args:
        max_connections: Maximum number of open connections.
        clock: Monotonic seconds.
    """

    max_connections: int
    clock: Callable[[], float]
    _open: set[Slot] = field(default_factory=set)
    _waiting: _Queues = field(default_factory=_Queues)
    _asking: _Queues = field(default_factory=_Queues)
    _idle: _Queues = field(default_factory=_Queues)
    _num_of_address: dict[str, int] = field(default_factory=dict)
    _num_ending: int = 0

    @property
    def num_open(self) -> int:
        """Number of connections that have a slot, including those being closed."""
        return len(self._open)

    @property
    def has_newcomers(self) -> bool:
        """Whether `end_overdue` may have something to do later."""
        return bool(len(self._waiting) + len(self._asking))

    @property
    def has_room(self) -> bool:
        """Whether a slot is free."""
        return len(self._open) < self.max_connections

    @property
    def is_full(self) -> bool:
        """Whether all slots are taken, and no closing connection will free one."""
        return len(self._open) >= self.max_connections and not self._num_ending

    @property
    def max_newcomers(self) -> int:
        """Maximum number of newcomers."""
        return max(1, self.max_connections // 2)

    @property
    def max_newcomers_of_address(self) -> int:
        """Maximum number of newcomers of one address."""
        return max(1, self.max_connections // 4)

    @property
    def max_of_address(self) -> int:
        """Maximum number of slots of one address: enough for the ranks of a host, but not all."""
        return self.max_connections - self.max_connections // 4

    def make_room(self) -> bool:
        """Return whether one more connection may be accepted now.

        If not, a connection is being closed and a slot becomes free in a moment, or `is_full` is true.
        """
        if len(self._open) >= self.max_connections and not self._num_ending:
            self._end(self._dispensable())
        return self.has_room

    def enter(self, address: str, end: Callable[[], object]) -> Slot | None:
        """Give a slot to a connection that was accepted after `make_room`.

        Args:
            address: The peer's address, as `client_of` returns it.
            end: See `Slot`.

        Returns:
            The slot, to be returned with `leave`; ``None`` if this address has its maximum of slots and uses all of
            them.
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
        slot = Slot(address, self.clock(), end)
        self._open.add(slot)
        self._waiting.add(slot)
        self._num_of_address[address] = self._num_of_address.get(address, 0) + 1
        return slot

    def asks(self, slot: Slot) -> None:
        """Note a newcomer's complete request: others lose their slots first until it is answered."""
        if not slot.is_ending:
            self._waiting.discard(slot)
            self._asking.add(slot)

    def authenticated(self, slot: Slot) -> None:
        """Note that the connection has authenticated itself. May be called with each request."""
        if not slot.is_authenticated:
            slot.is_authenticated = True
            self._waiting.discard(slot)
            self._asking.discard(slot)

    @contextlib.contextmanager
    def serving(self, slot: Slot) -> Iterator[None]:
        """Protect the connection of an authenticated peer from eviction while its request is answered."""
        if slot.is_authenticated:
            self._idle.discard(slot)
        else:
            self.asks(slot)
        try:
            yield
        finally:
            if not slot.is_ending and slot in self._open:
                self._asking.discard(slot)
                asking = self._asking if slot.claims else self._waiting
                (self._idle if slot.is_authenticated else asking).add(slot)

    @contextlib.contextmanager
    def waiting(self, slot: Slot) -> Iterator[None]:
        """Treat the connection as idle while a request in progress waits for its peer."""
        if slot.is_authenticated and not slot.is_ending:
            self._idle.add(slot)
        try:
            yield
        finally:
            self._idle.discard(slot)

    def leave(self, slot: Slot) -> None:
        """Return the slot of a connection that has ended. May be called twice."""
        if slot not in self._open:
            return
        self._open.remove(slot)
        slot.has_left = True
        # It refers back to the slot, and training loops run with the cyclic collector off.
        slot.end = _nothing
        if slot.is_ending:
            self._num_ending -= 1
        else:
            self._stop_counting(slot)

    def end_overdue(self) -> None:
        """Close the connections that have taken too long to authenticate themselves."""
        overdue_s = self.clock() - NEWCOMER_S
        for slot in [*self._waiting.all(), *self._asking.all()]:
            if slot.entered_s <= overdue_s:
                self._end(slot)

    def _dispensable(self) -> Slot | None:
        # Without a few newcomers no new client would ever get in beside idle clients that keep their slots.
        has_many = len(self._waiting) + len(self._asking) > self.max_newcomers // 2
        newcomer, idle = self._newcomer_of_crowd(), self._idle.first_of_crowd()
        return newcomer or idle if has_many else idle or newcomer

    def _dispensable_of(self, address: str) -> Slot | None:
        num_newcomers = self._waiting.num_of(address) + self._asking.num_of(address)
        newcomer, idle = self._newcomer_of(address), self._idle.first_of(address)
        return newcomer or idle if num_newcomers > self.max_newcomers_of_address // 2 else idle or newcomer

    def _newcomer_of(self, address: str) -> Slot | None:
        return self._waiting.first_of(address) or self._asking.first_of(address)

    def _newcomer_of_crowd(self) -> Slot | None:
        return self._waiting.first_of_crowd() or self._asking.first_of_crowd()

    def _end(self, slot: Slot | None) -> None:
        if slot is None:
            return
        self._stop_counting(slot)
        slot.is_ending = True
        self._num_ending += 1
        slot.end()

    def _stop_counting(self, slot: Slot) -> None:
        self._waiting.discard(slot)
        self._asking.discard(slot)
        self._idle.discard(slot)
        left = self._num_of_address[slot.address] - 1
        if left:
            self._num_of_address[slot.address] = left
        else:
            del self._num_of_address[slot.address]


@functools.lru_cache(maxsize=1024)
def client_of(host: str) -> str:
    """Return the address by which a peer counts: IPv4 also if mapped into IPv6, else its IPv6 network."""
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
