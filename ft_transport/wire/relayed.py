"""A receiver's request to another receiver, and its answer: chunks, each sent as soon as it has landed there.

The request names half-open ranges of the data's bytes, each of whole chunks: ``?ranges=4194304-8388608,0-1048576``. The
answer has all these chunks as they land, beginning with the first of those that have landed; each behind a header: its
position in the data, 8 bytes, and the number of chunks that the furthest receiver known to the sender has received,
without those it had before, 4 bytes, both big-endian (see ``wire.ring``). The answer is as long as all chunks together,
and ends early if the rest does not land in time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

from ft_transport.wire.chunks import ChunkTable, runs_of

HEADER: Final = struct.Struct(">QI")
MAX_RANGES: Final = 64
"""Maximum ranges in one request."""
_MAX_DIGITS: Final = 18


def answer_bytes(table: ChunkTable, chunks: Iterable[int]) -> int:
    """Return the length of an answer with these chunks."""
    return sum(HEADER.size + table.length_of(chunk) for chunk in chunks)


def format_ranges(table: ChunkTable, chunks: Sequence[int]) -> str:
    """Return the value of the parameter that requests chunks, in their order."""
    ranges = (table.range_of(run.start, run.stop) for run in runs_of(chunks))
    return ",".join(f"{start}-{end}" for start, end in ranges)


def parse_ranges(text: str) -> Sequence[tuple[int, int]] | None:
    """Return the ranges of a parameter, or ``None`` if it names none, or some byte twice."""
    parts = text.split(",", MAX_RANGES)
    if len(parts) > MAX_RANGES:
        return None
    ranges: list[tuple[int, int]] = []
    for part in parts:
        start, _, end = part.partition("-")
        if not all(each.isascii() and each.isdigit() and len(each) <= _MAX_DIGITS for each in (start, end)):
            return None
        ranges.append((int(start), int(end)))
    at = 0
    for first, last in sorted(ranges):
        if not at <= first < last:
            return None
        at = last
    return ranges


def chunks_of(table: ChunkTable, ranges: Sequence[tuple[int, int]]) -> Sequence[int] | None:
    """Return the chunks that make up ranges of bytes, or ``None`` if a range holds parts of chunks, or other bytes."""
    chunks: list[int] = []
    for start, end in ranges:
        first, last = start // table.chunk_bytes, -(-end // table.chunk_bytes)
        if not 0 <= first < last <= table.num_chunks or table.range_of(first, last) != (start, end):
            return None
        chunks += range(first, last)
    return chunks
