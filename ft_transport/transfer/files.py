"""Receives a snapshot into ``FILE.part``, which becomes ``FILE`` when it is whole; needs no torch.

Chunks are received into one buffer for each thread and written from there once they are verified, so that a full disk
is an error and not a signal, and memory is that of a few chunks. The file is sparse until it is whole. Its content is
only a hint: a fetch that resumes it compares each chunk with its digest from a source.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ft_transport.errors import ConfigurationError, FileWriteError, TransportError
from ft_transport.http.client.chunks import fetch_data
from ft_transport.http.client.fetch_settings import FetchSettings
from ft_transport.http.client.manifests import find_damaged
from ft_transport.http.peer_address import PeerAddress
from ft_transport.runtime.regular_files import is_in_place, open_regular, read_pieces, sync_directory, try_lock
from ft_transport.settings import default_num_threads
from ft_transport.telemetry.record import Record
from ft_transport.telemetry.recorder import Recorder, current, phase
from ft_transport.transfer.sources import ask_sources, with_restarts
from ft_transport.wire.chunks import ChunkTable
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.routes import LATEST, StepSelector

_MODE: Final = 0o666
_LOCK_S: Final = 0.5
"""How long an ending process may hold the lock of the part."""
_MAX_CHUNK_BYTES: Final = 256 << 20


class ThreadBuffers:
    """One buffer for each thread, which the next chunk overwrites."""

    def __init__(self) -> None:
        self._own = threading.local()

    def buffers(self, start: int, end: int) -> Sequence[memoryview]:
        """Return the calling thread's buffer, which has to receive a whole chunk; see ``wire.snapshot.Memory``."""
        num_bytes = end - start
        buffer: memoryview | None = getattr(self._own, "buffer", None)
        if buffer is None or len(buffer) < num_bytes:
            buffer = self._own.buffer = memoryview(bytearray(num_bytes))
        return (buffer[:num_bytes],)


