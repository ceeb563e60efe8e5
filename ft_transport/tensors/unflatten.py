"""A tree of nodes becomes a nested state again, without trusting the tree."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ft_transport.errors import ManifestError, RestoreError
from ft_transport.tensors import encodings
from ft_transport.tensors.dtypes import DTYPES_BY_NAME, QUANTIZED, is_dense
from ft_transport.tensors.placements import MeshResolver, matches, rebuild
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


class Unflattener:
    """Builds one state. Not thread-safe.

    Args:
        tensor_of: The entry of the tensor table with a given index, as a tensor of its wire dtype and shape. Called at
            most once per index; raises ``IndexError`` for one that the table does not have.
        is_destination: Whether a tensor of the receiver's was chosen to take the data of an entry.
        meshes: Where DTensors without a counterpart go.
    """

    def __init__(
        self,
        *,
        tensor_of: Callable[[int], torch.Tensor],
        is_destination: Callable[[int, torch.Tensor], bool],
        meshes: MeshResolver,
    ) -> None:
        self._tensor_of = tensor_of
        self._is_destination = is_destination
        self._meshes = meshes
        self._tensors: dict[Node, torch.Tensor] = {}

    def build(self, node: Node, into: object, path: str) -> object:
        """The value that ``node`` describes.

        Args:
            node: What came.
            into: The receiver's own value at the same place, if it has one; its tensors are returned where the data
                was received into them.
            path: The place, for errors.

        Raises:
            ManifestError: The node contradicts the tensor table or itself.
            RestoreError: It needs something that the receiver does not have.
        """
        match node:
            case None | bool() | int() | float() | str():
                return node
            case BigIntNode() | FloatNode() | ComplexNode() | StringNode() | BytesNode() | NumpyScalarNode():
                return encodings.decode_simple(node)
            case TensorNode() | LayoutNode() | ViewNode():
                return self._tensor(node, into, path)
            case MappingNode():
                return self._mapping(node, into, path)
            case DefaultDictNode():
                # The factory's type follows from the node's closed set of names.
                return defaultdict(encodings.DEFAULT_FACTORIES[node.factory], self._pairs(node.items, into, path))
            case SequenceNode():
                return self._sequence(node, into, path)
            case NamedTupleNode():
                type_ = encodings.named_tuple_type(node)
                if len(node.items) != len(node.fields):
                    raise ManifestError(f"expected {len(node.fields)} values, got {len(node.items)}", path=path)
                # tuple.__new__ and not the class itself, whose constructor is code that the name would choose.
                return tuple.__new__(type_, self._items(node.items, into, path))
            case DequeNode():
                return deque(self._items(node.items, into, path), node.maxlen)
            case ConstantNode():
                return encodings.decode_constant(node)
            case NumpyArrayNode():
                return self._numpy_array(node, path)
            case StoredBytesNode():
                data = self._bytes_of(node.index, path)
                return bytearray(data) if node.mutable else data.tobytes()
            case CustomNode():
                return self._custom(node, path)
            case QuantizedNode():
                return self._quantized(node, path)
            case LeafNode():
                return self._leaf(node, into, path)
            case DTensorNode():
                return self._dtensor(node, into, path)

    @staticmethod
    def reinterpret(stored: torch.Tensor, node: LayoutNode) -> torch.Tensor:
        """``stored`` in the dtype and shape of ``node``, still row-major; shares its memory.

        Raises:
            ManifestError: The bytes are not as many as dtype and shape need.
        """
        dtype = DTYPES_BY_NAME.get(node.dtype)
        if dtype is None:
            raise ManifestError(f"expected a dtype of torch {torch.__version__}, got {node.dtype[:64]!r}")
        if torch.Size(node.shape).numel() * dtype.itemsize != stored.nbytes:
            raise ManifestError(f"expected bytes for {node.dtype}{list(node.shape)}, got {stored.nbytes}")
        if dtype is stored.dtype:
            return stored.view(node.shape)
        return stored.reshape(-1).view(torch.uint8).view(dtype).view(node.shape)

    def _stored(self, index: int, path: str) -> torch.Tensor:
        key = TensorNode(index)
        if key not in self._tensors:
            try:
                self._tensors[key] = self._tensor_of(index)
            except IndexError:
                raise ManifestError(f"expected a tensor of the table, got index {index}", path=path) from None
        return self._tensors[key]

    def _tensor(self, node: TensorNode | LayoutNode | ViewNode, into: object, path: str) -> torch.Tensor:
        if isinstance(into, torch.Tensor) and self._fits(node, into):
            return into
        known = self._tensors.get(node)
        if known is None:
            known = self._make_tensor(node, path)
            self._tensors[node] = known
        return known

    def _fits(self, node: TensorNode | LayoutNode | ViewNode, into: torch.Tensor) -> bool:
        """Whether the receiver's own tensor is one that the data was, or will be, put into."""
        match node:
            case TensorNode() | LayoutNode():
                return self._is_destination(node.index, into)
            case ViewNode():
                return False

    def _make_tensor(self, node: TensorNode | LayoutNode | ViewNode, path: str) -> torch.Tensor:
        stored = self._stored(node.index, path)
        match node:
            case TensorNode():
                return stored
            case LayoutNode():
                return self._laid_out(self.reinterpret(stored, node), node, path)
            case ViewNode():
                if len(node.shape) != len(node.stride):
                    raise ManifestError("expected as many strides as dimensions", path=path)
                last = sum((size - 1) * step for size, step in zip(node.shape, node.stride, strict=True))
                if 0 in node.shape or node.offset + last >= stored.numel():
                    raise ManifestError(f"expected a view inside {stored.numel()} elements, got {node}", path=path)
                return stored.as_strided(node.shape, node.stride, stored.storage_offset() + node.offset)

    @staticmethod
    def _laid_out(tensor: torch.Tensor, node: LayoutNode, path: str) -> torch.Tensor:
        if len(node.stride) != len(node.shape) or not is_dense(node.shape, node.stride):
            raise ManifestError(f"expected strides of a dense layout, got {node.stride} for {node.shape}", path=path)
        if tensor.stride() == node.stride or tensor.numel() == 0:
            return tensor
        # Expanded dimensions are stored repeated; one copy of each element is enough.
        compact = tensor[tuple(slice(0, 1) if step == 0 else slice(None) for step in node.stride)]
        laid_out = torch.empty_strided(compact.shape, node.stride, dtype=tensor.dtype)
        itemsize_view = torch.uint8 if tensor.dtype.itemsize == 1 else tensor.dtype
        laid_out.view(itemsize_view).copy_(compact.view(itemsize_view))
        return laid_out.as_strided(node.shape, node.stride)

    def _pairs(self, items: Sequence[Node], into: object, path: str) -> Iterator[tuple[Any, object]]:
        if len(items) % 2:
            raise ManifestError("expected as many values as keys", path=path)
        counterparts: Mapping[Any, object] = into if isinstance(into, Mapping) else {}
        for key_node, value_node in zip(items[::2], items[1::2], strict=True):
            key: Any = key_node if type(key_node) is str else self.build(key_node, None, path)
            name = f"{path}.{key}" if path else str(key)
            try:
                counterpart = counterparts.get(key)
            except TypeError:
                raise ManifestError(f"expected a hashable key, got {type(key).__name__}", path=path) from None
            yield key, self.build(value_node, counterpart, name)

    def _mapping(self, node: MappingNode, into: object, path: str) -> object:
        pairs = self._pairs(node.items, into, path)
        match node.kind:
            case "dict":
                return dict(pairs)
            case "ordered":
                return OrderedDict(pairs)
            case "counter":
                return Counter(dict(pairs))

    def _items(self, items: Sequence[Node], into: object, path: str) -> list[object]:
        counterparts: Sequence[object] = (
            into if isinstance(into, (list, tuple, deque)) and len(into) == len(items) else [None] * len(items)
        )
        return [
            self.build(item, counterpart, f"{path}.{index}" if path else str(index))
            for index, (item, counterpart) in enumerate(zip(items, counterparts, strict=True))
        ]

    def _sequence(self, node: SequenceNode, into: object, path: str) -> object:
        items = self._items(node.items, into, path)
        try:
            match node.kind:
                case "list":
                    return items
                case "tuple":
                    return tuple(items)
                case "set":
                    return set(items)
                case "frozenset":
                    return frozenset(items)
                case "size":
                    return torch.Size(items)  # type: ignore[arg-type]
        except TypeError as error:
            raise ManifestError(f"expected the items of a {node.kind}: {error}", path=path) from error

    def _bytes_of(self, index: int, path: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        stored = self._stored(index, path)
        if stored.dtype is not torch.uint8:
            raise ManifestError(f"expected stored bytes, got {stored.dtype}", path=path)
        return stored.reshape(-1).numpy()

    def _numpy_array(self, node: NumpyArrayNode, path: str) -> np.ndarray[Any, Any]:
        dtype = encodings.numpy_dtype(node.dtype)
        data = self._bytes_of(node.index, path)
        if torch.Size(node.shape).numel() * dtype.itemsize != data.nbytes:
            raise ManifestError(f"expected bytes for {dtype}{list(node.shape)}, got {data.nbytes}", path=path)
        return np.frombuffer(bytearray(data), dtype=dtype).reshape(node.shape)

    def _custom(self, node: CustomNode, path: str) -> object:
        encoding = encodings.encoding_for_name(node.name)
        if encoding is None:
            raise RestoreError(
                f"expected the encoding {node.name[:64]!r} to be registered in this process (register_encoding)",
                path=path,
            )
        return encoding.decode(self.build(node.value, None, path))

    def _quantized(self, node: QuantizedNode, path: str) -> torch.Tensor:
        dtype = DTYPES_BY_NAME.get(node.dtype)
        values = self.build(node.values, None, path)
        integers = QUANTIZED.get(dtype) if dtype is not None else None
        if integers is None or not isinstance(values, torch.Tensor) or values.dtype != integers:
            raise ManifestError(f"expected the integers of a quantized tensor, got {node.dtype[:64]!r}", path=path)
        scale = encodings.float_from_bits(node.scale_bits)
        return torch._make_per_tensor_quantized_tensor(values, scale, node.zero_point)

    def _leaf(self, node: LeafNode, into: object, path: str) -> torch.Tensor:
        if isinstance(into, torch.Tensor):
            value = self.build(node.value, into.detach(), path)
            if isinstance(value, torch.Tensor) and value.data_ptr() == into.data_ptr() and value.shape == into.shape:
                return into
        else:
            value = self.build(node.value, None, path)
        if not isinstance(value, torch.Tensor):
            raise ManifestError(f"expected a tensor, got {type(value).__name__}", path=path)
        if node.requires_grad and not (value.is_floating_point() or value.is_complex()):
            raise ManifestError(f"expected a floating-point tensor to require grad, got {value.dtype}", path=path)
        if node.parameter:
            return torch.nn.Parameter(value, requires_grad=node.requires_grad)
        return value.detach().requires_grad_(node.requires_grad)

    def _dtensor(self, node: DTensorNode, into: object, path: str) -> DTensor:
        if isinstance(into, DTensor) and matches(into, node):
            local = self.build(node.local, into.to_local().detach(), path)
            if isinstance(local, torch.Tensor) and local.data_ptr() == into.to_local().data_ptr():
                return into
        else:
            local = self.build(node.local, None, path)
        if not isinstance(local, torch.Tensor):
            raise ManifestError(f"expected a local shard, got {type(local).__name__}", path=path)
        try:
            return rebuild(local, node, self._meshes.resolve(node, path))
        except (RuntimeError, ValueError, AssertionError) as error:
            raise ManifestError(f"expected a shard that fits its placements: {error}", path=path) from error
