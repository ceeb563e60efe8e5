"""Memory files, mapped and made resident before they are filled, in huge pages where the kernel has some.

Small pages cost three times: each is found and cleared (0.3 s for half a gigabyte, against 0.03 s in huge ones), each
takes a place in the processor's table of pages while a snapshot is written, and each is looked up again by whoever
reads the file: a receiver on the same host, or a socket.
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
"""At once: meanwhile other threads of the process may have to wait when they map memory."""
_HUGE_PAGE_SIZE: Final = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def map_file(descriptor: int, num_bytes: int, *, offset: int) -> mmap.mmap | memoryview:
    """Maps bytes of a file to be read and written, shared, where huge pages fit if the file is large.

    Args:
        descriptor: Of the file. Need not stay open.
        num_bytes: So many.
        offset: Of the first, a multiple of the size of a page.

    Returns:
        A writable buffer. It is unmapped when nothing refers to it or looks into it any more.

    Raises:
        OSError: It cannot be mapped.
    """
    huge = huge_page_bytes()
    if not huge or offset % huge or num_bytes < huge:
        return mmap.mmap(descriptor, num_bytes, offset=offset)
    # The kernel chooses an aligned address by itself only where it is told to give all shared memory huge pages. So the
    # file is laid over a part of a larger mapping, which Python owns and unmaps with its last view.
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
    """Finds and clears all pages of fresh memory that `map_file` has mapped; its content stays zero.

    Args:
        address: Where it begins.
        num_bytes: So much.
        is_wanted: Asked now and then.
        rest: Called now and then, with the seconds of work since the last call.

    Raises:
        SnapshotError: It is not wanted any more.
        OSError: There is no memory.
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
    """The size of a huge page in bytes; 0 where there are none, or none of a size that is of use here."""
    if sys.platform != "linux":
        return 0
    try:
        size = int(_HUGE_PAGE_SIZE.read_text())
    except (OSError, ValueError):
        return 0
    return size if 0 < size <= _PIECE_BYTES and size & (size - 1) == 0 else 0


def _collapse(address: int, num_bytes: int, huge: int) -> bool:
    """Backs what is aligned with huge pages; says whether that is worth another try.

    Asked for by the process itself, this does not depend on ``shmem_enabled``, which is ``never`` on most systems.
    """
    start, end = -(-address // huge) * huge, (address + num_bytes) // huge * huge
    if start >= end:
        return True
    try:
        for page in range(start, end, huge):
            # Of a range with no page at all the kernel thinks that it was cut off. To write there would end the process
            # (SIGBUS) where there is no memory.
            _populate(page, mmap.PAGESIZE)
        _advise(start, end - start, _MADV_COLLAPSE)
    except OSError as error:
        # Some were busy, or else there is no free huge page left, or no such kernel.
        return error.errno in (errno.EAGAIN, errno.EBUSY)
    return True


def _populate(address: int, num_bytes: int) -> None:
    _advise(address, num_bytes, _MADV_POPULATE_WRITE)


def _advise(address: int, num_bytes: int, advice: int) -> None:
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    # Not mmap.madvise, which keeps the GIL all the while.
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
