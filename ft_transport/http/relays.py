"""Opens and closes relays: while this process receives a state, a relay sends the received chunks to other receivers.

A relay sends each chunk as soon as the chunk is verified, directly from the destination memory. Nothing here ensures
that this memory stays unchanged. Instead, each receiver compares a chunk with its digest from a source, and requests a
changed chunk from another peer.

All relays close before their memory changes: at the next fetch, at a write section (`StateServer.materialize`) and at
the shutdown (`Relays.close_all`). A single relay closes if its fetch fails or its memory is freed (`Relay.close`). It
also closes if a newer relay of the same content opens (`Relays.open`), or if it is complete and gets no request for
10 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import Final, TypeAlias

from ft_transport.errors import ConfigurationError, PeerNotReadyError
from ft_transport.wire.chunks import ChunkTable
from ft_transport.wire.manifest import ContentId
from ft_transport.wire.routes import chunks_of

Views: TypeAlias = Callable[[int, int], Sequence[memoryview]]
"""Returns views that cover bytes ``[start, end)`` of the data once and in order. Called by any thread. The function
keeps the memory alive.
"""

_IDLE_S: Final = 10.0
"""How long a complete relay stays open without a request."""
_TICK_S: Final = 1.0


class Relay:
    """Sends one state to other receivers while this process receives that state. Thread-safe.

    Args:
        content: Id of the state's content.
        step: The committed step of the state.
        chunks: How the data is divided into chunks.
        views: Returns views of the destination memory.
        missing: Indices of the chunks that this process has yet to receive; it has all other chunks.

    Attributes:
        content: Id of the state's content.
        step: The committed step of the state.
        chunks: How the data is divided into chunks.
        close_s: Monotonic time, in seconds, at which the relay closes. Infinite until the relay is complete; each
            later request postpones it.
    """

    def __init__(
        self, content: ContentId, *, step: int, chunks: ChunkTable, views: Views, missing: Collection[int]
    ) -> None:
        self.content = content
        self.step = step
        self.chunks = chunks
        self.close_s = float("inf")
        self._views: Views | None = views
        self._mutex = threading.Lock()
        self._followers: tuple[Follower, ...] = ()
        self._furthest = 0
        self.landed_except(missing)

    @property
    def is_closed(self) -> bool:
        """Whether the relay sends no more chunks."""
        return self._views is None

    @property
    def furthest(self) -> int:
        """Number of chunks that the most advanced receiver has received, as far as this process knows."""
        return max(self._has_landed.count(1) - self._num_there, self._furthest)

    def report_progress(self, num_landed: int) -> None:
        """Record that another receiver has received ``num_landed`` chunks. Called by any thread."""
        self._furthest = max(self._furthest, min(num_landed, self.chunks.num_chunks))

    def has(self, chunk: int) -> bool:
        """Whether this process has received and verified the chunk."""
        return bool(self._has_landed[chunk])

    def landed(self, chunk: int) -> None:
        """Record that a chunk was received and verified. Called by any thread."""
        self._has_landed[chunk] = 1
        # A follower that is added meanwhile checks for landed chunks itself, after it was added to the tuple.
        for follower in self._followers:
            follower.landed(chunk)

    def landed_except(self, missing: Collection[int]) -> None:
        """Record that this process has verified all chunks except ``missing``. Called before the first `landed`."""
        has_landed = bytearray(b"\x01" * self.chunks.num_chunks)
        for chunk in missing:
            has_landed[chunk] = 0
        self._has_landed = has_landed
        self._num_there = has_landed.count(1)
        for follower in self._followers:
            follower.look()

    def follow(self, chunks: Iterable[int], on_first: Callable[[], None]) -> Follower:
        """Return a follower that reports chunks as they land; the caller closes the follower.

        Args:
            chunks: Indices of the chunks to report. If several have landed, the follower reports them in this order.
            on_first: Called once, by any thread, when the first chunk has landed or the relay closes.
        """
        follower = Follower(self, chunks, on_first)
        with self._mutex:
            self._followers = (*self._followers, follower)
        follower.look()
        if self.is_closed:
            follower.relay_closed()
        return follower

    def unfollow(self, follower: Follower) -> None:
        """Remove a follower. May be called twice."""
        with self._mutex:
            self._followers = tuple(each for each in self._followers if each is not follower)

    def touch(self) -> None:
        """Record a request, so that a complete relay stays open for another `_IDLE_S` seconds."""
        if self.close_s != float("inf"):
            self.close_s = time.monotonic() + _IDLE_S

    def complete(self) -> None:
        """Record that the fetch has all chunks; the relay closes after `_IDLE_S` seconds without a request."""
        self.close_s = time.monotonic() + _IDLE_S

    def close(self) -> None:
        """Stop sending, except for bytes in flight. Returns at once; may be called twice."""
        self._views = None
        for follower in self._followers:
            follower.relay_closed()

    def views(self) -> Views:
        """Return the function that returns views of the destination memory.

        Raises:
            PeerNotReadyError: The relay is closed.
        """
        views = self._views
        if views is None:
            raise PeerNotReadyError("expected an open relay, but this relay is closed", retry_after_s=0.0)
        return views


class Follower:
    """Tells one response which of its chunks have landed. Only one thread may call `next`.

    Attributes:
        relay: The relay that sends the response.
        chunks: Indices of all requested chunks. If several have landed, they are sent in this order.
    """

    def __init__(self, relay: Relay, chunks: Iterable[int], on_first: Callable[[], None]) -> None:
        self.relay = relay
        self.chunks = tuple(chunks)
        self._places = {chunk: place for place, chunk in enumerate(self.chunks)}
        self._wanted = set(self.chunks)
        self._in_turn: list[int] = []
        self._ready: SimpleQueue[int | None] = SimpleQueue()
        self._on_first: Callable[[], None] | None = on_first

    @property
    def is_ready(self) -> bool:
        """Whether a chunk has landed, or the relay has closed."""
        return not self._ready.empty()

    def landed(self, chunk: int) -> None:
        """Report a landed chunk to the response. Called by any thread."""
        try:
            self._wanted.remove(chunk)
        except KeyError:
            # The response does not include the chunk, or another thread has reported it.
            return
        self._report(chunk)

    def look(self) -> None:
        """Report the landed chunks that were not reported yet."""
        for chunk in self.chunks:
            if chunk in self._wanted and self.relay.has(chunk):
                self.landed(chunk)

    def relay_closed(self) -> None:
        """Wake the response, because the relay has closed."""
        self._report(None)

    def next(self, within_s: float) -> int | None:
        """Return the next landed chunk; ``None`` if no chunk lands within ``within_s`` seconds, or the relay closes."""
        with contextlib.suppress(Empty):
            if not self._in_turn and within_s > 0:
                self._take(self._ready.get(timeout=within_s))
            while True:
                self._take(self._ready.get_nowait())
        if not self._in_turn:
            return None
        chunk = self.chunks[heapq.heappop(self._in_turn)]
        if not self.relay.has(chunk):
            # The chunk was damaged, and this process fetches it again.
            self._wanted.add(chunk)
            self.look()
            return None
        return chunk

    def close(self) -> None:
        """Stop reporting. May be called twice."""
        self.relay.unfollow(self)

    def _take(self, chunk: int | None) -> None:
        if chunk is not None:
            heapq.heappush(self._in_turn, self._places[chunk])

    def _report(self, chunk: int | None) -> None:
        self._ready.put(chunk)
        on_first, self._on_first = self._on_first, None
        if on_first is not None:
            on_first()


class Relays:
    """All open relays. Thread-safe, except `follow`, which runs on the server's event loop.

    Args:
        loop: The server's event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._mutex = threading.Lock()
        self._by_content: dict[ContentId, Relay] = {}
        self._opened = asyncio.Event()
        """Set, and replaced by a new event, whenever a relay opens."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_open(self) -> int:
        """Number of open relays."""
        return len(self._by_content)

    def open(self, relay: Relay) -> None:
        """Open a relay, and close an earlier relay of the same content."""
        with self._mutex:
            earlier = self._by_content.pop(relay.content, None)
            self._by_content[relay.content] = relay
        if earlier is not None:
            earlier.close()
        with contextlib.suppress(RuntimeError):  # A shutdown closed the loop.
            self._loop.call_soon_threadsafe(self._on_open)

    def close_all(self) -> None:
        """Close all relays."""
        if not self._by_content:
            return
        with self._mutex:
            relays = list(self._by_content.values())
            self._by_content.clear()
        for relay in relays:
            relay.close()

    async def follow(self, content: ContentId, ranges: Sequence[tuple[int, int]], *, wait_s: float) -> Follower:
        """Wait until one of the requested chunks has landed; return a follower, which the caller closes.

        Args:
            content: Id of the requested content.
            ranges: Half-open byte ranges, which begin and end at chunk boundaries. If several chunks have landed, the
                relay sends them in this order.
            wait_s: Longest wait, in seconds.

        Raises:
            PeerNotReadyError: No requested chunk has landed in time.
            ConfigurationError: A range begins or ends within a chunk.
        """
        until_s = self._loop.time() + wait_s
        while True:
            relay = self._by_content.get(content)
            if relay is not None and not relay.is_closed:
                chunks = chunks_of(relay.chunks, ranges)
                if chunks is None:
                    raise ConfigurationError(f"expected ranges of whole chunks of {relay.chunks.chunk_bytes} bytes")
                relay.touch()
                follower = await self._follow(relay, chunks, until_s)
                if follower is not None:
                    return follower
                what = "none of the requested chunks has landed"
            else:
                what = "this process receives no such content"
                if await self._is_set(self._opened, until_s):
                    continue
            if self._loop.time() >= until_s:
                raise PeerNotReadyError(f"expected chunks to relay, but {what}", retry_after_s=0.0)

    async def _follow(self, relay: Relay, chunks: Sequence[int], until_s: float) -> Follower | None:
        """Return a follower as soon as a chunk has landed; ``None`` if no chunk lands in time, or the relay closes."""
        ready = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # A shutdown closed the loop.
                self._loop.call_soon_threadsafe(ready.set)

        follower = relay.follow(chunks, wake)
        is_wanted = False
        try:
            if not follower.is_ready:
                await self._is_set(ready, until_s)
            is_wanted = follower.is_ready and not relay.is_closed
        finally:
            if not is_wanted:
                follower.close()
        return follower if is_wanted else None

    async def _is_set(self, event: asyncio.Event, until_s: float) -> bool:
        """Wait for the event until ``until_s`` on the event loop's clock; return whether the event is set."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(event.wait(), max(0.0, until_s - self._loop.time()))
        return event.is_set()

    def _on_open(self) -> None:
        self._opened.set()
        self._opened = asyncio.Event()
        self._close_idle()

    def _close_idle(self) -> None:
        now_s = time.monotonic()
        with self._mutex:
            idle = [each for each in self._by_content.values() if each.close_s <= now_s or each.is_closed]
            for relay in idle:
                del self._by_content[relay.content]
        for relay in idle:
            relay.close()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(_TICK_S, self._close_idle) if self._by_content else None
