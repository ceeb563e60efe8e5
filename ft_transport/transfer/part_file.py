"""An incomplete safetensors file, ``FILE.part``, which becomes ``FILE`` when it is whole.

Chunks are received into one buffer for each thread and written from there once they are verified, so that a full disk
is an error and not a signal, and memory is that of a few chunks. The file is sparse until it is whole. Its content is
only a hint: a fetch that resumes it compares each chunk with its digest from a source.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from ft_transport.errors import ConfigurationError, FileWriteError
from ft_transport.http.client.manifests import find_damaged
from ft_transport.runtime.regular_files import open_regular, sync_directory
from ft_transport.settings import default_num_threads
from ft_transport.wire.chunks import ChunkTable
from ft_transport.wire.layouts import LayoutTable
from ft_transport.wire.manifest import DATA_ALIGN_BYTES, Manifest, encode_header

_MODE: Final = 0o666
_LOCK_S: Final = 0.5
"""How long an ending process may hold the lock of the part."""
_PAUSE_S: Final = 0.02
_PIECE_BYTES: Final = 1 << 20
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
        path: See the argument.
        part: Path of the file until then.
        buffers: Has the buffer of the calling thread, which `write` writes.
        error: The disk's error when it refused a chunk.

    Raises:
        ConfigurationError: The path is no regular file, the part cannot be made, or another process writes to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
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
            if self.is_empty and not self._is_named and _is_in_place(self._descriptor, self.part):
                os.unlink(self.part)
        finally:
            os.close(self._descriptor)

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been written to the part."""
        return not self.kept_bytes

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
        self._header_bytes = len(_header_of(manifest, [0] * table.num_chunks))
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
        header = _header_of(manifest, manifest.digests)
        assert len(header) == self._header_bytes, "digests take the same room whatever they are"
        os.pwrite(self._descriptor, header, 0)
        os.fsync(self._descriptor)
        if not _is_in_place(self._descriptor, self.part):
            raise FileNotFoundError(
                errno.ENOENT, "expected the file that was written, another one has its name", str(self.part)
            )
        os.replace(self.part, self.path)
        self._is_named = True
        sync_directory(self.path.absolute().parent)

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


def read_pieces(descriptor: int, start: int, end: int) -> Iterator[memoryview]:
    """Read a file piece by piece into one buffer, which each piece overwrites; yield less at the end of the file."""
    piece = memoryview(bytearray(min(_PIECE_BYTES, end - start)))
    while start < end and (count := os.preadv(descriptor, [piece[: end - start]], start)):
        yield piece[:count]
        start += count


def check_chunk_size(manifest: Manifest) -> None:
    """Check that chunks fit in memory.

    Raises:
        ConfigurationError: They are too large.
    """
    table = manifest.chunks
    if min(table.chunk_bytes, table.data_bytes) > _MAX_CHUNK_BYTES:
        raise ConfigurationError(
            f"expected chunks of at most {_MAX_CHUNK_BYTES} bytes, the source has some of {table.chunk_bytes}"
        )


def _check_replaceable(path: Path) -> None:
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigurationError(f"expected a file to fetch to: {error}") from error
    else:
        if not stat.S_ISREG(found.st_mode):
            raise ConfigurationError(
                f"expected a regular file to fetch to, or none yet, {path} is a link, a directory or a device; name "
                "another file"
            )


def _open_locked(path: Path) -> int:
    """Open or make a file of this user and lock it, until the descriptor is closed or the process ends.

    Raises:
        ConfigurationError: The file cannot be made, is another user's, a link, no regular file or has other names, or
            another process has locked it.
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
            if _try_lock(descriptor) and _is_in_place(descriptor, path):
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
        time.sleep(_PAUSE_S)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_in_place(descriptor: int, path: Path) -> bool:
    """Whether the name still leads to the open file: a fetch that ends well renames its part."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _header_of(manifest: Manifest, digests: Sequence[int]) -> bytes:
    return encode_header(
        step=manifest.step,
        snapshot_id=manifest.snapshot_id,
        tensors=list(manifest.tensors),
        tree=manifest.tree,
        chunks=manifest.chunks,
        digests=list(digests),
        align_bytes=DATA_ALIGN_BYTES,
        layouts=LayoutTable(meshes=list(manifest.meshes), layouts=list(manifest.layouts)),
        digester=manifest.digester,
    )
