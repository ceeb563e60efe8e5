"""Turns a nested state into a tree of nodes and a table of its tensors.

Flattening copies nothing: the table refers to live tensors. So the caller must flatten and copy under one read lock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import numpy as np
import torch

from ft_transport.errors import SnapshotError, UnsupportedLeafError
from ft_transport.state import encodings, python_values, tensors
from ft_transport.state.blocks import Blocks, FastLane, FlatState, OffLaneError
from ft_transport.state.placements import LayoutEncoder, dtensor_type
from ft_transport.wire import nodes
from ft_transport.wire.nodes import MAX_DEPTH, LayoutNode, LeafNode, MappingNode, Node, TensorNode

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_MAX_LANE_ATTEMPTS: Final = 3
_INLINE_BYTES: Final = 4096
"""Longer ``bytes`` leaves are not stored in the tree, but with the tensors."""


def flatten(state: object) -> FlatState:
    """Turn a state into a tree of nodes and a table of its tensors.

    Tensors with the same memory, dtype and layout (tied tensors) have one entry in the table. A tensor that is a view
    of another tensor in the state is described as a view, so that the receiver's tensors share memory in the same way.

    Raises:
        UnsupportedLeafError: A leaf has no safe encoding; ``path`` names the leaf.
        SnapshotError: The state contains itself, or is nested too deeply.
    """
    with _named_errors():
        flat = _flatten_in_lane(state)
        blocks = flat.blocks
        views = tensors.find_views(blocks.names, blocks.sources, blocks.addresses, blocks.num_bytes)
        return _Flattener(views, None).flatten(state) if views else flat


def check_encodable(state: object, *, with_tensors: bool = True) -> None:
    """Check that a snapshot of ``state`` is possible. Copies no tensor.

    Without ``with_tensors``, every tensor counts as supported.

    Raises:
        UnsupportedLeafError: A leaf has no safe encoding; ``path`` names the leaf.
        SnapshotError: The state contains itself, or is nested too deeply.
    """
    with _named_errors():
        (_Flattener if with_tensors else _StructureFlattener)({}, None).flatten(state)


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise SnapshotError(f"expected a state nested less deeply than Python's recursion limit: {error}") from error
    except SnapshotError as error:
        error.path = error.path or "(root)"
        raise


def _flatten_in_lane(state: object) -> FlatState:
    """Flatten a state with the fast lane for all usual tensors."""
    off_lane: frozenset[int] = frozenset()
    for _ in range(_MAX_LANE_ATTEMPTS):
        try:
            return _Flattener({}, off_lane).flatten(state)
        except OffLaneError as error:
            off_lane |= error.ids
    return _Flattener({}, None).flatten(state)


class _Flattener:
    """Turns one state into a tree of nodes and a table of tensors, in one walk.

    Args:
        views: The tensors that are views of other tensors, with their bases.
        off_lane: Ids of unusual tensors, which must not enter the fast lane; ``None`` to use no fast lane.
    """

    def __init__(self, views: dict[tensors.ViewKey, tensors.Base], off_lane: frozenset[int] | None) -> None:
        self.blocks = Blocks()
        self.layouts = LayoutEncoder()
        self._views = views
        self._lane = FastLane(self.blocks)
        self._is_lane_open = off_lane is not None
        self._off_lane = off_lane or frozenset()
        self._node_by_memory: dict[tuple[object, ...], Node] = {}
        # Keeps tensors alive, so that no other tensor gets an address that is a key above.
        self._kept: list[torch.Tensor] = []
        self._open: set[int] = set()
        self.encoders: dict[type[Any], Callable[[Any, str], Node]] = {
            torch.Tensor: self._tensor,
            torch.nn.Parameter: self._parameter,
            dict: lambda value, path: MappingNode("dict", self._mapping_items(value, path)),
            OrderedDict: lambda value, path: MappingNode("ordered", self._mapping_items(value, path)),
            Counter: lambda value, path: MappingNode("counter", self._mapping_items(value, path)),
            defaultdict: self._default_dict,
            list: lambda value, path: self._sequence("list", value, path),
            tuple: lambda value, path: self._sequence("tuple", value, path),
            set: lambda value, path: self._sequence("set", value, path),
            frozenset: lambda value, path: self._sequence("frozenset", value, path),
            torch.Size: lambda value, path: self._sequence("size", value, path),
            deque: lambda value, path: nodes.DequeNode(value.maxlen, self._items(value, value, path)),
            type(None): lambda _value, _path: None,
            bool: lambda value, _path: bool(value),
            int: python_values.encode_int,
            float: lambda value, _path: python_values.encode_float(value),
            complex: lambda value, _path: python_values.encode_complex(value),
            str: lambda value, _path: python_values.encode_str(value),
            bytes: lambda value, path: self._bytes(value, path, mutable=False),
            bytearray: lambda value, path: self._bytes(value, path, mutable=True),
            np.ndarray: self._numpy_array,
        }

    def flatten(self, state: object) -> FlatState:
        """Return the flattened state. Called once."""
        try:
            try:
                tree = self.encode(state, "")
            finally:
                # Even after an error: an earlier tensor in the lane may also be invalid, and must be reported first.
                self._lane.settle()
                self._lane.check()
            return FlatState(tree=tree, blocks=self.blocks, layouts=self.layouts.table)
        finally:
            # Break the reference cycle with this object's own methods, so that live tensors are freed at once.
            self.encoders.clear()

    def encode(self, value: object, path: str) -> Node:
        encoder = self.encoders.get(type(value))
        return encoder(value, path) if encoder is not None else self._other(value, path)

    def _other(self, value: object, path: str) -> Node:
        type_ = type(value)
        if type_ is dtensor_type():
            return self._dtensor(value, path)  # type: ignore[arg-type]
        custom = encodings.encoding_for_type(type_)
        if custom is not None:
            return self._custom(custom, value, path)
        if isinstance(value, np.generic) and python_values.is_plain_numpy_scalar(value):
            return python_values.encode_numpy_scalar(value)
        if encodings.is_named_tuple_type(type_) and isinstance(value, tuple):
            return self._named_tuple(value, path)
        constant = encodings.encode_constant(value)
        if constant is not None:
            return constant
        if tensors.is_lazy(value):
            raise UnsupportedLeafError(
                "expected a tensor with a shape, got a parameter or buffer of a lazy module that has not run yet; call "
                "its forward once before the first step",
                path=path,
            )
        advice = "leave it out of the state, or give its type an encoding with register_encoding"
        if type_.__name__ == "ShardedTensor":
            advice = (
                "FSDP1 makes these: use FSDP2 (fully_shard), or make FSDP1 with a device_mesh and call "
                "FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT) to get DTensors"
            )
        raise UnsupportedLeafError(
            f"expected a leaf with a safe encoding, got {type_.__module__}.{type_.__qualname__}; {advice}", path=path
        )

    def _custom(self, custom: encodings.Encoding, value: object, path: str) -> Node:
        self._enter(value, path)
        try:
            try:
                encoded = custom.encode(value)
            except Exception as error:
                raise SnapshotError(
                    f"the encoding {custom.name!r} failed: {type(error).__name__}: {error}", path=path
                ) from error
            return nodes.CustomNode(custom.name, self.encode(encoded, path))
        finally:
            self._open.discard(id(value))

    def _named_tuple(self, value: tuple[object, ...], path: str) -> Node:
        type_ = type(value)
        fields = list(type_._fields)  # type: ignore[attr-defined]
        node = nodes.NamedTupleNode(type_.__module__, type_.__qualname__, fields, self._items(value, value, path))
        if encodings.find_named_tuple_type(node) is not type_ or getattr(value, "__dict__", None):
            raise UnsupportedLeafError(
                f"expected a named tuple whose class a receiver finds as {type_.__module__}.{type_.__qualname__}, "
                "and without other attributes than its fields; define it at the top of a module, or register an "
                "encoding for it",
                path=path,
            )
        return node

    def _enter(self, container: object, path: str) -> None:
        if id(container) in self._open:
            raise SnapshotError("expected a tree, got a container that contains itself", path=path)
        if len(self._open) >= MAX_DEPTH:
            raise SnapshotError(f"expected at most {MAX_DEPTH} levels of nesting", path=f"{path[:100]}…")
        self._open.add(id(container))

    def _items(self, container: object, values: Iterable[object], path: str) -> list[Node]:
        self._enter(container, path)
        try:
            prefix = f"{path}." if path else ""
            return [
                value if python_values.is_small_int(value) else self.encode(value, f"{prefix}{index}")
                for index, value in enumerate(values)
            ]
        finally:
            self._open.discard(id(container))

    def _sequence(
        self, kind: Literal["list", "tuple", "set", "frozenset", "size"], value: Iterable[object], path: str
    ) -> Node:
        items = self._items(value, value, path)
        if kind in ("set", "frozenset"):
            # Sorted, so that equal sets have equal encodings: their order differs between processes (random hashes).
            items.sort(key=msgspec.json.encode)
        return nodes.SequenceNode(kind, items)

    def _mapping_items(self, value: dict[Any, object], path: str) -> list[Node]:
        self._enter(value, path)
        try:
            prefix = f"{path}." if path else ""
            has_lane = self._is_lane_open and path.isascii()
            off_lane = self._off_lane
            names, sources = self.blocks.names, self.blocks.sources
            plain = torch.Tensor
            items: list[Node] = []
            add = items.append
            for key, item in value.items():
                if type(key) is str and key.isascii():
                    name = prefix + key
                    add(key)
                    if type(item) is plain and has_lane and (not off_lane or id(item) not in off_lane):
                        add(TensorNode(len(names)))
                        names.append(name)
                        sources.append(item)
                        continue
                elif python_values.is_small_int(key):
                    name = f"{prefix}{key}"
                    add(key)
                else:
                    name = prefix + encodings.key_label(key)
                    add(self.encode(key, f"{name} (key)"))
                if type(item) is dict:
                    add(MappingNode("dict", self._mapping_items(item, name)))
                else:
                    add(self.encode(item, name))
            return items
        finally:
            self._open.discard(id(value))

    def _default_dict(self, value: defaultdict[Any, object], path: str) -> Node:
        factory = python_values.default_factory_name(value, path)
        return nodes.DefaultDictNode(factory, self._mapping_items(value, path))  # type: ignore[arg-type]

    def _bytes(self, value: bytes | bytearray, path: str, *, mutable: bool) -> Node:
        if len(value) <= _INLINE_BYTES:
            return nodes.BytesNode(bytes(value), mutable)
        block = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        return nodes.StoredBytesNode(self._lane.store(block, path, "U8", (block.numel(),)), mutable)

    def _numpy_array(self, value: np.ndarray[Any, Any], path: str) -> Node:
        data = python_values.numpy_bytes(value, path)
        block = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return nodes.NumpyArrayNode(self._lane.store(block, path, "U8", (block.numel(),)), value.dtype.str, value.shape)

    def _parameter(self, value: torch.Tensor, path: str) -> Node:
        return LeafNode(self._tensor(value.detach(), path), parameter=True, requires_grad=value.requires_grad)

    def _dtensor(self, value: DTensor, path: str) -> Node:
        self._check_leaf(value, path)
        # Use only the local shard: methods of the DTensor itself, such as clone(), may run collectives.
        layout = self.layouts.index_of(value, path)
        node = nodes.DTensorNode(self._plain_tensor(value.to_local().detach(), path), layout)
        # The class of a Parameter made from a DTensor is DTensor; isinstance still returns True for Parameter.
        is_parameter = isinstance(value, torch.nn.Parameter)
        if is_parameter or value.requires_grad:
            return LeafNode(node, parameter=is_parameter, requires_grad=value.requires_grad)
        return node

    def _tensor(self, value: torch.Tensor, path: str) -> Node:
        if value.requires_grad:
            self._check_leaf(value, path)
            return LeafNode(self._plain_tensor(value.detach(), path), parameter=False, requires_grad=True)
        return self._plain_tensor(value, path)

    @staticmethod
    def _check_leaf(value: torch.Tensor, path: str) -> None:
        if value.requires_grad and not value.is_leaf:
            raise UnsupportedLeafError(
                "expected a leaf of the autograd graph, got a computed tensor; put its detach() into the state",
                path=path,
            )

    def _plain_tensor(self, value: torch.Tensor, path: str) -> Node:
        dtype = value.dtype
        is_cpu = value.is_cpu
        if value.layout is not torch.strided or type(value) is not torch.Tensor or (not is_cpu and value.is_meta):
            raise UnsupportedLeafError(
                f"expected a dense tensor with memory, got {type(value).__name__} of layout {value.layout} on "
                f"{value.device}; put its parts, or a dense copy, into the state",
                path=path,
            )
        self._lane.settle()
        wire_dtype = tensors.SAFETENSORS_NAMES.get(dtype)
        if wire_dtype is None and value.is_quantized:
            return self._quantized(value, path)
        is_lazy = value.is_neg() or (dtype.is_complex and value.is_conj())
        contiguous = value.is_contiguous() and not is_lazy
        try:
            shape = value.shape
        except RuntimeError as error:  # a nested tensor, whose layout is also strided
            raise UnsupportedLeafError(f"expected a tensor with a shape: {error}", path=path) from error
        memory: tuple[object, ...] | None = None
        address = 0
        if value.nbytes:
            start = value.data_ptr()
            if not start:
                raise UnsupportedLeafError("expected a tensor with memory, got one whose storage was freed", path=path)
            base = self._views.get(tensors.view_key(value)) if self._views and not is_lazy else None
            if base is not None:
                return self._view(value, base)
            if contiguous:
                memory = (start, dtype, shape)
                address = start if is_cpu else 0
            else:
                memory = (start, dtype, shape, value.stride(), value.is_neg(), value.is_conj())
            known = self._node_by_memory.get(memory)
            if known is not None:
                return known
            first = self._lane.first_at(address)
            if first is not None and self.blocks.sources[first].dtype is dtype and self.blocks.shapes[first] == shape:
                return TensorNode(first)
        if wire_dtype is not None and contiguous:
            index = self._lane.store(value, path, wire_dtype, shape, address)
            if address:
                self._lane.note(address, index)
            node: Node = TensorNode(index)
        else:
            node = self._described(value, path, wire_dtype, tuple(shape))
        if memory is not None:
            self._node_by_memory[memory] = node
            if is_lazy:
                self._kept.append(value)
        return node

    def _described(self, value: torch.Tensor, path: str, wire_dtype: str | None, shape: tuple[int, ...]) -> Node:
        """Encode a tensor that needs a `LayoutNode`, because the tensor table lacks its dtype or memory layout."""
        source = value.resolve_conj().resolve_neg()
        # A tensor with holes is stored row-major, because the holes may be memory of other tensors.
        is_row_major = source.is_contiguous() or not tensors.is_dense(shape, source.stride())
        stride = torch.empty(shape, device="meta").stride() if is_row_major else source.stride()
        if wire_dtype is not None:
            index = self._lane.store(source, path, wire_dtype, shape)
            return TensorNode(index) if is_row_major else LayoutNode(index, tensors.name_of(value.dtype), shape, stride)
        if not source.is_contiguous():
            source = source.view(tensors.carrier_of(source.dtype))
        itemsize = value.dtype.itemsize
        entry_shape = shape if itemsize == 1 else (*shape, itemsize)
        index = self._lane.store(source, path, "U8", entry_shape)
        return LayoutNode(index, tensors.name_of(value.dtype), shape, stride)

    def _view(self, value: torch.Tensor, base: tensors.Base) -> Node:
        tensor, name = base
        node = self._plain_tensor(tensor, name)
        assert isinstance(node, TensorNode), "a base is row-major, and has a dtype of safetensors"
        offset = (value.data_ptr() - tensor.data_ptr()) // value.dtype.itemsize
        return nodes.ViewNode(node.index, tuple(value.shape), value.stride(), offset)

    def _quantized(self, value: torch.Tensor, path: str) -> Node:
        if value.dtype not in tensors.QUANTIZED:
            raise UnsupportedLeafError(
                f"expected a tensor with elements of whole bytes, got dtype {value.dtype}", path=path
            )
        if value.qscheme() not in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            raise UnsupportedLeafError(
                f"expected a tensor quantized per tensor, got {value.qscheme()}; store its integers and scales instead",
                path=path,
            )
        values = self._plain_tensor(value.int_repr(), path)
        return nodes.QuantizedNode(
            values, tensors.name_of(value.dtype), python_values.float_bits(value.q_scale()), value.q_zero_point()
        )


class _StructureFlattener(_Flattener):
    """A flattener that ignores tensors, which may still lack memory or a shape."""

    def encode(self, value: object, path: str) -> Node:
        return None if isinstance(value, torch.Tensor) else super().encode(value, path)
