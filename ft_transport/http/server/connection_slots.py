"""Connection slots of a server, and rate limits for clients that have not authenticated themselves.

A connection is a newcomer until it has authenticated itself as a member of the job; in a server without a secret, until
its first request. Newcomers never take more than a part of the slots, newcomers of one address a part of that, and a
newcomer keeps its slot for seconds at most. When there are too many newcomers, the next one evicts another: first one
that has sent no request, the oldest first. So a client that opens connections without end competes with other
newcomers, and a genuine peer, which sends its request at once, is a newcomer for an instant. When all slots are taken,
but not by a crowd of newcomers, the server closes the connections that have been idle for longest between two requests.

Each connection or request also costs the training a fraction of a millisecond of Python. A connection is charged when
its first request is about to be read; without budget it waits, unread. A client that authenticates itself gets its
charge refunded, so any number of genuine peers may come at once. A server without authentication cannot tell: there,
the first requests of a connection are free, responses that move data are free, and all others wait for their turn.
Each address has a budget, and all addresses share a larger one. A client that sends what only members know, such as the
id of the job's key, has a separate budget: a flood does not use up what genuine peers need, even if both come from one
address.

This module knows no sockets: a slot returns when its connection ends, over TLS or not.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

NEWCOMER_S: Final = 10.0
"""Deadline for a complete first request that authenticates the connection."""
_BURST: Final = 512.0
"""Enough for all ranks of a host that recover at once, each with several connections."""
_CONNECTIONS_PER_S: Final = 50.0
"""A connection with one request costs about 0.3 ms of Python."""
_REQUESTS_PER_S: Final = 300.0
"""A request costs about 0.1 ms."""
_ADDRESSES: Final = 4.0
"""Budget of all addresses together, in budgets of one address."""
_FREE_REQUESTS: Final = 8
"""More than a fetch makes on one connection before data comes."""
_MOVING_BYTES: Final = 64 << 10
"""Least size of a response that counts as a transfer of data."""
_KNOWN_S: Final = 600.0
_MAX_ADDRESSES: Final = 1024
_ROUNDING_S: Final = 1e-9
_IPV6_SITE_BITS: Final = 64
"""Prefix length of the network that one host owns (RFC 7421); its addresses count as one."""


@dataclass(slots=True, eq=False)
class Slot:
    """The slot of one connection.

    Attributes:
        address: The peer's address, as `client_of` returns it.
        entered_s: When the connection was accepted, by the clock of its `ConnectionSlots`.
        end: Closes the connection, at once or soon. Set by the code that makes the connection.
        claims: Whether it claims to be a member's, see ``http.server.listener``: other newcomers are evicted first.
        is_authenticated: Whether the connection has authenticated itself as a member of the job.
        is_ending: Whether the connection is being closed.
        has_left: Whether the connection has ended.
        num_requests: Number of its requests that `RateLimits` counts.
        charged: The budget that was charged for it; ``None`` before, and after a refund.
    """

    address: str
    entered_s: float
    end: Callable[[], object] = lambda: None
    claims: bool = False
    is_authenticated: bool = False
    is_ending: bool = False
    has_left: bool = False
    num_requests: int = 0
    charged: _Buckets | None = None

    def refund(self) -> bool:
        """Refund the connection's charge; return whether there was one."""
        charged, self.charged = self.charged, None
        if charged is not None:
            charged.give_back(self.address)
        return charged is not None


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


