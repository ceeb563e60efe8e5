"""Encodes and decodes values of Python and numpy whose nodes contain the whole value, without torch."""

from __future__ import annotations

import re
import struct
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from typing_extensions import TypeIs

from ft_transport.errors import ManifestError, UnsupportedLeafError
from ft_transport.wire.nodes import (
    MAX_BIG_INT_DIGITS,
    BigIntNode,
    BytesNode,
    ComplexNode,
    FloatNode,
    Node,
    NumpyScalarNode,
    StringNode,
)

_JSON_INT_LIMIT: Final = 2**63
_MAX_SHOWN_PATH: Final = 200

DEFAULT_FACTORIES: Final[dict[str, Callable[[], object] | None]] = {
    "none": None, "list": list, "dict": dict, "set": set, "int": int, "float": float, "str": str, "bool": bool,
    "tuple": tuple,
}  # fmt: skip
_NUMPY_DTYPE: Final = re.compile(r"[|<>](b1|[iufcSUV][1-9][0-9]{0,9}|[mM]8(\[[0-9]{0,9}[A-Za-z]{1,7}\])?)")
"""The type strings of numpy dtypes that a peer may send. ``numpy.dtype`` itself accepts many more strings."""


def is_small_int(value: object) -> TypeIs[int]:
    """Return whether the value is an int of at most 64 bits, which the tree contains as it is."""
    return type(value) is int and -_JSON_INT_LIMIT <= value < _JSON_INT_LIMIT


def encode_int(value: int, path: str) -> Node:
    """Encode an int.

    Raises:
        UnsupportedLeafError: The int has more than `MAX_BIG_INT_DIGITS` hexadecimal digits.
    """
    if is_small_int(value):
        return value
    if value.bit_length() > 4 * MAX_BIG_INT_DIGITS:
        raise UnsupportedLeafError(
            f"expected an int of at most {4 * MAX_BIG_INT_DIGITS} bits, got one of {value.bit_length()}; put it into "
            "the state as bytes (int.to_bytes)",
            path=path[:_MAX_SHOWN_PATH],
        )
    return BigIntNode(f"{value:x}")


def encode_float(value: float) -> Node:
    """Encode a float bit for bit; a nan or an infinity becomes a node with its bits."""
    return value if value - value == 0.0 else FloatNode(float_bits(value))


def float_bits(value: float) -> str:
    """Return the bits of a float64 as 16 hexadecimal digits."""
    return struct.pack(">d", value).hex()


def float_from_bits(bits: str) -> float:
    """Return the float64 with these bits."""
    value: float = struct.unpack(">d", bytes.fromhex(bits))[0]
    return value


def encode_complex(value: complex) -> Node:
    """Encode a complex number."""
    return ComplexNode(float_bits(value.real), float_bits(value.imag))


def encode_str(value: str) -> Node:
    """Encode a str; one with lone surrogates becomes a node with its bytes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return StringNode(value.encode("utf-8", "surrogatepass"))
    return value


def encode_numpy_scalar(value: np.generic[Any]) -> Node:
    """Encode a numpy scalar of a fixed-size dtype without objects or fields."""
    return NumpyScalarNode(value.dtype.str, value.tobytes())


def numpy_values(text: str, data: bytes | bytearray) -> np.ndarray[Any, Any]:
    """Return a one-dimensional numpy array on the memory of ``data``; ``text`` is the type string of its dtype.

    Raises:
        ManifestError: The dtype is unknown or has pointers or records, or the bytes are not values of this dtype.
    """
    if _NUMPY_DTYPE.fullmatch(text) is None:
        raise ManifestError(f"expected the type string of a numpy dtype of plain values, got {text[:64]!r}")
    try:
        dtype = np.dtype(text)
    except (TypeError, ValueError, OverflowError) as error:
        raise ManifestError(f"expected a numpy type string, got {text[:64]!r}") from error
    if len(data) % dtype.itemsize:
        raise ManifestError(f"expected a multiple of {dtype.itemsize} bytes for numpy {dtype}, got {len(data)} bytes")
    if dtype.kind == "U" and data:
        # numpy does not check code points, and Python crashes on invalid ones.
        code_points = np.frombuffer(data, dtype=np.dtype(f"{text[0]}u4"))
        if int(code_points.max()) > sys.maxunicode:
            raise ManifestError(f"expected valid characters in a numpy {dtype}, got {int(code_points.max()):#x}")
    return np.frombuffer(data, dtype=dtype)


def default_factory_name(value: defaultdict[Any, object], path: str) -> str:
    """Return the name of a defaultdict's factory.

    Raises:
        UnsupportedLeafError: The factory is not in `DEFAULT_FACTORIES`.
    """
    name = next((name for name, factory in DEFAULT_FACTORIES.items() if factory is value.default_factory), None)
    if name is None:
        raise UnsupportedLeafError(
            f"expected a defaultdict with a builtin type as factory, got {value.default_factory!r}", path=path
        )
    return name


def numpy_bytes(value: np.ndarray[Any, Any], path: str) -> bytearray:
    """Return a copy of an array's bytes in C order.

    Raises:
        UnsupportedLeafError: The values are not plain bytes, but objects or records, for example.
    """
    if not _is_plain(value.dtype):
        raise UnsupportedLeafError(f"expected a numpy array of plain values, got dtype {value.dtype}", path=path)
    return bytearray(value.tobytes())


def _is_plain(dtype: np.dtype[Any]) -> bool:
    """Return whether values of the dtype are plain bytes, and its type string describes them: no objects or records."""
    has_parts = dtype.hasobject or dtype.fields is not None or dtype.subdtype is not None
    return not has_parts and dtype.isbuiltin != 2 and dtype.itemsize > 0


def is_plain_numpy_scalar(value: np.generic[Any]) -> bool:
    """Return whether dtype and bytes suffice to restore a scalar; false for a text that ends with a zero character."""
    if not _is_plain(value.dtype):
        return False
    match value:
        case np.str_():
            return not value.endswith("\0")
        case np.bytes_():
            return not value.endswith(b"\0")
        case _:
            return True


def decode_simple(node: BigIntNode | FloatNode | ComplexNode | StringNode | BytesNode | NumpyScalarNode) -> object:
    """Decode a leaf whose node contains the whole value."""
    match node:
        case BigIntNode():
            if len(node.digits) > MAX_BIG_INT_DIGITS + 1:
                raise ManifestError(
                    f"expected an int of at most {MAX_BIG_INT_DIGITS} hex digits, got {len(node.digits)}"
                )
            return int(node.digits, 16)
        case FloatNode():
            return float_from_bits(node.bits)
        case ComplexNode():
            return complex(float_from_bits(node.real_bits), float_from_bits(node.imag_bits))
        case StringNode():
            try:
                return node.data.decode("utf-8", "surrogatepass")
            except UnicodeDecodeError as error:
                raise ManifestError(f"expected a str: {error}") from error
        case BytesNode():
            return bytearray(node.data) if node.mutable else node.data
        case NumpyScalarNode():
            values = numpy_values(node.dtype, node.data)
            if len(values) != 1:
                raise ManifestError(f"expected one numpy {values.dtype}, got {len(values)} values")
            return values[0]
