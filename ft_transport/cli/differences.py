"""The differences between two stored states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from ft_transport.cli.compare import Pair, Tally, compare
from ft_transport.cli.stored_state import StoredState, StoredTensor

if TYPE_CHECKING:
    from ft_transport.wire.manifest import Manifest

_OF_THE_FILE: Final = frozenset(f"ft_transport.{name}" for name in ("step", "snapshot", "digests", "digest"))
"""Metadata of a snapshot's file that does not describe the state."""

Kind = Literal["only in A", "only in B", "dtype or shape", "elements", "value"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A difference in one tensor or value.

    Attributes:
        name: Its name.
        kind: The kind of difference.
        one: Dtype and shape in A, in words; empty if it is missing there.
        other: The same in B.
        num_items: Number of its elements.
        tally: Statistics of the differing elements.
    """

    name: str
    kind: Kind
    one: str = ""
    other: str = ""
    num_items: int = 0
    tally: Tally | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The comparison of two states.

    Attributes:
        differences: The differences, in the order of A, then of B.
        num_common: Number of tensors in both.
        num_bytes: Their length.
        num_bytes_by_digest: Bytes that count as equal by the digests of their chunks.
        has_values: Whether other values were compared, because both sides store them alike.
    """

    differences: tuple[Difference, ...]
    num_common: int
    num_bytes: int
    num_bytes_by_digest: int
    has_values: bool


def find_differences(one: StoredState, other: StoredState, *, chunks: UnequalChunks | None) -> Comparison:
    """Compare two states.

    Args:
        one: State A.
        other: State B.
        chunks: The chunks whose digests differ, to trust the digests of the others.

    Raises:
        UnreadableError: A file is unreadable.
    """
    found: dict[str, Difference] = {}
    num_bytes, left_out = 0, 0
    pairs: dict[str, list[Pair]] = {"elements": [], "value": []}
    has_values = one.contents.form == other.contents.form
    sides: list[tuple[Kind, dict[str, StoredTensor], dict[str, StoredTensor]]] = [
        ("elements", one.tensors, other.tensors),
        ("value", one.values, other.values),
    ]
    for kind, ones, others in sides[: 1 + has_values]:
        for name, tensor in ones.items():
            twin = others.get(name)
            if twin is None:
                found[name] = Difference(name=name, kind="only in A", one=_shown(tensor))
            elif (tensor.dtype, tensor.shape) != (twin.dtype, twin.shape):
                found[name] = Difference(
                    name=name,
                    kind="dtype or shape" if kind == "elements" else "value",
                    one=_shown(tensor),
                    other=_shown(twin),
                )
            else:
                ranges = chunks.ranges_of(name) if chunks is not None else None
                size = tensor.num_bytes
                num_bytes += size
                left_out += size - sum(end - start for start, end in ranges) if ranges is not None else 0
                pairs[kind].append(Pair(name, tensor, twin, ranges))
        for name, twin in others.items():
            if name not in ones:
                found[name] = Difference(name=name, kind="only in B", other=_shown(twin))
    for kind, _, _ in sides:
        tallies = compare(pairs[kind])
        for pair in pairs[kind]:
            if pair.name in tallies:
                num_items = pair.one.num_bytes // pair.one.item_bytes
                found[pair.name] = Difference(
                    name=pair.name,
                    kind=kind,
                    num_items=num_items,
                    tally=tallies[pair.name],
                    one=_shown(pair.one),
                    other=_shown(pair.other),
                )
    if has_values:
        _compare_metadata(one.contents.metadata, other.contents.metadata, found)
    order = {name: at for at, name in enumerate([*one.tensors, *one.values, *other.tensors, *other.values])}
    return Comparison(
        differences=tuple(sorted(found.values(), key=lambda each: order.get(each.name, len(order)))),
        num_common=len(pairs["elements"]),
        num_bytes=num_bytes,
        num_bytes_by_digest=left_out,
        has_values=has_values,
    )


class UnequalChunks:
    """The chunks with different digests in two snapshots of one layout.

    Attributes:
        numbers: Chunk indices whose digests differ.
    """

    def __init__(self, one: Manifest, other: Manifest) -> None:
        assert one.digests is not None, "comparable"
        assert other.digests is not None, "comparable"
        pairs = zip(one.digests, other.digests, strict=True)
        self.numbers = frozenset(number for number, (first, second) in enumerate(pairs) if first != second)
        self._chunk_bytes = one.chunks.chunk_bytes
        self._tensors = {entry.name: entry for entry in one.tensors}

    @staticmethod
    def are_comparable(one: Manifest, other: Manifest) -> bool:
        """Whether equal digests of chunks imply equal tensors."""
        return (
            one.digests is not None
            and other.digests is not None
            and (one.digester, one.tensors, one.chunks) == (other.digester, other.tensors, other.chunks)
        )

    def ranges_of(self, name: str) -> Sequence[tuple[int, int]]:
        """Return the byte ranges of a tensor in these chunks, extended to whole elements."""
        entry = self._tensors[name]
        size, step = entry.end - entry.start, self._chunk_bytes
        if not size:
            return []
        ranges: list[tuple[int, int]] = []
        for number in range(entry.start // step, -(-entry.end // step)):
            if number not in self.numbers:
                continue
            start, end = max(0, number * step - entry.start), min(size, (number + 1) * step - entry.start)
            start, end = start // _ITEM * _ITEM, min(size, -(-end // _ITEM) * _ITEM)
            if ranges and ranges[-1][1] >= start:
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((start, end))
        return ranges


_ITEM: Final = 16
"""Length of the longest element in bytes."""


def _compare_metadata(one: dict[str, str], other: dict[str, str], found: dict[str, Difference]) -> None:
    for name in {**one, **other}:
        if name in _OF_THE_FILE or one.get(name) == other.get(name):
            continue
        kind: Kind = "only in B" if name not in one else "only in A" if name not in other else "value"
        found[name] = Difference(name=name, kind=kind)


def _shown(tensor: StoredTensor) -> str:
    return f"{tensor.dtype} {'×'.join(map(str, tensor.shape)) or '·'}"
