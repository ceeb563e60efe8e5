"""Memory at an address, as bytes."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

_WRITABLE: Final = 0x200  # PyBUF_WRITE in Include/cpython/object.h
_FIRST_ADDRESS: Final = 1  # NULL is none
_from_memory: Final = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_all_memory: Final[memoryview] = _from_memory(_FIRST_ADDRESS, sys.maxsize - _FIRST_ADDRESS, _WRITABLE)
"""From the first address to the last, whether anything is there or not: only parts of it are looked at."""


def bytes_at(address: int, num_bytes: int) -> memoryview:
    """A writable uint8 view. It keeps nothing alive: whoever has it keeps what owns the memory.

    An array of ctypes would do the same; but each length is a type of its own there, which takes many times as long to
    make, and is kept for ever. To make a view by the C function takes six times as long as a part of a larger one.

    Raises:
        ValueError: No memory can be there: ``address`` is NULL or negative, or the end lies beyond the last one.
    """
    if not num_bytes:
        return memoryview(bytearray())
    at = address - _FIRST_ADDRESS
    view = _all_memory[at : at + num_bytes]
    if at < 0 or len(view) != num_bytes:
        raise ValueError(f"expected an address of {num_bytes} bytes, got {address:#x}")
    return view
