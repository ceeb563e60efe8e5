"""The tree of a state, which encodes nested containers and their leaves as JSON.

JSON scalars represent themselves. Every other value is an array whose first element is a tag. The tree has no tensor
data: a node refers by index to an entry of the tensor table (``wire.manifest``). Tags are part of the format: add new
tags, but never change the meaning of a tag.

Trees come from untrusted peers. The length of the text bounds the time of `decode_tree`. Before decoding, two limits
bound the memory and the recursion: the number of arrays, because an array of two characters takes a hundred bytes of
memory, and the depth of arrays, if Python itself does not limit it.
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
"""Maximum number of dimensions of a tensor from a peer, as in torch."""

MAX_DEPTH: Final = 100
"""Maximum nesting of containers. A level takes up to seven stack frames of the thousand that Python allows."""

MAX_BIG_INT_DIGITS: Final = 1 << 14
"""Maximum number of hexadecimal digits of an int: 65,536 bits. Printing a longer int would take too long."""

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]
FloatBits: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
"""The bits of an IEEE 754 float64, big-endian, as hexadecimal digits."""
Dimensions: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=MAX_TENSOR_RANK)]


class _Node(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base class of all tagged nodes, which are arrays ``[tag, field, …]``.

    The garbage collector does not track nodes, because they form no cycles. Tens of thousands of tracked objects would
    start a collection of the whole process, which was measured at 100 ms.
    """


class BigIntNode(_Node, frozen=True, tag="i"):
    """An int outside the 64-bit range, as signed hexadecimal digits."""

    digits: Annotated[str, Meta(pattern="^-?[0-9a-f]+$")]


class FloatNode(_Node, frozen=True, tag="f"):
    """A float that JSON cannot represent (inf or nan), as IEEE 754 bits, which include the payload of a nan."""

    bits: FloatBits


class ComplexNode(_Node, frozen=True, tag="c"):
    """A Python complex number, as the bits of real and imaginary part."""

    real_bits: FloatBits
    imag_bits: FloatBits


class StringNode(_Node, frozen=True, tag="s"):
    """A str that UTF-8 cannot represent because of lone surrogates, encoded with ``surrogatepass``."""

    data: bytes


class BytesNode(_Node, frozen=True, tag="b"):
    """A short bytes or bytearray (``mutable``) object, whose content is part of the tree."""

    data: bytes
    mutable: bool = False


class StoredBytesNode(_Node, frozen=True, tag="B"):
    """A long bytes or bytearray (``mutable``) object: the content is uint8 entry ``index`` of the tensor table."""

    index: Count
    mutable: bool = False


class SequenceNode(_Node, frozen=True, tag="l"):
    """A list, tuple, set, frozenset or torch.Size; ``items`` in iteration order."""

    kind: Literal["list", "tuple", "set", "frozenset", "size"]
    items: list[Node]


class NamedTupleNode(_Node, frozen=True, tag="n"):
    """A named tuple. The receiver uses its own class with this name, and only if that class has the same fields."""

    module: str
    qualname: str
    fields: list[str]
    items: list[Node]


class MappingNode(_Node, frozen=True, tag="d"):
    """A dict, OrderedDict or Counter; ``items`` alternates keys and values, in order."""

    kind: Literal["dict", "ordered", "counter"]
    items: list[Node]


class DefaultDictNode(_Node, frozen=True, tag="dd"):
    """A defaultdict whose factory is ``None`` or a builtin type; ``items`` alternates keys and values, in order."""

    factory: Literal["none", "list", "dict", "set", "int", "float", "str", "bool", "tuple"]
    items: list[Node]


class DequeNode(_Node, frozen=True, tag="q"):
    """A deque and its maximum length, if it has one."""

    maxlen: Count | None
    items: list[Node]


class ConstantNode(_Node, frozen=True, tag="k"):
    """A named constant of torch, such as ``torch.float32`` (``kind="dtype"``)."""

    kind: Literal["dtype", "device", "layout", "memory_format"]
    name: str


class NumpyArrayNode(_Node, frozen=True, tag="na"):
    """A numpy array. Entry ``index`` of the tensor table has its bytes in C order; ``dtype`` is numpy's type string."""

    index: Count
    dtype: str
    shape: Dimensions


class NumpyScalarNode(_Node, frozen=True, tag="ns"):
    """A numpy scalar, as numpy's type string and the bytes of the value."""

    dtype: str
    data: bytes


class CustomNode(_Node, frozen=True, tag="x"):
    """A value whose type has an encoding that the user registered under ``name``; ``value`` is the encoded value."""

    name: str
    value: Node


class TensorNode(_Node, frozen=True, tag="T"):
    """A contiguous tensor with dtype and shape of entry ``index`` of the tensor table.

    Several nodes with the same index are the same tensor (tied tensors).
    """

    index: Count