class PartFile:
    """The file that receives the data of one snapshot. Any thread calls `buffers` and `write`, one thread the rest.

    Args:
        path: Path of the final file; a regular file there is replaced in the end.

    Attributes:
        part: Path of the file until then.
        buffers: Has the buffer of the calling thread, which `write` writes.
        error: The disk's error when it refused a chunk.

    Raises:
        ConfigurationError: The path is no regular file, the part cannot be made, or another process writes to it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        _check_replaceable(path)
        self.part = path.with_name(f"{path.name}.part")
        self._descriptor = _open_locked(self.part)
        self._table = ChunkTable(data_bytes=0, chunk_bytes=1)
        self._header_bytes = 0
        self.buffers = ThreadBuffers().buffers
        self.error: OSError | None = None
        self._is_named = False

    def __enter__(self) -> PartFile:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        try:
            if not self.kept_bytes and not self._is_named and is_in_place(self._descriptor, self.part):
                os.unlink(self.part)
        finally:
            os.close(self._descriptor)

    @property
    def kept_bytes(self) -> int:
        """Approximate number of bytes that it takes on the disk."""
        return os.fstat(self._descriptor).st_blocks * 512

    def begin(self, manifest: Manifest) -> None:
        """Allocate room for a snapshot.

        Raises:
            FileWriteError: The file system has no room for it.
            ConfigurationError: Its chunks are too large for memory.
        """
        check_chunk_size(manifest)
        table = manifest.chunks
        # Its length with the digests, which may come later.
        self._header_bytes = len(manifest.header([0] * table.num_chunks))
        self._table = table
        total_bytes = self._header_bytes + table.data_bytes
        room = os.fstatvfs(self._descriptor)
        free_bytes = room.f_bavail * room.f_frsize + self.kept_bytes
        if total_bytes > free_bytes:
            raise FileWriteError(
                f"expected room for {total_bytes} bytes, there is room for {free_bytes}; free some, or name a file "
                "elsewhere",
                path=str(self.part),
            )
        os.ftruncate(self._descriptor, total_bytes)

    def missing(self, manifest: Manifest, *, all_written: bool) -> list[int]:
        """Return the chunks that are not in the file, ascending.

        Args:
            manifest: With digests.
            all_written: Whether all chunks should be in it; otherwise chunks in holes are not read.
        """
        chunks = range(self._table.num_chunks)
        there = set(chunks) if all_written else self._written()
        looked_at = [chunk for chunk in chunks if chunk in there]
        damaged = find_damaged(manifest, self._stored, num_threads=default_num_threads(), chunks=looked_at)
        there.difference_update(damaged)
        return [chunk for chunk in chunks if chunk not in there]

    def write(self, chunk: int) -> None:
        """Write this chunk, which the calling thread has received.

        Raises:
            OSError: It cannot be written.
        """
        start, end = self._table.range_of(chunk, chunk + 1)
        (left,), position = self.buffers(start, end), self._header_bytes + start
        try:
            while left:
                written = os.pwrite(self._descriptor, left, position)
                left, position = left[written:], position + written
        except OSError as error:
            self.error = error
            raise

    def finish(self, manifest: Manifest) -> None:
        """Write the header, make the file durable, and give it its name.

        Args:
            manifest: With digests, which match all chunks.

        Raises:
            OSError: The file cannot be written or renamed; another process may have moved its part.
        """
        assert manifest.digests is not None, "they have been asked for"
        header = manifest.header(manifest.digests)
        assert len(header) == self._header_bytes, "digests take the same room whatever they are"
        os.pwrite(self._descriptor, header, 0)
        os.fsync(self._descriptor)
        if not is_in_place(self._descriptor, self.part):
            raise FileNotFoundError(
                errno.ENOENT, "expected the file that was written, another one has its name", str(self.part)
            )
        os.replace(self.part, self._path)
        self._is_named = True
        sync_directory(self._path.absolute().parent)

    def _written(self) -> set[int]:
        """Return the chunks that do not lie in holes of the file."""
        written: set[int] = set()
        table, starts_at = self._table, self._header_bytes
        end = min(os.fstat(self._descriptor).st_size, starts_at + table.data_bytes)
        position = starts_at
        while position < end:
            try:
                start = os.lseek(self._descriptor, position, os.SEEK_DATA)
                position = os.lseek(self._descriptor, start, os.SEEK_HOLE)
            except OSError:  # ENXIO: the rest is a hole
                break
            first, last = start - starts_at, min(position, end) - starts_at
            written.update(range(first // table.chunk_bytes, min(-(-last // table.chunk_bytes), table.num_chunks)))
        return written

    def _stored(self, start: int, end: int) -> Iterator[memoryview]:
        return read_pieces(self._descriptor, self._header_bytes + start, self._header_bytes + end)


def check_chunk_size(manifest: Manifest) -> None:
    """Raise `ConfigurationError` if chunks are too large for memory."""
    table = manifest.chunks
    if min(table.chunk_bytes, table.data_bytes) > _MAX_CHUNK_BYTES:
        raise ConfigurationError(
            f"expected chunks of at most {_MAX_CHUNK_BYTES} bytes, the source has some of {table.chunk_bytes}"
        )


def _check_replaceable(path: Path) -> None:
    try:
        is_regular = stat.S_ISREG(os.stat(path, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigurationError(f"expected a file to fetch to: {error}") from error
    if not is_regular:
        raise ConfigurationError(
            f"expected a regular file to fetch to, or none yet, {path} is a link, a directory or a device; name "
            "another file"
        )


def _open_locked(path: Path) -> int:
    """Open or make a file of this user and lock it, until the descriptor is closed or the process ends.

    Raises `ConfigurationError` for another user's file, a link, one with other names, and one that is locked.
    """
    until_s = time.monotonic() + _LOCK_S
    while True:
        try:
            descriptor = open_regular(path, os.O_RDWR | os.O_CREAT, _MODE)
        except OSError as error:
            raise ConfigurationError(f"expected a regular file of this user's as file to fetch to: {error}") from error
        try:
            found = os.fstat(descriptor)
            if found.st_uid != os.geteuid() or found.st_nlink > 1:
                raise ConfigurationError(
                    f"expected a file of this user's with one name as file to fetch to, {path} has {found.st_nlink} "
                    f"and is user {found.st_uid}'s"
                )
            if try_lock(descriptor) and is_in_place(descriptor, path):
                return descriptor
            if time.monotonic() > until_s:
                raise ConfigurationError(
                    f"expected a file to fetch to that no other fetch uses, another one writes to {path}; let it end, "
                    "or name another file"
                )
        except OSError as error:
            os.close(descriptor)
            raise ConfigurationError(f"expected a file that can be locked as file to fetch to: {error}") from error
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        time.sleep(0.02)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """The plan of a fetch into a file.

    Attributes:
        step: Step of the snapshot.
        sources: The peers that serve it.
        data_bytes: Size of all chunks.
        kept_bytes: Size of the chunks that are already in the file.
    """

    step: int
    sources: tuple[PeerAddress, ...]
    data_bytes: int
    kept_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedFile:
    """The result of a fetch into a file.

    Attributes:
        manifest: Manifest of the snapshot, with digests.
        plan: The chunks that the file had before, and the sources of the rest.
        record: Record of the fetch.
    """

    manifest: Manifest
    plan: FilePlan
    record: Record


def fetch_to_file(
    sources: Sequence[PeerAddress],
    step: StepSelector,
    path: Path,
    *,
    settings: FetchSettings,
    recorder: Recorder,
    on_plan: Callable[[FilePlan], None],
    wanted: Callable[[Manifest], Collection[int]] | None = None,
) -> FetchedFile:
    """Receive a snapshot into a safetensors file, which gets its name only once it is whole, verified and durable.

    If this fails, the received data stays in ``PATH.part``, and another call resumes from it, from any source.

    Args:
        sources: One or several peers that serve the same state.
        step: A step, or ``latest``.
        path: Path of the file.
        settings: How to fetch; chunks are always verified.
        recorder: Records the fetch.
        on_plan: Called before the first byte; again if a newer snapshot replaces the one being fetched.
        wanted: Selects the chunks to fetch from a manifest with digests; the file has holes for the others.

    Raises:
        ConfigurationError: The file cannot be written to, or has no room.
        FileWriteError: The disk failed, or is full.
        TransportError: See ``HTTPTransport.fetch``.
    """
    with PartFile(path) as part:
        with recorder.begin("fetch", replica=settings.replica, phase="manifest"):
            try:
                manifest, plan = with_restarts(
                    settings, lambda: _receive(sources, step, part, settings, on_plan=on_plan, wanted=wanted)
                )
                phase("load")
                part.finish(manifest)
            except (OSError, TransportError) as error:
                failed = part.error if isinstance(error, TransportError) else error
                if failed is None:
                    raise
                raise FileWriteError(
                    f"expected to write what is received, {failed.strerror or failed}; mend that, and what has come is "
                    "still there",
                    path=str(part.part),
                ) from error
        record = recorder.recent()[-1]
    return FetchedFile(manifest=manifest, plan=plan, record=record)


def check_data(peer: PeerAddress, settings: FetchSettings) -> Manifest:
    """Receive each chunk of a peer's newest snapshot, compare it with its digest, and return the manifest.

    The peer takes a snapshot if it has none.

    Raises:
        FetchFailedError: Chunks differ from their digests each time.
        TransportError: See ``HTTPTransport.fetch``.
    """

    def check() -> Manifest:
        with contextlib.ExitStack() as held:
            agreed = ask_sources([peer], LATEST, settings, held)
            check_chunk_size(agreed.manifest)
            manifest = agreed.manifest_with_digests(settings)
            fetch_data(agreed.files, manifest, ThreadBuffers(), settings)
            return manifest

    with Recorder().begin("fetch", replica=settings.replica, phase="manifest"):
        return with_restarts(settings, check)


def _receive(
    sources: Sequence[PeerAddress],
    step: StepSelector,
    part: PartFile,
    settings: FetchSettings,
    *,
    on_plan: Callable[[FilePlan], None],
    wanted: Callable[[Manifest], Collection[int]] | None,
) -> tuple[Manifest, FilePlan]:
    phase("manifest")
    with contextlib.ExitStack() as held:
        agreed = ask_sources(sources, step, settings, held)
        manifest = agreed.manifest
        recording = current()
        assert recording is not None, "the caller has begun it"
        recording.describe(step=manifest.step, num_bytes=manifest.data_bytes)
        phase("plan")
        table = manifest.chunks
        missing = list(range(table.num_chunks))
        if wanted is not None or part.kept_bytes:
            manifest = agreed.manifest_with_digests(settings)
            part.begin(manifest)
            missing = part.missing(manifest, all_written=False)
            if wanted is not None:
                chosen = wanted(manifest)
                missing = [chunk for chunk in missing if chunk in chosen]
            settings.timeouts.note_progress()
        else:
            part.begin(manifest)
        plan = FilePlan(
            step=manifest.step,
            sources=tuple(file.peer for file in agreed.files),
            data_bytes=table.data_bytes,
            kept_bytes=table.data_bytes - sum(map(table.length_of, missing)),
        )
        on_plan(plan)
        phase("transfer")
        fetch_data(agreed.files, manifest, part, settings, chunks=missing, on_landed=part.write)
        if manifest.digests is None:
            phase("verify")
            manifest = agreed.manifest_with_digests(settings)
            damaged = part.missing(manifest, all_written=True)
            settings.timeouts.note_progress()
            fetch_data(agreed.files, manifest, part, settings, chunks=damaged, on_landed=part.write)
        return manifest, plan
