"""Divides a save among the ranks: one rank plans which rank writes which bytes, so that all write similar amounts.

A part of the state can also be written to consolidated files: whole tensors in safetensors files, with the index that
``transformers`` reads (``model.safetensors.index.json`` of ``save_pretrained``, which maps tensor names to files). The
plan fixes the offset of each tensor in these files, so every rank writes its own data there. No rank collects the data
of other ranks. A tied tensor is stored once under each of its names, because safetensors does not let names share
bytes, and ``load_state_dict`` expects all names.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from ft_transport.checkpoint.write_items import LOCAL, SHARED, Described, Key, WriteItem
from ft_transport.errors import CheckpointError, ReplicasDivergedError
from ft_transport.runtime.regular_files import create_file
from ft_transport.wire.manifest import SAFETENSORS_FILE_NAMES
from ft_transport.wire.nodes import QuantizedNode
from ft_transport.wire.slices import Slice, row_major_strides, slice_of

INDEX_NAME: Final = "model.safetensors.index.json"
MAX_FILE_BYTES: Final = 5_000_000_000
"""Largest size of a consolidated file, unless a single tensor is larger. The limit of ``save_pretrained``."""
OWN_STATE_ADVICE: Final = "put rank-local state under a top-level key that rank_local names"
_ALIGN_BYTES: Final = 8
_MAX_SHOWN: Final = 5
_HALF_BYTES: Final = "float4_e2m1fn_x2"


@dataclass(frozen=True, slots=True)
class ConsolidatedFile:
    """A safetensors file that several ranks write together.

    Attributes:
        name: Name of the file.
        header: The first bytes of the file: length prefix and JSON header.
        num_bytes: Length of the file.
    """

    name: str
    header: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Consolidation:
    """The consolidated files of one part of the state.

    Attributes:
        files: All files, in order.
        index: Content of ``model.safetensors.index.json``.
        places: By the name of each tensor in DCP: the index of its file in ``files``, and its offset in that file.
    """

    files: tuple[ConsolidatedFile, ...]
    index: bytes
    places: dict[str, tuple[int, int]]


def consolidate(
    described: Sequence[Described],
    root: str,
    max_file_bytes: int = MAX_FILE_BYTES,
    single_name: str | None = None,
) -> Consolidation:
    """Lay out the tensors of one part of a state in consolidated files.

    Args:
        described: Items and values of each rank.
        root: Path of the part, keys joined by dots. Tensor names in the files omit this path.
        max_file_bytes: Largest size of a file, unless a single tensor is larger.
        single_name: Name of the file if there is only one file.

    Raises:
        CheckpointError: The part has no tensors, or a tensor has a form that safetensors does not support.
    """
    for each in described:
        for value in each.values:
            if value.part == SHARED and isinstance(value.node, QuantizedNode) and value.name.startswith(f"{root}."):
                raise CheckpointError(
                    "expected tensors that safetensors can store, got a quantized one", path=value.name
                )
    tensors: dict[str, WriteItem] = {}
    for item in itertools.chain.from_iterable(each.items for each in described):
        for name in names_below(item, root):
            tensors.setdefault(name, item)
    if not tensors:
        raise CheckpointError("expected a part of the state with tensors to consolidate, found none", path=root)
    if f"{root}.__metadata__" in tensors:
        raise CheckpointError(
            "expected a tensor with another name, because safetensors reserves __metadata__",
            path=f"{root}.__metadata__",
        )
    files: list[dict[str, WriteItem]] = [{}]
    num_bytes = 0
    for name, item in tensors.items():
        size = _num_bytes_of(item, name)
        if files[-1] and num_bytes + size > max_file_bytes:
            files.append({})
            num_bytes = 0
        files[-1][name] = item
        num_bytes += size
    laid_out = []
    places: dict[str, tuple[int, int]] = {}
    for number, held in enumerate(files):
        name = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        file, starts = _lay_out(single_name if single_name is not None and len(files) == 1 else name, held, root)
        laid_out.append(file)
        places.update({name: (number, start) for name, start in starts.items()})
    weight_map = {name[len(root) + 1 :]: laid_out[places[name][0]].name for name in tensors}
    total_bytes = sum(_num_bytes_of(item, name) for name, item in tensors.items())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    return Consolidation(tuple(laid_out), msgspec.json.format(msgspec.json.encode(index)), places)


def names_below(item: WriteItem, root: str) -> list[str]:
    """Return those names of an item's tensor that lie below the path ``root``."""
    return [name for name in item.names if name.startswith(f"{root}.")] if item.part == SHARED else []


