"""Describes how DTensors are sharded, and builds the receiver's DTensors on the receiver's own meshes."""

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

# The functions that need torch.distributed.tensor import it themselves, because that takes half a second. A process
# with a DTensor has already imported it.


def encode_placements(dtensor: DTensor, path: str) -> list[Placement]:
    """Return the placements of a DTensor, as the wire format describes them.

    Raises:
        UnsupportedLeafError: A placement is partial: only a reduction over the mesh would yield the values.
    """
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415
    from torch.distributed.tensor.placement_types import _StridedShard  # noqa: PLC0415

    encoded = []
    for placement in dtensor.placements:
        match placement:
            # The strided shard must come first: in some releases of torch it is a subclass of `Shard`.
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
    """Convert placements from the wire format to torch's classes."""
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
    """Collects the layouts of the DTensors in one state.

    Attributes:
        table: The layouts so far.
    """

    def __init__(self) -> None:
        self.table = LayoutTable()
        self._meshes: dict[int, tuple[DeviceMesh, Mesh]] = {}
        self._known: dict[tuple[object, ...], int] = {}

    def index_of(self, dtensor: DTensor, path: str) -> int:
        """Return the index of a DTensor's layout in the table, after adding the layout if it is new.

        Raises:
            UnsupportedLeafError: A placement is partial.
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
            # Keep a reference to the mesh, so that no other mesh gets its id.
            known = self._meshes[id(mesh)] = (mesh, describe_mesh(mesh))
        return known[1]


def describe_mesh(mesh: DeviceMesh) -> Mesh:
    """Describe a mesh for the wire format, including the coordinate of this process."""
    coordinate = mesh.get_coordinate()
    return Mesh(
        device_type=mesh.device_type,
        shape=tuple(mesh.mesh.shape),
        ranks=tuple(mesh.mesh.flatten().tolist()),
        dim_names=tuple(mesh.mesh_dim_names) if mesh.mesh_dim_names is not None else None,
        coordinate=tuple(coordinate) if coordinate is not None else None,
    )


def matches(dtensor: DTensor, layout: Layout, mesh: Mesh) -> bool:
    """Return whether the receiver's DTensor has the described shard, so that its bytes can be received in place."""
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
    """Return whether two mesh coordinates have the same shard: they may differ in mesh dimensions that replicate."""
    if here is None or there is None:
        return here is there
    return all(
        own == other or placement.kind == "replicate" for own, other, placement in zip(here, there, at, strict=True)
    )


def spans_ranks(state: object) -> bool:
    """Return whether a state contains a DTensor on a mesh of several ranks."""
    return any(dtensor.device_mesh.size() > 1 for dtensor in _dtensors(state))


class MeshResolver:
    """Finds a mesh of the receiver for a received DTensor that the receiver's state lacks.

    Args:
        state: The receiver's own state. The meshes of its DTensors are candidates. May be ``None``.
        meshes: Further candidates.
    """

    def __init__(self, state: object, meshes: Sequence[DeviceMesh] = ()) -> None:
        self._state = state
        self._meshes = list(meshes)
        self._resolved: dict[Mesh, DeviceMesh] = {}

    def resolve(self, described: Mesh, path: str) -> DeviceMesh:
        """Return a mesh of the receiver with the described shape and dimension names; build one if there is none.

        Raises:
            RestoreError: The receiver has no such mesh, and torch.distributed is not initialised to build one.
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
        # Prefer a mesh of the same ranks. If the sender is another job, its ranks may differ.
        for mesh in candidates:
            if tuple(mesh.mesh.flatten().tolist()) == described.ranks:
                return mesh
        if candidates:
            return candidates[0]
        if not dist.is_initialized() or not _is_device_type(described.device_type):
            raise RestoreError(
                f"expected a device mesh of shape {list(described.shape)} and names {names} in the receiver's state, "
                "but there is none, and torch.distributed is not initialised to build one; receive into a state that "
                "has one",
                path=path,
            )
        # Without a process group, because creating one is a collective; the caller may create one later.
        ranks = torch.tensor(described.ranks, dtype=torch.int).reshape(described.shape)
        mesh = DeviceMesh(described.device_type, ranks, mesh_dim_names=names, _init_backend=False)
        self._meshes.append(mesh)
        return mesh


def rebuild(local: torch.Tensor, layout: Layout, described: Mesh, mesh: DeviceMesh, path: str) -> DTensor:
    """Build a DTensor on ``mesh`` from its local shard. No collective runs.

    Args:
        local: The received shard.
        layout: The layout of the DTensor at the sender.
        described: The mesh of the sender.
        mesh: The mesh of the receiver, with the same shape.
        path: Path of the tensor, for errors.

    Raises:
        ManifestError: The layout contradicts the shape of the shard.
        RestoreError: The receiver's coordinate in the mesh requires another shard.
    """
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    _check(local, layout, described, path)
    here = mesh.get_coordinate()
    if not _is_same_place(here, described.coordinate, layout.placements):
        raise RestoreError(
            f"expected the shard of this process's mesh coordinate {tuple(here or ())}, got the shard of coordinate "
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
        raise ManifestError(f"expected a global shape within the limits of torch: {error}", path=path) from error
    if here is None:
        # On a rank outside the mesh, from_local replaces the shard by an empty one, but distribute_tensor does not.
        dtensor._local_tensor = local
    return dtensor


def _is_device_type(name: str) -> bool:
    try:
        return torch.device(name).type == name
    except (RuntimeError, Warning):  # a deprecated type warns, and a warning may be an error
        return False


def _check(local: torch.Tensor, layout: Layout, mesh: Mesh, path: str) -> None:
    """Raise if a layout contradicts the shape of the local shard, which torch itself does not check."""
    if mesh.coordinate is None:  # a process outside the mesh has an empty shard with any number of dimensions
        return
    if local.dim() != len(layout.global_shape):
        raise ManifestError(
            f"expected a shard of {len(layout.global_shape)} dimensions, got one of {local.dim()}", path=path
        )
    sharded = {placement.dim for placement in layout.placements if placement.kind != "replicate"}
    for dim, (whole, part, start) in enumerate(zip(layout.global_shape, local.shape, layout.local_offset, strict=True)):
        if part > whole or (part != whole and dim not in sharded) or start > whole:
            raise ManifestError(
                f"expected a shard inside shape {list(layout.global_shape)}, got shape {list(local.shape)} at offset "
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
    """Return the class ``DTensor``; ``None`` if no module has imported it, so that no value can be a DTensor."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Return whether the value is a DTensor."""
    dtensor = dtensor_type()
    return dtensor is not None and isinstance(value, dtensor)
