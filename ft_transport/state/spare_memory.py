"""Memory made resident before a state arrives: the first touch takes longer than receiving into it."""

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
    """One block of private memory for the next received state. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._block: mmap.mmap | None = None

    def prepare(self, num_bytes: int) -> None:
        """Make ``num_bytes`` resident on this thread, unless that exceeds half of the free memory."""
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
            # Releases the GIL meanwhile.
            ctypes.memset(address + start, 0, min(_FILLED_AT_ONCE, num_bytes - start))
        with self._mutex:
            self._block = block

    def take(self, num_bytes: int) -> mmap.mmap | None:
        """Return the block, once, resized to ``num_bytes``; added bytes are not resident. ``None`` without a block."""
        with self._mutex:
            block, self._block = self._block, None
        if block is None:
            return None
        with contextlib.suppress(OSError, SystemError, BufferError):  # some systems cannot resize mappings
            block.resize(num_bytes)
        return block if len(block) >= num_bytes else None

    def free(self) -> None:
        """Free the block."""
        with self._mutex:
            self._block = None


def new_block(num_bytes: int) -> mmap.mmap:
    """Return fresh, untouched memory.

    Raises:
        OSError: Not enough memory.
    """
    # Private, because shared anonymous memory gets no huge pages on most systems.
    block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        # Fewer, larger page faults: a fresh buffer of small pages is filled at a fraction of the speed.
        with contextlib.suppress(OSError):  # a kernel without them
            block.madvise(mmap.MADV_HUGEPAGE)
    return block
