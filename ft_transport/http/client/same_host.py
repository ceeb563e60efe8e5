"""Copies the data of a snapshot directly from the memory of a source on the same host.

If a copy fails, the caller fetches the missing chunks over HTTP. Only the deadline and errors of the receiver's own
callbacks end the fetch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from ft_transport.errors import DeadlineExceededError, PeerProtocolError, TransportError
from ft_transport.http.client.connection import Connection
from ft_transport.http.client.fetch_settings import FetchSettings
from ft_transport.http.shared_memory import LentMemory
from ft_transport.runtime.threads import run_on_threads
from ft_transport.settings import default_num_threads
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.routes import MEMORY_ROUTE, bound_path, decode_ticket
from ft_transport.wire.snapshot import Memory

logger = logging.getLogger(__name__)

_WAIT_S: Final = 5.0
"""Timeout for the source to accept a connection and to send its memory's descriptor."""
_MAX_TICKET_BYTES: Final = 4096
_CONNECT_S: Final = 1.0
"""Timeout of a connection to the source's socket, for which the kernel queues receivers."""
_PIECE_BYTES: Final = 512 << 10
"""Bytes to copy before they are digested: few enough to stay in the processor's cache. Smaller pieces cost more
overhead."""


def is_on_this_host(source: Connection) -> bool:
    """Return whether a source is on this host and lends its snapshot's memory to this process.

    Args:
        source: Connection to the source, after the manifest was received.
    """
    if source.same_host is None:
        return False
    try:
        LentMemory(source.same_host, timeout_s=_CONNECT_S).close()
    except TransportError:
        return False
    return True


def fetch_from_memory(
    connection: Connection,
    manifest: Manifest,
    destination: Memory,
    settings: FetchSettings,
    *,
    chunks: Sequence[int],
    on_landed: Callable[[int], None],
) -> Sequence[int]:
    """Copy chunks from the source's memory, if the source is on this host.

    Verifies each copied chunk if ``settings.verify`` is set and the manifest has digests. Otherwise the source confirms
    that it did not change the memory during the copy.

    Args:
        connection: Connection to the source, after the manifest was received.
        manifest: Manifest of the snapshot.
        destination: Memory to fill.
        settings: Settings of the fetch.
        chunks: Indices of the chunks to copy, ascending.
        on_landed: Called with the index of each copied chunk, on any thread. If the source has reclaimed its memory
            meanwhile, such a chunk is among the returned ones nevertheless.

    Returns:
        The indices of the chunks that were not copied, ascending.

    Raises:
        DeadlineExceededError: The deadline passed.
        TransportError: The caller's ``on_progress`` raised an error.
    """
    name = connection.same_host
    if name is None or not chunks:
        return chunks
    started_s = time.monotonic()
    try:
        lent = _borrow(name, connection, manifest, settings)
    except TransportError as error:
        # If the deadline passed, the fetch over HTTP reports that at once.
        logger.debug("cannot use the memory of %s on this host: %s", connection.peer, error)
        return chunks
    with lent:
        copying = _Copying(
            lent, manifest, destination, settings, chunks, on_landed=on_landed, peer=str(connection.peer)
        )
        copying.run()
        left = copying.left()
    logger.info(
        "step %d: copied %d of %d chunks from the memory of %s on this host in %.2f s",
        manifest.step,
        len(chunks) - len(left),
        len(chunks),
        connection.peer,
        time.monotonic() - started_s,
    )
    return left


def _borrow(name: str, connection: Connection, manifest: Manifest, settings: FetchSettings) -> LentMemory:
    peer, timeouts = str(connection.peer), settings.timeouts
    # Connects first, which fails for a source on another host, so that such a source receives no request.
    lent = LentMemory(
        name, timeout_s=min(_WAIT_S, timeouts.remaining_s("asking for memory on this host", connection.peer))
    )
    try:
        timeouts.handle.add(lent)
        response = connection.get(
            bound_path(MEMORY_ROUTE, manifest.step, manifest.snapshot_id),
            headers={},
            expected_status=200,
            answer_within_s=0.0,
        )
        ticket = decode_ticket(connection.read_body(response, max_bytes=_MAX_TICKET_BYTES), peer=peer)
        if ticket.data_bytes != manifest.data_bytes:
            raise PeerProtocolError(
                f"expected the peer to lend memory of {manifest.data_bytes} bytes, got {ticket.data_bytes} bytes",
                peer=peer,
            )
        lent.borrow(ticket)
    except BaseException:
        lent.close()
        raise
    return lent


