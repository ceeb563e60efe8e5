"""The edges of a plan: a single element that nobody has, and views of what a source has."""

from __future__ import annotations

import dataclasses

import pytest

from ft_transport.errors import ManifestError, RestoreError
from ft_transport.wire.chunks import ChunkTable
from ft_transport.wire.layouts import Layout, Mesh, Placement
from ft_transport.wire.manifest import Manifest, SnapshotId, TensorEntry
from ft_transport.wire.nodes import TensorNode, ViewNode
from ft_transport.wire.reshard import Planner, StoredNode, Wanted

ITEM_BYTES = 8
NUM_ITEMS = 5


def _manifest(start: int, num_items: int, rank: int | None = None) -> Manifest:
    """A source that has a vector, or as rank of two its part of one of 5 elements."""
    end = start + num_items * ITEM_BYTES
    is_part = rank is not None
    return Manifest(
        step=1,
        snapshot_id=SnapshotId("0" * 32),
        tensors=(TensorEntry("w", "I64", (num_items,), start, end),),
        tree=None,
        meshes=(Mesh("cpu", (2,), (0, 1), None, (rank,)),) if is_part and rank is not None else (),
        layouts=(Layout(0, (Placement("shard", 0),), (NUM_ITEMS,), (1,), (0,)),) if is_part else (),
        chunks=ChunkTable(data_bytes=end, chunk_bytes=1 << 20),
        digests=None,
        header_bytes=0,
    )


def _wanted(num_items: int, node: StoredNode, layouts: tuple[int | None, ...]) -> Wanted:
    return Wanted(
        path="w",
        start=0,
        dtype="I64",
        item_bytes=ITEM_BYTES,
        global_shape=(num_items,),
        region=(((0, num_items),),),
        sources=tuple(range(len(layouts))),
        nodes=(node,) * len(layouts),
        layouts=layouts,
    )


def test_a_single_element_that_no_source_has_is_missed() -> None:
    # The second rank has the last two of five.
    lengths = (3, 2)
    manifests = [_manifest(0, lengths[rank], rank) for rank in range(2)]
    both = _wanted(NUM_ITEMS, TensorNode(0), (0, 0))
    reads = Planner(manifests).plan([both])
    assert [[read.num_bytes for read in each] for each in reads] == [[24], [16]]
    alone = dataclasses.replace(both, sources=(0,), nodes=both.nodes[:1], layouts=both.layouts[:1], region=(((0, 4),),))
    with pytest.raises(RestoreError, match=r"got sources with 3"):
        Planner(manifests[:1]).plan([alone])


def test_a_view_begins_at_its_own_element() -> None:
    planner = Planner([_manifest(16, 10)])
    wanted = _wanted(3, ViewNode(0, (3,), (2,), 4), (None,))
    (read,) = planner.plan([wanted])[0]
    piece = planner.held(read, 0)
    assert (piece.start, piece.end) == (16 + 4 * ITEM_BYTES, 16 + 9 * ITEM_BYTES)


@pytest.mark.parametrize("offset", [6, 7, 1 << 40])
def test_a_view_that_reaches_beyond_its_tensor_is_refused(offset: int) -> None:
    planner = Planner([_manifest(0, 10)])
    wanted = _wanted(3, ViewNode(0, (3,), (2,), offset), (None,))
    (read,) = planner.plan([wanted])[0]
    with pytest.raises(ManifestError, match=r"expected a view of I64\[10\]"):
        planner.held(read, 0)
