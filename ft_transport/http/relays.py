"""Passes the data that this process is receiving on to other receivers: each chunk as soon as it is verified.

The bytes are sent from the destination memory, without a copy. Nothing here ensures that they stay unchanged: receivers
compare them with digests from a source, and ask another peer if they have changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Final, TypeAlias

from ft_transport.errors import ConfigurationError, PeerNotReadyError
from ft_transport.wire.chunks import ChunkTable
from ft_transport.wire.manifest import ContentId
from ft_transport.wire.routes import chunks_of

Views: TypeAlias = Callable[[int, int], Sequence[memoryview]]
"""Returns views that cover bytes ``[start, end)`` of the data once, in order; the function keeps the memory alive.
Called by any thread.
"""

_IDLE_S: Final = 10.0
"""How long a complete relay stays open for other receivers without a request."""
_TICK_S: Final = 1.0


class Relay:
    """One content that this process receives and passes on. Thread-safe.

    Args:
        content: Id of the content.
        step: The committed step of the content.
        chunks: Division of the content into chunks.
        views: Returns views of the destination memory.
        missing: Chunks that have yet to land; all others are there.

    Attributes:
        content: Id of the content.
        step: The committed step of the content.
        chunks: Division of the content into chunks.
        close_s: When a complete relay closes unless a receiver requests it before, in monotonic seconds.
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
        self.landed_but_for(missing)

    @property
    def is_closed(self) -> bool:
        """Whether no more chunks are sent."""
        return self._views is None

    @property
    def furthest(self) -> int:
        """The largest number of chunks that any receiver, as far as known here, has received."""
        return max(self._has_landed.count(1) - self._num_there, self._furthest)

    def report_progress(self, num_landed: int) -> None:
        """Note that another receiver has received ``num_landed`` chunks. Called by any thread."""
        self._furthest = max(self._furthest, min(num_landed, self.chunks.num_chunks))

    def has(self, chunk: int) -> bool:
        """Whether the chunk has landed and is verified."""
        return bool(self._has_landed[chunk])

    def landed(self, chunk: int) -> None:
        """Note that a chunk has landed and is verified. Called by any thread."""
        self._has_landed[chunk] = 1
        # A follower that is added meanwhile looks for landed chunks once it is in the tuple.
        for follower in self._followers:
            follower.landed(chunk)

    def landed_but_for(self, missing: Collection[int]) -> None:
        """Note that all chunks but ``missing`` are there and verified, before any was received."""
        has_landed = bytearray(b"\x01" * self.chunks.num_chunks)
        for chunk in missing:
            has_landed[chunk] = 0
        self._has_landed = has_landed
        self._num_there = has_landed.count(1)
        for follower in self._followers:
            follower.look()

    def follow(self, chunks: Iterable[int], on_first: Callable[[], None]) -> Follower:
        """Return a follower of these chunks, closed by the caller; it reports present ones first, in this order.

        Args:
            chunks: The chunks to follow.
            on_first: Called by any thread when the first chunk has landed, or when the relay closes.
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
        """Note a request: a complete relay stays open for another while."""
        if self.close_s != float("inf"):
            self.close_s = time.monotonic() + _IDLE_S

    def complete(self) -> None:
        """Note that all chunks are there; the relay stays open for a while."""
        self.close_s = time.monotonic() + _IDLE_S

    def close(self) -> None:
        """Stop sending, except bytes already in flight. May be called twice, and returns at once."""
        self._views = None
        for follower in self._followers:
            follower.relay_closed()

    def views(self) -> Views:
        """Return the function that returns views of the data.

        Raises:
            PeerNotReadyError: The relay is closed.
        """
        views = self._views
        if views is None:
            raise PeerNotReadyError("expected chunks to pass on, they are not passed on any more", retry_after_s=0.0)
        return views


class Follower:
    """Reports the chunks of one response as they land. Any thread may report chunks; one thread reads them.

    Attributes:
        relay: The relay of the chunks.
        chunks: All requested chunks; of the landed ones, the earliest in this order goes first.
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
        """Note that the chunk has landed. Called by any thread."""
        try:
            self._wanted.remove(chunk)
        except KeyError:
            # The chunk was not requested, or another thread has reported it.
            return
        self._report(chunk)

    def look(self) -> None:
        """Check for landed chunks that were not reported."""
        for chunk in self.chunks:
            if chunk in self._wanted and self.relay.has(chunk):
                self.landed(chunk)

    def relay_closed(self) -> None:
        """Report the end of the relay to the reader of this follower."""
        self._report(None)

    def next(self, within_s: float) -> int | None:
        """Return the first landed chunk; ``None`` if none lands within ``within_s``, or the relay closes."""
        with contextlib.suppress(Empty):
            if not self._in_turn and within_s > 0:
                self._take(self._ready.get(timeout=within_s))
            while True:
                self._take(self._ready.get_nowait())
        if not self._in_turn:
            return None
        chunk = self.chunks[heapq.heappop(self._in_turn)]
        if not self.relay.has(chunk):
            # The chunk was damaged, and is being fetched again.
            self._wanted.add(chunk)
            self.look()
            return None
        return chunk

    def close(self) -> None:
        """Close this subscription. Idempotent."""
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
        self._waiting: dict[ContentId, list[asyncio.Future[None]]] = {}
        """Futures of requests that wait for a relay of a content."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_open(self) -> int:
        """Number of open relays."""
        return len(self._by_content)

    def begin(self, relay: Relay) -> None:
        """Open a relay, and close an earlier relay of the same content."""
        with self._mutex:
            earlier = self._by_content.pop(relay.content, None)
            self._by_content[relay.content] = relay
        if earlier is not None:
            earlier.close()
        with contextlib.suppress(RuntimeError):  # A shutdown closed the loop.
            self._loop.call_soon_threadsafe(self._begun, relay.content)

    def close_all(self) -> None:
        """Close all relays. Costs nothing if there are none."""
        if not self._by_content:
            return
        with self._mutex:
            relays = list(self._by_content.values())
            self._by_content.clear()
        for relay in relays:
            relay.close()

    async def follow(self, content: ContentId, ranges: Sequence[tuple[int, int]], *, wait_s: float) -> Follower:
        """Wait until the first of the requested chunks has landed; return a follower, which the caller closes.

        Args:
            content: The content of the chunks.
            ranges: Half-open byte ranges of whole chunks; of the landed ones, the earliest in this order goes first.
            wait_s: Longest wait, in seconds.

        Raises:
            PeerNotReadyError: None has landed in time.
            ConfigurationError: The ranges are not of whole chunks.
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
                what = "none of these chunks is here"
            else:
                what = "nothing of this content is received here"
                with self._opening_of(content) as opened:
                    await asyncio.wait({opened}, timeout=max(0.0, until_s - self._loop.time()))
                    is_open = opened.done()
                if is_open:
                    continue
            if self._loop.time() >= until_s:
                raise PeerNotReadyError(f"expected chunks to pass on, {what}", retry_after_s=0.0)

    async def _follow(self, relay: Relay, chunks: Sequence[int], until_s: float) -> Follower | None:
        """Return a follower once it has a chunk; ``None`` if none lands in time, or the relay closes."""
        ready: asyncio.Future[None] = self._loop.create_future()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # A shutdown closed the loop.
                self._loop.call_soon_threadsafe(_set_done, ready)

        follower = relay.follow(chunks, wake)
        is_wanted = False
        try:
            if not follower.is_ready:
                await asyncio.wait({ready}, timeout=max(0.0, until_s - self._loop.time()))
            is_wanted = follower.is_ready and not relay.is_closed
        finally:
            if not is_wanted:
                follower.close()
        return follower if is_wanted else None

    @contextlib.contextmanager
    def _opening_of(self, content: ContentId) -> Iterator[asyncio.Future[None]]:
        """Yield a future that completes when a relay of the content opens."""
        opened = self._loop.create_future()
        waiting = self._waiting.setdefault(content, [])
        waiting.append(opened)
        try:
            yield opened
        finally:
            waiting.remove(opened)
            if not waiting and self._waiting.get(content) is waiting:
                del self._waiting[content]

    def _begun(self, content: ContentId) -> None:
        for opened in self._waiting.get(content, ()):
            _set_done(opened)
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


def _set_done(opened: asyncio.Future[None]) -> None:
    if not opened.done():
        opened.set_result(None)
