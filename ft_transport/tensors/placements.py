"""DTensors: what a shard's node says of its place, and how a receiver rebuilds one on a mesh of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import _StridedShard

from ft_transport.errors import ManifestError, RestoreError, UnsupportedLeafError
from ft_transport.wire.nodes import DTensorNode, Node, Placement


def encode_placements(dtensor: DTensor, path: str) -> list[Placement]:
    """The placements of a DTensor.

    Raises:
        UnsupportedLeafError: A partial placement: its value is only known after a reduction over the mesh.
    """
    encoded = []
    for placement in dtensor.placements:
        match placement:
            # The strided shard first: in some releases of torch it is a subclass of the plain one.
            case _StridedShard():
                encoded.append(Placement("strided_shard", placement.dim, int(placement.split_factor)))
            case Shard():
                encoded.append(Placement("shard", placement.dim))
            case Replicate():
                encoded.append(Placement("replicate"))
            case _:
                raise UnsupportedLeafError(
                    f"expected a DTensor that is sharded or replicated, got placement {placement}; redistribute it "
                    "first",
                    path=path,
                )
    return encoded


def decode_placements(placements: Sequence[Placement]) -> tuple[TorchPlacement, ...]:
    """The inverse of ``encode_placements``."""
    decoded: list[TorchPlacement] = []
    for placement in placements:
        match placement.kind:
            case "shard":
                decoded.append(Shard(placement.dim))
            case "replicate":
                decoded.append(Replicate())
            case "strided_shard":
                decoded.append(_StridedShard(placement.dim, split_factor=placement.split_factor))
    return tuple(decoded)


def dtensor_node(dtensor: DTensor, local: Node, path: str) -> DTensorNode:
    """Describes a DTensor whose local shard is the node ``local``.

    Offset and coordinate are those of this process; a process outside the mesh has no coordinate.
    """
    mesh = dtensor.device_mesh
    placements = encode_placements(dtensor, path)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        offset: Sequence[int] = (0,) * dtensor.dim()
    else:
        _, offset = compute_local_shape_and_global_offset(dtensor.shape, mesh, dtensor.placements)
    return DTensorNode(
        local=local,
        device_type=mesh.device_type,
        mesh_shape=tuple(mesh.mesh.shape),
        mesh_ranks=mesh.mesh.flatten().tolist(),
        mesh_dim_names=list(mesh.mesh_dim_names) if mesh.mesh_dim_names is not None else None,
        coordinate=list(coordinate) if coordinate is not None else None,
        placements=placements,
        global_shape=tuple(dtensor.shape),
        global_stride=tuple(dtensor.stride()),
        local_offset=tuple(int(start) for start in offset),
    )


def matches(dtensor: DTensor, node: DTensorNode) -> bool:
    """Whether the receiver's DTensor holds the very part that the node describes, so that bytes can land in it."""
    coordinate = dtensor.device_mesh.get_coordinate()
    return (
        tuple(dtensor.shape) == node.global_shape
        and dtensor.placements == decode_placements(node.placements)
        and tuple(dtensor.device_mesh.mesh.shape) == node.mesh_shape
        and (list(coordinate) if coordinate is not None else None) == node.coordinate
    )


class MeshResolver:
    """Finds, for a DTensor that has no counterpart in the receiver's state, the receiver's mesh to put it on.

    Args:
        state: The receiver's own state, whose DTensors show which meshes it has; may be ``None``.
        meshes: Meshes that the caller names for this purpose.
    """

    def __init__(self, state: object, meshes: Sequence[DeviceMesh] = ()) -> None:
        self._state = state
        self._meshes = list(meshes)

    def resolve(self, node: DTensorNode, path: str) -> DeviceMesh:
        """A mesh of the shape and names that the node gives.

        Raises:
            RestoreError: The receiver has no such mesh and torch.distributed is not initialised to build one.
        """
        names = tuple(node.mesh_dim_names) if node.mesh_dim_names is not None else None
        for mesh in chain(self._meshes, (dtensor.device_mesh for dtensor in _dtensors(self._state))):
            if tuple(mesh.mesh.shape) == node.mesh_shape and mesh.mesh_dim_names == names:
                return mesh
        if not dist.is_initialized() or not _is_mesh(node):
            raise RestoreError(
                f"expected a device mesh of shape {list(node.mesh_shape)} and names {names} in the receiver's state, "
                "found none, and torch.distributed is not initialised to build one; receive into a state that has it",
                path=path,
            )
        # No process group is created: a collective over this mesh is the caller's to set up.
        ranks = torch.tensor(node.mesh_ranks, dtype=torch.int).reshape(node.mesh_shape)
        mesh = DeviceMesh(node.device_type, ranks, mesh_dim_names=names, _init_backend=False)
        self._meshes.append(mesh)
        return mesh


