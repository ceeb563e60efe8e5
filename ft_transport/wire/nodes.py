"""The tree of a state as JSON values.

A state is any nesting of containers and leaves. JSON scalars represent themselves; other values are tagged arrays,
whose first element is the tag. The tree has no tensor data: a node refers to an entry of the tensor table
(``wire.manifest``) by index. Tags are part of the format: add new ones, never change a meaning.

The length of the text bounds work and memory of `encode_tree` and `decode_tree`. Decoding JSON takes linear time. Two
other costs are bounded before decoding: the number of arrays, since an array of two characters takes a hundred bytes of
memory, and their depth, if Python itself does not bound it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta, Struct

from ft_transport.errors import ManifestError
from ft_transport.runtime.decoding import collector_paused

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


MAX_ARRAYS: Final = 1 << 21
"""Maximum number of arrays in a tree. A container or tensor takes one or two, so a million of them are allowed."""

CheckTime: TypeAlias = Callable[[], None]
"""Called repeatedly by long loops; raises `DeadlineExceededError` after the deadline."""

STRIDE: Final = 1 << 10
"""Steps of a loop between two checks of the time."""

_MAX_TEXT_DEPTH: Final = 4 * MAX_DEPTH
"""Maximum depth of arrays: a container takes two levels, and a leaf in it a few more."""
_USUAL_RECURSION_LIMIT: Final = 10_000
"""Up to this limit, Python stops a decoder's recursion before the thread's stack overflows."""
_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)

_PIECE: Final = re.compile(rb'(?:[^"]{1,256}|"[^"\\]*(?:\\.[^"\\]*)*"){1,256}', re.DOTALL)
"""Several whole strings, and the text between them."""

_decoder: Final = msgspec.json.Decoder(Node)
_encoder: Final = msgspec.json.Encoder()


def unbounded() -> None:
    """A `CheckTime` without a deadline."""


def encode_tree(tree: Node, *, step: int) -> str:
    """Encode a tree as text.

    Args:
        tree: The tree.
        step: The committed step, for errors.

    Raises:
        ManifestError: The tree has more containers and tensors than a receiver accepts.
    """
    encoded = _encoder.encode(tree)
    if (num_arrays := _num_arrays(encoded)) > MAX_ARRAYS:
        raise ManifestError(
            f"expected a state of at most {MAX_ARRAYS} nested containers, tensors and other leaves that JSON does not "
            f"have, got {num_arrays}; put what belongs together into tensors",
            step=step,
        )
    return encoded.decode()


def decode_tree(text: str, *, peer: str | None, check_time: CheckTime = unbounded) -> Node:
    """Decode a tree. The input is untrusted.

    Args:
        text: The received text.
        peer: The sender, for errors.
        check_time: Called repeatedly.

    Raises:
        ManifestError: Too many arrays, or too deep nesting.
        DeadlineExceededError: ``check_time`` raised it.
        msgspec.MsgspecError: The text is not a tree.
        RecursionError: The nesting exceeds Python's recursion limit.
    """
    encoded = text.encode()
    if (num_arrays := _num_arrays(encoded, check_time)) > MAX_ARRAYS:
        raise ManifestError(f"expected a tree of at most {MAX_ARRAYS} arrays, got {num_arrays}", peer=peer)
    if sys.getrecursionlimit() > _USUAL_RECURSION_LIMIT and (depth := _depth(encoded, check_time)) > _MAX_TEXT_DEPTH:
        raise ManifestError(
            f"expected a tree of at most {_MAX_TEXT_DEPTH} arrays in each other, got {depth}", peer=peer
        )
    with collector_paused():
        tree: Node = _decoder.decode(encoded)
        return tree


def _num_arrays(encoded: bytes, check_time: CheckTime = unbounded) -> int:
    """Return the number of arrays; up to `MAX_ARRAYS` a fast count, which includes brackets inside strings."""
    num_brackets = encoded.count(b"[")
    if num_brackets <= MAX_ARRAYS:
        return num_brackets
    return sum(piece.count(b"[") for piece in _without_strings(encoded, check_time))


def _depth(encoded: bytes, check_time: CheckTime) -> int:
    depth = deepest = 0
    for piece in _without_strings(encoded, check_time):
        characters = np.frombuffer(piece, np.uint8)
        steps = (characters == ord("[")).astype(np.int32) - (characters == ord("]"))
        depths = steps.cumsum(dtype=np.int32)
        deepest = max(deepest, depth + int(depths.max(initial=0)))
        depth += int(steps.sum())
    return deepest


def _without_strings(encoded: bytes, check_time: CheckTime) -> Iterator[bytes]:
    """Yield the text outside strings in pieces, which bounds memory and allows checks of the time."""
    for piece in _PIECE.finditer(encoded):
        check_time()
        yield _STRING.sub(b"", piece.group())
