"""Makes memory resident before its first use, and finds out how much memory of the host is free.

The kernel must find and clear a page at its first use, so filling a fresh mapping takes ten times as long as filling
resident memory. Small pages are slow in three ways. The kernel finds and clears each of them (0.3 s for half a
gigabyte, 0.03 s with huge pages). Each one needs an entry in the page tables while a snapshot is written. And each
reader of the file, a receiver on the same host or a socket, looks up each page again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Final

import torch

from ft_transport.errors import RestoreError, SnapshotError
from ft_transport.wire.manifest import Manifest

_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14, include/uapi/asm-generic/mman-common.h
_MADV_COLLAPSE: Final = 25  # Linux 6.1, ibid.
_MAP_FIXED: Final = 0x10  # include/uapi/asm-generic/mman-common.h
_MAP_NORESERVE: Final = 0x4000  # ibid.; Python has it since 3.13
_PIECE_BYTES: Final = 16 << 20
"""Number of bytes that are made resident in one call. Other threads that map memory may have to wait for the call."""
_HUGE_PAGE_SIZE: Final = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def map_file(descriptor: int, num_bytes: int, *, offset: int) -> mmap.mmap | memoryview:
    """Map a part of a file for shared reading and writing, aligned for huge pages if it is large.

    Args:
        descriptor: Descriptor of the file. The caller may close it afterwards.
        num_bytes: Length of the part.
        offset: Position of the part, a multiple of the page size.

    Returns:
        A writable buffer. The memory is unmapped when the last reference to the buffer or to a view of it is deleted.

    Raises:
        OSError: The system refuses the mapping.
    """
    huge = huge_page_bytes()
    if not huge or offset % huge or num_bytes < huge:
        return mmap.mmap(descriptor, num_bytes, offset=offset)
    # The kernel aligns a mapping of a file only if it is configured to use huge pages for all shared memory. So map the
    # file over an aligned part of a larger mapping, which Python unmaps when the last view is deleted.
    whole = mmap.mmap(-1, num_bytes + huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    at = -begin % huge
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if _libc().mmap(begin + at, num_bytes, protection, flags, descriptor, offset) != begin + at:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return memoryview(whole)[at : at + num_bytes]


def make_resident(
    address: int, num_bytes: int, *, is_wanted: Callable[[], bool], rest: Callable[[float], None] | None
) -> None:
    """Let the kernel find and clear all pages of fresh memory from `map_file`. The content stays zero.

    Args:
        address: Address of the memory.
        num_bytes: Length of the memory.
        is_wanted: Called repeatedly; ``False`` ends the work.
        rest: Called repeatedly, with the CPU seconds of work since its previous call. It may pause.

    Raises:
        SnapshotError: ``is_wanted`` returned ``False``.
        OSError: Not enough memory is free.
    """
    huge = huge_page_bytes()
    for start in range(0, num_bytes, _PIECE_BYTES):
        # Not the time that the thread waited for a core or for the GIL.
        started_s = time.thread_time()
        if not is_wanted():
            raise SnapshotError("stopped making memory ready: the transport was shut down, or the state has grown")
        piece = min(_PIECE_BYTES, num_bytes - start)
        if huge and not _collapse(address + start, piece, huge):
            huge = 0
        try:
            _populate(address + start, piece)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):  # no memory
                raise
            # Linux before 5.14.
            ctypes.memset(address + start, 0, piece)
        if rest is not None:
            rest(time.thread_time() - started_s)


@functools.cache
def huge_page_bytes() -> int:
    """Return the size of a huge page in bytes; 0 if the system has no huge pages of a usable size."""
    if sys.platform != "linux":
        return 0
    try:
        size = int(_HUGE_PAGE_SIZE.read_text())
    except (OSError, ValueError):
        return 0
    return size if 0 < size <= _PIECE_BYTES and size & (size - 1) == 0 else 0


def _collapse(address: int, num_bytes: int, huge: int) -> bool:
    """Move the aligned part of the memory to huge pages. Return whether to try the same with the next part.

    This works even if ``shmem_enabled`` is ``never``, as on most systems.
    """
    start, end = -(-address // huge) * huge, (address + num_bytes) // huge * huge
    if start >= end:
        return True
    try:
        for page in range(start, end, huge):
            # The kernel collapses only a range that has a page. Populate one: a plain write would end the process
            # (SIGBUS) if no memory is free.
            _populate(page, mmap.PAGESIZE)
        _advise(start, end - start, _MADV_COLLAPSE)
    except OSError as error:
        # True for busy pages. Other errors: no huge page is free, or the kernel does not have the call.
        return error.errno in (errno.EAGAIN, errno.EBUSY)
    return True


def _populate(address: int, num_bytes: int) -> None:
    _advise(address, num_bytes, _MADV_POPULATE_WRITE)


def _advise(address: int, num_bytes: int, advice: int) -> None:
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    # mmap.madvise would hold the GIL during the call.
    if _libc().madvise(address, num_bytes, advice):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    )  # fmt: skip
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


_PROC: Final = Path("/proc")
_CGROUPS: Final = Path("/sys/fs/cgroup")


def available_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Return the number of bytes that this process can still allocate; ``None`` if unknown.

    That is the smallest free memory of the machine and of the control groups of this process. Cached files count as
    free. Sources: ``MemAvailable`` (man 5 proc_meminfo), ``memory.max`` and ``memory.current`` (Linux,
    Documentation/admin-guide/cgroup-v2.rst), ``memory.limit_in_bytes`` and ``memory.usage_in_bytes``
    (cgroup-v1/memory.rst).

    Args:
        proc: Mount point of procfs.
        cgroups: Mount point of the control groups.
    """
    found = [_field(proc / "meminfo", "MemAvailable:", unit=1024)]
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            found += _groups_left(cgroups, path, limit="memory.max", usage="memory.current", prefix="")
        elif "memory" in controllers.split(","):
            found += _groups_left(
                cgroups / "memory",
                path,
                limit="memory.limit_in_bytes",
                usage="memory.usage_in_bytes",
                prefix="total_",
            )
    known = [number for number in found if number is not None]
    return max(0, min(known)) if known else None


