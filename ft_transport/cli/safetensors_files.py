"""Reads the headers of safetensors files, and checks them as the safetensors library does.

A file has the length of the header (8 bytes, little-endian), the header as JSON, and the data:
https://huggingface.co/docs/safetensors (Format). The checks are those of the library's ``tensor.rs``. A snapshot that a
peer serves has the same header.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from ft_transport.cli.contents import (
    ITEM_BITS,
    MAX_DIMENSIONS,
    Contents,
    Read,
    StoredPart,
    TensorEntry,
    TensorPiece,
    UnreadableError,
)
from ft_transport.cli.output import escape
from ft_transport.cli.stored_state import StoredFile, path_in
from ft_transport.runtime.decoding import DECODE_ERRORS

SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"

_LENGTH: Final = struct.Struct("<Q")
_MAX_BYTES: Final = 100_000_000
"""The longest header that the library accepts; the limit for an index too."""
_MAX_COUNT: Final = (1 << 64) - 1
_METADATA: Final = "__metadata__"
_FIELDS: Final = {_METADATA, "dtype", "shape", "data_offsets"}
_STEP: Final = "ft_transport.step"
_SHARDING: Final = "DCP_SHARDING_INFO"
"""Metadata key under which DCP stores the first index of each shard (torch/distributed/checkpoint/_hf_utils.py)."""
_DTYPES: Final = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip

_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A length or position that fits in a signed 64-bit integer."""


