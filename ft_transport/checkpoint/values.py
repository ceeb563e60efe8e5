"""Leaves that are no tensors, as Python values, for DCP's part of a checkpoint."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from ft_transport.state.dtypes import DTYPES_BY_SAFETENSORS_NAME
from ft_transport.state.placements import MeshResolver
from ft_transport.state.unflatten import Unflattener
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.nodes import (
    CustomNode,
    DefaultDictNode,
    DequeNode,
    DTensorNode,
    LeafNode,
    MappingNode,
    NamedTupleNode,
    Node,
    QuantizedNode,
    SequenceNode,
)


def value_of(node: Node, manifest: Manifest, data: memoryview) -> object:
    """The value that a node describes, in types that every process has.

    A named tuple becomes a tuple, and a value with a registered encoding what that encodes it to; the part of a DTensor
    becomes a plain tensor.

    Args:
        node: What to build.
        manifest: Of the snapshot.
        data: Of the snapshot.
    """

    def tensor_of(index: int) -> torch.Tensor:
        entry = manifest.tensors[index]
        dtype = DTYPES_BY_SAFETENSORS_NAME[entry.dtype]
        if entry.start == entry.end:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(bytearray(data[entry.start : entry.end]), dtype=dtype).view(entry.shape)

    unflattener = Unflattener(
        manifest=manifest, tensor_of=tensor_of, is_destination=lambda _index, _tensor: False, meshes=MeshResolver(None)
    )
    return unflattener.build(_plain(node), None)


def _plain(node: Any) -> Node:
    match node:
        case CustomNode():
            return _plain(node.value)
        case DTensorNode():
            return _plain(node.local)
        case LeafNode():
            return _plain(node.value)
        case NamedTupleNode():
            return SequenceNode("tuple", [_plain(item) for item in node.items])
        case MappingNode() | DefaultDictNode() | SequenceNode() | DequeNode():
            replaced: Node = msgspec.structs.replace(node, items=[_plain(item) for item in node.items])
            return replaced
        case QuantizedNode():
            return QuantizedNode(_plain(node.values), node.dtype, node.scale_bits, node.zero_point)
        case _:
            plain: Node = node
            return plain
