"""Fetching a snapshot: the manifest first, then its chunks over parallel connections, each byte into its place.

The decisions are those of ``wire.fetch``; this module performs them with one thread per connection. Reads block and
release the GIL, so a receiver's threads move bytes as fast as the kernel hands them out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ft_transport.errors import (
    DeadlineExceededError,
    IntegrityError,
    ManifestError,
    PeerNotReadyError,
    PeerProtocolError,
    PeerUnreachableError,
    StepNotServedError,
    TransportError,
)
from ft_transport.net.connection import Connection, Patience, PeerAddress
from ft_transport.net.token import JobToken
from ft_transport.wire.fetch import (
    Aborted,
    ChunkVerified,
    FetchChunks,
    FetchMachine,
    RequestFailed,
    Stop,
    Wait,
    WorkerIndex,
)
from ft_transport.wire.integrity import Hasher, digest
from ft_transport.wire.manifest import MAX_HEADER_BYTES, Manifest, decode_header
from ft_transport.wire.routes import MANIFEST_DIGEST_HEADER, StepSelector, full_path, metadata_path

_READ_BYTES: Final = 1 << 20
"""Read this much, then digest it while it is still in the core's cache."""
_RETRY_PAUSE_S: Final = 0.1
_HOLD_S: Final = 10.0
"""The longest that the server is asked to hold one request; after that the client asks again."""


