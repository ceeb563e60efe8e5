"""Trees of snapshot format 1, in which each DTensor's node held its mesh and its layout.

There a node was ``["D", local, device_type, mesh_shape, mesh_ranks, mesh_dim_names, coordinate, placements,
global_shape, global_stride, local_offset]``. Nothing else in a tree is an array of that length whose first element is
"D" and whose fourth is an array that does not begin with a tag.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ft_transport.wire.layouts import Layout, LayoutTable, Mesh
from ft_transport.wire.nodes import Node

_NUM_FIELDS: Final = 11


def upgrade(tree: str) -> tuple[Node, LayoutTable]:
    """The tree as it is today, and the layouts that it names.

    Raises:
        msgspec.MsgspecError: It is no tree of format 1.
        RecursionError: It is nested too deeply.
    """
    table = LayoutTable()
    return msgspec.convert(_upgraded(msgspec.json.decode(tree), table), Node), table


def _upgraded(value: object, table: LayoutTable) -> object:
    if not isinstance(value, list):
        return value
    if _is_dtensor(value):
        return ["D", _upgraded(value[1], table), _layout_index(value, table)]
    return [_upgraded(item, table) for item in value]


def _is_dtensor(value: list[object]) -> bool:
    if len(value) != _NUM_FIELDS or value[0] != "D":
        return False
    mesh_shape = value[3]
    return isinstance(mesh_shape, list) and not any(isinstance(item, str) for item in mesh_shape[:1])


def _layout_index(fields: list[object], table: LayoutTable) -> int:
    _, _, device_type, shape, ranks, dim_names, coordinate, placements, global_shape, global_stride, offset = fields
    mesh = msgspec.convert([device_type, shape, ranks, dim_names, coordinate], Mesh)
    layout = msgspec.convert([0, placements, global_shape, global_stride, offset], Layout)
    return table.add(
        mesh,
        layout.placements,
        global_shape=layout.global_shape,
        global_stride=layout.global_stride,
        local_offset=layout.local_offset,
    )
