"""Makes deltas between versions of weights, applies deltas to tensors, and reads and writes `DeltaDirectory` files.

A receiver does not trust deltas: after it has applied them, it compares each chunk with the digests of the version. So
a delta that is lost, repeated, damaged or made for other weights costs time, but does not change the result.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch

from ft_transport.errors import IntegrityError, RestoreError
from ft_transport.runtime.decoding import DECODE_ERRORS
from ft_transport.runtime.regular_files import (
    UnusableFileError,
    create_file,
    open_regular,
    read_regular,
)
from ft_transport.state.tensors import as_bytes
from ft_transport.wire.chunks import Hasher
from ft_transport.wire.delta import Bytes, Delta, TensorChanges, TensorPair, apply_changes, encode_delta

_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes with an exclusive-or on all devices, by the size of an element in bytes."""
DELTA_NAME: Final = ".delta"
DIGESTS_NAME: Final = ".digests.json"
"""Names that no file of a user can have, because the names of a version's files must not begin with a dot."""
SAFETENSORS: Final = ".safetensors"
MAX_DIGESTS_BYTES: Final = 64 << 20
"""Longest record of a version's digests."""
_DELTA_SURPLUS_BYTES: Final = 16 << 20
"""Allowance for the header of a delta, added to the size of the weights, which bounds the rest of the delta."""
_MAX_HEADER_BYTES: Final = 100 << 20
"""Longest header that the safetensors library accepts."""
_READ_BYTES: Final = 4 << 20
_digests_decoder: Final = msgspec.json.Decoder(dict[str, str])
_header_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def delta_between(
    version: int, weights: Mapping[str, torch.Tensor], base: int, base_weights: Mapping[str, torch.Tensor]
) -> bytes | None:
    """Make the delta that changes one version into another.

    Args:
        version: The newer version.
        weights: Tensors of the newer version, in host memory.
        base: The older version, to which a receiver applies the delta.
        base_weights: Tensors of the older version, in host memory.

    Returns:
        The encoded delta. ``None`` if names, dtypes or shapes differ between the versions, or if the delta would
        be too large to be useful (`encode_delta`).
    """
    kinds, base_kinds = (
        {name: (tensor.dtype, tensor.shape) for name, tensor in each.items()} for each in (weights, base_weights)
    )
    if kinds != base_kinds:
        return None
    return encode_delta(version, base, [pair_of(name, base_weights[name], each) for name, each in weights.items()])


def pair_of(name: str, base: torch.Tensor, new: torch.Tensor) -> TensorPair:
    """Return the bytes of one tensor in two versions, for `encode_delta`.

    Args:
        name: Name of the tensor.
        base: The tensor in the older version, row-major in host memory.
        new: The tensor in the newer version, with the same dtype and shape, row-major in host memory.
    """
    return TensorPair(name, new.itemsize if new.itemsize in _SIGNED else 1, _bytes_of(base), _bytes_of(new))


def changes_of(
    deltas: Sequence[Delta], weights: Mapping[str, torch.Tensor]
) -> list[tuple[torch.Tensor, TensorChanges]]:
    """Decode all changes that deltas make to an engine's tensors, before any tensor is changed.

    Args:
        deltas: The deltas, in the order in which they must be applied.
        weights: The engine's tensors by name. A tied tensor has an entry for each of its names.

    Returns:
        The arguments of a `flip` for each change: the tensor and its changes. Empty if the deltas do not fit the
        tensors.

    Raises:
        ManifestError: A delta is inconsistent.
    """
    changes: list[tuple[torch.Tensor, TensorChanges]] = []
    for delta in deltas:
        taken: set[int] = set()
        for change in delta.changes():
            tensor = weights.get(change.tensor.name)
            if tensor is None or not tensor.is_contiguous():
                return []
            if (tensor.nbytes, tensor.itemsize) != (change.tensor.num_bytes, change.bits.itemsize):
                return []
            # A delta lists a tied tensor under each of its names.
            if id(tensor) not in taken:
                taken.add(id(tensor))
                changes.append((tensor, change))
    return changes


def flip(tensor: torch.Tensor, changes: TensorChanges) -> None:
    """Apply changes to a tensor in place. A second call with the same changes restores the previous bits."""
    if tensor.device.type == "cpu":
        apply_changes(changes, _bytes_of(tensor))
        return
    elements = as_bytes(tensor).view(_SIGNED[tensor.itemsize])
    positions = torch.from_numpy(changes.positions).to(tensor.device)
    bits = torch.from_numpy(changes.bits.view(f"<i{tensor.itemsize}" if tensor.itemsize > 1 else "u1"))
    elements[positions] ^= bits.to(tensor.device)


