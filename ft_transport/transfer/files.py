"""Receives a snapshot into ``FILE.part``, and renames it to ``FILE`` when complete. Does not import torch.

Each thread receives a chunk into its own buffer, verifies the chunk and writes it to the sparse file. So a fetch needs
memory for a few chunks only, and a full disk raises an error instead of a signal. A fetch that resumes a ``FILE.part``
does not trust its content: it compares each chunk in it with the digest that a source sends.
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
from ft_transport.telemetry.record import Record
from ft_transport.telemetry.recorder import Recorder, current, phase
from ft_transport.transfer.sources import ask_sources, with_restarts
from ft_transport.wire.chunks import ChunkTable
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.routes import LATEST, StepSelector

_MODE: Final = 0o666
_LOCK_S: Final = 0.5
"""Longest wait for the lock of ``FILE.part``: the process that has the lock may be ending."""
_MAX_CHUNK_BYTES: Final = 256 << 20


class ThreadBuffers:
    """Buffers of a fetch, one for each thread. Each received chunk overwrites the thread's previous chunk."""

    def __init__(self) -> None:
        self._own = threading.local()

    def buffers(self, start: int, end: int) -> Sequence[memoryview]:
        """Return the calling thread's buffer for bytes ``[start, end)``; see ``wire.snapshot.Memory``."""
        num_bytes = end - start
        buffer: memoryview | None = getattr(self._own, "buffer", None)
        if buffer is None or len(buffer) < num_bytes:
            buffer = self._own.buffer = memoryview(bytearray(num_bytes))
        return (buffer[:num_bytes],)


