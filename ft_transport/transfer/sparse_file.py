"""Which chunks a sparse file has something of, and what."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from ft_transport.wire.chunks import ChunkTable

_PIECE_BYTES: Final = 1 << 20


def chunks_in(descriptor: int, table: ChunkTable, *, starts_at: int) -> set[int]:
    """The chunks of which something may be in the file, and not only a hole.

    Args:
        descriptor: Of the file; its position moves.
        table: The chunks.
        starts_at: Where in the file the first of them begins.
    """
    there: set[int] = set()
    end = min(os.fstat(descriptor).st_size, starts_at + table.data_bytes)
    position = starts_at
    while position < end:
        try:
            start = os.lseek(descriptor, position, os.SEEK_DATA)
            position = os.lseek(descriptor, start, os.SEEK_HOLE)
        except OSError:  # ENXIO: nothing but a hole from here on
            break
        first, last = start - starts_at, min(position, end) - starts_at
        there.update(range(first // table.chunk_bytes, min(-(-last // table.chunk_bytes), table.num_chunks)))
    return there


def read_pieces(descriptor: int, start: int, end: int) -> Iterator[memoryview]:
    """Bytes of a file, piece by piece, in memory that the next piece is read into; fewer where it ends early."""
    piece = memoryview(bytearray(min(_PIECE_BYTES, end - start)))
    while start < end and (count := os.preadv(descriptor, [piece[: end - start]], start)):
        yield piece[:count]
        start += count