def create_consolidated(directory: Path, consolidation: Consolidation, *, is_private: bool = False) -> None:
    """Create the consolidated files with their headers and their final length, but without data."""
    for file in consolidation.files:
        descriptor = create_file(directory / file.name, is_private=is_private)
        try:
            os.ftruncate(descriptor, file.num_bytes)
            _write_at(descriptor, memoryview(file.header), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_box(descriptor: int, data: memoryview, item: WriteItem, start: int) -> None:
    """Write an item (a box of a tensor) to its place in a consolidated file.

    Args:
        descriptor: Descriptor of the file.
        data: Bytes of the box, row by row.
        item: Position and shape of the box in its tensor.
        start: Offset of the tensor in the file.
    """
    item_bytes = item.item_bytes
    strides = row_major_strides(item.global_shape, item_bytes)
    target = slice_of(start, strides, item.offset, item.shape, item_bytes)
    for number, position in enumerate(_positions(target)):
        first = number * target.block_bytes
        _write_at(descriptor, data[first : first + target.block_bytes], position)


def _positions(target: Slice) -> Iterator[int]:
    """Yield the offset of each contiguous block of a slice."""
    for steps in itertools.product(*(range(count) for count, _ in target.loops)):
        yield target.start + sum(step * stride for step, (_, stride) in zip(steps, target.loops, strict=True))


def _lay_out(name: str, tensors: dict[str, WriteItem], root: str) -> tuple[ConsolidatedFile, dict[str, int]]:
    # Order by descending item size: then every tensor is aligned without padding, which safetensors readers refuse.
    order = sorted(tensors.items(), key=lambda pair: -pair[1].item_bytes)
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for tensor, item in order:
        offsets[tensor] = end
        end += _num_bytes_of(item, tensor)
        table[tensor[len(root) + 1 :]] = {
            "dtype": SAFETENSORS_FILE_NAMES[item.dtype],
            "shape": _file_shape(item),
            "data_offsets": (offsets[tensor], end),
        }
    encoded = msgspec.json.encode(table)
    padded_bytes = -(-len(encoded) // _ALIGN_BYTES) * _ALIGN_BYTES
    header = padded_bytes.to_bytes(8, "little") + encoded.ljust(padded_bytes)
    starts = {tensor: len(header) + offset for tensor, offset in offsets.items()}
    return ConsolidatedFile(name, header, len(header) + end), starts


def _num_bytes_of(item: WriteItem, name: str) -> int:
    if item.dtype not in SAFETENSORS_FILE_NAMES or (item.dtype == _HALF_BYTES and not item.global_shape):
        raise CheckpointError(
            f"expected a dtype and a shape that safetensors can store, got {item.dtype}{list(item.global_shape)}",
            path=name,
        )
    return math.prod(item.global_shape) * item.item_bytes


def _file_shape(item: WriteItem) -> tuple[int, ...]:
    shape = item.global_shape
    return (*shape[:-1], 2 * shape[-1]) if item.dtype == _HALF_BYTES else shape


def _write_at(descriptor: int, data: memoryview, position: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, position)
        data = data[count:]
        position += count


class RankPlan(Struct, frozen=True, array_like=True):
    """The work of one rank. Items and values are given as indices in the rank's own `Described`.

    Attributes:
        items: Items that the rank writes, ascending.
        values: Values that the rank writes, ascending.
        compared: Items that other ranks also have, and whose bytes must be equal on all these ranks.
        targets: One entry for each item that is also written to a consolidated file: the index of the item, the index
            of the file in ``files``, and the offset of the item's tensor in that file.
        files: Names of the consolidated files.
    """

    items: tuple[int, ...] = ()
    values: tuple[int, ...] = ()
    compared: tuple[int, ...] = ()
    targets: tuple[tuple[int, int, int], ...] = ()
    files: tuple[str, ...] = ()


# Never called. Makes msgspec inspect the type during this import. Otherwise two threads that import other modules with
# decoders of this type might do so at the same time.
_plan_decoder: Final = msgspec.msgpack.Decoder(RankPlan)


@dataclass(slots=True)
class SavePlan:
    """The plan of a save.

    Attributes:
        rank_plans: The plan of each rank.
        described: Items and values of each rank.
        consolidation: The consolidated files; ``None`` if the save has none.
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
    """Decide which rank writes which items and values.

    Args:
        described: Items and values of each rank.
        consolidated: Path of the part of the state that is also written to consolidated files; ``None`` for no part.
        max_file_bytes: Largest size of a consolidated file, unless a single tensor is larger.
        single_name: Name of the consolidated file if there is only one.

    Raises:
        CheckpointError: A tensor has different shapes or dtypes on different ranks, or a part of it is on no rank.
    """
    holders: dict[Key, list[tuple[int, int, WriteItem]]] = {}
    loads = [0] * len(described)
    items: list[list[int]] = [[] for _ in described]
    for rank, each in enumerate(described):
        for position, item in enumerate(each.items):
            if item.part == LOCAL:
                items[rank].append(position)
                loads[rank] += item.num_bytes
            else:
                holders.setdefault(item.key, []).append((rank, position, item))
    compared: list[list[int]] = [[] for _ in described]
    # Assign large items first, so that the small ones can even out the loads.
    for held in sorted(holders.values(), key=lambda held: -held[0][2].num_bytes):
        first_rank, _, first = held[0]
        for rank, _, item in held[1:]:
            if (first.dtype, first.global_shape, first.shape) != (item.dtype, item.global_shape, item.shape):
                raise ReplicasDivergedError(
                    f"expected the same tensor on all ranks, got {_shown(first)} on rank {first_rank} and "
                    f"{_shown(item)} on rank {rank}",
                    path=first.key[0],
                )
        owner, position, _ = min(held, key=lambda holder: loads[holder[0]])
        items[owner].append(position)
        loads[owner] += first.num_bytes
        if len(held) > 1:
            for rank, position, _ in held:
                compared[rank].append(position)
    values: list[list[int]] = [[] for _ in described]
    taken: set[str] = set()
    for rank, each in enumerate(described):
        for position, value in enumerate(each.values):
            if value.name not in taken:
                taken.add(value.name)
                values[rank].append(position)
    _check_coverage(described)
    rank_plans = [
        RankPlan(
            tuple(sorted(items[rank])),
            tuple(values[rank]),
            tuple(sorted(compared[rank])),
        )
        for rank in range(len(described))
    ]
    if consolidated is None:
        return SavePlan(rank_plans, described, None)
    consolidation = consolidate(described, consolidated, max_file_bytes, single_name)
    files = tuple(file.name for file in consolidation.files)
    for rank, plan in enumerate(rank_plans):
        named = [(at, name) for at in plan.items for name in names_below(described[rank].items[at], consolidated)]
        targets = tuple((at, *consolidation.places[name]) for at, name in named)
        rank_plans[rank] = msgspec.structs.replace(plan, targets=targets, files=files)
    return SavePlan(rank_plans, described, consolidation)


def find_diverged(plan: SavePlan, digests: Sequence[Sequence[int]]) -> None:
    """Raise an error if an item differs between the ranks that have it.

    Args:
        plan: The plan, with the compared items of each rank.
        digests: For each rank, the digests of its compared items, in the order of the plan.

    Raises:
        ReplicasDivergedError: Digests differ; the message names the ranks and the tensors.
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
        raise ReplicasDivergedError(
            f"expected equal values on ranks {ranks}, {len(names)} of {len(known)} tensors differ: "
            f"{shown_names(names)}; {OWN_STATE_ADVICE}",
            path=names[0],
        )


def shown_names(names: Sequence[str]) -> str:
    """Return names as text for an error message; only the first few if there are many."""
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return ", ".join(names[:_MAX_SHOWN]) + more


def _check_coverage(described: Sequence[Described]) -> None:
    """Check that each element of each tensor is on some rank. DCP would load arbitrary data for a missing element."""
    found: dict[str, dict[tuple[int, ...], WriteItem]] = {}
    for item in itertools.chain.from_iterable(each.items for each in described):
        if item.names:
            found.setdefault(item.names[0], {})[item.offset] = item
    for name, by_offset in found.items():
        first = next(iter(by_offset.values()))
        num_found = sum(math.prod(item.shape) for item in by_offset.values())
        if any(item.global_shape != first.global_shape for item in by_offset.values()):
            raise ReplicasDivergedError("expected the same global shape on all ranks", path=name)
        if num_found != math.prod(first.global_shape):
            raise CheckpointError(
                f"expected the ranks to have all {math.prod(first.global_shape)} elements of "
                f"{list(first.global_shape)}, they have {num_found}; give the store all ranks of the mesh",
                path=name,
            )


def _shown(item: WriteItem) -> str:
    return f"{item.dtype}{list(item.shape)} of {list(item.global_shape)}"