def _bytes_of(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    data: np.ndarray[tuple[int], np.dtype[np.uint8]] = as_bytes(tensor).numpy()
    return data


class _Entry(msgspec.Struct):
    data_offsets: tuple[int, int]


_entry_decoder: Final = msgspec.json.Decoder(_Entry)


def open_file(path: Path) -> FileIO:
    """Open a file of a version.

    Raises:
        RestoreError: The path is a link, or something else that is not a file.
        OSError: The file cannot be opened.
    """
    try:
        return FileIO(open_regular(path))
    except UnusableFileError as error:
        raise RestoreError(f"expected a regular file at {path}, got a link or something else") from error


def copy_file(source: Path, target: Path, *, is_private: bool) -> None:
    """Copy a file of a version, and wait until the copy is on disk.

    Raises:
        RestoreError: The source is a link, or something else that is not a file.
        OSError: The source cannot be read, or the target cannot be written.
    """
    with open_file(source) as reading, FileIO(create_file(target, is_private=is_private), "w") as writing:
        shutil.copyfileobj(reading, writing, _READ_BYTES)
        os.fsync(writing.fileno())


def digests_of(directory: Path) -> dict[str, int]:
    """Return the digest of each file in a version's directory, by file name."""
    digests = {}
    buffer = memoryview(bytearray(_READ_BYTES))
    for file in directory.iterdir():
        if file.name not in (DELTA_NAME, DIGESTS_NAME):
            hasher = Hasher()
            with open_file(file) as opened:
                while count := opened.readinto(buffer):
                    hasher.update(buffer[:count])
            digests[file.name] = hasher.intdigest()
    return digests


def digests_in(directory: Path) -> dict[str, int]:
    """Return the digests that a `DeltaDirectory` has recorded for a version, by file name.

    The publisher computed the digests from the whole version, with `digests_of`.

    Raises:
        RestoreError: The version has no readable record of digests.
    """
    file = directory / DIGESTS_NAME
    try:
        encoded = read_regular(file, max_bytes=MAX_DIGESTS_BYTES)
    except (FileNotFoundError, UnusableFileError) as error:
        raise RestoreError(f"expected a readable record of digests in {file}: {error}") from error
    return decode_digests(encoded, str(file))


def encode_digests(digests: Mapping[str, int]) -> bytes:
    """Encode the digests of a version's files, by name."""
    return msgspec.json.encode({name: f"{each:016x}" for name, each in sorted(digests.items())})


def decode_digests(encoded: bytes, where: str) -> dict[str, int]:
    """Decode the result of `encode_digests`.

    Raises:
        RestoreError: The record is invalid; ``where`` is its path.
    """
    try:
        return {name: int(each, 16) for name, each in _digests_decoder.decode(encoded).items()}
    except (ValueError, *DECODE_ERRORS) as error:
        raise RestoreError(f"expected a readable record of digests in {where}: {error}") from error


def check_files(path: Path, expected: Mapping[str, int], version: int) -> None:
    """Check that a directory has exactly the files of a version.

    Args:
        path: The directory to check.
        expected: Digests of the version's files, by name.
        version: Number of the version, for errors.

    Raises:
        RestoreError: A file is missing or unexpected, or is not a regular file.
        IntegrityError: A file has another digest.
    """
    actual = digests_of(path)
    if expected.keys() != actual.keys():
        raise RestoreError(
            f"expected exactly the files of version {version}; missing or unexpected: "
            f"{sorted(expected.keys() ^ actual.keys())[:5]}"
        )
    for name in sorted(actual):
        if actual[name] != expected[name]:
            raise IntegrityError(
                f"expected a file of version {version}, got one with other content",
                chunk=None,
                expected=expected[name],
                actual=actual[name],
                path=name,
                step=version,
            )


def headers_of(directory: Path) -> dict[str, bytes]:
    """Return the header of each safetensors file of a version, by file name."""
    headers = {}
    for file in directory.glob(f"*{SAFETENSORS}"):
        with open_file(file) as opened:
            length = int.from_bytes(opened.read(8), "little")
            headers[file.name] = opened.read(min(length, _MAX_HEADER_BYTES))
    return headers


def decode_limit(num_bytes: int) -> int:
    """Return how much memory a delta may take, in bytes, for weights of ``num_bytes``."""
    return num_bytes + _DELTA_SURPLUS_BYTES


def num_bytes_of(directory: Path) -> int:
    """Return the total size of a version's safetensors files, in bytes."""
    return sum(file.lstat().st_size for file in directory.glob(f"*{SAFETENSORS}"))


@contextmanager
def tensors_of(directory: Path) -> Iterator[dict[str, Bytes]]:
    """Map the safetensors files of a directory into memory, and yield the writable bytes of each tensor by name.

    The end of the context writes changes to disk.

    Raises:
        RestoreError: A file is not a safetensors file.
    """
    maps: list[np.memmap[tuple[int], np.dtype[np.uint8]]] = []
    tensors: dict[str, Bytes] = {}
    for file in sorted(directory.glob(f"*{SAFETENSORS}")):
        try:
            data = np.memmap(file, np.uint8, "r+")
            length = int.from_bytes(data[:8].tobytes(), "little")
            if length > min(_MAX_HEADER_BYTES, len(data) - 8):
                raise RestoreError(f"expected a safetensors file, got {file}")
            header = _header_decoder.decode(data[8 : 8 + length].tobytes())
            header.pop("__metadata__", None)
            for name, raw in header.items():
                start, end = _entry_decoder.decode(raw).data_offsets
                if not 0 <= start <= end <= len(data) - 8 - length:
                    raise RestoreError(f"expected tensors inside of {file}", path=name)
                tensors[name] = data[8 + length + start : 8 + length + end]
        except (ValueError, *DECODE_ERRORS) as error:
            # ValueError: the file is empty.
            raise RestoreError(f"expected a safetensors file, got {file}: {error}") from error
        maps.append(data)
    yield tensors
    for data in maps:
        data.flush()
