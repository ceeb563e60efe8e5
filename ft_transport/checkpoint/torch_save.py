"""Writes the format of ``torch.save`` without torch, whose import takes seconds and 190 MB in each writer process.

A file of ``torch.save`` is a ZIP archive without compression (APPNOTE.TXT of PKWARE; in torch,
caffe2/serialize/inline_container.cc), whose contents begin at multiples of 64 bytes. ``data.pkl`` is a pickle, and
``data/0`` has the bytes of its tensor. Here these bytes come last, so that everything before them depends only on dtype
and shape. Their CRC-32 is 0: torch does not read it, and computing it slows torch down to 0.3 GB/s, on a disk that
accepts 1.7 GB/s. The digests in ``manifest.json`` cover every byte.

torch's pickles name its classes and functions. A `Name` stands for one, so this module needs no import to write it.
"""

from __future__ import annotations

import itertools
import math
import pickle  # noqa: TID251 # the format of torch.save; what we read ourselves is never unpickled
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

from ft_transport.errors import CheckpointError
from ft_transport.wire.slices import row_major_strides

_MAX_ENVELOPES: Final = 1 << 16
_PROTOCOL: Final = 2
_ALIGN_BYTES: Final = 64
_TYPED_STORAGES: Final = {
    "float64": "DoubleStorage", "float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage",
    "int64": "LongStorage", "int32": "IntStorage", "int16": "ShortStorage", "int8": "CharStorage",
    "uint8": "ByteStorage", "bool": "BoolStorage", "complex128": "ComplexDoubleStorage",
    "complex64": "ComplexFloatStorage",
}  # fmt: skip
"""Classes of torch/storage.py. The storage of any other dtype is untyped."""

