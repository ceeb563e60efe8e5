"""Memory at an address, as bytes."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Column: TypeAlias = npt.NDArray[np.int64]

_WRITABLE: Final = 0x200  # PyBUF_WRITE in Include/cpython/object.h
_NOT_WRITABLE: Final = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) .-", re.MULTILINE)
_FIRST_ADDRESS: Final = 1  # NULL is none
_from_memory: Final = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_all_memory: Final[memoryview] = _from_memory(_FIRST_ADDRESS, sys.maxsize - _FIRST_ADDRESS, _WRITABLE)
"""Spans all addresses, mapped or not; only slices of it are used."""


def bytes_at(address: int, num_bytes: int) -> memoryview:
    """Return a writable uint8 view. The caller keeps the owner of the memory alive.

    Slicing one large view is six times as fast as making a view by the C function. A ctypes array would need a type for
    each length, which is slow to make and never freed.

    Raises:
        ValueError: ``address`` is NULL or negative, or the end is beyond the last address.
    """
    if not num_bytes:
        return memoryview(bytearray())
    at = address - _FIRST_ADDRESS
    view = _all_memory[at : at + num_bytes]
    if at < 0 or len(view) != num_bytes:
        raise ValueError(f"expected an address of {num_bytes} bytes, got {address:#x}")
    return view


def read_only_positions(starts: Column, ends: Column) -> list[int]:
    """Return the positions of memory ranges that are read-only: a write there would end the process.

    The system lists the process's mappings in half a millisecond. Without that list no range counts as read-only.

    Args:
        starts: The first address of each range.
        ends: The address after the last byte of each range.
    """
    try:
        mappings = Path("/proc/self/maps").read_bytes()
    except OSError:
        return []
    read_only = np.array(
        [[int(each, 16) for each in pair] for pair in _NOT_WRITABLE.findall(mappings)], dtype=np.uint64
    )
    if not len(read_only):
        return []
    # Only the last mapping that begins before a range ends can overlap the end of the range.
    last = np.searchsorted(read_only[:, 0], ends.astype(np.uint64), side="left").astype(np.int64) - 1
    reaches_into = read_only[np.maximum(last, 0), 1] > starts.astype(np.uint64)
    return [int(each) for each in np.flatnonzero((last >= 0) & reaches_into)]
