"""The queue of a receiver's orders. One fetch runs at a time; a slow fetch is cancelled if another order waits.

An order is a publisher's request to fetch a version (``engines.pulling``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ft_transport.errors import TransportError
from ft_transport.http.client.fetch_settings import FetchHandle
from ft_transport.http.peer_address import PeerAddress
from ft_transport.publish.engines.pulling import Order, Reason

_MAX_WAITING: Final = 8
_LEAST_BYTES_PER_S: Final = 1 << 20


class OrderRefusedError(TransportError):
    """The receiver refuses an order. The attribute ``reason`` is a key of ``REASONS``."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


class OrderQueue:
    """Carries out publishers' orders to fetch a version, one after the other. Not thread-safe: used on one event loop.

    A source is the ``host:port`` of a publisher's transport. At most one order of each source waits: the one with the
    highest version. The queue refuses an order for an older version than the source's waiting or running order, or than
    the version that was last fetched from this source. It does not compare versions of different sources: the weights
    of a later order replace those of an earlier one.

    Args:
        fetch: Fetches the version of an order, on a worker thread. Cancelling the `FetchHandle` ends the fetch.
        patience_s: Seconds over which the rate of a fetch is measured. While an order waits, the queue cancels a fetch
            that receives less than 1 MiB/s.
    """

    def __init__(self, fetch: Callable[[Order, FetchHandle], None], *, patience_s: float) -> None:
        self._fetch = fetch
        self._patience_s = patience_s
        self._waiting: dict[str, _Entry] = {}
        self._running: _Entry | None = None
        self._newest: tuple[str, int] | None = None
        self._working: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._is_closed = False

    async def carry_out(self, order: Order) -> None:
        """Wait for the order's turn, then fetch the version.

        Raises:
            OrderRefusedError: The queue refused the order, and did not start the fetch.
            Exception: The error with which ``fetch`` failed.
        """
        entry = _Entry(order, str(PeerAddress.from_url(order.address)), asyncio.get_running_loop().create_future())
        self._admit(entry)
        if self._working is None or self._working.done():
            self._working = asyncio.ensure_future(self._work())
        elif self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._watch())
        # Shielded: the fetch continues even if the publisher disconnects.
        await asyncio.shield(entry.done)

    async def close(self) -> None:
        """Cancel the running fetch, and refuse all waiting orders."""
        self._is_closed = True
        for entry in self._waiting.values():
            entry.fail(OrderRefusedError("closing", "the receiver is being closed"))
        self._waiting.clear()
        if self._running is not None:
            self._running.handle.cancel("the receiver is being closed")
        for task in (self._working, self._watching):
            if task is not None:
                await asyncio.wait({task}, timeout=5.0)

    def _admit(self, entry: _Entry) -> None:
        source, version = entry.source, entry.order.version
        if self._is_closed:
            raise OrderRefusedError("closing", "the receiver is being closed")
        waiting = self._waiting.get(source)
        begun = [each.order.version for each in (waiting, self._running) if each is not None and each.source == source]
        if self._newest is not None and self._newest[0] == source:
            begun.append(self._newest[1])
        if begun and version < max(begun):
            raise OrderRefusedError(
                "stale", f"expected version {max(begun)} of {source} or a later one, got an order for {version}"
            )
        if waiting is not None:
            waiting.fail(OrderRefusedError("superseded", f"version {version} of {source} replaced this waiting order"))
        elif len(self._waiting) >= _MAX_WAITING:
            raise OrderRefusedError("busy", f"orders of {_MAX_WAITING} other sources are already waiting")
        self._waiting[source] = entry

    async def _work(self) -> None:
        while self._waiting:
            entry = self._waiting.pop(next(iter(self._waiting)))
            self._running = entry
            try:
                await asyncio.to_thread(self._fetch, entry.order, entry.handle)
            except Exception as error:
                if getattr(error, "destination_touched", False):
                    self._newest = entry.source, entry.order.version
                entry.fail(error)
            else:
                self._newest = entry.source, entry.order.version
                entry.done.set_result(None)
            finally:
                self._running = None

    async def _watch(self) -> None:
        """Cancel the running fetch if it is too slow while other orders wait."""
        while self._waiting and (entry := self._running) is not None:
            before = entry.handle.num_bytes
            await asyncio.wait({entry.done}, timeout=self._patience_s)
            num_bytes = entry.handle.num_bytes - before
            if self._running is entry and self._waiting and num_bytes < self._patience_s * _LEAST_BYTES_PER_S:
                entry.handle.cancel(
                    f"expected at least {_LEAST_BYTES_PER_S} bytes/s while another order waits, received {num_bytes} "
                    f"bytes within {self._patience_s:g} s"
                )
                await asyncio.wait({entry.done})


@dataclass(slots=True, eq=False)
class _Entry:
    order: Order
    source: str
    done: asyncio.Future[None]
    handle: FetchHandle = field(default_factory=FetchHandle)

    def fail(self, error: Exception) -> None:
        self.done.set_exception(error)
        self.done.exception()  # Marks the error as retrieved: no one awaits it if the publisher disconnected.
