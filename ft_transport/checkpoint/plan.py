"""The division of a write: every byte has one writer, and all ranks write about as much. One rank plans for all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Struct

from ft_transport.checkpoint.consolidated import MAX_FILE_BYTES, Consolidation, consolidate, names_below
from ft_transport.checkpoint.write_items import LOCAL, Described, Key, WriteItem
from ft_transport.errors import CheckpointError, ReplicasDivergedError

OWN_STATE_ADVICE: Final = "what each rank has for itself belongs under a top-level key that is named in rank_local"
_MAX_SHOWN: Final = 5


class RankPlan(Struct, frozen=True, array_like=True):
    """The work of one rank, by position in its own lists.

    Attributes:
        items: Items that it writes, ascending.
        values: Values that it writes, ascending.
        compared: Items that other ranks have, too, and that have to be equal.
        targets: For each item that also goes to a consolidated file: the item, the file, and the offset of the item's
            tensor in the file.
        files: Names of the consolidated files.
    """

    items: tuple[int, ...] = ()
    values: tuple[int, ...] = ()
    compared: tuple[int, ...] = ()
    targets: tuple[tuple[int, int, int], ...] = ()
    files: tuple[str, ...] = ()


# Not called. Two modules have decoders of types that contain this one, and two threads may import them at once.
_plan_decoder: Final = msgspec.msgpack.Decoder(RankPlan)


@dataclass(slots=True)
class SavePlan:
    """The plans of all ranks.

    Attributes:
        rank_plans: By rank.
        described: By rank.
        consolidation: The files with whole tensors, if there are any.
    """

    rank_plans: list[RankPlan]
    described: Sequence[Described]
    consolidation: Consolidation | None


def make_plan(
    described: Sequence[Described],
    consolidated: str | None = None,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    single_name: str | None = None,
) -> SavePlan:
    """Divide the ranks' data among them.

    Args:
        described: By rank.
        consolidated: Path of the part of the state that also goes to consolidated files.
        max_file_bytes: See `consolidate`.
        single_name: See `consolidate`.

    Raises:
        CheckpointError: Ranks disagree about a tensor, or lack a part of one.
    """
    holders: dict[Key, list[tuple[int, int]]] = {}
    loads = [0] * len(described)
    items: list[list[int]] = [[] for _ in described]
    for rank, each in enumerate(described):
        for position, item in enumerate(each.items):
            if item.part == LOCAL:
                items[rank].append(position)
                loads[rank] += item.num_bytes
            else:
                holders.setdefault(item.key, []).append((rank, position))
    compared: list[list[int]] = [[] for _ in described]
    # The largest first: the small ones at the end even out the loads.
    for held in sorted(holders.values(), key=lambda held: -_item(described, held[0]).num_bytes):
        first = _item(described, held[0])
        for rank, position in held[1:]:
            _check_same(first, _item(described, (rank, position)), held[0][0], rank)
        owner, position = min(held, key=lambda holder: loads[holder[0]])
        items[owner].append(position)
        loads[owner] += first.num_bytes
        if len(held) > 1:
            for rank, position in held:
                compared[rank].append(position)
    values: list[list[int]] = [[] for _ in described]
    taken: set[str] = set()
    for rank, each in enumerate(described):
        for position, value in enumerate(each.values):
            if value.name not in taken:
                taken.add(value.name)
                values[rank].append(position)
    _check_coverage(described)
    consolidation = None
    if consolidated is not None:
        consolidation = consolidate(described, consolidated, max_file_bytes, single_name)
    rank_plans = [
        RankPlan(
            tuple(sorted(items[rank])),
            tuple(values[rank]),
            tuple(sorted(compared[rank])),
            _targets(described[rank], sorted(items[rank]), consolidation),
            tuple(file.name for file in consolidation.files) if consolidation is not None else (),
        )
        for rank in range(len(described))
    ]
    return SavePlan(rank_plans, described, consolidation)


def _targets(
    described: Described, items: Sequence[int], consolidation: Consolidation | None
) -> tuple[tuple[int, int, int], ...]:
    if consolidation is None:
        return ()
    return tuple(
        (position, *consolidation.places[name])
        for position in items
        for name in names_below(described.items[position], consolidation.root)
    )


def find_diverged(plan: SavePlan, digests: Sequence[Sequence[int]]) -> None:
    """Refuse ranks that hold different bytes of an item that has to be the same.

    Args:
        plan: The plan, which names the compared items.
        digests: By rank, digests of its compared items, in order.

    Raises:
        ReplicasDivergedError: Names the ranks and the tensors.
    """
    known: dict[Key, tuple[int, int]] = {}
    diverged: dict[Key, list[int]] = {}
    for rank, (rank_plan, each) in enumerate(zip(plan.rank_plans, digests, strict=True)):
        for position, digest in zip(rank_plan.compared, each, strict=True):
            key = plan.described[rank].items[position].key
            first, expected = known.setdefault(key, (rank, digest))
            if digest != expected:
                diverged.setdefault(key, [first]).append(rank)
    if diverged:
        names = [name for name, _ in diverged]
        ranks = sorted({rank for each in diverged.values() for rank in each})
        shown = ", ".join(names[:_MAX_SHOWN]) + (", …" if len(names) > _MAX_SHOWN else "")
        raise ReplicasDivergedError(
            f"expected ranks {ranks} to hold the same, they differ in {len(names)} of {len(known)} tensors: {shown}; "
            + OWN_STATE_ADVICE,
            path=names[0],
        )


def _item(described: Sequence[Described], holder: tuple[int, int]) -> WriteItem:
    return described[holder[0]].items[holder[1]]


def _check_same(first: WriteItem, other: WriteItem, rank: int, other_rank: int) -> None:
    if (first.dtype, first.global_shape, first.shape) != (other.dtype, other.global_shape, other.shape):
        raise ReplicasDivergedError(
            f"expected the same on all ranks, got {_shown(first)} on rank {rank} and {_shown(other)} on rank "
            f"{other_rank}",
            path=first.key[0],
        )


def _check_coverage(described: Sequence[Described]) -> None:
    """Check that every element of every tensor is there, or DCP would load data that was never written."""
    found: dict[str, dict[tuple[int, ...], WriteItem]] = {}
    for item in _named_items(described):
        found.setdefault(item.names[0], {})[item.offset] = item
    for name, by_offset in found.items():
        first = next(iter(by_offset.values()))
        num_found = sum(math.prod(item.shape) for item in by_offset.values())
        if any(item.global_shape != first.global_shape for item in by_offset.values()):
            raise ReplicasDivergedError("expected one shape on all ranks", path=name)
        if num_found != math.prod(first.global_shape):
            raise CheckpointError(
                f"expected ranks that hold all {math.prod(first.global_shape)} elements of {list(first.global_shape)}, "
                f"and they hold {num_found}; the process group of a store has all ranks of a mesh",
                path=name,
            )


def _named_items(described: Sequence[Described]) -> Iterable[WriteItem]:
    return (item for each in described for item in each.items if item.names)


def _shown(item: WriteItem) -> str:
    return f"{item.dtype}{list(item.shape)} of {list(item.global_shape)}"