class Destination(Protocol):
    """Memory for the data of one snapshot."""

    def buffers(self, start: int, end: int) -> list[memoryview]:
        """Writable uint8 views that cover bytes ``[start, end)`` of the data once, in order. Called by any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchProgress:
    """How far a fetch is: bytes verified so far, bytes in all, seconds since it began."""

    done_bytes: int
    total_bytes: int
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSettings:
    """How to fetch.

    Attributes:
        num_connections: Parallel connections, at most one per chunk is used.
        verify: Whether each chunk is compared with its digest.
        max_failures: Failures in a row after which a source is given up.
        token: The job token, if the sources ask for one.
        patience: Deadlines and the least throughput.
        on_progress: Called after each chunk, from the fetching threads, one call at a time; must be quick.
    """

    num_connections: int
    verify: bool
    max_failures: int
    token: JobToken | None
    patience: Patience
    on_progress: Callable[[FetchProgress], None] | None


def fetch_manifest(connection: Connection, step: StepSelector, settings: FetchSettings) -> Manifest:
    """The manifest of the snapshot that a peer serves for ``step``, waiting for it until the deadline.

    Args:
        connection: To the peer. As long as the caller leaves it open, the peer keeps the snapshot for it.
        step: A step or ``latest``.
        settings: How to fetch.

    Raises:
        StepNotServedError: The peer serves later steps only.
        DeadlineExceededError: The step did not come, or the peer could not be reached, in time.
        PeerError: The peer refused, or answered outside the protocol.
        ManifestError: What it sent is no manifest.
        IntegrityError: The manifest was damaged on the way.
    """
    patience = settings.patience
    peer = connection.peer
    last: TransportError | None = None
    while True:
        try:
            patience.remaining_s(f"waiting for step {step}", peer)
            return _read_manifest(connection, step, patience)
        except DeadlineExceededError as error:
            connection.close()
            if last is None:
                raise
            raise DeadlineExceededError(
                f"timed out waiting for a snapshot; last: {last}", peer=str(peer), step=step
            ) from error
        except (PeerUnreachableError, PeerNotReadyError, IntegrityError) as error:
            connection.close()
            last = error
        except StepNotServedError as error:
            error.step = step
            raise
        time.sleep(min(_RETRY_PAUSE_S, max(0.0, patience.deadline_s - time.monotonic())))


def _read_manifest(connection: Connection, step: StepSelector, patience: Patience) -> Manifest:
    peer = str(connection.peer)
    wait_s = min(_HOLD_S, max(0.0, patience.deadline_s - time.monotonic()))
    response = connection.get(
        metadata_path(step, wait_s=wait_s), headers={}, expected_status=200, answer_within_s=wait_s
    )
    length = response.length
    if length is None or length > MAX_HEADER_BYTES:
        raise ManifestError(
            f"expected a manifest of at most {MAX_HEADER_BYTES} bytes, the peer announced {length}",
            peer=peer,
            step=step,
        )
    body = bytearray(length)
    connection.read_into([memoryview(body)])
    connection.end_response(response)
    announced = response.headers.get(MANIFEST_DIGEST_HEADER, "")
    actual = digest(memoryview(body))
    if announced != f"{actual:016x}":
        try:
            expected = int(announced, 16)
        except ValueError:
            raise PeerProtocolError(
                f"expected a manifest digest, got {announced[:64]!r}", peer=peer, step=step
            ) from None
        raise IntegrityError(
            "the manifest was damaged", chunk=None, expected=expected, actual=actual, peer=peer, step=step
        )
    manifest = decode_header(memoryview(body), peer=peer)
    if isinstance(step, int) and manifest.step != step:
        raise PeerProtocolError(f"expected the manifest of step {step}, got step {manifest.step}", peer=peer, step=step)
    return manifest


def fetch_data(
    sources: Sequence[PeerAddress], manifest: Manifest, destination: Destination, settings: FetchSettings
) -> None:
    """Fetches all data of a snapshot into ``destination``; returns when every chunk landed and was verified.

    Args:
        sources: Peers that serve this very snapshot.
        manifest: Its manifest.
        destination: Where the bytes go. After an error its content is undefined.
        settings: How to fetch.

    Raises:
        FetchFailedError: No source could deliver the rest; carries each failure.
        DeadlineExceededError: The deadline passed first.
    """
    _Fetch(sources, manifest, destination, settings).run()


class _Fetch:
    """The threads of one fetch around its machine."""

    def __init__(
        self, sources: Sequence[PeerAddress], manifest: Manifest, destination: Destination, settings: FetchSettings
    ) -> None:
        self._sources = sources
        self._manifest = manifest
        self._destination = destination
        self._settings = settings
        self._num_workers = max(1, min(settings.num_connections, manifest.chunks.num_chunks))
        self._machine = FetchMachine(
            num_chunks=manifest.chunks.num_chunks,
            sources=[str(source) for source in sources],
            num_workers=self._num_workers,
            max_failures=settings.max_failures,
        )
        self._changed = threading.Condition()
        self._connections: list[Connection] = []
        self._started_s = time.monotonic()
        self._done_bytes = 0

    def run(self) -> None:
        """Runs one thread per further connection, and the first one on this thread."""
        threads = [
            threading.Thread(
                target=self._work, args=(WorkerIndex(index),), name=f"ft-transport-fetch-{index}", daemon=True
            )
            for index in range(1, self._num_workers)
        ]
        for thread in threads:
            thread.start()
        try:
            self._work(WorkerIndex(0))
        except BaseException as error:
            # A signal handler raised on this thread: the others must not go on writing behind the caller's back.
            self._abort(TransportError(f"the fetch was interrupted: {type(error).__name__}"))
            raise
        finally:
            for thread in threads:
                thread.join()
        stopped = self._machine.stopped
        assert stopped is not None, "the workers end only when the machine stops"
        if stopped.error is not None:
            raise stopped.error

    def _work(self, worker: WorkerIndex) -> None:
        connections: dict[int, Connection] = {}
        try:
            while True:
                with self._changed:
                    instruction = self._machine.next(worker)
                    while isinstance(instruction, Wait):
                        self._changed.wait(timeout=self._settings.patience.stall_timeout_s)
                        instruction = self._machine.next(worker)
                match instruction:
                    case Stop():
                        return
                    case FetchChunks():
                        self._perform(worker, instruction, connections)
        finally:
            for connection in connections.values():
                connection.close()

    def _perform(self, worker: WorkerIndex, instruction: FetchChunks, connections: dict[int, Connection]) -> None:
        settings = self._settings
        source = self._sources[instruction.source]
        connection = connections.get(instruction.source)
        if connection is None:
            connection = Connection(source, token=settings.token, patience=settings.patience)
            connections[instruction.source] = connection
            with self._changed:
                self._connections.append(connection)
        try:
            if instruction.delay_s:
                with self._changed:
                    self._changed.wait_for(lambda: self._machine.stopped is not None, timeout=instruction.delay_s)
            self._receive_chunks(worker, connection, instruction.first, instruction.end)
        except TransportError as error:
            connection.close()
            error.step = self._manifest.step
            out_of_time = time.monotonic() >= settings.patience.deadline_s
            if out_of_time:
                self._abort(error)
            else:
                with self._changed:
                    self._machine.receive(RequestFailed(worker, error))
                    self._changed.notify_all()
        except Exception as error:
            failure = TransportError(f"the receiver failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._abort(failure)

    def _abort(self, error: TransportError) -> None:
        """Stops the machine and wakes every worker, also those that are reading."""
        with self._changed:
            self._machine.receive(Aborted(error))
            self._changed.notify_all()
            connections = list(self._connections)
        for connection in connections:
            connection.interrupt()

    def _receive_chunks(self, worker: WorkerIndex, connection: Connection, first: int, end: int) -> None:
        manifest = self._manifest
        start, stop = manifest.chunks.range_of(first, end)
        position = manifest.header_bytes
        response = connection.get(
            full_path(manifest.step, manifest.snapshot_id),
            headers={"Range": f"bytes={position + start}-{position + stop - 1}"},
            expected_status=206,
            answer_within_s=0.0,
        )
        content_range = response.headers.get("Content-Range")
        expected_range = f"bytes {position + start}-{position + stop - 1}/{manifest.total_bytes}"
        if response.length != stop - start or content_range != expected_range:
            raise PeerProtocolError(
                f"expected {expected_range!r}, got {str(content_range)[:100]!r} of {response.length} bytes",
                peer=str(connection.peer),
            )
        for chunk in range(first, end):
            self._receive_chunk(connection, chunk)
            with self._changed:
                if self._machine.stopped is not None:
                    connection.close()
                    return
                self._machine.receive(ChunkVerified(worker))
                if self._machine.stopped is not None:
                    self._changed.notify_all()
                self._report_progress(chunk)
        connection.end_response(response)

    def _receive_chunk(self, connection: Connection, chunk: int) -> None:
        start, stop = self._manifest.chunks.range_of(chunk, chunk + 1)
        hasher = Hasher() if self._settings.verify else None
        for views in _batches(self._destination.buffers(start, stop)):
            connection.read_into(views)
            if hasher is not None:
                for view in views:
                    hasher.update(view)
        if hasher is not None and hasher.intdigest() != self._manifest.digests[chunk]:
            raise IntegrityError(
                f"chunk {chunk} (data bytes [{start}, {stop})) was damaged",
                chunk=chunk,
                expected=self._manifest.digests[chunk],
                actual=hasher.intdigest(),
                peer=str(connection.peer),
                step=self._manifest.step,
            )

    def _report_progress(self, chunk: int) -> None:
        start, stop = self._manifest.chunks.range_of(chunk, chunk + 1)
        self._done_bytes += stop - start
        if self._settings.on_progress is not None:
            self._settings.on_progress(
                FetchProgress(
                    done_bytes=self._done_bytes,
                    total_bytes=self._manifest.data_bytes,
                    elapsed_s=time.monotonic() - self._started_s,
                )
            )


def _batches(views: list[memoryview]) -> Iterator[list[memoryview]]:
    """Groups views into batches of about ``_READ_BYTES``, cutting large ones."""
    batch: list[memoryview] = []
    room = _READ_BYTES
    for view in views:
        position = 0
        while position < len(view):
            piece = view if not position and len(view) <= room else view[position : position + room]
            batch.append(piece)
            position += len(piece)
            room -= len(piece)
            if not room:
                yield batch
                batch, room = [], _READ_BYTES
    if batch:
        yield batch
