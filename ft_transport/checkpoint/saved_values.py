"""Decodes the values of a snapshot that are not tensors, and encodes them in the form of ``torch.save``.

Neither needs torch for values of Python and numpy. `encode_value` imports torch for any other value, such as a dtype or
a tuple with a tensor.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Sized
from typing import Any, Final, TypeVar

from ft_transport.checkpoint.torch_save import saved
from ft_transport.errors import CheckpointError
from ft_transport.state.python_values import DEFAULT_FACTORIES, decode_simple, numpy_values
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.nodes import (
    BigIntNode,
    BytesNode,
    ComplexNode,
    ConstantNode,
    CustomNode,
    DefaultDictNode,
    DequeNode,
    DTensorNode,
    FloatNode,
    LayoutNode,
    LeafNode,
    MappingNode,
    NamedTupleNode,
    Node,
    NumpyArrayNode,
    NumpyScalarNode,
    QuantizedNode,
    SequenceNode,
    StoredBytesNode,
    StringNode,
    TensorNode,
    ViewNode,
)

C = TypeVar("C", bound=Sized)

_OF_TORCH: Final = (ConstantNode, TensorNode, LayoutNode, ViewNode, QuantizedNode, LeafNode, DTensorNode)
_SEQUENCES: Final = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: Final = {"dict": dict, "ordered": OrderedDict, "counter": Counter}


def encode_value(node: Node, manifest: Manifest, data: memoryview) -> bytes:
    """Return the output of ``torch.save`` for a value; see `decoded`.

    Args:
        node: The node of the value.
        manifest: The manifest of the snapshot.
        data: The data of the snapshot.
    """
    if _needs_torch(node):
        from ft_transport.checkpoint import torch_values  # noqa: PLC0415 # spares others the import of torch

        return torch_values.encode_value(node, manifest, data)
    return saved(_decoded(node, manifest, data))


def decoded(node: Node, manifest: Manifest, data: memoryview) -> object:
    """Decode a value. Replace user-defined types, which other programs may lack.

    A named tuple becomes a tuple, a value with a registered encoding becomes its encoded form, and the shard of a
    DTensor becomes a plain tensor.
    """
    if _needs_torch(node):
        from ft_transport.checkpoint import torch_values  # noqa: PLC0415 # as above

        return torch_values.decoded(node, manifest, data)
    return _decoded(node, manifest, data)


def _needs_torch(node: Any) -> bool:
    match node:
        case SequenceNode() if node.kind == "size":
            return True
        case SequenceNode() | MappingNode() | DefaultDictNode() | DequeNode() | NamedTupleNode():
            return any(map(_needs_torch, node.items))
        case CustomNode():
            return _needs_torch(node.value)
        case _:
            return isinstance(node, _OF_TORCH)


def _decoded(node: Any, manifest: Manifest, data: memoryview) -> Any:
    def all_of(nodes: list[Node]) -> list[Any]:
        return [_decoded(each, manifest, data) for each in nodes]

    def bytes_of(index: int) -> bytearray:
        entry = manifest.tensors[index]
        return bytearray(data[entry.start : entry.end])

    match node:
        case BigIntNode() | FloatNode() | ComplexNode() | StringNode() | BytesNode() | NumpyScalarNode():
            return decode_simple(node)
        case StoredBytesNode():
            content = bytes_of(node.index)
            return content if node.mutable else bytes(content)
        case NumpyArrayNode():
            return numpy_values(node.dtype, bytes_of(node.index)).reshape(node.shape)
        case SequenceNode():
            return _distinct(_SEQUENCES[node.kind](all_of(node.items)), len(node.items))
        case NamedTupleNode():
            return tuple(all_of(node.items))
        case MappingNode():
            return _MAPPINGS[node.kind](_pairs(all_of(node.items)))
        case DefaultDictNode():
            return defaultdict(DEFAULT_FACTORIES[node.factory], _pairs(all_of(node.items)))
        case DequeNode():
            return deque(all_of(node.items), node.maxlen)
        case CustomNode():
            return _decoded(node.value, manifest, data)
        case _:
            return node  # text, a number, a bool or None


def _pairs(items: list[Any]) -> dict[Any, Any]:
    return _distinct(dict(zip(items[::2], items[1::2], strict=True)), len(items) // 2)


def _distinct(container: C, num_items: int) -> C:
    """Refuse a container that has lost items because user-defined keys were replaced by equal ones."""
    if len(container) != num_items:
        raise CheckpointError(f"expected {num_items} distinct keys or members, got {len(container)}")
    return container
