"""Parts of tensors as several ranks hold them, in one process: on meshes that have no process groups."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Sequence
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

STRIDES_AS_FSDP2 = _StridedShard(0, split_factor=2)._split_tensor(torch.arange(5), 2)[0][0].tolist() == [0, 1, 3]
"""Whether torch divides an uneven strided shard as FSDP2 divides a parameter that is divided already; 2.9 does not."""

_takes_rank = "_rank" in inspect.signature(DeviceMesh.__init__).parameters
_patch_mutex = threading.Lock()


def mesh_of(shape: tuple[int, ...], rank: int, *names: str) -> DeviceMesh:
    """A mesh as ``rank`` sees it."""
    ranks = torch.arange(math.prod(shape), dtype=torch.int).view(shape)
    if _takes_rank:
        return DeviceMesh("cpu", ranks, mesh_dim_names=names or None, _init_backend=False, _rank=rank)
    # torch 2.9 asks for the rank of the process.
    with _patch_mutex, mock.patch("torch.distributed.device_mesh.get_rank", return_value=rank):
        return DeviceMesh("cpu", ranks, mesh_dim_names=names or None, _init_backend=False)


def part_of(whole: torch.Tensor, mesh: DeviceMesh, at: Sequence[Placement]) -> DTensor:
    """The part of ``whole`` that a rank holds, as torch divides it; memory of its own."""
    local = whole
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for mesh_dim, placement in enumerate(at):
        if isinstance(placement, (Shard, _StridedShard)):
            pieces, _ = placement._split_tensor(local, mesh.size(mesh_dim), with_padding=False, contiguous=True)
            local = pieces[coordinate[mesh_dim]]
        else:
            assert isinstance(placement, Replicate)
    return DTensor.from_local(
        local.clone(), mesh, list(at), run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )
