"""Builds a nested state from a tree of nodes. The tree may be forged, so everything in it is checked."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import torch

from ft_transport.errors import ManifestError, RestoreError, TransportError
from ft_transport.state import encodings, python_values, tensors
from ft_transport.state.encodings import HashWatch, distinct, set_of
from ft_transport.state.placements import MeshResolver, is_dtensor, matches, rebuild
from ft_transport.wire import nodes
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.nodes import MAX_DEPTH, STRIDE, CheckTime, LayoutNode, Node, TensorNode, ViewNode, unbounded

_MAX_LABEL_CHARACTERS: Final = 200
_MAX_PATH_CHARACTERS: Final = 1000
"""Maximum length of paths in errors. A deep tree could otherwise need a long path for each of very many items."""
_SPARE_COPY_BYTES: Final = 1 << 20
_SCALARS: Final = frozenset({type(None), bool, int, float, str})

_MAX_NODE_DEPTH: Final = 3 * MAX_DEPTH
"""Three nodes for each container: a parameter that is a quantized tensor, for example, has three nested nodes."""

_TensorKey: TypeAlias = int | bytes | tuple[int | bytes, bool, bool]
_encode: Final = msgspec.msgpack.Encoder().encode


class Unflattener:
    """Builds one state. Not thread-safe.

    Args:
        tensor_of: Returns the tensor at an index of the tensor table, with the dtype and shape of that entry. Called at
            most once for each index. Raises ``IndexError`` for an index outside the table.
        direct: The receiver's tensors into which bytes were received, by index; plain tensors, not Parameters.
        is_destination: Returns whether a tensor of the receiver receives the data at an index of the table.
        meshes: Finds meshes for DTensors that the receiver's state lacks.
        check_time: Called repeatedly; an error that it raises ends the work.
    """

    def __init__(
        self,
        *,
        manifest: Manifest,
        tensor_of: Callable[[int], torch.Tensor],
        direct: Mapping[int, torch.Tensor],
        is_destination: Callable[[int, torch.Tensor], bool],
        meshes: MeshResolver,
        check_time: CheckTime = unbounded,
    ) -> None:
        self._manifest = manifest
        self._tensor_of = tensor_of
        self._direct = direct
        self._is_destination = is_destination
        self._meshes = meshes
        self._check_time = check_time
        # Limits copies: a forged tree could name the same tensor any number of times.
        self._copy_bytes_left = 2 * manifest.data_bytes + _SPARE_COPY_BYTES
        self._depth = self._num_built = 0
        self._tensors: dict[_TensorKey, torch.Tensor] = {}

    def build(self, node: Node, into: object, path: str = "") -> object:
        """Build the value that ``node`` describes.

        Args:
            node: The received node.
            into: The receiver's own value at the same path; ``None`` if it has none. If one of its tensors has received
                the data, that tensor becomes part of the built value.
            path: The path of the node, for errors.

        Raises:
            ManifestError: The node contradicts the tensor table or itself.
            RestoreError: The node needs an object that the receiver does not have.
            DeadlineExceededError: ``check_time`` raised it.
        """
        self._num_built += 1
        if self._num_built % STRIDE == 0:
            self._check_time()
        self._depth += 1
        try:
            if self._depth > _MAX_NODE_DEPTH:
                raise ManifestError(f"expected at most {MAX_DEPTH} levels of nesting, got more")
            return self._build(node, None if tensors.is_lazy(into) else into, path)
        except TransportError as error:
            error.path = error.path or path or "(root)"
            raise
        finally:
            self._depth -= 1

    def _build(self, node: Node, into: object, path: str) -> object:
        match node:
            case None | bool() | int() | float() | str():
                return node
            case TensorNode() | LayoutNode() | ViewNode():
                return self._tensor(node, into, path)
            case (
                nodes.BigIntNode()
                | nodes.FloatNode()
                | nodes.ComplexNode()
                | nodes.StringNode()
                | nodes.BytesNode()
                | nodes.NumpyScalarNode()
            ):
                return python_values.decode_simple(node)
            case nodes.MappingNode():
                return self._mapping(node, into, path)
            case nodes.DefaultDictNode():
                # Safe: the decoder of the node accepts only names in `DEFAULT_FACTORIES`.
                pairs = distinct(dict(self._pairs(node.items, into, path)), len(node.items) // 2, path)
                return defaultdict(python_values.DEFAULT_FACTORIES[node.factory], pairs)
            case nodes.SequenceNode():
                return self._sequence(node, into, path)
            case nodes.NamedTupleNode():
                type_ = encodings.named_tuple_type(node)
                if len(node.items) != len(node.fields):
                    raise ManifestError(f"expected {len(node.fields)} values of a named tuple, got {len(node.items)}")
                # Call tuple.__new__, not the class: a forged name must not choose a constructor to run.
                return tuple.__new__(type_, self._items(node.items, into, path))
            case nodes.DequeNode():
                return deque(self._items(node.items, into, path), node.maxlen)
            case nodes.ConstantNode():
                return encodings.decode_constant(node)
            case nodes.NumpyArrayNode():
                return self._numpy_array(node, path)
            case nodes.StoredBytesNode():
                data = self._bytes_of(node.index, path)
                self._spend(data.nbytes, path)
                return bytearray(data) if node.mutable else data.tobytes()
            case nodes.CustomNode():
                return self._custom(node, path)
            case nodes.QuantizedNode():
                return self._quantized(node, path)
            case nodes.LeafNode():
                return self._leaf(node, into, path)
            case nodes.DTensorNode():
                return self._dtensor(node, into, path)

    @staticmethod
    def reinterpret(stored: torch.Tensor, node: LayoutNode) -> torch.Tensor:
        """Return ``stored`` as a row-major view with the dtype and shape of ``node``.

        Raises:
            ManifestError: The number of bytes does not match dtype and shape.
        """
        dtype = tensors.WHOLE_BYTE_DTYPES_BY_NAME.get(node.dtype)
        if dtype is None:
            raise ManifestError(f"expected a dtype that torch {torch.__version__} has, got {node.dtype[:64]!r}")
        if math.prod(node.shape) * dtype.itemsize != stored.nbytes:
            raise ManifestError(f"expected as many bytes as {node.dtype}{list(node.shape)} needs, got {stored.nbytes}")
        try:
            return tensors.as_bytes(stored.detach()).view(dtype).view(node.shape)
        except RuntimeError as error:  # an empty tensor whose other sizes exceed torch's limits
            raise ManifestError(f"expected a shape within the limits of torch, got {list(node.shape)}") from error

    def _stored(self, index: int, path: str) -> torch.Tensor:
        if index not in self._tensors:
            try:
                self._tensors[index] = self._tensor_of(index)
            except IndexError:
                raise ManifestError(
                    f"expected the index of a tensor in the tensor table, got {index}", path=path
                ) from None
        return self._tensors[index]

    def _tensor(self, node: TensorNode | LayoutNode | ViewNode, into: object, path: str) -> torch.Tensor:
        # A view is never a destination, because its base receives the data.
        receiver = as_plain(into) if tensors.has_own_memory(into) else None
        if receiver is not None and type(node) is not ViewNode and self._is_destination(node.index, receiver):
            return receiver
        key = _key_of(node)
        known = self._tensors.get(key)
        if known is None:
            known = self._tensors[key] = self._make_tensor(node, path)
        if receiver is not None and known.numel() and tensors.view_key(receiver) == tensors.view_key(known):
            return receiver
        return known

    def _make_tensor(self, node: TensorNode | LayoutNode | ViewNode, path: str) -> torch.Tensor:
        stored = self._stored(node.index, path)
        match node:
            case TensorNode():
                return stored
            case LayoutNode():
                return self._laid_out(self.reinterpret(stored, node), node, path)
            case ViewNode():
                if len(node.shape) != len(node.stride):
                    raise ManifestError(
                        f"expected one stride for each of {len(node.shape)} dimensions, got {len(node.stride)}",
                        path=path,
                    )
                last = sum((size - 1) * step for size, step in zip(node.shape, node.stride, strict=True))
                if 0 in node.shape or math.prod(node.shape) >= 2**62 or node.offset + last >= stored.numel():
                    raise ManifestError(f"expected a view inside {stored.numel()} elements, got {node}", path=path)
                return stored.detach().as_strided(node.shape, node.stride, stored.storage_offset() + node.offset)

    def _laid_out(self, tensor: torch.Tensor, node: LayoutNode, path: str) -> torch.Tensor:
        if tensor.stride() == node.stride:
            return tensor
        if len(node.stride) != len(node.shape) or not tensors.is_dense(node.shape, node.stride):
            raise ManifestError(f"expected dense strides for shape {node.shape}, got {node.stride}", path=path)
        # The elements of an expanded dimension are stored repeatedly. Copy each element once, and expand again.
        compact = tensor[tuple(slice(0, 1) if step == 0 else slice(None) for step in node.stride)]
        self._spend(compact.nbytes, path)
        laid_out = torch.empty_strided(compact.shape, node.stride, dtype=tensor.dtype)
        carrier = tensors.carrier_of(tensor.dtype)
        laid_out.view(carrier).copy_(compact.view(carrier))
        return laid_out.as_strided(node.shape, node.stride)

    def _pairs(self, items: Sequence[Node], into: object, path: str) -> Iterator[tuple[Any, object]]:
        if len(items) % 2:
            raise ManifestError(f"expected as many values as keys, got {len(items)} of both together", path=path)
        counterparts: Mapping[Any, object] = into if isinstance(into, Mapping) else {}
        watch = HashWatch()
        prefix, is_short = f"{path}." if path else "", len(path) < _MAX_PATH_CHARACTERS
        for num_before, (key_node, value_node) in enumerate(zip(items[::2], items[1::2], strict=True)):
            if num_before % STRIDE == 0:
                self._check_time()
            is_text = type(key_node) is str
            key: Any = key_node if is_text else self.build(key_node, None, path)
            try:
                if not is_text:
                    watch.admit(key, path)
                counterpart = counterparts.get(key)
            except TypeError:
                raise ManifestError(f"expected a hashable key, got {type(key).__name__}", path=path) from None
            # Handle the most frequent case first: a tensor that was received into the receiver's own tensor.
            if (
                type(value_node) is TensorNode
                and counterpart is not None
                and self._direct.get(value_node.index) is counterpart
            ):
                yield key, counterpart
                continue
            label = (key if is_text else encodings.key_label(key))[:_MAX_LABEL_CHARACTERS]
            name = f"{prefix}{label}" if is_short else path
            if type(value_node) is TensorNode:
                yield key, self._tensor(value_node, counterpart, name)
            else:
                yield key, self.build(value_node, counterpart, name)

    def _mapping(self, node: nodes.MappingNode, into: object, path: str) -> object:
        pairs = self._pairs(node.items, into, path)
        num_pairs = len(node.items) // 2
        match node.kind:
            case "dict":
                return distinct(dict(pairs), num_pairs, path)
            case "ordered":
                return distinct(OrderedDict(pairs), num_pairs, path)
            case "counter":
                return Counter(distinct(dict(pairs), num_pairs, path))

    def _items(self, items: Sequence[Node], into: object, path: str) -> list[object]:
        counterparts = chain(into if isinstance(into, (list, tuple, deque)) else (), repeat(None))
        built: list[object] = []
        prefix, is_short = f"{path}." if path else "", len(path) < _MAX_PATH_CHARACTERS
        for index, (item, counterpart) in enumerate(zip(items, counterparts, strict=False)):
            if index % STRIDE == 0:
                self._check_time()
            if type(item) in _SCALARS:
                built.append(item)
            else:
                built.append(self.build(item, counterpart, f"{prefix}{index}" if is_short else path))
        return built

    def _sequence(self, node: nodes.SequenceNode, into: object, path: str) -> object:
        items = self._items(node.items, into, path)
        try:
            match node.kind:
                case "list":
                    return items
                case "tuple":
                    return tuple(items)
                case "set":
                    return set_of(items, path, self._check_time)
                case "frozenset":
                    return frozenset(set_of(items, path, self._check_time))
                case "size":
                    return torch.Size(items)  # type: ignore[arg-type]
        except ManifestError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise ManifestError(f"expected valid items of a {node.kind}: {error}") from error

    def _spend(self, num_bytes: int, path: str) -> None:
        self._copy_bytes_left -= num_bytes
        if self._copy_bytes_left < 0:
            raise ManifestError(
                "expected each tensor of the tensor table to be copied at most once, got more copies", path=path
            )

    def _bytes_of(self, index: int, path: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        stored = self._stored(index, path)
        if stored.dtype is not torch.uint8:
            raise ManifestError(f"expected a uint8 tensor with stored bytes, got {stored.dtype}", path=path)
        return stored.reshape(-1).numpy()

    def _numpy_array(self, node: nodes.NumpyArrayNode, path: str) -> np.ndarray[Any, Any]:
        data = self._bytes_of(node.index, path)
        self._spend(data.nbytes, path)
        values = python_values.numpy_values(node.dtype, bytearray(data))
        if math.prod(node.shape) != len(values):
            raise ManifestError(
                f"expected one value for each element of shape {list(node.shape)}, got {len(values)} values"
            )
        try:
            return values.reshape(node.shape)
        except ValueError as error:  # too many dimensions, or an empty array whose other sizes exceed numpy's limits
            raise ManifestError(f"expected a shape within the limits of numpy, got {list(node.shape)}") from error

    def _custom(self, node: nodes.CustomNode, path: str) -> object:
        encoding = encodings.encoding_for_name(node.name)
        if encoding is None:
            raise RestoreError(
                f"expected the encoding {node.name[:64]!r} to be registered in this process (register_encoding)"
            )
        value = self.build(node.value, None, path)
        try:
            return encoding.decode(value)
        except TransportError:
            raise
        except Exception as error:
            raise RestoreError(
                f"the encoding {encoding.name!r} could not decode a value: {type(error).__name__}: {error}"
            ) from error

    def _quantized(self, node: nodes.QuantizedNode, path: str) -> torch.Tensor:
        dtype = tensors.DTYPES_BY_NAME.get(node.dtype)
        # Only nodes whose tensors are as large as the bytes sent for them, because the tensor is copied below.
        values = self.build(node.values, None, path) if isinstance(node.values, (TensorNode, LayoutNode)) else None
        integers = tensors.QUANTIZED.get(dtype) if dtype is not None else None
        if integers is None or not isinstance(values, torch.Tensor) or values.dtype != integers:
            raise ManifestError(f"expected a quantized dtype and a tensor of its integers, got {node.dtype[:64]!r}")
        if abs(node.zero_point) >= 2**31:
            raise ManifestError(f"expected a zero point of 32 bits, got {node.zero_point}")
        self._spend(values.nbytes, path)
        try:
            scale = python_values.float_from_bits(node.scale_bits)
            return torch._make_per_tensor_quantized_tensor(values, scale, node.zero_point)
        except (RuntimeError, ValueError, TypeError) as error:
            raise ManifestError(f"expected a valid scale and zero point for {node.dtype}: {error}") from error

    def _leaf(self, node: nodes.LeafNode, into: object, path: str) -> torch.Tensor:
        receiver = into.detach() if isinstance(into, torch.Tensor) else None
        value = self.build(node.value, receiver, path)
        if (
            isinstance(into, torch.Tensor)
            and value is receiver
            and into.is_leaf
            and into.requires_grad == node.requires_grad
            and isinstance(into, torch.nn.Parameter) == node.parameter
        ):
            return into
        if not isinstance(value, torch.Tensor):
            raise ManifestError(f"expected a tensor, got {type(value).__name__}")
        if node.requires_grad and not (value.is_floating_point() or value.is_complex()):
            raise ManifestError(f"expected a floating-point tensor to require grad, got {value.dtype}")
        # A parameter that occurs several times must stay one object. It is identified by the node of its tensor.
        named = node.value if isinstance(node.value, (TensorNode, LayoutNode, ViewNode)) else None
        key = (_key_of(named), node.parameter, node.requires_grad) if named is not None else None
        if key is not None and key in self._tensors:
            return self._tensors[key]
        if node.parameter:
            leaf: torch.Tensor = torch.nn.Parameter(value, requires_grad=node.requires_grad)
        else:
            leaf = value.detach().requires_grad_(node.requires_grad)
        if key is not None:
            self._tensors[key] = leaf
        return leaf

    def _dtensor(self, node: nodes.DTensorNode, into: object, path: str) -> torch.Tensor:
        if node.layout >= len(self._manifest.layouts):
            raise ManifestError(f"expected the index of a layout in the layout table, got {node.layout}")
        layout = self._manifest.layouts[node.layout]
        described = self._manifest.meshes[layout.mesh]
        receiver = into.to_local().detach() if is_dtensor(into) and matches(into, layout, described) else None
        local = self.build(node.local, receiver, path)
        if is_dtensor(into) and receiver is not None and local is receiver:
            return as_plain(into)
        if not isinstance(local, torch.Tensor) or is_dtensor(local):
            raise ManifestError(f"expected a local shard, got {type(local).__name__}")
        return rebuild(local.detach(), layout, described, self._meshes.resolve(described, path), path)


def _key_of(node: TensorNode | LayoutNode | ViewNode) -> int | bytes:
    """Return the key of a tensor: its index or the encoded node, so that no sender can choose colliding hashes."""
    return node.index if type(node) is TensorNode else _encode(node)


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor; for a Parameter or a tensor that requires grad, a plain tensor with the same memory."""
    if type(tensor) is torch.Tensor and not tensor.requires_grad:
        return tensor
    return tensor.detach() if tensor.requires_grad or isinstance(tensor, torch.nn.Parameter) else tensor
