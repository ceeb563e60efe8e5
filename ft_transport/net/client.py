"""Fetching the data of a snapshot: its chunks over parallel connections, each byte into its place.

The decisions are those of ``wire.fetch``; this module performs them with one thread per connection. Reads block and
release the GIL, so a receiver's threads move bytes as fast as the kernel hands them out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final, Protocol

from ft_transport.errors import (
    DeadlineExceededError,
    IntegrityError,
    PeerProtocolError,
    TransportError,
)
from ft_transport.net.connection import Connection, Patience
from ft_transport.net.peer_address import PeerAddress
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
from ft_transport.wire.integrity import Hasher
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.routes import full_path

_IN_FLIGHT_BYTES: Final = 16 << 20
"""More than the buffers of both sockets grow to by Linux's defaults (``tcp_rmem``, ``tcp_wmem``)."""


class Destination(Protocol):
    """Memory for the data of one snapshot."""

    def buffers(self, start: int, end: int) -> list[memoryview]:
        """Writable uint8 views that cover bytes ``[start, end)`` of the data once, in order. Called by any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchProgress:
    """How far a fetch is: bytes received so far, bytes in all, seconds since it began.

    They are verified, unless their digests come after the data; what was damaged then is fetched again, counted anew.
    """

    done_bytes: int
    total_bytes: int
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSettings:
    """How to fetch.

    Attributes:
        num_connections: Parallel connections, at most one per chunk is used.
        verify: Whether each chunk is compared with its digest as it lands, where the manifest has them.
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


def fetch_data(
    sources: Sequence[PeerAddress],
    manifest: Manifest,
    destination: Destination,
    settings: FetchSettings,
    *,
    chunks: Sequence[int] | None = None,
) -> None:
    """Fetches the data of a snapshot into ``destination``; returns when every chunk landed.

    Each has been verified then, if that is asked for and the manifest has digests.

    Args:
        sources: Peers that serve this very snapshot.
        manifest: Its manifest.
        destination: Where the bytes go. After an error its content is undefined.
        settings: How to fetch.
        chunks: Only these.

    Raises:
        FetchFailedError: No source could deliver the rest; carries each failure.
        DeadlineExceededError: The deadline passed first.
    """
    ranges = [(chunk, chunk + 1) for chunk in chunks] if chunks is not None else [(0, manifest.chunks.num_chunks)]
    _Fetch(sources, manifest, destination, settings, ranges).run()


class _ProgressError(Exception):
    """The caller's ``on_progress`` raised; never to be taken for a failure of a source."""


