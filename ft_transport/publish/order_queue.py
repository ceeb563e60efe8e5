"""The queue of orders to fetch a version: one order runs at a time, and no order can block the others for good."""

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
    """The receiver refuses an order, for a reason of `Reason`."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


class OrderQueue:
    """Carries out orders one after the other. Used on one event loop.

    The queue compares versions within a source, the ``host:port`` of its transport: the latest version of each source
    waits, and an earlier version than the last one that began is refused. Versions of different sources are not
    compared; the later order wins.

    Args:
        fetch: Carries out an order, on a thread; the handle ends it.
        patience_s: While an order waits, the running fetch is ended unless it receives 1 MiB/s over this many seconds.
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
        """Wait for the order's turn, and fetch the version.

        Raises:
            OrderRefusedError: The order did not begin.
            Exception: The error of the fetch.
        """
        entry = _Entry(order, str(PeerAddress.from_url(order.address)), asyncio.get_running_loop().create_future())
        self._admit(entry)
        if self._working is None or self._working.done():
            self._working = asyncio.ensure_future(self._work())
        elif self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._watch())
        # The order runs even if its sender disconnects.
        await asyncio.shield(entry.done)

    async def close(self) -> None:
        """End the running fetch, and refuse the waiting orders."""
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
                "stale", f"expected version {max(begun)} of {source}, which was begun before, or a later one"
            )
        if waiting is not None:
            waiting.fail(OrderRefusedError("superseded", f"version {version} of {source} came before its turn"))
        elif len(self._waiting) >= _MAX_WAITING:
            raise OrderRefusedError("busy", f"orders of {_MAX_WAITING} sources wait for their turn")
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
        """End the running fetch if it is too slow while other orders wait."""
        while self._waiting and (entry := self._running) is not None:
            before = entry.handle.num_bytes
            await asyncio.wait({entry.done}, timeout=self._patience_s)
            num_bytes = entry.handle.num_bytes - before
            if self._running is entry and self._waiting and num_bytes < self._patience_s * _LEAST_BYTES_PER_S:
                entry.handle.cancel(
                    f"another order waits, and {num_bytes} bytes came within {self._patience_s:g} s; expected "
                    f"{_LEAST_BYTES_PER_S} bytes/s"
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
        self.done.exception()  # the sender may have disconnected
