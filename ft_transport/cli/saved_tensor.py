"""Finds the data of a tensor in a file of ``torch.save``, without torch and without unpickling.

The file is a zip file with uncompressed, aligned entries: ``data.pkl`` describes the tensor, and ``data/0`` is the
storage of the tensor (torch/serialization.py, ``_save``). This module parses the pickle into tuples, strings and
numbers, and never calls a function that the pickle names.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from ft_transport.cli.contents import Read, UnreadableError

_END: Final = struct.Struct("<4sHHHHIIH")
_END_64: Final = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR_64: Final = struct.Struct("<4sIQI")
_CENTRAL: Final = struct.Struct("<4sHHHHHHIIIHHHHHII")
_LOCAL: Final = struct.Struct("<4sHHHHHIIIHH")
_EXTRA: Final = struct.Struct("<HH")
_TAIL_BYTES: Final = 2048
"""Number of bytes at the end of the file that usually contain the whole zip directory."""
_MAX_DIRECTORY_BYTES: Final = 1 << 20
_MAX_ENTRIES: Final = 4096
_MAX_PICKLE_BYTES: Final = 1 << 16
_FULL_32: Final = 0xFFFFFFFF
_EXTRA_64: Final = 1
_VERSIONS: Final = ("version", ".data/version")
_FLAGS: Final = 0x0808
"""Allowed flags of an entry: sizes that follow the data, and names in UTF-8 (APPNOTE.TXT 4.4.4)."""
_REBUILD_QUANTIZED: Final = ("torch._utils", "_rebuild_qtensor")
_REBUILD: Final = (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3"), _REBUILD_QUANTIZED)


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """An entry of a zip file.

    Attributes:
        name: Name of the entry, without the leading name of the archive.
        head: Position of the entry's header.
        num_bytes: Length of the entry's data.
        crc: CRC-32 of the data; 0 if ``torch.serialization.set_crc32_options(False)`` turned it off.
    """

    name: str
    head: int
    num_bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """The position and shape of a tensor in a file of ``torch.save``.

    Attributes:
        start: Position of the first element, in bytes.
        end: Position of the end of the storage, in bytes.
        shape: Shape of the tensor.
        strides: Strides in elements.
        is_quantized: Whether the tensor is quantized: its values depend on a scale, which is stored separately.
    """

    start: int
    end: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_quantized: bool


def zip_entries(read: Read, num_bytes: int) -> list[ZipEntry]:
    """Return the entries of a file of ``torch.save``, in the order of the zip directory.

    Args:
        read: Function that reads bytes of the file.
        num_bytes: Length of the file.

    Raises:
        UnreadableError: The file is damaged, or is not one of ``torch.save``.
    """
    try:
        found = list(_entries(read, num_bytes))
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise UnreadableError(f"expected a file of torch.save: {error}") from error
    archives = {entry.name.partition("/")[0] for entry in found}
    entries = [replace(entry, name=entry.name.partition("/")[2]) for entry in found]
    # ``torch.load`` requires this too.
    if len(archives) != 1 or not any(entry.name in _VERSIONS for entry in entries):
        raise UnreadableError("expected a file of torch.save, got damaged or missing names in its zip directory")
    return entries


def start_of(entry: ZipEntry, read: Read, num_bytes: int) -> int:
    """Return the position of the data of an entry.

    Raises:
        UnreadableError: The entry is not at the position that the zip directory names, or is longer than the file.
    """
    head = read(entry.head, _LOCAL.size)
    if len(head) < _LOCAL.size or not head.startswith(b"PK\x03\x04"):
        raise UnreadableError("expected a file of torch.save, got a zip directory with a wrong position of an entry")
    fields = _LOCAL.unpack(head)
    start: int = entry.head + _LOCAL.size + fields[9] + fields[10]
    if start + entry.num_bytes > num_bytes:
        raise UnreadableError(f"expected a file of torch.save, got an entry {entry.name} that is longer than the file")
    return start


def locate_tensor(read: Read, num_bytes: int, item_bytes: int) -> SavedTensor:
    """Return the position of the tensor in a file of ``torch.save`` that contains only one CPU tensor.

    Args:
        read: Function that reads bytes of the file.
        num_bytes: Length of the file.
        item_bytes: Length of an element.

    Raises:
        UnreadableError: The file contains another object, or is damaged.
    """
    by_name = {entry.name: entry for entry in zip_entries(read, num_bytes)}
    pickled, storage, order = by_name.get("data.pkl"), by_name.get("data/0"), by_name.get("byteorder")
    if pickled is None or storage is None or pickled.num_bytes > _MAX_PICKLE_BYTES:
        raise UnreadableError("expected a file of torch.save with one tensor, got other entries")
    if order is not None and read(start_of(order, read, num_bytes), min(order.num_bytes, 16)) != b"little":
        raise UnreadableError("expected a tensor in little-endian byte order, got another order")
    try:
        kind, arguments = _walk(read(start_of(pickled, read, num_bytes), pickled.num_bytes))
        while kind == ("torch._utils", "_rebuild_parameter"):
            kind, arguments = arguments[0]
        if kind not in _REBUILD:
            raise UnreadableError("expected a plain tensor, got another object")
        _storage, offset, shape, strides = arguments[:4]
        storage_start = start_of(storage, read, num_bytes)
        start = storage_start + offset * item_bytes
        last = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    except (TypeError, ValueError, LookupError) as error:
        raise UnreadableError(f"expected the pickle of a tensor: {error}") from error
    end = storage_start + storage.num_bytes
    numbers = (offset, *shape, *strides)
    is_empty = 0 in shape
    if min(numbers) < 0 or (not is_empty and start + (last + 1) * item_bytes > end):
        raise UnreadableError(f"expected a storage for shape {shape} with strides {strides}, got one that is too short")
    return SavedTensor(start, end, shape, strides, kind == _REBUILD_QUANTIZED)


@lru_cache(1024)
def _walk(pickled: bytes) -> Any:
    """Parse a pickle into tuples, strings and numbers. Results are cached, because similar tensors have equal pickles.

    A name becomes ``(module, name)``, a call ``(name, arguments)``, a persistent id ``("persistent", id)``. Time and
    memory are proportional to the length of the pickle.

    Raises:
        ValueError: The bytes are no pickle, or have opcodes that ``torch.save`` does not write for a tensor.
        LookupError: The pickle pops from an empty stack.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in pickletools.genops(pickled):
        match opcode.name:
            case "BINUNICODE" | "BININT1" | "BININT2" | "BININT" | "LONG1" | "BINFLOAT":
                stack.append(argument)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(opcode.name == "NEWTRUE")
            case "GLOBAL":
                stack.append(tuple(str(argument).split(" ", 1)))
            case "BINPERSID":
                stack.append(("persistent", stack.pop()))
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                _make_tuple(stack, len(stack) - marks.pop())
            case "EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3" | "REDUCE":
                _make_tuple(stack, len(opcode.stack_before))
            case "PROTO" | "STOP":
                pass
            case _:
                raise ValueError(f"expected the pickle of a tensor, got one with the opcode {opcode.name}")
    return stack.pop()


