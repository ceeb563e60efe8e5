"""Decodes the values of a snapshot that need torch, and encodes them by ``torch.save``."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import torch

from ft_transport.state.placements import MeshResolver
from ft_transport.state.tensors import DTYPES_BY_SAFETENSORS_NAME
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


def encode_value(node: Node, manifest: Manifest, data: memoryview) -> bytes:
    """Return the output of ``torch.save`` for a value; see ``saved_values.encode_value``."""
    buffer = io.BytesIO()
    torch.save(decoded(node, manifest, data), buffer)  # noqa: TID251 # DCP's format; what we read is never unpickled
    return buffer.getvalue()


def decoded(node: Node, manifest: Manifest, data: memoryview) -> object:
    """Decode a value; see ``saved_values.decoded``."""

    def tensor_of(index: int) -> torch.Tensor:
        entry = manifest.tensors[index]
        dtype = DTYPES_BY_SAFETENSORS_NAME[entry.dtype]
        if entry.start == entry.end:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(bytearray(data[entry.start : entry.end]), dtype=dtype).view(entry.shape)

    unflattener = Unflattener(
        manifest=manifest,
        tensor_of=tensor_of,
        direct={},
        is_destination=lambda _index, _tensor: False,
        meshes=MeshResolver(None),
    )
    return unflattener.build(_plain_node(node), None)


def _plain_node(node: Any) -> Node:
    match node:
        case CustomNode():
            return _plain_node(node.value)
        case DTensorNode():
            return _plain_node(node.local)
        case LeafNode():
            return _plain_node(node.value)
        case NamedTupleNode():
            return SequenceNode("tuple", [_plain_node(item) for item in node.items])
        case MappingNode() | DefaultDictNode() | SequenceNode() | DequeNode():
            replaced: Node = msgspec.structs.replace(node, items=[_plain_node(item) for item in node.items])
            return replaced
        case QuantizedNode():
            return QuantizedNode(_plain_node(node.values), node.dtype, node.scale_bits, node.zero_point)
        case _:
            plain: Node = node
            return plain
