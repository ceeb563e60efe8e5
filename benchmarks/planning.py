"""Planning: how long a receiver takes from the manifests of 64 ranks to the list of what to ask whom for.

The manifests are made here, as their decoder would make them; no rank exists, and nothing is sent.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.layouts import ensure_process_group
from benchmarks.options import Options
from benchmarks.report import Group, Quantity, Role, Sample, Verdict
from ft_transport.state.resharding import reshard
from ft_transport.wire.chunks import ChunkTable
from ft_transport.wire.layouts import LayoutTable, Mesh, Placement, region_of, shape_of
from ft_transport.wire.manifest import Manifest, SnapshotId, TensorEntry
from ft_transport.wire.nodes import DTensorNode, LeafNode, MappingNode, Node, TensorNode
from ft_transport.wire.reshard import Planner

NUM_TENSORS: Final = 10_000
NUM_RANKS: Final = 64
_SHAPES: Final = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (4096,), (128_256, 4096))
_REPLICATE: Final = Placement("replicate")
_SHARD_0: Final = Placement("shard", 0)
_SECONDS: Final = Quantity("plan", "s")


@dataclass(frozen=True, slots=True)
class Change:
    """From one layout of all sources to another of one receiver."""

    name: str
    source_mesh: tuple[int, ...]
    source_at: tuple[Placement, ...]
    receiver_mesh: tuple[int, ...]
    receiver_dims: tuple[int, ...]
    role: Role = "ours"


CHANGES: Final = (
    Change("64 ranks to 48, dimension 0", (64,), (_SHARD_0,), (48,), (0,)),
    Change("HSDP 4 x 16 to 32 ranks", (4, 16), (_REPLICATE, _SHARD_0), (32,), (0,)),
    Change("64 ranks on dimension 0 to 8 x 8 on both", (64,), (_SHARD_0,), (8, 8), (0, 1)),
)


def measure(options: Options) -> Group:
    """Measures one change after the other."""
    group = Group("reshard", "planning", f"{NUM_TENSORS} tensors over {NUM_RANKS} ranks")
    for change, number in itertools.product(CHANGES, range(options.size.num_samples)):
        options.settle()
        options.say(f"reshard plan {change.name}")
        group.add(change, _SECONDS, Sample(number, _seconds_of(change)))
    slowest = max((series.figure for series in group.series), key=lambda figure: figure.value)
    group.verdicts = [Verdict.at_most(f"planning {group.title}, the slowest median", slowest, 1.0)]
    return group


def _seconds_of(change: Change) -> float:
    """How long one receiver plans."""
    manifests, into = _inputs(change)
    started_s = time.perf_counter()
    Planner(manifests).plan(reshard(manifests, into).wanted)
    return time.perf_counter() - started_s


@functools.lru_cache(maxsize=1)
def _inputs(change: Change) -> tuple[list[Manifest], dict[str, object]]:
    """What a receiver plans with; to make it takes several times as long as to plan."""
    ensure_process_group()
    shapes = [_SHAPES[number % len(_SHAPES)] for number in range(NUM_TENSORS)]
    manifests = [
        _manifest(shapes, change, coordinate) for coordinate in itertools.product(*map(range, change.source_mesh))
    ]
    return manifests, _receiver(shapes, change)


def _manifest(shapes: Sequence[tuple[int, ...]], change: Change, coordinate: tuple[int, ...]) -> Manifest:
    mesh = Mesh("cpu", change.source_mesh, tuple(range(NUM_RANKS)), None, coordinate)
    table = LayoutTable()
    # Few shapes and many tensors: what only depends on the shape is computed once.
    layouts = {
        shape: table.add(mesh, change.source_at, global_shape=shape, global_stride=(1,) * len(shape))
        for shape in dict.fromkeys(shapes)
    }
    local_shapes = {shape: shape_of(region_of(mesh, change.source_at, shape) or ()) for shape in layouts}
    entries, items, end = [], list[Node](), 0
    for number, shape in enumerate(shapes):
        local_shape = local_shapes[shape]
        start, end = end, end + 4 * math.prod(local_shape)
        entries.append(TensorEntry(f"model.layer.{number}", "F32", local_shape, start, end))
        items += (f"layer.{number}", LeafNode(DTensorNode(TensorNode(number), layouts[shape]), True, True))
    return Manifest(
        step=1,
        snapshot_id=SnapshotId("0" * 32),
        tensors=tuple(entries),
        tree=MappingNode("dict", ["model", MappingNode("dict", items)]),
        meshes=tuple(table.meshes),
        layouts=tuple(table.layouts),
        chunks=ChunkTable(data_bytes=end, chunk_bytes=4 << 20),
        digests=None,
        header_bytes=0,
    )


def _receiver(shapes: Sequence[tuple[int, ...]], change: Change) -> dict[str, dict[str, torch.Tensor]]:
    num_ranks = math.prod(change.receiver_mesh)
    rank = num_ranks // 3
    ranks = torch.arange(num_ranks, dtype=torch.int).view(change.receiver_mesh)
    mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)
    described = Mesh("cpu", change.receiver_mesh, tuple(range(num_ranks)), None, tuple(mesh.get_coordinate() or ()))
    state: dict[str, torch.Tensor] = {}
    for number, shape in enumerate(shapes):
        dims = [min(dim, len(shape) - 1) for dim in change.receiver_dims]
        region = region_of(described, [Placement("shard", dim) for dim in dims], shape)
        local = torch.empty(shape_of(region or ()), device="meta")
        stride = torch.empty(shape, device="meta").stride()
        state[f"layer.{number}"] = DTensor.from_local(
            local, mesh, [Shard(dim) for dim in dims], run_check=False, shape=torch.Size(shape), stride=stride
        )
    return {"model": state}