class _Fetch:
    """The threads of one fetch around its machine."""

    def __init__(
        self,
        sources: Sequence[PeerAddress],
        manifest: Manifest,
        destination: Destination,
        settings: FetchSettings,
        ranges: Sequence[tuple[int, int]],
    ) -> None:
        self._sources = sources
        self._manifest = manifest
        self._destination = destination
        self._settings = settings
        self._num_workers = max(1, min(settings.num_connections, manifest.chunks.num_chunks))
        self._machine = FetchMachine(
            ranges=ranges,
            sources=[str(source) for source in sources],
            num_workers=self._num_workers,
            max_failures=settings.max_failures,
            num_in_flight=-(-_IN_FLIGHT_BYTES // manifest.chunks.chunk_bytes),
        )
        self._changed = threading.Condition()
        self._connections: list[Connection] = []
        self._interruption: BaseException | None = None
        self._ended: set[WorkerIndex] = set()
        self._ends: SimpleQueue[WorkerIndex] = SimpleQueue()
        self._started_s = time.monotonic()
        self._done_bytes = 0

    def run(self) -> None:
        """Runs one thread per further connection, and the first one on this thread.

        Returns or raises only when no thread writes to the destination any more, whatever signals come meanwhile.
        """
        threads = [
            threading.Thread(
                target=self._work_on_thread, args=(WorkerIndex(index),), name=f"ft-transport-fetch-{index}", daemon=True
            )
            for index in range(1, self._num_workers)
        ]
        num_started = 0
        try:
            for thread in threads:
                self._start(thread)
                num_started += 1
            self._work(WorkerIndex(0))
        except BaseException as error:
            self._interrupt(error)
        # Not Thread.join: interrupted by a signal handler that raises, it takes a running thread for an ended one.
        while len(self._ended) < num_started:
            try:
                self._ends.get()
            except BaseException as error:
                self._interrupt(error)
        for thread in threads[:num_started]:
            thread.join()
        if self._interruption is not None:
            raise self._interruption
        stopped = self._machine.stopped
        assert stopped is not None, "the workers end only when the machine stops"
        if stopped.error is not None:
            raise stopped.error

    @staticmethod
    def _start(thread: threading.Thread) -> None:
        try:
            thread.start()
        except RuntimeError as error:
            raise TransportError(f"expected a thread for each connection: {error}") from error

    def _work_on_thread(self, worker: WorkerIndex) -> None:
        try:
            self._work(worker)
        except BaseException as error:
            self._interrupt(error)
        finally:
            self._ended.add(worker)
            self._ends.put(worker)

    def _interrupt(self, error: BaseException) -> None:
        """Ends the fetch because ``error`` was raised where none is expected; ``run`` raises it again."""
        if self._interruption is None:
            self._interruption = error
        self._abort(TransportError(f"the fetch was interrupted: {type(error).__name__}"))

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
                left_s = settings.patience.remaining_s("waiting to try again", source)
                with self._changed:
                    if self._changed.wait_for(
                        lambda: self._machine.stopped is not None, timeout=min(instruction.delay_s, left_s)
                    ):
                        return
            self._receive_chunks(worker, connection, instruction.first, instruction.end)
        except TransportError as error:
            connection.close()
            error.step = self._manifest.step
            if settings.patience.is_over():
                self._abort(self._out_of_time(error))
                return
            with self._changed:
                self._machine.receive(RequestFailed(worker, error))
                self._changed.notify_all()
                stopped = self._machine.stopped
            if stopped is not None:
                self._interrupt_connections()
        except Exception as error:
            cause = error.__cause__ if isinstance(error, _ProgressError) else error
            failure = TransportError(f"the receiver failed: {type(cause).__name__}: {cause}", step=self._manifest.step)
            failure.__cause__ = cause
            self._abort(failure)

    def _out_of_time(self, error: TransportError) -> DeadlineExceededError:
        out_of_time = DeadlineExceededError(
            f"timed out with {self._done_bytes} of {self._manifest.data_bytes} bytes received; last: {error.message}",
            peer=error.peer,
            step=self._manifest.step,
        )
        out_of_time.__cause__ = error
        return out_of_time

    def _abort(self, error: TransportError) -> None:
        """Stops the machine and wakes every worker, also those that are reading."""
        with self._changed:
            self._machine.receive(Aborted(error))
            self._changed.notify_all()
        self._interrupt_connections()

    def _interrupt_connections(self) -> None:
        with self._changed:
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
                # First, because an error of the caller's own must end a fetch also at its last chunk.
                self._report_progress(chunk)
                self._machine.receive(ChunkVerified(worker))
                if self._machine.stopped is not None:
                    self._changed.notify_all()
                is_cut_short = chunk + 1 < end and not self._machine.has_request(worker)
            if is_cut_short:
                # Others fetch the rest; HTTP has no other way to say that it is not wanted any more.
                connection.close()
                return
        connection.end_response(response)

    def _receive_chunk(self, connection: Connection, chunk: int) -> None:
        start, stop = self._manifest.chunks.range_of(chunk, chunk + 1)
        digests = self._manifest.digests if self._settings.verify else None
        views = self._destination.buffers(start, stop)
        # All of it at once, and the digest afterwards: smaller parts would be digested from a nearer cache, but each
        # of them costs more than that saves.
        connection.read_into(views)
        if digests is None:
            return
        hasher = Hasher()
        for view in views:
            hasher.update(view)
        if hasher.intdigest() != digests[chunk]:
            raise IntegrityError(
                f"chunk {chunk} (data bytes [{start}, {stop})) was damaged",
                chunk=chunk,
                expected=digests[chunk],
                actual=hasher.intdigest(),
                peer=str(connection.peer),
                step=self._manifest.step,
            )

    def _report_progress(self, chunk: int) -> None:
        start, stop = self._manifest.chunks.range_of(chunk, chunk + 1)
        self._done_bytes += stop - start
        if self._settings.on_progress is not None:
            progress = FetchProgress(
                done_bytes=self._done_bytes,
                total_bytes=self._manifest.data_bytes,
                elapsed_s=time.monotonic() - self._started_s,
            )
            try:
                self._settings.on_progress(progress)
            except Exception as error:
                raise _ProgressError from error