class _Copying:
    """The threads that copy the chunks of one snapshot, and their progress."""

    def __init__(
        self,
        lent: LentMemory,
        manifest: Manifest,
        destination: Memory,
        settings: FetchSettings,
        chunks: Sequence[int],
        *,
        on_landed: Callable[[int], None],
        peer: str,
    ) -> None:
        self._lent = lent
        self._manifest = manifest
        self._destination = destination
        self._settings = settings
        self._chunks = chunks
        self._on_landed = on_landed
        self._peer = peer
        self._digests = manifest.digests if settings.verify else None
        self._mutex = threading.Lock()
        self._next = 0
        self._landed: set[int] = set()
        self._done_bytes = 0
        self._started_s = time.monotonic()
        self._is_over = False
        self._error: BaseException | None = None

    def run(self) -> None:
        """Copy on this thread and on others; return or raise only when no thread writes any more."""
        run_on_threads(
            lambda _number: self._work(),
            min(default_num_threads(), len(self._chunks)),
            name="ft-transport-copy",
            failed=self._fail,
            needs_all=False,
        )
        if self._error is not None:
            raise self._error

    def left(self) -> list[int]:
        """Return the chunks that were not copied."""
        # If the source has reclaimed its memory, bytes that were copied without digests may be of another snapshot.
        if self._digests is None and not self._lent.was_held():
            return list(self._chunks)
        return [chunk for chunk in self._chunks if chunk not in self._landed]

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, Exception) and not isinstance(error, TransportError):
            failure = self._failed(error)
            failure.__cause__ = error
            error = failure
        self._error = self._error or error
        self._is_over = True

    def _work(self) -> None:
        timeouts = self._settings.timeouts
        while not self._is_over:
            with self._mutex:
                if self._next == len(self._chunks):
                    return
                chunk = self._chunks[self._next]
                self._next += 1
            if timeouts.is_over():
                raise DeadlineExceededError(
                    f"timed out with {self._done_bytes} of {self._manifest.data_bytes} bytes received: "
                    f"{timeouts.reason()}",
                    peer=self._peer,
                    step=self._manifest.step,
                )
            start, end = self._manifest.chunks.range_of(chunk, chunk + 1)
            if self._copy(chunk, start, end):
                self._on_landed(chunk)
                timeouts.note_progress(end - start)
                with self._mutex:
                    self._landed.add(chunk)
                    self._report(end - start)
            elif not self._lent.is_held():
                # The source has reclaimed its memory for a newer snapshot. The fetch over HTTP reports that.
                self._is_over = True

    def _copy(self, chunk: int, start: int, end: int) -> bool:
        """Copy and verify a chunk; return whether that succeeded."""
        lent = self._lent
        # With digests, the source may even have exited: this process keeps the memory allocated.
        if self._digests is None and not lent.is_held():
            return False
        views = [view for view in self._destination.buffers(start, end) if view]
        try:
            if self._digests is None:
                lent.read(views, start)
                return True
            hasher = self._manifest.digester.hasher()
            for piece in _pieces(views):
                lent.read(piece, start)
                for view in piece:
                    hasher.update(view)
                    start += len(view)
        except OSError as error:
            logger.debug("cannot read chunk %d from the memory of %s: %s", chunk, self._peer, error)
            return False
        return hasher.intdigest() == self._digests[chunk]

    def _report(self, num_bytes: int) -> None:
        """Count ``num_bytes`` more copied bytes, and call the caller's ``on_progress``. Called under the lock."""
        self._done_bytes += num_bytes
        elapsed_s = time.monotonic() - self._started_s
        try:
            self._settings.report_progress(self._done_bytes, self._manifest.data_bytes, elapsed_s=elapsed_s)
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> TransportError:
        return TransportError(f"the receiver failed: {type(error).__name__}: {error}", step=self._manifest.step)


def _pieces(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Yield the bytes of the views in pieces of `_PIECE_BYTES`; each piece is a list of views or parts of views."""
    piece: list[memoryview] = []
    piece_bytes = 0
    for view in views:
        at = 0
        while at < len(view):
            part = view[at : at + _PIECE_BYTES - piece_bytes]
            piece.append(part)
            piece_bytes += len(part)
            at += len(part)
            if piece_bytes >= _PIECE_BYTES:
                yield piece
                piece, piece_bytes = [], 0
    if piece:
        yield piece
