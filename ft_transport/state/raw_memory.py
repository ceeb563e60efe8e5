"""Memory at an address, as bytes."""

from __future__ import annotations

import ctypes
from typing import Final

_WRITABLE: Final = 0x200  # PyBUF_WRITE in Include/cpython/object.h
_from_memory: Final = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)


def bytes_at(address: int, num_bytes: int) -> memoryview:
    """A writable uint8 view. It keeps nothing alive: whoever has it keeps what owns the memory.

    An array of ctypes would do the same; but each length is a type of its own there, which takes ten times as long to
    make, and is kept for ever.
    """
    view: memoryview = _from_memory(address, num_bytes, _WRITABLE) if num_bytes else memoryview(bytearray())
    return view
