"""The files of versions in a directory of deltas: copied, digested and compared, without following links."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from ft_transport.errors import IntegrityError, RestoreError
from ft_transport.runtime.decode_errors import DECODE_ERRORS
from ft_transport.runtime.regular_files import (
    FileTooLargeError,
    NotRegularFileError,
    create_file,
    open_regular,
    read_regular,
)
from ft_transport.wire.chunks import Hasher
from ft_transport.wire.delta import Bytes

DELTA_NAME: Final = ".delta"
DIGESTS_NAME: Final = ".digests.json"
"""No file of a version begins with a dot, so a user's file has neither name."""
SAFETENSORS: Final = ".safetensors"
_MAX_HEADER_BYTES: Final = 100 << 20
"""Maximum header of a safetensors file that the safetensors library accepts."""
_MAX_DIGESTS_BYTES: Final = 64 << 20
_READ_BYTES: Final = 4 << 20


class _Entry(msgspec.Struct):
    data_offsets: tuple[int, int]


_digests_decoder: Final = msgspec.json.Decoder(dict[str, str])
_header_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry_decoder: Final = msgspec.json.Decoder(_Entry)


def open_file(path: Path) -> FileIO:
    """Open a file of a version.

    Raises:
        RestoreError: The path is a link, or something else that is not a file.
        OSError: The file cannot be opened.
    """
    try:
        return FileIO(open_regular(path))
    except NotRegularFileError as error:
        raise RestoreError(f"expected a file of a version at {path}, found a link or something else") from error


def copy_file(source: Path, target: Path, *, is_private: bool) -> None:
    """Copy a file of a version to disk.

    Raises:
        RestoreError: The source is a link, or something else that is not a file.
        OSError: The source cannot be read, or the target cannot be written.
    """
    with open_file(source) as reading, FileIO(create_file(target, is_private=is_private), "w") as writing:
        shutil.copyfileobj(reading, writing, _READ_BYTES)
        os.fsync(writing.fileno())


def read_delta(path: Path, max_bytes: int) -> bytes:
    """Return the content of a delta.

    Raises:
        RestoreError: The path is a link or not a file, or the file is larger than any delta.
        OSError: The file cannot be read.
    """
    try:
        return read_regular(path, max_bytes=max_bytes)
    except (NotRegularFileError, FileTooLargeError) as error:
        raise RestoreError(f"expected a delta at {path}: {error}") from error


def digests_of(directory: Path) -> dict[str, int]:
    """Return the digest of each file of a version, by its name."""
    return {file.name: _digest_of(file) for file in directory.iterdir() if file.name not in (DELTA_NAME, DIGESTS_NAME)}


def _digest_of(file: Path) -> int:
    hasher = Hasher()
    buffer = memoryview(bytearray(_READ_BYTES))
    with open_file(file) as opened:
        while count := opened.readinto(buffer):
            hasher.update(buffer[:count])
    return hasher.intdigest()


def digests_in(directory: Path) -> dict[str, int]:
    """Return the output of `digests_of` that the directory of deltas records for a version.

    Raises:
        RestoreError: The directory records no digests.
    """
    file = directory / DIGESTS_NAME
    try:
        told = _digests_decoder.decode(read_regular(file, max_bytes=_MAX_DIGESTS_BYTES))
        return {name: int(each, 16) for name, each in told.items()}
    except (FileNotFoundError, NotRegularFileError, FileTooLargeError, ValueError, *DECODE_ERRORS) as error:
        raise RestoreError(f"expected the digests of a version in {file}: {error}") from error


def check_files(path: Path, expected: Mapping[str, int], version: int) -> None:
    """Compare the files of a version with their digests in the directory of deltas.

    Raises:
        RestoreError: A file is missing or unexpected, or is not a regular file.
        IntegrityError: A file has another digest.
    """
    actual = digests_of(path)
    if expected.keys() != actual.keys():
        raise RestoreError(
            f"expected the files of version {version}, got {sorted(expected.keys() ^ actual.keys())[:5]}"
        )
    for name in sorted(actual):
        if actual[name] != expected[name]:
            raise IntegrityError(
                f"a file is not that of version {version}",
                chunk=None,
                expected=expected[name],
                actual=actual[name],
                path=name,
                step=version,
            )


def headers_of(directory: Path) -> dict[str, bytes]:
    """Return the headers of a version's safetensors files."""
    headers = {}
    for file in directory.glob(f"*{SAFETENSORS}"):
        with open_file(file) as opened:
            length = int.from_bytes(opened.read(8), "little")
            headers[file.name] = opened.read(min(length, _MAX_HEADER_BYTES))
    return headers


def num_bytes_of(directory: Path) -> int:
    """Return the size of a version's tensor files, in bytes."""
    return sum(file.lstat().st_size for file in directory.glob(f"*{SAFETENSORS}"))


@contextmanager
def tensors_of(directory: Path) -> Iterator[dict[str, Bytes]]:
    """Yield the bytes of all tensors in the safetensors files of a directory, for changes in place, which are synced.

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
