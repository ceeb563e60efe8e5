"""DTensors: the description of a shard's placement, and the receiver's DTensor on its own mesh."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import TypeIs

from ft_transport.errors import ManifestError, RestoreError, UnsupportedLeafError
from ft_transport.wire.layouts import Layout, LayoutTable, Mesh, Placement

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement as TorchPlacement

# torch.distributed.tensor takes half a second to import, so a function that needs it does: a state with a DTensor has
# imported it already.


def encode_placements(dtensor: DTensor, path: str) -> list[Placement]:
    """Return the placements of a DTensor.

    Raises:
        UnsupportedLeafError: A partial placement: its value is only known after a reduction over the mesh.
    """
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415
    from torch.distributed.tensor.placement_types import _StridedShard  # noqa: PLC0415

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
    """Return torch's placements."""
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415
    from torch.distributed.tensor.placement_types import _StridedShard  # noqa: PLC0415

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


class LayoutEncoder:
    """Collects the layouts of the DTensors of one state.

    Attributes:
        table: The collected layouts.
    """

    def __init__(self) -> None:
        self.table = LayoutTable()
        self._meshes: dict[int, tuple[DeviceMesh, Mesh]] = {}
        self._known: dict[tuple[object, ...], int] = {}

    def index_of(self, dtensor: DTensor, path: str) -> int:
        """Return the index of its layout in the table, with this process's offset and coordinate.

        Raises:
            UnsupportedLeafError: A partial placement.
        """
        mesh = dtensor.device_mesh
        key = (id(mesh), dtensor.placements, dtensor.shape, dtensor.stride())
        index = self._known.get(key)
        if index is None:
            at = encode_placements(dtensor, path)
            index = self._known[key] = self.table.add(
                self._mesh(mesh), at, global_shape=tuple(dtensor.shape), global_stride=dtensor.stride()
            )
        return index

    def _mesh(self, mesh: DeviceMesh) -> Mesh:
        known = self._meshes.get(id(mesh))
        if known is None:
            # A reference to the mesh, so that no other mesh gets its id.
            known = self._meshes[id(mesh)] = (mesh, describe_mesh(mesh))
        return known[1]


def describe_mesh(mesh: DeviceMesh) -> Mesh:
    """Describe a mesh in plain numbers, with this process's coordinate."""
    coordinate = mesh.get_coordinate()
    return Mesh(
        device_type=mesh.device_type,
        shape=tuple(mesh.mesh.shape),
        ranks=tuple(mesh.mesh.flatten().tolist()),
        dim_names=tuple(mesh.mesh_dim_names) if mesh.mesh_dim_names is not None else None,
        coordinate=tuple(coordinate) if coordinate is not None else None,
    )


def matches(dtensor: DTensor, layout: Layout, mesh: Mesh) -> bool:
    """Return whether the receiver's DTensor has exactly the described part, so that bytes can land in it."""
    coordinate = dtensor.device_mesh.get_coordinate()
    placements = decode_placements(layout.placements)
    return (
        tuple(dtensor.shape) == layout.global_shape
        and tuple(dtensor.device_mesh.mesh.shape) == mesh.shape
        and dtensor.placements == placements
        # In torch 2.9 a Shard equals a _StridedShard of the same dimension.
        and [*map(type, dtensor.placements)] == [*map(type, placements)]
        and _is_same_place(coordinate, mesh.coordinate, layout.placements)
    )


def _is_same_place(here: Sequence[int] | None, there: Sequence[int] | None, at: Sequence[Placement]) -> bool:
    """Return whether two coordinates have the same part; replicating mesh dimensions do not matter."""
    if here is None or there is None:
        return here is there
    return all(
        own == other or placement.kind == "replicate" for own, other, placement in zip(here, there, at, strict=True)
    )


def spans_ranks(state: object) -> bool:
    """Return whether a DTensor of the state is on a mesh of several ranks."""
    return any(dtensor.device_mesh.size() > 1 for dtensor in _dtensors(state))