class LayoutNode(_Node, frozen=True, tag="L"):
    """A tensor whose dtype or strides a safetensors entry cannot express.

    Entry ``index`` has the elements in row-major order of ``shape``. The restored tensor has the torch dtype ``dtype``
    and the strides ``stride``, in elements; a stride of 0 is that of an expanded dimension.
    """

    index: Count
    dtype: str
    shape: Dimensions
    stride: Dimensions


class ViewNode(_Node, frozen=True, tag="V"):
    """A view of the memory of another tensor, entry ``index``; ``offset`` and ``stride`` are in elements."""

    index: Count
    shape: Dimensions
    stride: Dimensions
    offset: Count


class QuantizedNode(_Node, frozen=True, tag="Q"):
    """A quantized tensor with one scale: the tensor of its integers, and the scale as bits of a float64."""

    values: Node
    dtype: str
    scale_bits: FloatBits
    zero_point: int


class LeafNode(_Node, frozen=True, tag="g"):
    """A tensor that is a Parameter, or a leaf of autograd that requires a gradient."""

    value: Node
    parameter: bool
    requires_grad: bool


class DTensorNode(_Node, frozen=True, tag="D"):
    """The local shard of a DTensor; ``layout`` is an index into the layouts of the manifest (``wire.layouts``)."""

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
"""An int of 64 bits, as JSON readers accept it. Larger ints are a `BigIntNode`."""
Node: TypeAlias = bool | SmallInt | float | str | TaggedNode | None


MAX_ARRAYS: Final = 1 << 21
"""Maximum number of arrays in a tree. A container or tensor takes one or two arrays, so a tree may have a million."""

CheckTime: TypeAlias = Callable[[], None]
"""Called repeatedly by long loops; raises `DeadlineExceededError` after the deadline."""

STRIDE: Final = 1 << 10
"""Number of iterations of a long loop between two calls of `CheckTime`."""

_MAX_TEXT_DEPTH: Final = 4 * MAX_DEPTH
"""Maximum nesting of arrays: a container takes two levels, and a leaf in it a few more."""
_USUAL_RECURSION_LIMIT: Final = 10_000
"""Up to this limit, Python stops a decoder's recursion before the thread's stack overflows."""
_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)

_PIECE: Final = re.compile(rb'(?:[^"]{1,256}|"[^"\\]*(?:\\.[^"\\]*)*"){1,256}', re.DOTALL)
"""Matches a piece of JSON text that consists of complete strings and the text between them."""

_decoder: Final = msgspec.json.Decoder(Node)
_encoder: Final = msgspec.json.Encoder()


def unbounded() -> None:
    """Do nothing: a `CheckTime` without a deadline."""


def encode_tree(tree: Node, *, step: int) -> str:
    """Encode a tree as JSON text.

    Args:
        tree: The tree.
        step: The committed step of the state, for errors.

    Raises:
        ManifestError: The tree has more containers and tensors than a receiver accepts.
    """
    encoded = _encoder.encode(tree)
    if (num_arrays := _num_arrays(encoded)) > MAX_ARRAYS:
        raise ManifestError(
            f"expected a state of at most {MAX_ARRAYS} containers, tensors and leaves that JSON cannot represent, got "
            f"{num_arrays}; combine values into tensors",
            step=step,
        )
    return encoded.decode()


def decode_tree(text: str, *, peer: str | None, check_time: CheckTime = unbounded) -> Node:
    """Decode the JSON text of a tree. The input is untrusted.

    Args:
        text: The received text.
        peer: Name of the sender, for errors.
        check_time: Called repeatedly; raises an error after a deadline.

    Raises:
        ManifestError: The text has too many or too deeply nested arrays.
        DeadlineExceededError: ``check_time`` raised the error.
        msgspec.MsgspecError: The text is not a tree.
        RecursionError: The nesting exceeds Python's recursion limit.
    """
    encoded = text.encode()
    if (num_arrays := _num_arrays(encoded, check_time)) > MAX_ARRAYS:
        raise ManifestError(f"expected a tree of at most {MAX_ARRAYS} arrays, got {num_arrays}", peer=peer)
    if sys.getrecursionlimit() > _USUAL_RECURSION_LIMIT and (depth := _depth(encoded, check_time)) > _MAX_TEXT_DEPTH:
        raise ManifestError(f"expected a tree of at most {_MAX_TEXT_DEPTH} nested arrays, got {depth}", peer=peer)
    with collector_paused():
        tree: Node = _decoder.decode(encoded)
        return tree


def _num_arrays(encoded: bytes, check_time: CheckTime = unbounded) -> int:
    """Return the number of arrays. A result up to `MAX_ARRAYS` may be too high: it may count brackets in strings."""
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
    """Yield the JSON text without its strings, piece by piece to limit the memory; check the time before each piece."""
    for piece in _PIECE.finditer(encoded):
        check_time()
        yield _STRING.sub(b"", piece.group())
