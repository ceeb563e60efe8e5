"""What this process is receiving, passed on to others who receive the same: each chunk as soon as it is verified.

The bytes are sent from where they were received to, without a copy. Nothing here makes sure that they stay as they are:
whoever takes them compares them with digests from a source, and asks somebody else where they have changed.
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
from ft_transport.wire.relayed import chunks_of

Views: TypeAlias = Callable[[int, int], Sequence[memoryview]]
"""Views that cover bytes ``[start, end)`` of the data once, in order; whoever has the function keeps the memory alive.
Called by any thread."""

_IDLE_S: Final = 10.0
"""How long what is here whole is kept for others without a request."""
_TICK_S: Final = 1.0


class Relay:
    """One content that is being received. Thread-safe.

    Args:
        content: Which it is.
        step: The committed step that it shows.
        chunks: How it divides.
        views: Where it lies.
        missing: The chunks that are yet to come; all others are there.

    Attributes:
        content: Which it is.
        step: The committed step that it shows.
        chunks: How it divides.
        end_s: When it ends unless it is asked for, once all is there; monotonic seconds.
    """

    def __init__(
        self, content: ContentId, *, step: int, chunks: ChunkTable, views: Views, missing: Collection[int]
    ) -> None:
        self.content = content
        self.step = step
        self.chunks = chunks
        self.end_s = float("inf")
        self._views: Views | None = views
        self._mutex = threading.Lock()
        self._followers: tuple[Follower, ...] = ()
        self._furthest = 0
        self.landed_but_for(missing)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is sent."""
        return self._views is None

    @property
    def furthest(self) -> int:
        """How many chunks that receiver has received which has received most, of all that this one has heard of."""
        return max(self._has_landed.count(1) - self._num_there, self._furthest)

    def heard(self, num_landed: int) -> None:
        """Another receiver has received so many chunks. Called by any thread."""
        self._furthest = max(self._furthest, min(num_landed, self.chunks.num_chunks))

    def has(self, chunk: int) -> bool:
        """Whether the chunk is there and verified."""
        return bool(self._has_landed[chunk])

    def landed(self, chunk: int) -> None:
        """A chunk is there and verified. Called by any thread."""
        self._has_landed[chunk] = 1
        # A follower that comes meanwhile looks for what is there when it is among them.
        for follower in self._followers:
            follower.landed(chunk)

    def landed_but_for(self, missing: Collection[int]) -> None:
        """All chunks but these are there and verified, before any has been received."""
        has_landed = bytearray(b"\x01" * self.chunks.num_chunks)
        for chunk in missing:
            has_landed[chunk] = 0
        self._has_landed = has_landed
        self._num_there = has_landed.count(1)
        for follower in self._followers:
            follower.look()

    def follow(self, chunks: Iterable[int], on_first: Callable[[], None]) -> Follower:
        """Whoever is to be told of these chunks, until it is closed; what is there comes first, in this order.

        Args:
            chunks: Which.
            on_first: Called by any thread when the first one is there, or when this ends.
        """
        follower = Follower(self, chunks, on_first)
        with self._mutex:
            self._followers = (*self._followers, follower)
        follower.look()
        if self.has_ended:
            follower.end()
        return follower

    def unfollow(self, follower: Follower) -> None:
        """The follower is told no more. May be called twice."""
        with self._mutex:
            self._followers = tuple(each for each in self._followers if each is not follower)

    def touch(self) -> None:
        """Somebody has asked for it."""
        if self.end_s != float("inf"):
            self.end_s = time.monotonic() + _IDLE_S

    def complete(self) -> None:
        """All is there: it is kept for others for a while."""
        self.end_s = time.monotonic() + _IDLE_S

    def end(self) -> None:
        """Sends nothing more but what is on its way already. May be called twice, and returns at once."""
        self._views = None
        for follower in self._followers:
            follower.end()

    def views(self) -> Views:
        """Where it lies.

        Raises:
            PeerNotReadyError: It has ended.
        """
        views = self._views
        if views is None:
            raise PeerNotReadyError("expected chunks to pass on, they are not passed on any more", retry_after_s=0.0)
        return views