class MeshResolver:
    """Finds the receiver's mesh for a DTensor without a counterpart in the receiver's state.

    Args:
        state: The receiver's own state, whose DTensors' meshes are candidates; may be ``None``.
        meshes: Further candidates.
    """

    def __init__(self, state: object, meshes: Sequence[DeviceMesh] = ()) -> None:
        self._state = state
        self._meshes = list(meshes)
        self._resolved: dict[Mesh, DeviceMesh] = {}

    def resolve(self, described: Mesh, path: str) -> DeviceMesh:
        """Return a mesh with the described shape and names.

        Raises:
            RestoreError: The receiver has no such mesh and torch.distributed is not initialised to build one.
        """
        known = self._resolved.get(described)
        if known is None:
            known = self._resolved[described] = self._resolve(described, path)
        return known

    def _resolve(self, described: Mesh, path: str) -> DeviceMesh:
        names = described.dim_names
        candidates = [
            mesh
            for mesh in chain(self._meshes, (dtensor.device_mesh for dtensor in _dtensors(self._state)))
            if tuple(mesh.mesh.shape) == described.shape and mesh.mesh_dim_names == names
        ]
        # Prefer the mesh with the same ranks; a mesh with other ranks is the counterpart in another job.
        for mesh in candidates:
            if tuple(mesh.mesh.flatten().tolist()) == described.ranks:
                return mesh
        if candidates:
            return candidates[0]
        if not dist.is_initialized() or not _is_device_type(described.device_type):
            raise RestoreError(
                f"expected a device mesh of shape {list(described.shape)} and names {names} in the receiver's state, "
                "found none, and torch.distributed is not initialised to build one; receive into a state that has it",
                path=path,
            )
        # No process group is created: a collective over this mesh is the caller's to set up.
        ranks = torch.tensor(described.ranks, dtype=torch.int).reshape(described.shape)
        mesh = DeviceMesh(described.device_type, ranks, mesh_dim_names=names, _init_backend=False)
        self._meshes.append(mesh)
        return mesh


def rebuild(local: torch.Tensor, layout: Layout, described: Mesh, mesh: DeviceMesh, path: str) -> DTensor:
    """Return a DTensor around ``local`` on ``mesh``; no collective runs.

    Args:
        local: The shard.
        layout: The sender's layout.
        described: The sender's mesh.
        mesh: The receiver's mesh of the same shape.
        path: Path in the state, for errors.

    Raises:
        ManifestError: The layout contradicts the local shard.
        RestoreError: The receiver's coordinate in the mesh needs another part.
    """
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    _check(local, layout, described, path)
    here = mesh.get_coordinate()
    if not _is_same_place(here, described.coordinate, layout.placements):
        raise RestoreError(
            f"expected the shard of mesh coordinate {tuple(here or ())}, which is this process's own, got that of "
            f"{described.coordinate}",
            path=path,
        )
    try:
        dtensor = DTensor.from_local(
            local,
            mesh,
            decode_placements(layout.placements),
            run_check=False,
            shape=torch.Size(layout.global_shape),
            stride=layout.global_stride,
        )
    except (RuntimeError, ValueError) as error:
        raise ManifestError(f"expected a global shape that torch can count: {error}", path=path) from error
    if here is None:
        # Outside the mesh from_local drops the shard; distribute_tensor, for example, keeps it.
        dtensor._local_tensor = local
    return dtensor


def _is_device_type(name: str) -> bool:
    try:
        return torch.device(name).type == name
    except (RuntimeError, Warning):  # deprecated kinds warn, and a warning may be an error
        return False


def _check(local: torch.Tensor, layout: Layout, mesh: Mesh, path: str) -> None:
    """Refuse a layout that contradicts the local shard; torch does not check."""
    if mesh.coordinate is None:  # a process outside the mesh holds an empty tensor of any rank
        return
    if local.dim() != len(layout.global_shape):
        raise ManifestError(
            f"expected a shard of {len(layout.global_shape)} dimensions, got one of {local.dim()}", path=path
        )
    sharded = {placement.dim for placement in layout.placements if placement.kind != "replicate"}
    for dim, (whole, part, start) in enumerate(zip(layout.global_shape, local.shape, layout.local_offset, strict=True)):
        if part > whole or (part != whole and dim not in sharded) or start > whole:
            raise ManifestError(
                f"expected a part of {list(layout.global_shape)}, got {list(local.shape)} from "
                f"{list(layout.local_offset)}",
                path=path,
            )


def _dtensors(state: object) -> Iterator[DTensor]:
    pending: list[Any] = [state]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if is_dtensor(value):
            yield value
        elif isinstance(value, (Mapping, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            pending.extend(value.values() if isinstance(value, Mapping) else value)


def dtensor_type() -> type[DTensor] | None:
    """Return ``DTensor``, or ``None`` if it is not imported; then no value of this process is one."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Return ``isinstance(value, DTensor)``."""
    dtensor = dtensor_type()
    return dtensor is not None and isinstance(value, dtensor)
