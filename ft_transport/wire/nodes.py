"""The tree of a state as JSON values.

A state is any nesting of containers and leaves. JSON scalars represent themselves; other values are tagged arrays,
whose first element is the tag. The tree has no tensor data: a node refers to an entry of the tensor table
(``wire.manifest``) by index. Tags are part of the format: add new ones, never change a meaning.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta, Struct

MAX_TENSOR_RANK = 64
"""Highest number of dimensions accepted from a peer; torch itself stops at 64."""

MAX_DEPTH: Final = 100
"""Maximum nesting of containers: a level takes up to seven frames of Python's default thousand."""

MAX_BIG_INT_DIGITS: Final = 1 << 14
"""Maximum number of hexadecimal digits of an int: 65,536 bits. Conversion to decimal takes quadratic time."""

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]
FloatBits: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
"""The bits of an IEEE 754 float64, big-endian, as hexadecimal digits."""
Dimensions: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=MAX_TENSOR_RANK)]


class _Node(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of all tagged nodes: an array ``[tag, field, …]``.

    A tree has no cycles, so the garbage collector need not look at it: a collection, which tens of thousands of tracked
    objects set off, walks the whole process and was measured at 100 ms.
    """


class BigIntNode(_Node, frozen=True, tag="i"):
    """An int outside the 64-bit range, as signed hexadecimal digits."""

    digits: Annotated[str, Meta(pattern="^-?[0-9a-f]+$")]


class FloatNode(_Node, frozen=True, tag="f"):
    """A float that JSON has no number for (inf, nan): its IEEE 754 bits, so that a nan keeps its payload."""

    bits: FloatBits


class ComplexNode(_Node, frozen=True, tag="c"):
    """A Python complex number as the bits of its two parts."""

    real_bits: FloatBits
    imag_bits: FloatBits


class StringNode(_Node, frozen=True, tag="s"):
    """A str that UTF-8 cannot carry (lone surrogates), encoded with ``surrogatepass``."""

    data: bytes


class BytesNode(_Node, frozen=True, tag="b"):
    """Short bytes, inline."""

    data: bytes
    mutable: bool = False


class StoredBytesNode(_Node, frozen=True, tag="B"):
    """Long bytes: the uint8 entry ``index`` of the tensor table."""

    index: Count
    mutable: bool = False


class SequenceNode(_Node, frozen=True, tag="l"):
    """A list, tuple, set, frozenset or torch.Size; ``items`` in iteration order."""

    kind: Literal["list", "tuple", "set", "frozenset", "size"]
    items: list[Node]


class NamedTupleNode(_Node, frozen=True, tag="n"):
    """A named tuple. The receiver uses its own class of that name, and only if it has the same fields."""

    module: str
    qualname: str
    fields: list[str]
    items: list[Node]


class MappingNode(_Node, frozen=True, tag="d"):
    """A dict, OrderedDict or Counter; ``items`` alternates keys and values, in order."""

    kind: Literal["dict", "ordered", "counter"]
    items: list[Node]


class DefaultDictNode(_Node, frozen=True, tag="dd"):
    """A defaultdict whose factory is one of a fixed set of builtins; ``items`` as in ``MappingNode``."""

    factory: Literal["none", "list", "dict", "set", "int", "float", "str", "bool", "tuple"]
    items: list[Node]


class DequeNode(_Node, frozen=True, tag="q"):
    """A deque with its bound, if it has one."""

    maxlen: Count | None
    items: list[Node]


class ConstantNode(_Node, frozen=True, tag="k"):
    """A named constant of torch: ``kind`` says which family, ``name`` which member."""

    kind: Literal["dtype", "device", "layout", "memory_format"]
    name: str


class NumpyArrayNode(_Node, frozen=True, tag="na"):
    """A numpy array: entry ``index`` holds its bytes in C order; ``dtype`` is numpy's type string."""

    index: Count
    dtype: str
    shape: Dimensions


class NumpyScalarNode(_Node, frozen=True, tag="ns"):
    """A numpy scalar: type string and bytes."""

    dtype: str
    data: bytes


class CustomNode(_Node, frozen=True, tag="x"):
    """A value of a type that the user registered an encoding for, under ``name``."""

    name: str
    value: Node


class TensorNode(_Node, frozen=True, tag="T"):
    """A tensor that is entry ``index`` as it stands: row-major, of the entry's own dtype and shape.

    Two nodes with one index are one tensor seen twice (a tie).
    """

    index: Count


class LayoutNode(_Node, frozen=True, tag="L"):
    """A tensor whose dtype or memory layout the entry cannot say.

    The entry holds the elements in row-major order of ``shape``; the restored tensor has ``stride`` (elements; a zero
    repeats an expanded dimension) and the torch dtype ``dtype``.
    """

    index: Count
    dtype: str
    shape: Dimensions
    stride: Dimensions


class ViewNode(_Node, frozen=True, tag="V"):
    """A view into another tensor's memory: ``offset`` and ``stride`` count elements of entry ``index``."""

    index: Count
    shape: Dimensions
    stride: Dimensions
    offset: Count


class QuantizedNode(_Node, frozen=True, tag="Q"):
    """A per-tensor quantized tensor: ``values`` its integers, its scale as the bits of a float64."""

    values: Node
    dtype: str
    scale_bits: FloatBits
    zero_point: int


class LeafNode(_Node, frozen=True, tag="g"):
    """A tensor that takes part in autograd: a Parameter, or a leaf that requires grad."""

    value: Node
    parameter: bool
    requires_grad: bool


class DTensorNode(_Node, frozen=True, tag="D"):
    """The local shard of a DTensor; ``layout`` is its index in the manifest's table (``wire.layouts``)."""

    local: Node
    layout: Count


TaggedNode: TypeAlias = (
    BigIntNode
    | FloatNode
    | ComplexNode
    | StringNode
    | BytesNode
    | StoredBytesNode
    | SequenceNode
    | NamedTupleNode
    | MappingNode
    | DefaultDictNode
    | DequeNode
    | ConstantNode
    | NumpyArrayNode
    | NumpyScalarNode
    | CustomNode
    | TensorNode
    | LayoutNode
    | ViewNode
    | QuantizedNode
    | LeafNode
    | DTensorNode
)
SmallInt: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""An int as JSON's readers take it, of 64 bits; any other is a `BigIntNode`."""
Node: TypeAlias = bool | SmallInt | float | str | TaggedNode | None
