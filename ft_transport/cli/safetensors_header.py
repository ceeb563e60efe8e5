"""The header of a safetensors file, which a snapshot that a peer serves is too.

Eight bytes of length, little end first, and so many of JSON: https://huggingface.co/docs/safetensors (Format).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Annotated, Final, TypeAlias

import msgspec

from ft_transport.cli.contents import MAX_DIMENSIONS, Contents, StoredPart, TensorEntry, TensorPiece, UnreadableError
from ft_transport.runtime.decode_errors import DECODE_ERRORS

_LENGTH: Final = struct.Struct("<Q")
_MAX_BYTES: Final = 256 << 20
_METADATA: Final = "__metadata__"
_STEP: Final = "ft_transport.step"
_DTYPES: Final = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip

Read = Callable[[int, int], bytes]
"""Bytes from a position on, so many."""


_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""A product of some millions of numbers takes hours, and one of many digits is no float."""


class _Entry(msgspec.Struct, frozen=True, gc=False):
    dtype: str
    shape: Annotated[tuple[_Number, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[_Number, _Number]


_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entries: Final = msgspec.json.Decoder(_Entry)
_metadata: Final = msgspec.json.Decoder(dict[str, str])


def read_header(read: Read, *, kind: str, name: str) -> Contents:
    """What a file contains by its header.

    Args:
        read: Reads the file.
        kind: What it is, in words.
        name: Of the file, for errors.

    Raises:
        UnreadableError: It is no safetensors file.
    """
    begin = read(0, _LENGTH.size)
    num_bytes = _LENGTH.unpack(begin)[0] if len(begin) == _LENGTH.size else 0
    if not 2 <= num_bytes <= _MAX_BYTES:
        raise UnreadableError(f"expected a safetensors file, {name} begins with no length of a header")
    try:
        table = _decoder.decode(read(_LENGTH.size, num_bytes))
        metadata = table.pop(_METADATA, None)
        told = _metadata.decode(metadata) if metadata is not None else {}
        entries = {path: _entries.decode(entry) for path, entry in table.items()}
    except DECODE_ERRORS as error:
        raise UnreadableError(f"expected the header of a safetensors file in {name}: {error}") from error
    step = told.get(_STEP, "")
    is_number = step.isascii() and step.isdigit() and len(step) <= 18
    return Contents(
        kind=kind,
        tensors=tuple(_tensor(path, entry) for path, entry in entries.items()),
        values=dict.fromkeys(told),
        step=int(step) if is_number else None,
        data_start=_LENGTH.size + num_bytes,
        metadata=told,
    )


def _tensor(path: str, entry: _Entry) -> TensorEntry:
    start, end = entry.data_offsets
    num_bytes = max(0, end - start)
    stored = StoredPart("", start, end - start)
    return TensorEntry(
        path=path,
        dtype=_DTYPES.get(entry.dtype, entry.dtype),
        shape=entry.shape,
        num_bytes=num_bytes,
        pieces=(TensorPiece((0,) * len(entry.shape), entry.shape, stored),),
    )
