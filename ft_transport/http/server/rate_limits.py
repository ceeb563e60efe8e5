"""Rate limits for unauthenticated clients: a burst of connections and requests, and then a few per second.

Each connection or request costs the training a fraction of a millisecond of Python. A connection is charged when its
first request is about to be read; without budget it waits, unread. A client that authenticates itself gets its charge
refunded, so any number of genuine peers may come at once. A server without authentication cannot tell: there, the first
requests of a connection are free, responses that move data are free, and all others wait for their turn.

Each address has a budget, and all addresses share a larger one. A client that sends what only members know, such as the
id of the job's key, has a separate budget: a flood does not use up what genuine peers need, even if both come from one
address.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ft_transport.http.server.connection_slots import Slot

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


@dataclass(slots=True)
class _Level:
    tokens: float
    at_s: float


class Buckets:
    """Token buckets, one for each address and one for all. Used only by one thread.

    Args:
        per_s: Tokens that an address gets per second.
        clock: Monotonic seconds.
    """

    def __init__(self, per_s: float, clock: Callable[[], float]) -> None:
        self._per_s = per_s
        self._clock = clock
        self._levels: dict[str, _Level] = {}
        self._all = _Level(_BURST * _ADDRESSES, clock())

    def take(self, address: str) -> bool:
        """Take a token of this address; return whether one was available."""
        of_address, of_all = self._level(address)
        if of_address.tokens < 1 or of_all.tokens < 1:
            return False
        of_address.tokens -= 1
        of_all.tokens -= 1
        return True

    def borrow(self, address: str) -> float:
        """Take a token of this address in any case; return the seconds until it is available."""
        of_address, of_all = self._level(address)
        of_address.tokens -= 1
        of_all.tokens -= 1
        return max(0.0, -of_address.tokens / self._per_s, -of_all.tokens / (self._per_s * _ADDRESSES))

    def give_back(self, address: str) -> None:
        """Return a token that was taken or borrowed."""
        for level in self._level(address):
            level.tokens += 1

    def _level(self, address: str) -> tuple[_Level, _Level]:
        now_s = self._clock()
        level = self._levels.pop(address, None) or _Level(_BURST, now_s)
        if len(self._levels) >= _MAX_ADDRESSES:
            # The addresses are in the order of their last use.
            del self._levels[next(iter(self._levels))]
        self._levels[address] = level
        _fill(level, now_s, self._per_s, _BURST)
        _fill(self._all, now_s, self._per_s * _ADDRESSES, _BURST * _ADDRESSES)
        return level, self._all


def _fill(level: _Level, now_s: float, per_s: float, burst: float) -> None:
    level.tokens = min(burst, level.tokens + (now_s - level.at_s) * per_s)
    level.at_s = now_s


class RateLimits:
    """Rate limits of unauthenticated clients. Used only on the server's event loop.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._connections = Buckets(_CONNECTIONS_PER_S, clock)
        self._claims = Buckets(_CONNECTIONS_PER_S, clock)
        self._requests = Buckets(_REQUESTS_PER_S, clock)
        self._known_s: dict[str, float] = {}

    def admit(self, slot: Slot) -> bool:
        """Return whether the first request of a connection may be read now; if so, charge for it."""
        buckets = self._claims if slot.claims else self._connections
        if not buckets.take(slot.address):
            return False
        slot.paid = functools.partial(buckets.give_back, slot.address)
        return True

    def belongs(self, slot: Slot) -> None:
        """Refund a connection that has authenticated itself. May be called with each request."""
        if not slot.pay_back():
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
        slot.pay_back()
        if slot.num_requests > _FREE_REQUESTS:
            self._requests.give_back(slot.address)
        else:
            slot.num_requests -= 1
