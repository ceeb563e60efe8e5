"""Maps memory files and makes them resident before the first write, with huge pages if the kernel has some.

Small pages cost three times: the kernel finds and clears each one (0.3 s for half a gigabyte, 0.03 s with huge pages),
each one occupies the processor's page tables while a snapshot is written, and each reader of the file (a receiver on
the same host, or a socket) looks each one up again.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ft_transport.errors import SnapshotError

_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14, include/uapi/asm-generic/mman-common.h
_MADV_COLLAPSE: Final = 25  # Linux 6.1, ibid.
_MAP_FIXED: Final = 0x10  # include/uapi/asm-generic/mman-common.h
_MAP_NORESERVE: Final = 0x4000  # ibid.; Python has it since 3.13
_PIECE_BYTES: Final = 16 << 20
"""Size of one step, during which other threads that map memory may wait."""
_HUGE_PAGE_SIZE: Final = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def map_file(descriptor: int, num_bytes: int, *, offset: int) -> mmap.mmap | memoryview:
    """Map a part of a file for shared reading and writing, aligned for huge pages if it is large.

    Args:
        descriptor: The file; may be closed afterwards.
        num_bytes: Length of the part.
        offset: Position of the part, a multiple of the page size.

    Returns:
        A writable buffer, unmapped with the last reference to it or its memory.

    Raises:
        OSError: The system cannot map it.
    """
    huge = huge_page_bytes()
    if not huge or offset % huge or num_bytes < huge:
        return mmap.mmap(descriptor, num_bytes, offset=offset)
    # The kernel chooses aligned addresses only if it is configured to use huge pages for all shared memory. So the file
    # is mapped over a part of a larger mapping, which Python owns and unmaps with the last view.
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
    """Make the kernel find and clear all pages of fresh memory of `map_file`; its content stays zero.

    Args:
        address: Address of the memory.
        num_bytes: Length of the memory.
        is_wanted: Called repeatedly; false ends the work.
        rest: Called repeatedly, with the seconds of work since the last call.

    Raises:
        SnapshotError: ``is_wanted`` returned false.
        OSError: Not enough memory.
    """
    huge = huge_page_bytes()
    for start in range(0, num_bytes, _PIECE_BYTES):
        started_s = time.monotonic()
        if not is_wanted():
            raise SnapshotError("expected to be still wanted: the transport was shut down, or the state has grown")
        piece = min(_PIECE_BYTES, num_bytes - start)
        if huge and not _collapse(address + start, piece, huge):
            huge = 0
        try:
            _populate(address + start, piece)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):  # no memory
                raise
            # A kernel before 5.14.
            ctypes.memset(address + start, 0, piece)
        if rest is not None:
            rest(time.monotonic() - started_s)


@functools.cache
def huge_page_bytes() -> int:
    """Return the size of a huge page in bytes; 0 if there are none of a usable size."""
    if sys.platform != "linux":
        return 0
    try:
        size = int(_HUGE_PAGE_SIZE.read_text())
    except (OSError, ValueError):
        return 0
    return size if 0 < size <= _PIECE_BYTES and size & (size - 1) == 0 else 0


def _collapse(address: int, num_bytes: int, huge: int) -> bool:
    """Back the aligned part with huge pages; return whether another attempt is worthwhile.

    This request of the process does not depend on ``shmem_enabled``, which is ``never`` on most systems.
    """
    start, end = -(-address // huge) * huge, (address + num_bytes) // huge * huge
    if start >= end:
        return True
    try:
        for page in range(start, end, huge):
            # The kernel refuses a range without any page. A plain write there could end the process (SIGBUS) without
            # memory.
            _populate(page, mmap.PAGESIZE)
        _advise(start, end - start, _MADV_COLLAPSE)
    except OSError as error:
        # Busy pages; otherwise no free huge page is left, or the kernel lacks the call.
        return error.errno in (errno.EAGAIN, errno.EBUSY)
    return True


def _populate(address: int, num_bytes: int) -> None:
    _advise(address, num_bytes, _MADV_POPULATE_WRITE)


def _advise(address: int, num_bytes: int, advice: int) -> None:
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    # Not mmap.madvise, which holds the GIL.
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