class PartFile:
    """The file ``FILE.part`` that receives the data of one snapshot. It is locked against other processes.

    Any thread may call `buffers` and `write`; only one thread may call the other methods.

    Args:
        path: Path of the final file. If a regular file exists there, `finish` replaces it.

    Attributes:
        part: Path of the file until `finish` renames it.
        buffers: Function that returns the buffer of the calling thread, from which `write` writes.
        error: Error of the last failed `write`, if any.

    Raises:
        ConfigurationError: ``path`` is not a regular file, or ``FILE.part`` cannot be created or is in use.
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
            if not self.stored_bytes and not self._is_named and is_in_place(self._descriptor, self.part):
                os.unlink(self.part)
        finally:
            os.close(self._descriptor)

    @property
    def stored_bytes(self) -> int:
        """Approximate number of bytes that the file occupies on the disk."""
        return os.fstat(self._descriptor).st_blocks * 512

    def begin(self, manifest: Manifest) -> None:
        """Set the size of the file for a snapshot.

        Raises:
            FileWriteError: The file system has not enough free space.
            ConfigurationError: The chunks of the snapshot are too large for memory.
        """
        check_chunk_size(manifest)
        table = manifest.chunks
        # Length of the header with digests, even if the source sends the digests only later.
        self._header_bytes = len(manifest.header([0] * table.num_chunks))
        self._table = table
        total_bytes = self._header_bytes + table.data_bytes
        found = os.fstatvfs(self._descriptor)
        free_bytes = found.f_bavail * found.f_frsize + self.stored_bytes
        if total_bytes > free_bytes:
            what = f"expected {total_bytes} bytes of free space, got {free_bytes}"
            raise FileWriteError(f"{what}; delete other files, or use another disk", path=str(self.part))
        os.ftruncate(self._descriptor, total_bytes)

    def missing(self, manifest: Manifest, *, all_written: bool) -> list[int]:
        """Return the chunks that are missing in the file or differ from their digests, in ascending order.

        Args:
            manifest: Manifest of the snapshot, with digests.
            all_written: Whether all chunks were written. Otherwise holes in the file are missing chunks, and are not
                read.
        """
        chunks = range(self._table.num_chunks)
        written = set(chunks) if all_written else self._written()
        damaged = find_damaged(manifest, self._stored, chunks=sorted(written))
        intact = written.difference(damaged)
        return [chunk for chunk in chunks if chunk not in intact]

    def write(self, chunk: int) -> None:
        """Write the chunk that is in the calling thread's buffer.

        Raises:
            OSError: The chunk cannot be written.
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
        """Write the header, flush the file to the disk, and rename it to its final name.

        Args:
            manifest: Manifest of the snapshot, with the digests of all chunks in the file.

        Raises:
            OSError: The file cannot be written or renamed, for example because another process has moved it.
        """
        assert manifest.digests is not None, "the caller passes a manifest with digests"
        header = manifest.header(manifest.digests)
        assert len(header) == self._header_bytes, "the length does not depend on the values of the digests"
        os.pwrite(self._descriptor, header, 0)
        os.fsync(self._descriptor)
        if not is_in_place(self._descriptor, self.part):
            raise FileNotFoundError(
                errno.ENOENT, "another process has moved or replaced the .part file", str(self.part)
            )
        os.replace(self.part, self._path)
        self._is_named = True
        sync_directory(self._path.absolute().parent)

    def _written(self) -> set[int]:
        """Return the chunks of which the file contains at least a part."""
        written: set[int] = set()
        table, starts_at = self._table, self._header_bytes
        end = min(os.fstat(self._descriptor).st_size, starts_at + table.data_bytes)
        position = starts_at
        while position < end:
            try:
                start = os.lseek(self._descriptor, position, os.SEEK_DATA)
                position = os.lseek(self._descriptor, start, os.SEEK_HOLE)
            except OSError:  # ENXIO: the rest of the file is a hole
                break
            first, last = start - starts_at, min(position, end) - starts_at
            written.update(range(first // table.chunk_bytes, min(-(-last // table.chunk_bytes), table.num_chunks)))
        return written

    def _stored(self, start: int, end: int) -> Iterator[memoryview]:
        return read_pieces(self._descriptor, self._header_bytes + start, self._header_bytes + end)


def check_chunk_size(manifest: Manifest) -> None:
    """Raise a `ConfigurationError` if the chunks of a snapshot are too large for a buffer in memory."""
    table = manifest.chunks
    if min(table.chunk_bytes, table.data_bytes) > _MAX_CHUNK_BYTES:
        raise ConfigurationError(
            f"expected chunks of at most {_MAX_CHUNK_BYTES} bytes from the source, got {table.chunk_bytes} bytes"
        )


def _check_replaceable(path: Path) -> None:
    try:
        is_regular = stat.S_ISREG(os.stat(path, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigurationError(f"cannot check whether the output file may be replaced: {error}") from error
    if not is_regular:
        raise ConfigurationError(
            f"expected the name of a regular file or of a new file, got {path}, which is a link, a directory or a "
            "device; name another file"
        )


def _open_locked(path: Path) -> int:
    """Open or create ``FILE.part``, and lock it until the descriptor is closed or the process ends.

    Raises a `ConfigurationError` if another user owns the file, another fetch has locked it, or it has several hard
    links.
    """
    until_s = time.monotonic() + _LOCK_S
    while True:
        try:
            descriptor = open_regular(path, os.O_RDWR | os.O_CREAT, _MODE)
        except OSError as error:
            raise ConfigurationError(f"cannot open or create the .part file: {error}") from error
        try:
            found = os.fstat(descriptor)
            if found.st_uid != os.geteuid() or found.st_nlink > 1:
                raise ConfigurationError(
                    f"expected {path} with owner {os.geteuid()} and one hard link, got owner {found.st_uid} and "
                    f"{found.st_nlink} hard links; delete this file, or name another output file"
                )
            if try_lock(descriptor) and is_in_place(descriptor, path):
                return descriptor
            if time.monotonic() > until_s:
                raise ConfigurationError(
                    f"another fetch is writing to {path}; wait until that fetch ends, or name another output file"
                )
        except OSError as error:
            os.close(descriptor)
            raise ConfigurationError(f"cannot lock the .part file: {error}") from error
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
        sources: Addresses of the sources.
        data_bytes: Size of all chunks.
        stored_bytes: Size of the chunks that the file already contains.
    """

    step: int
    sources: tuple[PeerAddress, ...]
    data_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedFile:
    """The result of a fetch into a file.

    Attributes:
        manifest: Manifest of the snapshot, with digests.
        plan: Plan of the fetch.
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
    """Receive a snapshot into a safetensors file, which appears at ``path`` only once it is complete and verified.

    If this function fails, the received data stays in ``PATH.part``. A later call resumes the fetch, from any source.

    Args:
        sources: Addresses of peers that serve the same state.
        step: A step or ``latest``.
        path: Path of the file.
        settings: Settings of the fetch; this function always verifies the chunks.
        recorder: Records the fetch.
        on_plan: Function to call with the plan before any data is fetched, and again if the source replaces the
            snapshot by a newer one.
        wanted: Function that is called with a manifest with digests, and returns the chunks to fetch. The file has
            holes in place of the other chunks. ``None`` for all chunks.

    Raises:
        ConfigurationError: The file cannot be created.
        FileWriteError: The disk failed or is full.
        TransportError: The fetch failed; see ``HTTPTransport.fetch``.
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
                what = f"expected to write the received data: {failed.strerror or failed}; the next fetch continues"
                raise FileWriteError(f"{what} with the data written so far", path=str(part.part)) from error
        record = recorder.recent()[-1]
    return FetchedFile(manifest=manifest, plan=plan, record=record)


def check_data(peer: PeerAddress, settings: FetchSettings) -> Manifest:
    """Receive a peer's newest snapshot, verify each chunk, drop the data and return the manifest.

    A peer without a snapshot takes one for this request.

    Raises:
        FetchFailedError: Received chunks did not match their digests in any attempt.
        TransportError: The fetch failed; see ``HTTPTransport.fetch``.
    """

    def check() -> Manifest:
        with contextlib.ExitStack() as connections:
            agreed = ask_sources([peer], LATEST, settings, connections)
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
    with contextlib.ExitStack() as connections:
        agreed = ask_sources(sources, step, settings, connections)
        manifest = agreed.manifest
        recording = current()
        assert recording is not None, "the caller has opened a recording"
        recording.describe(step=manifest.step, num_bytes=manifest.data_bytes)
        phase("plan")
        table = manifest.chunks
        missing = list(range(table.num_chunks))
        if wanted is not None or part.stored_bytes:
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
            stored_bytes=table.data_bytes - sum(map(table.length_of, missing)),
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