def rebuild(local: torch.Tensor, node: DTensorNode, mesh: DeviceMesh, path: str) -> DTensor:
    """A DTensor around ``local`` on ``mesh``; no collective runs.

    Raises:
        ManifestError: The node contradicts itself or the local shard.
        RestoreError: The receiver stands elsewhere in the mesh, where another part belongs.
    """
    _check(local, node, path)
    coordinate = mesh.get_coordinate()
    here = list(coordinate) if coordinate is not None else None
    if here != node.coordinate and any(placement.kind != "replicate" for placement in node.placements):
        raise RestoreError(
            f"expected the shard of mesh coordinate {here}, which is this process's own, got that of {node.coordinate}",
            path=path,
        )
    try:
        dtensor = DTensor.from_local(
            local,
            mesh,
            decode_placements(node.placements),
            run_check=False,
            shape=torch.Size(node.global_shape),
            stride=node.global_stride,
        )
    except (RuntimeError, ValueError) as error:
        raise ManifestError(f"expected a global shape that torch can count: {error}", path=path) from error
    if here is None:
        # Outside the mesh from_local forgets the shard, which distribute_tensor, for one, leaves there.
        dtensor._local_tensor = local
    return dtensor


def _is_mesh(node: DTensorNode) -> bool:
    """Whether a mesh can be made of what the node says of it."""
    try:
        is_device = torch.device(node.device_type).type == node.device_type
    except (RuntimeError, Warning):  # deprecated kinds warn, and a warning may be an error
        is_device = False
    names = node.mesh_dim_names
    return (
        is_device
        and 0 < len(node.mesh_ranks) == math.prod(node.mesh_shape)
        and len(set(node.mesh_ranks)) == len(node.mesh_ranks)
        and max(node.mesh_ranks) < 2**31
        and (names is None or len(set(names)) == len(names) == len(node.mesh_shape))
    )


def _check(local: torch.Tensor, node: DTensorNode, path: str) -> None:
    """Refuses a node whose numbers do not fit together; torch takes them as they are."""
    num_dims = len(node.global_shape)
    if not (
        len(node.placements) == len(node.mesh_shape)
        and num_dims == len(node.global_stride) == len(node.local_offset)
        and (node.coordinate is None or (local.dim() == num_dims and len(node.coordinate) == len(node.mesh_shape)))
    ):
        raise ManifestError("expected as many placements as mesh dimensions, and one rank throughout", path=path)
    is_sharded = [False] * num_dims
    for placement in node.placements:
        if placement.kind == "replicate":
            continue
        if placement.dim >= num_dims or (placement.kind == "strided_shard" and placement.split_factor < 1):
            raise ManifestError(f"expected a shard of {num_dims} dimensions, got {placement}", path=path)
        is_sharded[placement.dim] = True
    if node.coordinate is None:  # a process outside the mesh holds an empty tensor of any rank
        return
    for whole, part, start, sharded in zip(node.global_shape, local.shape, node.local_offset, is_sharded, strict=True):
        if part > whole or (part != whole and not sharded) or start > whole:
            raise ManifestError(
                f"expected a part of {list(node.global_shape)}, got {list(local.shape)} from {list(node.local_offset)}",
                path=path,
            )


def _dtensors(state: object) -> Iterator[DTensor]:
    pending: list[Any] = [state]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if isinstance(value, DTensor):
            yield value
        elif isinstance(value, (Mapping, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            pending.extend(value.values() if isinstance(value, Mapping) else value)
