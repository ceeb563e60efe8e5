"""What one receiver asks another one for, and how that answers: chunks, each as soon as it has landed there.

The request names half-open ranges of the data's bytes, each of whole chunks: ``?ranges=4194304-8388608,0-1048576``. The
answer has all these chunks as they land, and of those that are there the first one first; each behind a header: where
it begins in the data, 8 bytes, and how many chunks the furthest receiver has received of which the answerer has heard,
not counting what it had before, 4 bytes, both big-endian (see ``wire.ring``). It is as long as all of them are, and
ends early where the rest does not land in time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

from ft_transport.wire.chunks import ChunkTable, runs_of

HEADER: Final = struct.Struct(">QI")
MAX_RANGES: Final = 64
"""In one request."""
_MAX_DIGITS: Final = 18


def answer_bytes(table: ChunkTable, chunks: Iterable[int]) -> int:
    """How long an answer with these chunks is."""
    return sum(HEADER.size + table.length_of(chunk) for chunk in chunks)


def format_ranges(table: ChunkTable, chunks: Sequence[int]) -> str:
    """The value of the parameter that asks for chunks, in their order."""
    ranges = (table.range_of(run.start, run.stop) for run in runs_of(chunks))
    return ",".join(f"{start}-{end}" for start, end in ranges)


def parse_ranges(text: str) -> Sequence[tuple[int, int]] | None:
    """The ranges that a parameter names, or ``None`` if it names none, or some byte twice."""
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
    """The chunks of which ranges of bytes consist, or ``None`` if there are others among them, or parts of some."""
    chunks: list[int] = []
    for start, end in ranges:
        first, last = start // table.chunk_bytes, -(-end // table.chunk_bytes)
        if not 0 <= first < last <= table.num_chunks or table.range_of(first, last) != (start, end):
            return None
        chunks += range(first, last)
    return chunks
