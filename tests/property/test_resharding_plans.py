"""Plans for a state in another layout: every wanted byte is read once, from a source that has it, and lands in place.

Sources and receivers here are plain memory, divided by torch itself; nothing is sent. That the plan agrees with DCP's
own resharding (``torch.distributed.checkpoint``) is checked where DCP knows the layout: it has no strided shards.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import num_examples
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ft_transport.state.placements import decode_placements
from ft_transport.wire.chunks import ChunkTable
from ft_transport.wire.layouts import Layout, Mesh, Placement, Region, region_of, shape_of
from ft_transport.wire.manifest import Manifest, SnapshotId, TensorEntry
from ft_transport.wire.nodes import TensorNode
from ft_transport.wire.reshard import Planner, Read, Wanted
from ft_transport.wire.slices import Slice

_ITEM_BYTES = 8
_Division = tuple[tuple[int, ...], tuple[Placement, ...]]


def _coordinates(mesh_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, mesh_shape)))


def _mesh(mesh_shape: tuple[int, ...], at: tuple[int, ...]) -> Mesh:
    return Mesh("cpu", mesh_shape, tuple(range(math.prod(mesh_shape))), None, at)


def _region(division: _Division, at: tuple[int, ...], shape: Sequence[int]) -> Region:
    region = region_of(_mesh(division[0], at), division[1], shape)
    assert region is not None
    return region


def _part(whole: torch.Tensor, division: _Division, at: tuple[int, ...]) -> torch.Tensor:
    for placement, num_parts, part in zip(decode_placements(division[1]), division[0], at, strict=True):
        if not placement.is_replicate():
            whole = placement._split_tensor(whole, num_parts, with_padding=False, contiguous=True)[0][part]  # type: ignore[attr-defined]
    return whole.contiguous()


def _manifest(division: _Division, at: tuple[int, ...], shape: tuple[int, ...], start: int) -> Manifest:
    local_shape = shape_of(_region(division, at, shape))
    end = start + math.prod(local_shape) * _ITEM_BYTES
    return Manifest(
        step=1,
        snapshot_id=SnapshotId("0" * 32),
        tensors=(TensorEntry("w", "I64", local_shape, start, end),),
        tree=None,
        meshes=(_mesh(division[0], at),),
        layouts=(Layout(0, division[1], shape, (1,) * len(shape), (0,) * len(shape)),),
        chunks=ChunkTable(data_bytes=end, chunk_bytes=1 << 20),
        digests=None,
        header_bytes=0,
    )


def _wanted(region: Region, shape: tuple[int, ...], num_sources: int) -> Wanted:
    return Wanted(
        path="w",
        start=24,
        dtype="I64",
        item_bytes=_ITEM_BYTES,
        global_shape=shape,
        region=region,
        sources=tuple(range(num_sources)),
        nodes=(TensorNode(0),) * num_sources,
        layouts=(0,) * num_sources,
    )


def _indices(piece: Slice) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The positions of a slice's bytes, in order."""
    at = np.array([piece.start])
    for count, stride in piece.loops:
        at = (at[:, None] + np.arange(count) * stride).reshape(-1)
    return (at[:, None] + np.arange(piece.block_bytes)).reshape(-1)


_plain_placements = st.one_of(
    st.just(Placement("replicate")), st.builds(Placement, st.just("shard"), st.integers(0, 2))
)
_placements = st.one_of(
    _plain_placements, st.builds(Placement, st.just("strided_shard"), st.integers(0, 2), st.integers(1, 3))
)


def _divisions(placements: st.SearchStrategy[Placement]) -> st.SearchStrategy[_Division]:
    return st.integers(1, 3).flatmap(
        lambda num_dims: st.tuples(
            st.lists(st.integers(1, 4), min_size=num_dims, max_size=num_dims).map(tuple),
            st.lists(placements, min_size=num_dims, max_size=num_dims).map(tuple),
        )
    )


_shapes = st.tuples(st.integers(0, 11), st.integers(1, 7), st.integers(1, 5))