class Follower:
    """Chunks that one answer is to have, as they land. Told by any thread, asked by one.

    Attributes:
        relay: What they are of.
        chunks: All of them; of those that are there an earlier one goes first.
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
        """Whether a chunk is there, or the relay has ended."""
        return not self._ready.empty()

    def landed(self, chunk: int) -> None:
        """The chunk is there. Called by any thread."""
        try:
            self._wanted.remove(chunk)
        except KeyError:
            # No business of this one, or another thread has told of it.
            return
        self._tell(chunk)

    def look(self) -> None:
        """Chunks may be there of which it has not been told."""
        for chunk in self.chunks:
            if chunk in self._wanted and self.relay.has(chunk):
                self.landed(chunk)

    def end(self) -> None:
        """The relay has ended."""
        self._tell(None)

    def next(self, within_s: float) -> int | None:
        """The first one of the chunks that are there; ``None`` if none is within so many seconds, or the relay ends."""
        with contextlib.suppress(Empty):
            if not self._in_turn and within_s > 0:
                self._take(self._ready.get(timeout=within_s))
            while True:
                self._take(self._ready.get_nowait())
        if not self._in_turn:
            return None
        chunk = self.chunks[heapq.heappop(self._in_turn)]
        if not self.relay.has(chunk):
            # It was damaged, and is fetched again.
            self._wanted.add(chunk)
            self.look()
            return None
        return chunk

    def close(self) -> None:
        """The follower is told no more. May be called twice."""
        self.relay.unfollow(self)

    def _take(self, chunk: int | None) -> None:
        if chunk is not None:
            heapq.heappush(self._in_turn, self._places[chunk])

    def _tell(self, chunk: int | None) -> None:
        self._ready.put(chunk)
        on_first, self._on_first = self._on_first, None
        if on_first is not None:
            on_first()


class Relays:
    """All that is passed on at the moment. Thread-safe, but for `follow`, which belongs to the server's event loop.

    Args:
        loop: The server's.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._mutex = threading.Lock()
        self._by_content: dict[ContentId, Relay] = {}
        self._waiting: dict[ContentId, list[asyncio.Future[None]]] = {}
        """Futures of the requests that wait for a content to begin."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_open(self) -> int:
        """How many contents are passed on."""
        return len(self._by_content)

    def begin(self, relay: Relay) -> None:
        """Passes on what comes from now on; one of the same content that is there already ends."""
        with self._mutex:
            earlier = self._by_content.pop(relay.content, None)
            self._by_content[relay.content] = relay
        if earlier is not None:
            earlier.end()
        with contextlib.suppress(RuntimeError):  # The loop was closed by a shutdown.
            self._loop.call_soon_threadsafe(self._begun, relay.content)

    def end_all(self) -> None:
        """Passes nothing more on. Costs nothing where there is nothing."""
        if not self._by_content:
            return
        with self._mutex:
            relays = list(self._by_content.values())
            self._by_content.clear()
        for relay in relays:
            relay.end()

    async def follow(self, content: ContentId, ranges: Sequence[tuple[int, int]], *, wait_s: float) -> Follower:
        """Waits until the first of some chunks is there; to be closed by the caller.

        Args:
            content: Of which content.
            ranges: Bytes of the data, half-open, of whole chunks; of those that are there an earlier one goes first.
            wait_s: The longest that it waits, in seconds.

        Raises:
            PeerNotReadyError: None is there in time.
            ConfigurationError: These are no ranges of whole chunks.
        """
        until_s = self._loop.time() + wait_s
        while True:
            relay = self._by_content.get(content)
            if relay is not None and not relay.has_ended:
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
                with self._told_of(content) as told:
                    await asyncio.wait({told}, timeout=max(0.0, until_s - self._loop.time()))
                    is_told = told.done()
                if is_told:
                    continue
            if self._loop.time() >= until_s:
                raise PeerNotReadyError(f"expected chunks to pass on, {what}", retry_after_s=0.0)

    async def _follow(self, relay: Relay, chunks: Sequence[int], until_s: float) -> Follower | None:
        """Whoever has the first of these chunks; ``None`` if there is none in time, or the relay has ended."""
        told: asyncio.Future[None] = self._loop.create_future()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # The loop was closed by a shutdown.
                self._loop.call_soon_threadsafe(_set_done, told)

        follower = relay.follow(chunks, tell)
        is_wanted = False
        try:
            if not follower.is_ready:
                await asyncio.wait({told}, timeout=max(0.0, until_s - self._loop.time()))
            is_wanted = follower.is_ready and not relay.has_ended
        finally:
            if not is_wanted:
                follower.close()
        return follower if is_wanted else None

    @contextlib.contextmanager
    def _told_of(self, content: ContentId) -> Iterator[asyncio.Future[None]]:
        """A future that is done as soon as the content begins."""
        told = self._loop.create_future()
        waiting = self._waiting.setdefault(content, [])
        waiting.append(told)
        try:
            yield told
        finally:
            waiting.remove(told)
            if not waiting and self._waiting.get(content) is waiting:
                del self._waiting[content]

    def _begun(self, content: ContentId) -> None:
        for told in self._waiting.get(content, ()):
            _set_done(told)
        self._end_idle()

    def _end_idle(self) -> None:
        now_s = time.monotonic()
        with self._mutex:
            idle = [each for each in self._by_content.values() if each.end_s <= now_s or each.has_ended]
            for relay in idle:
                del self._by_content[relay.content]
        for relay in idle:
            relay.end()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(_TICK_S, self._end_idle) if self._by_content else None


def _set_done(told: asyncio.Future[None]) -> None:
    if not told.done():
        told.set_result(None)
