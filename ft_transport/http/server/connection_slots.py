"""Connection slots of a server, and rate limits for clients that have not authenticated themselves.

Slots: A connection is a newcomer until it has authenticated itself as a member of the job; in a server without a
secret, until its first request. All newcomers together may use half of the slots, and those of one address a quarter.
A newcomer keeps its slot for 10 seconds at most. If there are too many newcomers, the next one evicts another: the
oldest without a request, if possible. So a client that opens connections without end mostly evicts its own connections.
A genuine peer is a newcomer only for an instant, because it authenticates itself at once. If all slots are in use, but
few of them by newcomers, the server closes the connection that has been idle for longest.

Rate limits: Each connection and each request costs the training a fraction of a millisecond of Python. The server
charges a connection to a budget before it reads the first request. If the budget is used up, the request waits
unread. After the client has authenticated itself, the server refunds the charge, so that any number of genuine peers
may connect at once.
A server without authentication cannot recognize genuine peers. There, the first requests of a connection are free, and
so are responses with much data; other requests are charged. Each address has a budget, and all addresses share a larger
one. Clients that send what only members know, such as the id of the job's key, have separate budgets. So a flood does
not use up the budget of genuine peers at the same address.

This module uses no sockets: the owner of a connection returns the slot when the connection ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

NEWCOMER_S: Final = 10.0
"""How long a connection may take to authenticate itself, in seconds."""
_BURST: Final = 512.0
"""Size of a budget: enough for all ranks of a host that recover at once, each with several connections."""
_CONNECTIONS_PER_S: Final = 50.0
"""Connections that are added to a budget each second; a connection with one request costs 0.3 ms of Python."""
_REQUESTS_PER_S: Final = 300.0
"""Requests that are added to a budget each second; a request costs about 0.1 ms of Python."""
_ADDRESSES: Final = 4.0
"""Budget of all addresses together, as a multiple of the budget of one address."""
_FREE_REQUESTS: Final = 8
"""Free requests of a connection: more than a fetch makes on one connection before it receives data."""
_MOVING_BYTES: Final = 64 << 10
"""Minimum size of a response that counts as a transfer of data."""
_KNOWN_S: Final = 600.0
"""How long an address counts as a member's after a client there has authenticated itself."""
_MAX_ADDRESSES: Final = 1024
_ROUNDING_S: Final = 1e-9