# Signatures and fields of APPNOTE.TXT.
_LOCAL_HEADER: Final = struct.Struct("<4s5H3I2H")
_CENTRAL_HEADER: Final = struct.Struct("<4s6H3I5H2I")
_END: Final = struct.Struct("<4s4H2IH")
_END_64: Final = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64: Final = struct.Struct("<4sIQI")
_VERSION_64: Final = 45
_UTF8: Final = 0x800
_MAX_32: Final = 0xFFFFFFFF
_PADDING: Final = b"FB"
"""Identifies the padding among the extra fields, as in torch's files."""


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function of another module in a pickle."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """The result of a call in a pickle."""

    function: Name
    arguments: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Instance:
    """An object in a pickle: its class, and its ``__dict__`` or the result of its ``__getstate__``."""

    type: Name
    state: object


@dataclass(frozen=True, slots=True)
class Pairs:
    """A dict in a pickle, whose keys need not be hashable here."""

    pairs: Sequence[tuple[object, object]]


@dataclass(frozen=True, slots=True)
class Persistent:
    """An object in a pickle that the reader finds by this identifier."""

    identifier: object


class _Record(NamedTuple):
    name: str
    checksum: int
    num_bytes: int
    offset: int


def pickled(value: object) -> bytes:
    """Return a pickle of text, integers, bool, ``None``, tuples, lists, dicts and the classes of this module.

    A pickle of torch's own classes has the same instructions (``pickletools`` of Python describes them).
    """
    parts = [b"\x80", bytes([_PROTOCOL])]
    _put(value, parts, {})
    parts.append(b".")
    return b"".join(parts)


_Memo: TypeAlias = dict[object, bytes]
"""Instructions that repeat values which the pickle has already."""


def _put(value: Any, parts: list[bytes], memo: _Memo) -> None:
    _WRITERS[type(value)](value, parts, memo)


def _remember(value: object, parts: list[bytes], memo: _Memo) -> None:
    number = len(memo).to_bytes(4, "little")
    parts.append(b"r" + number)
    memo[value] = b"j" + number


def _put_int(value: int, parts: list[bytes], _memo: _Memo) -> None:
    if 0 <= value < 1 << 8:
        parts.append(b"K" + value.to_bytes(1, "little"))
    elif -1 << 31 <= value < 1 << 31:
        parts.append(b"J" + value.to_bytes(4, "little", signed=True))
    else:
        encoded = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        parts.append(b"\x8a" + bytes([len(encoded)]) + encoded)


def _put_str(value: str, parts: list[bytes], memo: _Memo) -> None:
    known = memo.get(value)
    if known is not None:
        parts.append(known)
        return
    encoded = value.encode("utf-8", "surrogatepass")
    parts.append(b"X" + len(encoded).to_bytes(4, "little") + encoded)
    _remember(value, parts, memo)


def _put_all(values: Iterable[Any], end: bytes, parts: list[bytes], memo: _Memo) -> None:
    parts.append(b"(")
    for value in values:
        _WRITERS[type(value)](value, parts, memo)
    parts.append(end)


def _put_list(value: list[object], parts: list[bytes], memo: _Memo) -> None:
    parts.append(b"]")
    _put_all(value, b"e", parts, memo)


def _put_pairs(value: Iterable[tuple[object, object]], parts: list[bytes], memo: _Memo) -> None:
    parts.append(b"}")
    _put_all(itertools.chain.from_iterable(value), b"u", parts, memo)


def _put_name(value: Name, parts: list[bytes], memo: _Memo) -> None:
    known = memo.get(value)
    if known is not None:
        parts.append(known)
        return
    if not all(part.isidentifier() for part in (*value.module.split("."), value.name)):
        # A name from a forged manifest could contain further instructions.
        raise CheckpointError(f"expected the name of a class or function, got {value.module}.{value.name}"[:200])
    parts.append(f"c{value.module}\n{value.name}\n".encode())
    _remember(value, parts, memo)


def _put_call(value: Call, parts: list[bytes], memo: _Memo) -> None:
    _put_name(value.function, parts, memo)
    _put_all(value.arguments, b"tR", parts, memo)


def _put_instance(value: Instance, parts: list[bytes], memo: _Memo) -> None:
    _put_name(value.type, parts, memo)
    parts.append(b")\x81")
    if value.state is not None:
        _put(value.state, parts, memo)
        parts.append(b"b")


def _put_persistent(value: Persistent, parts: list[bytes], memo: _Memo) -> None:
    _put(value.identifier, parts, memo)
    parts.append(b"Q")


_WRITERS: Final[dict[type[Any], Callable[[Any, list[bytes], _Memo], None]]] = {
    type(None): lambda _value, parts, _memo: parts.append(b"N"),
    bool: lambda value, parts, _memo: parts.append(b"\x88" if value else b"\x89"),
    int: _put_int,
    str: _put_str,
    tuple: lambda value, parts, memo: _put_all(value, b"t", parts, memo),
    list: _put_list,
    dict: lambda value, parts, memo: _put_pairs(value.items(), parts, memo),
    Pairs: lambda value, parts, memo: _put_pairs(value.pairs, parts, memo),
    Name: _put_name,
    Call: _put_call,
    Instance: _put_instance,
    Persistent: _put_persistent,
}


def saved(value: object) -> bytes:
    """Return the file that ``torch.save`` writes for a value without tensors. DCP passes it to ``torch.load``."""
    before, records = _records(pickle.dumps(value, _PROTOCOL))
    return before + _directory(records, len(before))


@lru_cache(_MAX_ENVELOPES)
def envelope_of(dtype: str, shape: tuple[int, ...], num_bytes: int) -> tuple[bytes, bytes]:
    """Return the bytes that stand before and after the data of a row-major tensor in a file of ``torch.save``.

    Args:
        dtype: torch's name of the dtype.
        shape: Shape of the tensor.
        num_bytes: Length of the data.

    Returns:
        The bytes before the data, whose length is a multiple of 64, and the bytes after it.
    """
    num_elements = math.prod(shape)
    # As torch computes the strides of an empty tensor.
    strides = row_major_strides([max(size, 1) for size in shape], 1)
    typed = _TYPED_STORAGES.get(dtype)
    storage = Name("torch", typed) if typed is not None else Name("torch.storage", "UntypedStorage")
    identifier = ("storage", storage, "0", "cpu", num_elements if typed is not None else num_bytes)
    hooks = Call(Name("collections", "OrderedDict"), ())
    arguments = (Persistent(identifier), 0, shape, strides, False, hooks)
    if typed is not None:
        tensor = Call(Name("torch._utils", "_rebuild_tensor_v2"), arguments)
    else:
        tensor = Call(Name("torch._utils", "_rebuild_tensor_v3"), (*arguments, Name("torch", dtype)))
    before, records = _records(pickled(tensor))
    data = _Record("data/0", 0, num_bytes, len(before))
    before += _local_header(data)
    return before, _directory([*records, data], len(before) + num_bytes)


def _records(data_pickle: bytes) -> tuple[bytes, list[_Record]]:
    """Return the beginning of a file: all records but the data of tensors."""
    contents = {
        "data.pkl": data_pickle,
        ".format_version": b"1",
        ".storage_alignment": str(_ALIGN_BYTES).encode(),
        "byteorder": b"little",
        "version": b"3\n",
    }
    file = b""
    records = []
    for name, content in contents.items():
        record = _Record(name, zlib.crc32(content), len(content), len(file))
        file += _local_header(record) + content
        records.append(record)
    return file, records


def _local_header(record: _Record) -> bytes:
    name = _path(record)
    sizes, extra, version = _sizes(record)
    end = record.offset + _LOCAL_HEADER.size + len(name) + len(extra) + len(_PADDING) + 2
    num_padding = -end % _ALIGN_BYTES
    extra += _PADDING + num_padding.to_bytes(2, "little") + b"Z" * num_padding
    return (
        _LOCAL_HEADER.pack(b"PK\3\4", version, _UTF8, 0, 0, 0, record.checksum, *sizes, len(name), len(extra))
        + name
        + extra
    )


def _directory(records: Sequence[_Record], offset: int) -> bytes:
    """Return the end of a file whose contents end at ``offset``."""
    directory = b""
    for record in records:
        name = _path(record)
        sizes, extra, version = _sizes(record)
        directory += (
            _CENTRAL_HEADER.pack(
                b"PK\1\2", version, version, _UTF8, 0, 0, 0, record.checksum, *sizes, len(name), len(extra), 0, 0, 0, 0,
                record.offset,
            )
            + name
            + extra
        )  # fmt: skip
    count, length = len(records), len(directory)
    end = b""
    if offset >= _MAX_32:
        at = offset + length
        version = _VERSION_64
        end += _END_64.pack(b"PK\6\6", _END_64.size - 12, version, version, 0, 0, count, count, length, offset)
        end += _LOCATOR_64.pack(b"PK\6\7", 0, at, 1)
    end += _END.pack(b"PK\5\6", 0, 0, count, count, length, min(offset, _MAX_32), 0)
    return directory + end


def _path(record: _Record) -> bytes:
    return f"archive/{record.name}".encode()


def _sizes(record: _Record) -> tuple[tuple[int, int], bytes, int]:
    """Return both sizes for a header, the extra field with sizes above 32 bits, and the version that a reader needs."""
    if record.num_bytes < _MAX_32:
        return (record.num_bytes, record.num_bytes), b"", 0
    return (_MAX_32, _MAX_32), struct.pack("<2H2Q", 1, 16, record.num_bytes, record.num_bytes), _VERSION_64