def _groups_left(root: Path, path: str, *, limit: str, usage: str, prefix: str) -> list[int | None]:
    """Return the free bytes of each control group from ``path`` up to the root. Skips groups that do not exist."""
    group = root / path.lstrip("/")
    left: list[int | None] = []
    while True:
        limit_bytes, usage_bytes = _number(group / limit), _number(group / usage)
        if limit_bytes is not None and usage_bytes is not None:
            files = [_field(group / "memory.stat", f"{prefix}{kind}_file") or 0 for kind in ("inactive", "active")]
            left.append(limit_bytes - usage_bytes + sum(files))
        if group == root or root not in group.parents:
            return left
        group = group.parent


def _number(path: Path) -> int | None:
    """Return the number in a file; ``None`` if the file does not exist or contains a word (``max``)."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _field(path: Path, name: str, *, unit: int = 1) -> int | None:
    for line in _lines(path):
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdigit():
            return int(words[1]) * unit
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeError):
        return []


logger = logging.getLogger(__name__)

_FILLED_AT_ONCE: Final = 64 << 20
_MOST_OF_AVAILABLE: Final = 0.5


class PrefaultedMemory:
    """Prepares one block of resident private memory for the next state to be received. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._block: mmap.mmap | None = None

    def prepare(self, num_bytes: int) -> None:
        """Make a block of ``num_bytes`` resident on this thread, unless that is more than half of the free memory."""
        self.free()
        left = available_bytes()
        if num_bytes <= 0 or (left is not None and num_bytes > _MOST_OF_AVAILABLE * left):
            return
        try:
            block = new_block(num_bytes)
        except OSError as error:
            logger.debug("no memory could be made resident for the next received state: %s", error)
            return
        address = ctypes.addressof(ctypes.c_char.from_buffer(block))
        for start in range(0, num_bytes, _FILLED_AT_ONCE):
            # ctypes releases the GIL during the call.
            ctypes.memset(address + start, 0, min(_FILLED_AT_ONCE, num_bytes - start))
        with self._mutex:
            self._block = block

    def take(self, num_bytes: int) -> mmap.mmap | None:
        """Hand over the prepared block, resized to ``num_bytes``. Return ``None`` if no block is ready.

        Bytes that the resize adds are not resident.
        """
        with self._mutex:
            block, self._block = self._block, None
        if block is None:
            return None
        with contextlib.suppress(OSError, SystemError, BufferError):  # some systems cannot resize mappings
            block.resize(num_bytes)
        return block if len(block) >= num_bytes else None

    def free(self) -> None:
        """Free the prepared block."""
        with self._mutex:
            self._block = None


def new_block(num_bytes: int) -> mmap.mmap:
    """Return private memory that is not resident yet.

    Raises:
        OSError: Not enough memory is free.
    """
    # Private, because shared anonymous memory gets no huge pages on most systems.
    block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        # With huge pages, page faults are far fewer, and filling the memory is several times as fast.
        with contextlib.suppress(OSError):  # a kernel without huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


_ALIGN_BYTES: Final = 64


class FreshMemory:
    """One block of memory for all tensors of a snapshot that are not received in place.

    Args:
        manifest: The manifest of the snapshot.
        direct: Indices of the tensors that are received in place.
        prefaulted: Provides a prepared block of resident memory, if it has one.

    Raises:
        RestoreError: Not enough memory is free.
    """

    def __init__(self, manifest: Manifest, direct: Container[int], prefaulted: PrefaultedMemory | None) -> None:
        self._num_bytes: dict[int, int] = {}
        self._offsets: dict[int, int] = {}
        end = 0
        for index, entry in enumerate(manifest.tensors):
            if index not in direct and entry.end > entry.start:
                self._offsets[index], self._num_bytes[index] = end, entry.end - entry.start
                end += -(-(entry.end - entry.start) // _ALIGN_BYTES) * _ALIGN_BYTES
        self._block: mmap.mmap | None = None
        if end:
            try:
                self._block = (prefaulted.take(end) if prefaulted is not None else None) or new_block(end)
            except OSError as error:
                raise RestoreError(
                    f"expected {end} bytes of memory to receive into: {error}", step=manifest.step
                ) from error
        self._view = memoryview(self._block) if self._block is not None else memoryview(b"")

    def view(self, index: int, offset: int, num_bytes: int) -> memoryview:
        """Return a writable view of some bytes of a tensor."""
        at = self._offsets[index] + offset
        return self._view[at : at + num_bytes]

    def tensor(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory of a non-empty tensor as a one-dimensional tensor, which keeps the whole block alive."""
        assert self._block is not None, "a tensor with bytes has memory"
        num_items = self._num_bytes[index] // dtype.itemsize
        return torch.frombuffer(self._block, dtype=dtype, count=num_items, offset=self._offsets[index])