@dataclass(slots=True, eq=False)
class Slot:
    """The slot of one connection.

    Attributes:
        address: The peer's address, as `client_of` returns it.
        entered_s: Time at which the connection was accepted, by the clock of `ConnectionSlots`.
        end: Closes the connection, at once or soon. Set by the owner of the connection.
        claims: Whether the client has sent what only members know; if so, the server evicts other newcomers first.
        is_authenticated: Whether the connection has authenticated itself as a member of the job.
        is_ending: Whether the connection is being closed.
        has_left: Whether the connection has ended.
        num_requests: Number of challenges and unauthenticated requests on the connection, except free ones with large
            responses.
        charged: The budget that was charged for the connection; ``None`` before the charge and after a refund.
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
        """Refund the charge for the connection; return whether the connection was charged."""
        charged, self.charged = self.charged, None
        if charged is not None:
            charged.give_back(self.address)
        return charged is not None


class _Queues:
    """Slots, grouped by address. The slots of each address are in the order in which they were added."""

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
        """Return the oldest slot of the address with the most slots, so that a crowd does not evict a lone client."""
        crowd = max(self._by_address.values(), key=len, default=None)
        return next(iter(crowd)) if crowd is not None else None

    def all(self) -> list[Slot]:
        return [slot for slots in self._by_address.values() for slot in slots]


class ConnectionSlots:
    """Assigns slots to connections. Used only on the server's event loop.

    A newcomer is a connection that has not authenticated itself yet.

    Args:
        max_connections: Maximum number of open connections.
        clock: Returns monotonic seconds.

    Attributes:
        max_connections: Maximum number of open connections.
        max_newcomers: Maximum number of newcomers.
        max_newcomers_of_address: Maximum number of newcomers from one address.
        max_of_address: Maximum number of slots of one address: enough for the ranks of a host, but not all slots.
        limits: Rate limits for newcomers.
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
        """Number of connections with a slot, including connections that are being closed."""
        return len(self._open)

    @property
    def has_newcomers(self) -> bool:
        """Whether any connection is a newcomer, so that `end_overdue` has to be called again."""
        return bool(len(self._waiting) + len(self._asking))

    @property
    def has_room(self) -> bool:
        """Whether a slot is free."""
        return len(self._open) < self.max_connections

    @property
    def is_full(self) -> bool:
        """Whether all slots are in use, and no connection is being closed."""
        return not self.has_room and not self._num_ending

    def make_room(self) -> bool:
        """Free a slot if none is free; return whether a slot is free now.

        If not, `is_full` is true, or a connection is being closed and its slot becomes free soon.
        """
        if self.is_full:
            self._end(self._dispensable())
        return self.has_room

    def enter(self, address: str) -> Slot | None:
        """Assign a slot to a connection that was accepted after `make_room`.

        Args:
            address: The peer's address, as `client_of` returns it.

        Returns:
            The slot, which the caller returns with `leave`; ``None`` if the address has its maximum number of slots and
            none of its connections can be closed.
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

    def note_request(self, slot: Slot) -> None:
        """Record that a newcomer has sent a request. Until its response, newcomers without a request go first."""
        if not slot.is_ending:
            self._waiting.discard(slot)
            self._asking.add(slot)

    def authenticated(self, slot: Slot) -> None:
        """Record that the connection has authenticated itself. May be called for each request."""
        if not slot.is_authenticated:
            slot.is_authenticated = True
            self._waiting.discard(slot)
            self._asking.discard(slot)

    @contextlib.contextmanager
    def serving(self, slot: Slot) -> Iterator[None]:
        """Protect an authenticated connection from eviction while the server processes a request on it."""
        if slot.is_authenticated:
            self._idle.discard(slot)
        else:
            self.note_request(slot)
        try:
            yield
        finally:
            if not slot.is_ending and slot in self._open:
                self._asking.discard(slot)
                asking = self._asking if slot.claims else self._waiting
                (self._idle if slot.is_authenticated else asking).add(slot)

    @contextlib.contextmanager
    def waiting(self, slot: Slot) -> Iterator[None]:
        """Allow the eviction of a connection during the ``with`` block, in which its request only waits."""
        if slot.is_authenticated and not slot.is_ending:
            self._idle.add(slot)
        try:
            yield
        finally:
            self._idle.discard(slot)

    def leave(self, slot: Slot) -> None:
        """Free the slot of a connection that has ended. May be called twice."""
        if slot not in self._open:
            return
        self._open.remove(slot)
        slot.has_left = True
        # Breaks a reference cycle, because training loops often disable the cyclic garbage collector.
        slot.end = lambda: None
        if slot.is_ending:
            self._num_ending -= 1
        else:
            self._stop_counting(slot)

    def end_overdue(self) -> None:
        """Close the connections that have not authenticated themselves within `NEWCOMER_S`."""
        overdue_s = self._clock() - NEWCOMER_S
        for slot in [*self._waiting.all(), *self._asking.all()]:
            if slot.entered_s <= overdue_s:
                self._end(slot)

    def _dispensable(self) -> Slot | None:
        # Leaves room for a few newcomers, because otherwise idle clients would keep all new clients out.
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
    """Rate limits for clients that have not authenticated themselves. Used only on the server's event loop.

    Args:
        clock: Returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._connections = _Buckets(_CONNECTIONS_PER_S, clock)
        self._claims = _Buckets(_CONNECTIONS_PER_S, clock)
        self._requests = _Buckets(_REQUESTS_PER_S, clock)
        self._known_s: dict[str, float] = {}

    def admit(self, slot: Slot) -> bool:
        """Charge for a new connection; return whether the budget sufficed. If not, the connection has to wait."""
        buckets = self._claims if slot.claims else self._connections
        if not buckets.take(slot.address):
            return False
        slot.charged = buckets
        return True

    def refund_member(self, slot: Slot) -> None:
        """Refund the charge for a connection that has authenticated itself. May be called for each request."""
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
        """Charge for a request of an unauthenticated client; return the seconds for which the request has to wait."""
        slot.num_requests += 1
        return self._requests.borrow(slot.address) if slot.num_requests > _FREE_REQUESTS else 0.0

    def refund_transfer(self, slot: Slot, num_bytes: int) -> None:
        """Refund the charge for a request if its response had at least `_MOVING_BYTES` bytes."""
        if num_bytes < _MOVING_BYTES:
            return
        slot.refund()
        if slot.num_requests > _FREE_REQUESTS:
            self._requests.give_back(slot.address)
        else:
            slot.num_requests -= 1


class _Buckets:
    """Token buckets that limit a rate: one bucket for each address, and one for all addresses together.

    A bucket is stored as one time: it has tokens while that time is in the past, and taking a token advances the time.
    """

    def __init__(self, per_s: float, clock: Callable[[], float]) -> None:
        self._token_s = 1 / per_s
        self._clock = clock
        self._empty_s: dict[str, float] = {}
        self._all_empty_s = float("-inf")

    def borrow(self, address: str) -> float:
        """Take a token of this address, even from an empty bucket; return the seconds until the token is available."""
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
        """Take a token of this address if one is available; return whether it was taken."""
        is_available = not self.borrow(address)
        if not is_available:
            self.give_back(address)
        return is_available

    def give_back(self, address: str) -> None:
        """Return a token that was taken or borrowed."""
        if address in self._empty_s:
            self._empty_s[address] -= self._token_s
        self._all_empty_s -= self._token_s / _ADDRESSES