@given(_divisions(_placements), _divisions(_placements), _shapes, st.randoms(use_true_random=False))
@settings(max_examples=num_examples(300), deadline=None)
def test_every_wanted_byte_is_read_once_and_is_the_right_one(
    source: _Division, receiver: _Division, shape: tuple[int, int, int], random: object
) -> None:
    whole = torch.arange(math.prod(shape), dtype=torch.int64).view(shape)
    places = _coordinates(source[0])
    random.shuffle(places)  # type: ignore[attr-defined]
    manifests = [_manifest(source, at, shape, start=8 * number) for number, at in enumerate(places)]
    memory = [
        np.concatenate([np.zeros(8 * number, np.uint8), _part(whole, source, at).numpy().reshape(-1).view(np.uint8)])
        for number, at in enumerate(places)
    ]
    for at in _coordinates(receiver[0]):
        region = _region(receiver, at, shape)
        num_bytes = math.prod(shape_of(region)) * _ITEM_BYTES
        received, num_written = np.zeros(24 + num_bytes, np.uint8), np.zeros(24 + num_bytes, np.int64)
        planner = Planner(manifests)
        for number, reads in enumerate(planner.plan([_wanted(region, shape, len(places))])):
            for read in reads:
                into = _indices(planner.destination(read))
                received[into] = memory[number][_indices(planner.held(read, number))]
                num_written[into] += 1
        assert num_written.tolist() == [0] * 24 + [1] * num_bytes
        expected = _part(whole, receiver, at)
        assert received[24:].view(np.int64).tolist() == expected.reshape(-1).tolist()


def _as_dcp_reads(source: _Division, receiver_part: Region, shape: tuple[int, ...]) -> Counter[tuple[object, ...]]:
    """What DCP would read: for each saved chunk, where in it and in the receiver's part, and how much."""
    chunks = {}
    for at in _coordinates(source[0]):
        region = _region(source, at, shape)
        if math.prod(shape_of(region)):
            offsets = tuple(intervals[0][0] for intervals in region)
            chunks[offsets] = ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape_of(region)))
    metadata = TensorStorageMetadata(TensorProperties(torch.int64), torch.Size(shape), list(chunks.values()))
    own = ChunkStorageMetadata(
        torch.Size(intervals[0][0] for intervals in receiver_part), torch.Size(shape_of(receiver_part))
    )
    assert not isinstance(metadata, BytesStorageMetadata)
    reads = create_read_items_for_chunk_list("w", metadata, [own])
    return Counter(
        (
            tuple(item.storage_index.offset or ()),
            tuple(item.storage_offsets),
            tuple(item.dest_offsets),
            tuple(item.lengths),
        )
        for item in reads
    )


def _as_ours(source: _Division, places: list[tuple[int, ...]], reads: list[Read], shape: tuple[int, ...]) -> object:
    return Counter(
        (
            tuple(intervals[0][0] for intervals in _region(source, places[read.sources[0]], shape)),
            read.box.held_origin,
            read.box.origin,
            read.box.counts,
        )
        for read in reads
    )


@given(_divisions(_plain_placements), _divisions(_plain_placements), _shapes)
@settings(max_examples=num_examples(200), deadline=None)
def test_it_is_what_dcp_would_read(source: _Division, receiver: _Division, shape: tuple[int, int, int]) -> None:
    places = _coordinates(source[0])
    manifests = [_manifest(source, at, shape, start=0) for at in places]
    for at in _coordinates(receiver[0]):
        region = _region(receiver, at, shape)
        if not math.prod(shape_of(region)):
            continue
        reads = list(itertools.chain(*Planner(manifests).plan([_wanted(region, shape, len(places))])))
        assert _as_ours(source, places, reads, shape) == _as_dcp_reads(source, region, shape)


@given(_divisions(_placements), _shapes, st.integers(0, 63))
@settings(max_examples=num_examples(100), deadline=None)
def test_a_source_too_few_is_found_before_anything_is_read(
    source: _Division, shape: tuple[int, int, int], which: int
) -> None:
    """Whatever is missing: the plan covers all that is wanted, or there is none."""
    places = _coordinates(source[0])
    del places[which % len(places)]
    if not places:
        return
    manifests = [_manifest(source, at, shape, start=0) for at in places]
    region: Region = tuple(((0, size),) if size else () for size in shape)
    held = Counter(
        index
        for part in {_region(source, at, shape) for at in places}
        for index in itertools.product(
            *([i for start, end in intervals for i in range(start, end)] for intervals in part)
        )
    )
    planner = Planner(manifests)
    wanted = _wanted(region, shape, len(places))
    if len(held) == math.prod(shape):
        assert sum(math.prod(box.counts) for box in planner.boxes(wanted)) == math.prod(shape)
    else:
        import pytest

        from ft_transport.errors import RestoreError

        expected = f"the {math.prod(shape)} elements .* sources with {len(held)} of them;.*at w"
        with pytest.raises(RestoreError, match=expected):
            planner.plan([wanted])
