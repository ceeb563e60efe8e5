"""Memory that is made resident before a state comes: its first touch takes longer than receiving into it."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import sys
import threading
from typing import Final

from ft_transport.state.host_memory import available_bytes

logger = logging.getLogger(__name__)

_FILLED_AT_ONCE: Final = 64 << 20
_MOST_OF_AVAILABLE: Final = 0.5


class SpareMemory:
    """One block of private memory for the next state that is received. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._block: mmap.mmap | None = None

    def prepare(self, num_bytes: int) -> None:
        """Makes so much resident, on this thread; less than half of what is free, or else nothing."""
        self.free()
        left = available_bytes()
        if num_bytes <= 0 or (left is not None and num_bytes > _MOST_OF_AVAILABLE * left):
            return
        try:
            block = new_block(num_bytes)
        except OSError as error:
            logger.debug("no memory is made ready: %s", error)
            return
        address = ctypes.addressof(ctypes.c_char.from_buffer(block))
        for start in range(0, num_bytes, _FILLED_AT_ONCE):
            # Gives the interpreter away meanwhile.
            ctypes.memset(address + start, 0, min(_FILLED_AT_ONCE, num_bytes - start))
        with self._mutex:
            self._block = block

    def take(self, num_bytes: int) -> mmap.mmap | None:
        """The block, once, if there is one; what it has too much is given back, and what it lacks is not resident."""
        with self._mutex:
            block, self._block = self._block, None
        if block is None:
            return None
        with contextlib.suppress(OSError, SystemError, BufferError):  # Somewhere a mapping has the length it has.
            block.resize(num_bytes)
        return block if len(block) >= num_bytes else None

    def free(self) -> None:
        """Gives it back."""
        with self._mutex:
            self._block = None


def new_block(num_bytes: int) -> mmap.mmap:
    """Fresh memory, which nothing has touched.

    Raises:
        OSError: The system has none.
    """
    # Private, because shared anonymous memory gets no huge pages on most systems.
    block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        # Fewer, larger page faults: a fresh buffer of small pages is filled at a fraction of the speed.
        with contextlib.suppress(OSError):  # a kernel without them
            block.madvise(mmap.MADV_HUGEPAGE)
    return block
