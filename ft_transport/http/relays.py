"""What this process is receiving, passed on to others who receive the same: each chunk as soon as it is verified.

An answer begins with the first chunk that was asked for, and goes on with the others as they land: a request for each
chunk would cost both sides more than sending it does, and leave the link idle meanwhile.

The bytes are sent from where they were received to, without a copy. Nothing here makes sure that they stay as they are:
whoever takes them compares them with digests from a source, and asks somebody else where they have changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final, TypeAlias

from aiohttp import web

from ft_transport.errors import ConfigurationError, PeerNotReadyError
from ft_transport.http.body_sender import MAX_VIEWS_PER_SEND
from ft_transport.http.send_cap import PacedSocket
from ft_transport.http.tls_sender import EncryptedSocket
from ft_transport.runtime.handler_safety import SafeCondition
from ft_transport.wire.chunks import ChunkTable
from ft_transport.wire.content import ContentId

Views: TypeAlias = Callable[[int, int], Sequence[memoryview]]
"""Views that cover bytes ``[start, end)`` of the data once, in order; whoever has the function keeps the memory alive.
Called by any thread."""

_IDLE_S: Final = 10.0
"""How long what is here whole is kept for others without a request."""
_TICK_S: Final = 1.0
_LOOK_S: Final = 0.1
"""How often an answer that waits for its next chunk looks whether the receiver is still there."""


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
        on_landed: Called with a chunk that is there now, by any thread; with ``None`` if much has changed.
        end_s: When it ends unless it is asked for, once all is there; monotonic seconds.
    """

    def __init__(
        self, content: ContentId, *, step: int, chunks: ChunkTable, views: Views, missing: Collection[int]
    ) -> None:
        self.content = content
        self.step = step
        self.chunks = chunks
        self._views: Views | None = views
        self.on_landed: Callable[[int | None], None] = _nothing
        self.end_s = float("inf")
        self._changed = SafeCondition()
        self._awaited: Counter[int] = Counter()
        self.landed_but_for(missing)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is sent."""
        return self._views is None

    def landed(self, chunk: int) -> None:
        """A chunk is there and verified. Called by any thread."""
        self._has_landed[chunk] = 1
        # Whoever waits says so before it looks once more.
        if self._awaited[chunk]:
            self._tell_waiting()
        self.on_landed(chunk)

    def landed_but_for(self, missing: Collection[int]) -> None:
        """All chunks but these are there and verified."""
        has_landed = bytearray(b"\x01" * self.chunks.num_chunks)
        for chunk in missing:
            has_landed[chunk] = 0
        self._has_landed = has_landed
        self._tell_waiting()
        self.on_landed(None)

    def num_landed_from(self, first: int, end: int) -> int:
        """How many of the chunks ``first`` to ``end`` are there, without a hole from the first one on."""
        hole = self._has_landed.find(0, first, end)
        return (hole if hole >= 0 else end) - first

    def wait_for(self, chunk: int, within_s: float) -> bool:
        """Waits for a chunk, until so many seconds are over or the relay ends; says whether it is there."""
        if self._has_landed[chunk]:
            return True
        with self._changed:
            self._awaited[chunk] += 1
            try:
                self._changed.wait_for(lambda: self._has_landed[chunk] or self.has_ended, timeout=within_s)
            finally:
                self._awaited[chunk] -= 1
        return bool(self._has_landed[chunk]) and not self.has_ended

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
        self._tell_waiting()
        self.on_landed(None)

    def _tell_waiting(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def views(self) -> Views:
        """Where it lies.

        Raises:
            PeerNotReadyError: It has ended.
        """
        views = self._views
        if views is None:
            raise PeerNotReadyError("expected chunks to pass on, they are not passed on any more", retry_after_s=0.0)
        return views


class RelayedRange:
    """Bytes ``[position, end)`` of what is relayed; see ``body_sender.Content``.

    Args:
        relay: What is relayed.
        position: Where it begins.
        end: Where it ends.
        pause_s: How long it waits for each chunk that has not landed yet; then it ends early.
    """

    def __init__(self, relay: Relay, position: int, end: int, *, pause_s: float) -> None:
        self._relay = relay
        self._views_of = relay.views()
        self._pause_s = pause_s
        self.position = position
        self.end = end

    def send_to(self, connected: PacedSocket) -> None:
        """See ``body_sender.Content``."""
        while self.position < self.end:
            self._await_chunk(connected)
            views = self._views(connected.pace.piece_bytes)[:MAX_VIEWS_PER_SEND]
            num_bytes = sum(map(len, views))
            connected.pace.admit(num_bytes)
            sent = connected.raw.sendmsg(views)
            connected.pace.unsent(num_bytes - sent)
            self.position += sent

    def send_encrypted(self, encrypted: EncryptedSocket) -> None:
        """See ``body_sender.Content``."""
        while self.position < self.end:
            self._await_chunk(encrypted)
            for view in self._views(self._relay.chunks.chunk_bytes):
                encrypted.sendall(view)
                self.position += len(view)

    def _await_chunk(self, connected: PacedSocket | EncryptedSocket) -> None:
        """Returns when the chunk at ``position`` is there."""
        chunk = self.position // self._relay.chunks.chunk_bytes
        if self._relay.wait_for(chunk, 0.0):
            return
        until_s = time.monotonic() + self._pause_s
        # The end of the chunk before would wait until that is acknowledged (man 7 tcp).
        connected.raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connected.pace.held_up():
            while not self._relay.wait_for(chunk, max(0.0, min(_LOOK_S, until_s - time.monotonic()))):
                if self._relay.has_ended:
                    raise ConnectionAbortedError("it is not passed on any more")
                if connected.pace.has_ended(0.0):
                    raise ConnectionResetError("the receiver has closed the connection")
                if time.monotonic() >= until_s:
                    raise ConnectionAbortedError(f"chunk {chunk} has not landed in time")
        connected.raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)

    def _views(self, max_bytes: int) -> Sequence[memoryview]:
        if self._relay.has_ended:
            raise ConnectionAbortedError("it is not passed on any more")
        chunk_bytes = self._relay.chunks.chunk_bytes
        chunk_end = (self.position // chunk_bytes + 1) * chunk_bytes
        return self._views_of(self.position, min(self.end, chunk_end, self.position + max_bytes))


class Relays:
    """All that is passed on at the moment. Thread-safe, but for `find`, which belongs to the server's event loop.

    Args:
        loop: The server's.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._mutex = threading.Lock()
        self._by_content: dict[ContentId, Relay] = {}
        self._waiting: dict[tuple[ContentId, int | None], list[asyncio.Future[None]]] = {}
        """Futures of the requests that wait for a chunk, or (``None``) for a content to begin."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_open(self) -> int:
        """How many contents are passed on."""
        return len(self._by_content)

    def begin(self, relay: Relay) -> None:
        """Passes on what comes from now on; one of the same content that is there already ends."""
        relay.on_landed = functools.partial(self._landed, relay.content)
        with self._mutex:
            earlier = self._by_content.pop(relay.content, None)
            self._by_content[relay.content] = relay
        if earlier is not None:
            earlier.end()
        self._landed(relay.content, None)
        with contextlib.suppress(RuntimeError):  # The loop was closed by a shutdown.
            self._loop.call_soon_threadsafe(self._end_idle)

    def end_all(self) -> None:
        """Passes nothing more on. Costs nothing where there is nothing."""
        if not self._by_content:
            return
        with self._mutex:
            relays = list(self._by_content.values())
            self._by_content.clear()
        for relay in relays:
            relay.end()

    async def find(self, content: ContentId, start: int, end: int, *, wait_s: float) -> tuple[Relay, int]:
        """Waits until the first chunk of bytes ``[start, end)`` of the data has landed; returns how far those go then.

        Args:
            content: Which content.
            start: Where a chunk begins.
            end: Where one ends.
            wait_s: The longest that it waits, in seconds.

        Raises:
            PeerNotReadyError: It has not, in time.
            ConfigurationError: The range is none of whole chunks.
        """
        until_s = self._loop.time() + wait_s
        while True:
            relay = self._open(content)
            chunks = _chunks_of(relay.chunks, start, end) if relay is not None else range(0)
            with self._told_of(content, chunks.start if chunks else None) as told:
                # Once more: it may just have begun, ended or landed.
                if self._open(content) is not relay:
                    continue
                what = "nothing of this content is received here"
                if relay is not None:
                    relay.touch()
                    num_landed = relay.num_landed_from(chunks.start, chunks.stop)
                    if num_landed:
                        return relay, relay.chunks.range_of(chunks.start, chunks.start + num_landed)[1]
                    what = "none of these chunks is here"
                remaining_s = until_s - self._loop.time()
                if remaining_s <= 0:
                    raise PeerNotReadyError(f"expected chunks to pass on, {what}", retry_after_s=0.0)
                await asyncio.wait({told}, timeout=remaining_s)

    def _open(self, content: ContentId) -> Relay | None:
        relay = self._by_content.get(content)
        return None if relay is None or relay.has_ended else relay

    @contextlib.contextmanager
    def _told_of(self, content: ContentId, chunk: int | None) -> Iterator[asyncio.Future[None]]:
        """A future that is done as soon as the chunk lands, or the content begins or ends."""
        key, told = (content, chunk), self._loop.create_future()
        waiting = self._waiting.setdefault(key, [])
        waiting.append(told)
        try:
            yield told
        finally:
            waiting.remove(told)
            if not waiting:
                del self._waiting[key]

    def _landed(self, content: ContentId, chunk: int | None) -> None:
        """Called by any thread. Few chunks are waited for: to wake the event loop costs more than to look."""
        if self._waiting and (chunk is None or (content, chunk) in self._waiting):
            with contextlib.suppress(RuntimeError):  # The loop was closed by a shutdown.
                self._loop.call_soon_threadsafe(self._tell, content, chunk)

    def _tell(self, content: ContentId, chunk: int | None) -> None:
        for key, waiting in self._waiting.items():
            if key[0] == content and (chunk is None or key[1] == chunk):
                for told in waiting:
                    if not told.done():
                        told.set_result(None)

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


def _chunks_of(chunks: ChunkTable, start: int, end: int) -> range:
    """The chunks that a range of bytes consists of."""
    first, last = start // chunks.chunk_bytes, -(-end // chunks.chunk_bytes)
    if not 0 <= first < last <= chunks.num_chunks or chunks.range_of(first, last) != (start, end):
        raise ConfigurationError(f"expected a range of whole chunks of {chunks.chunk_bytes} bytes")
    return range(first, last)


def parse_relayed_range(request: web.Request) -> tuple[int, int]:
    """The half-open range that a request for relayed data asks for.

    Raises:
        ConfigurationError: It asks for none, or not for one.
    """
    try:
        asked = request.http_range
    except ValueError:
        asked = slice(None)
    if asked.start is None or asked.stop is None or not 0 <= asked.start < asked.stop:
        raise ConfigurationError("expected one range of bytes in a request for relayed data")
    return asked.start, asked.stop


def _nothing(_chunk: int | None) -> None:
    pass