def _make_tuple(stack: list[Any], count: int) -> None:
    if not 0 <= count <= len(stack):
        raise IndexError("an opcode pops from an empty stack")
    stack[len(stack) - count :] = [tuple(stack[len(stack) - count :])]


def _entries(read: Read, num_bytes: int) -> Iterator[ZipEntry]:
    tail_bytes = min(_TAIL_BYTES, num_bytes)
    tail_start = num_bytes - tail_bytes
    tail = read(tail_start, tail_bytes)
    end = num_bytes - _END.size
    signature, *_, count, size, start, _comment = _END.unpack_from(tail, len(tail) - _END.size)
    if signature != b"PK\x05\x06":
        raise UnreadableError("expected a file of torch.save, got one without a zip directory at its end")
    signature, _disk, position, disks = _LOCATOR_64.unpack_from(tail, len(tail) - _END.size - _LOCATOR_64.size)
    is_damaged = False
    if signature == b"PK\x06\x07":
        end, found = position, _END_64.unpack(read(position, _END_64.size))
        count, size, start = found[7:]
        is_damaged = (*found[:2], *found[4:7], disks) != (b"PK\x06\x06", _END_64.size - 12, 0, 0, count, 1)
    if is_damaged or start + size != end:
        raise UnreadableError("expected a file of torch.save, got a zip directory whose end is damaged")
    if size > _MAX_DIRECTORY_BYTES or count > _MAX_ENTRIES:
        raise UnreadableError(
            f"expected a zip directory of at most {_MAX_ENTRIES} entries in {_MAX_DIRECTORY_BYTES} bytes, got {count} "
            f"entries in {size} bytes"
        )
    directory = tail[start - tail_start :] if start >= tail_start else read(start, size)
    at = 0
    for _ in range(count):
        fields = _CENTRAL.unpack_from(directory, at)
        name_bytes, extra_bytes, comment_bytes = fields[10:13]
        stored, length, local = fields[8], fields[9], fields[16]
        name = directory[at + _CENTRAL.size :][:name_bytes].decode()
        extra = directory[at + _CENTRAL.size + name_bytes :][:extra_bytes]
        stored, length, local = _widened(extra, stored, length, local)
        at += _CENTRAL.size + name_bytes + extra_bytes + comment_bytes
        if fields[0] != b"PK\x01\x02" or fields[3] & ~_FLAGS or fields[4] or stored != length or any(fields[13:16]):
            raise UnreadableError("expected a file of torch.save, got compressed entries or a damaged zip directory")
        yield ZipEntry(name, local, length, fields[7])
    if at != size:
        raise UnreadableError("expected a file of torch.save, got a damaged zip directory")


def _widened(extra: bytes, stored: int, length: int, local: int) -> tuple[int, int, int]:
    """Return the sizes and position of an entry; if a 32-bit field is full, the ZIP64 extra field has its value."""
    at = 0
    while at + _EXTRA.size <= len(extra):
        kind, num_bytes = _EXTRA.unpack_from(extra, at)
        at += _EXTRA.size
        if kind == _EXTRA_64:
            wide = [value for (value,) in struct.iter_unpack("<Q", extra[at : at + num_bytes // 8 * 8])]
            length = wide.pop(0) if length == _FULL_32 else length
            stored = wide.pop(0) if stored == _FULL_32 else stored
            local = wide.pop(0) if local == _FULL_32 else local
        at += num_bytes
    return stored, length, local