class ConnectionSlots:
    """Gives slots to connections. Used only on the server's event loop.

    Args:
        max_connections: Maximum number of open connections.
        clock: Monotonic seconds.

    Attributes:
        max_connections: Maximum number of open connections.
        max_newcomers: Maximum number of newcomers.
        max_newcomers_of_address: Maximum number of newcomers of one address.
        max_of_address: Maximum number of slots of one address: enough for the ranks of a host, but not all.
        limits: Rate limits of newcomers.
    """

    def __init__(self, max_connections: int, clock: Callable[[], float]) -> None:
        self.max_connections = max_connections
        self.max_newcomers = max(1, max_connections // 2)
        self.max_newcomers_of_address = max(1, max_connections // 4)
        self.max_of_address = max_connections - max_connections // 4
        self.limits = RateLimits(clock)
        self._clock = clock
        self._open: set[Slot] = set()
        self._waiting = _Queues()
        self._asking = _Queues()
        self._idle = _Queues()
        self._num_of_address: dict[str, int] = {}
        self._num_ending = 0

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
        return not self.has_room and not self._num_ending

    def make_room(self) -> bool:
        """Return whether one more connection may be accepted now.

        If not, a connection is being closed and a slot becomes free in a moment, or `is_full` is true.
        """
        if self.is_full:
            self._end(self._dispensable())
        return self.has_room

    def enter(self, address: str) -> Slot | None:
        """Give a slot to a connection that was accepted after `make_room`.

        Args:
            address: The peer's address, as `client_of` returns it.

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
        slot = Slot(address, self._clock())
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
        slot.end = lambda: None
        if slot.is_ending:
            self._num_ending -= 1
        else:
            self._stop_counting(slot)

    def end_overdue(self) -> None:
        """Close the connections that have taken too long to authenticate themselves."""
        overdue_s = self._clock() - NEWCOMER_S
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


class RateLimits:
    """Rate limits of unauthenticated clients. Used only on the server's event loop.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._connections = _Buckets(_CONNECTIONS_PER_S, clock)
        self._claims = _Buckets(_CONNECTIONS_PER_S, clock)
        self._requests = _Buckets(_REQUESTS_PER_S, clock)
        self._known_s: dict[str, float] = {}

    def admit(self, slot: Slot) -> bool:
        """Return whether the first request of a connection may be read now; if so, charge for it."""
        buckets = self._claims if slot.claims else self._connections
        if not buckets.take(slot.address):
            return False
        slot.charged = buckets
        return True

    def belongs(self, slot: Slot) -> None:
        """Refund a connection that has authenticated itself. May be called with each request."""
        if not slot.refund():
            return
        self._known_s.pop(slot.address, None)
        if len(self._known_s) >= _MAX_ADDRESSES:
            del self._known_s[next(iter(self._known_s))]
        self._known_s[slot.address] = self._clock()

    def is_known(self, address: str) -> bool:
        """Whether a client at this address has authenticated itself recently."""
        known_s = self._known_s.get(address)
        return known_s is not None and self._clock() - known_s < _KNOWN_S

    def turn_after_s(self, slot: Slot) -> float:
        """Return the seconds until a request's turn, in a server without authentication."""
        slot.num_requests += 1
        return self._requests.borrow(slot.address) if slot.num_requests > _FREE_REQUESTS else 0.0

    def moved(self, slot: Slot, num_bytes: int) -> None:
        """Refund a request, after its turn, whose response moved at least `_MOVING_BYTES`."""
        if num_bytes < _MOVING_BYTES:
            return
        slot.refund()
        if slot.num_requests > _FREE_REQUESTS:
            self._requests.give_back(slot.address)
        else:
            slot.num_requests -= 1


class _Buckets:
    """Token buckets, one for each address and one for all.

    A bucket is the time at which it is empty: a token moves it into the future by the time that the token takes.
    """

    def __init__(self, per_s: float, clock: Callable[[], float]) -> None:
        self._token_s = 1 / per_s
        self._clock = clock
        self._empty_s: dict[str, float] = {}
        self._all_empty_s = float("-inf")

    def borrow(self, address: str) -> float:
        """Take a token of this address in any case; return the seconds until it is available."""
        now_s = self._clock()
        full_s = now_s - _BURST * self._token_s
        empty_s = max(full_s, self._empty_s.pop(address, full_s)) + self._token_s
        if len(self._empty_s) >= _MAX_ADDRESSES:
            # The addresses are in the order of their last use.
            del self._empty_s[next(iter(self._empty_s))]
        self._empty_s[address] = empty_s
        self._all_empty_s = max(full_s, self._all_empty_s) + self._token_s / _ADDRESSES
        wait_s = max(empty_s, self._all_empty_s) - now_s
        return wait_s if wait_s > _ROUNDING_S else 0.0

    def take(self, address: str) -> bool:
        """Take a token of this address; return whether one was available."""
        is_available = not self.borrow(address)
        if not is_available:
            self.give_back(address)
        return is_available

    def give_back(self, address: str) -> None:
        """Return a token that was taken or borrowed."""
        if address in self._empty_s:
            self._empty_s[address] -= self._token_s
        self._all_empty_s -= self._token_s / _ADDRESSES


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