class _Entry(msgspec.Struct, frozen=True, gc=False):
    dtype: str
    shape: Annotated[tuple[_Number, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[_Number, _Number]


class _Offsets(msgspec.Struct, frozen=True, gc=False):
    saved_offsets: tuple[_Number, ...]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entries: Final = msgspec.json.Decoder(_Entry)
_metadata: Final = msgspec.json.Decoder(dict[str, str] | None)
_sharding: Final = msgspec.json.Decoder(dict[str, _Offsets])
_index: Final = msgspec.json.Decoder(_Index)


def read_header(read: Read, *, kind: str, name: str, file: str = "") -> Contents:
    """Return the tensors and metadata in the header of a safetensors file.

    Args:
        read: Function that reads bytes of the file.
        kind: Description of the source, for `Contents.kind`.
        name: Name of the file, for error messages.
        file: Name of the file in its directory, for the positions of tensors.

    Raises:
        UnreadableError: The file is not a safetensors file.
    """
    begin = read(0, _LENGTH.size)
    num_bytes = _LENGTH.unpack(begin)[0] if len(begin) == _LENGTH.size else 0
    if num_bytes < 2:
        raise UnreadableError(
            f"expected the length of a header at the beginning of the safetensors file {name}, got none"
        )
    if num_bytes > _MAX_BYTES:
        raise UnreadableError(
            f"expected a safetensors file with a header of at most {_MAX_BYTES} bytes, got a header of {num_bytes} "
            f"bytes in {name}"
        )
    try:
        header = read(_LENGTH.size, num_bytes)
        table = _decoder.decode(header)
        raw = table.pop(_METADATA, None)
        metadata = (_metadata.decode(raw) if raw is not None else None) or {}
        entries = {path: _entries.decode(entry) for path, entry in table.items()}
        json.loads(header.decode(), object_pairs_hook=_refuse_doubled)
    except (*DECODE_ERRORS, ValueError) as error:
        raise UnreadableError(f"expected the header of a safetensors file in {name}: {error}") from error
    if len(header) < num_bytes:
        raise UnreadableError(f"expected the header of a safetensors file in {name}: the file ends inside the header")
    data_start = _LENGTH.size + num_bytes
    step = metadata.get(_STEP, "")
    is_number = step.isascii() and step.isdigit() and len(step) <= 18
    return Contents(
        kind=kind,
        form="file",
        tensors=tuple(_tensor(path, entry, StoredPart(file, data_start, 0)) for path, entry in entries.items()),
        values=dict.fromkeys(metadata),
        step=int(step) if is_number else None,
        data_start=data_start,
        metadata=metadata,
    )


def read_file(path: Path, *, file: str = "") -> Contents:
    """Return the tensors of a safetensors file. If the library cannot open the file, ``troubles`` has the reasons.

    Args:
        path: The path of the file.
        file: Name of the file in its directory, for the positions of tensors; empty for a single file.

    Raises:
        UnreadableError: The file is not a safetensors file.
    """
    with contextlib.closing(StoredFile.at(path)) as opened:
        try:
            contents = read_header(opened.read, kind="safetensors file", name=str(path), file=file)
        except OSError as error:
            raise UnreadableError(f"cannot read the safetensors file {path}: {error}") from error
    ends = (part.start + part.num_bytes for part in _parts(contents.tensors))
    missing = max(0, max(ends, default=contents.data_start) - opened.num_bytes)
    troubles = _layout_troubles(contents, opened.num_bytes - contents.data_start, path.name)
    return replace(contents, num_bytes_missing=missing, troubles=tuple(troubles))


def read_files(directory: Path, index: Path | None) -> Contents:
    """Return the tensors of all safetensors files in a directory, with their faults in ``troubles``.

    Args:
        directory: The directory.
        index: An index file, which names the file of each tensor. Without an index, all safetensors files of the
            directory are read. A tensor may be divided among several files, as `HuggingFaceStorageWriter` of DCP does.

    Raises:
        UnreadableError: The index is invalid.
    """
    there = sorted(path.name for path in directory.glob(f"*{SUFFIX}"))
    weight_map = _read_index(index) if index is not None else dict[str, str]()
    names = sorted({*weight_map.values()}) if index is not None else there
    troubles, pieces, num_missing = list[str](), dict[str, list[TensorEntry]](), 0
    unread = set[str]()
    for name in names:
        try:
            contents = read_file(path_in(directory, name), file=name)
            sharding = _sharding.decode(contents.metadata.get(_SHARDING, "{}"))
        except (UnreadableError, *DECODE_ERRORS) as error:
            troubles.append(f"{escape(name)}: {error}")
            unread.add(name)
            continue
        troubles += contents.troubles
        num_missing += contents.num_bytes_missing
        for tensor in contents.tensors:
            offsets = sharding[tensor.path].saved_offsets if tensor.path in sharding else None
            pieces.setdefault(tensor.path, []).append(_moved(tensor, offsets))
    troubles += _index_troubles(weight_map, pieces, unread) if index is not None else ()
    others = ", ".join(escape(name) for name in there if name not in names)
    return Contents(
        kind="directory of safetensors files",
        form="files",
        tensors=tuple(_merged(parts, troubles) for parts in pieces.values()),
        num_bytes_missing=num_missing,
        troubles=tuple(troubles),
        notes=(f"{others}: not examined, because the index does not name them",) if others else (),
    )


def _read_index(index: Path) -> dict[str, str]:
    with contextlib.closing(StoredFile.at(index)) as file:
        try:
            return _index.decode(file.read(0, _MAX_BYTES)).weight_map
        except DECODE_ERRORS as error:
            raise UnreadableError(f"expected the index of a model in {index}: {error}") from error


def _index_troubles(
    weight_map: dict[str, str], pieces: dict[str, list[TensorEntry]], unread: set[str]
) -> Iterator[str]:
    for name, parts in pieces.items():
        files = ", ".join(escape(stored.file) for stored in _parts(parts))
        if name not in weight_map:
            yield f"{escape(name)}: the tensor is in {files}, but not in the index"
        elif files != escape(weight_map[name]):
            yield f"{escape(name)}: expected in {escape(weight_map[name])}, as the index says; found in {files}"
    for name, file in weight_map.items():
        if name not in pieces and file not in unread:
            yield f"{escape(name)}: expected in {escape(file)}, as the index says; found in no file"


def _merged(parts: list[TensorEntry], troubles: list[str]) -> TensorEntry:
    first = parts[0]
    if len(parts) == 1 and first.shape == first.pieces[0].sizes:
        return first
    if any((part.dtype, len(part.shape)) != (first.dtype, len(first.shape)) for part in parts):
        troubles.append(f"{escape(first.path)}: its parts have different dtypes or numbers of dimensions")
        return first
    shape = tuple(max(lengths) for lengths in zip(*(part.shape for part in parts), strict=True))
    pieces = tuple(part.pieces[0] for part in parts)
    num_bytes = sum(part.num_bytes for part in parts)
    return replace(first, shape=shape, num_bytes=num_bytes, num_parts=len(pieces), pieces=pieces)


def _moved(tensor: TensorEntry, offsets: tuple[int, ...] | None) -> TensorEntry:
    """Return a shard of a tensor with the shard's position in the whole tensor.

    As in DCP's reader, the whole tensor gets the smallest shape that contains the shard.
    """
    (piece,) = tensor.pieces
    if offsets is None or len(offsets) != len(piece.sizes):
        return tensor
    shape = tuple(offset + size for offset, size in zip(offsets, piece.sizes, strict=True))
    return replace(tensor, shape=shape, pieces=(replace(piece, offsets=offsets),))


def _tensor(path: str, entry: _Entry, data: StoredPart) -> TensorEntry:
    start, end = entry.data_offsets
    stored = replace(data, start=data.start + start, num_bytes=end - start)
    return TensorEntry(
        path=path,
        dtype=_DTYPES.get(entry.dtype, entry.dtype),
        shape=entry.shape,
        num_bytes=max(0, end - start),
        pieces=(TensorPiece((0,) * len(entry.shape), entry.shape, stored),),
    )


def _layout_troubles(contents: Contents, data_bytes: int, name: str) -> Iterator[str]:
    """Yield the faults that ``Metadata::validate`` of the library refuses: tensors must fill the file without gaps."""
    for tensor in contents.tensors:
        yield from _size_troubles(tensor)
    shown, end = escape(name), 0
    for start, stop in sorted(
        (part.start - contents.data_start, part.start - contents.data_start + part.num_bytes)
        for part in _parts(contents.tensors)
    ):
        if stop > data_bytes:
            yield f"{shown}: a tensor is in bytes [{start}, {stop}), but the file has only {data_bytes} bytes of data"
        elif start < end:
            yield f"{shown}: a tensor in bytes [{start}, {stop}) overlaps another one, which ends at {end}"
        elif start > end:
            yield f"{shown}: bytes [{end}, {start}) belong to no tensor"
        end = max(end, stop)
    if end < data_bytes:
        yield f"{shown}: {data_bytes - end} bytes after the last tensor belong to no tensor"


def _size_troubles(tensor: TensorEntry) -> Iterator[str]:
    bits = ITEM_BITS.get(tensor.dtype)
    if bits is None:
        yield f"{escape(tensor.path)}: its dtype {escape(tensor.dtype)} is unknown"
        return
    (piece,) = tensor.pieces
    assert piece.stored is not None, "the pieces of a safetensors file are"
    num_bits = 1
    for length in (*tensor.shape, bits):
        num_bits *= length
        if num_bits > _MAX_COUNT:
            # The library refuses this even if a later dimension is 0.
            yield f"{escape(tensor.path)}: its number of bits does not fit into 64 bits"
            return
    if num_bits != 8 * piece.stored.num_bytes:
        size = f"{num_bits // 8} bytes" + (f" and {num_bits % 8} bits" if num_bits % 8 else "")
        yield (
            f"{escape(tensor.path)}: {tensor.dtype} of {list(tensor.shape)} takes {size}, but {piece.stored.num_bytes} "
            "are stored"
        )


def _parts(tensors: Iterable[TensorEntry]) -> Iterator[StoredPart]:
    return (piece.stored for tensor in tensors for piece in tensor.pieces if piece.stored is not None)


def _refuse_doubled(pairs: list[tuple[str, Any]]) -> None:
    """Raise `ValueError` if one of the `_FIELDS` occurs twice. Other names may repeat: the last one counts."""
    fields = [name for name, _ in pairs if name in _FIELDS]
    if len(fields) > len({*fields}):
        raise ValueError(f"expected each field once, got one of {', '.join(sorted({*fields}))} twice")
