"""Reads the file ``.metadata`` of a DCP checkpoint without running code that it contains, and without torch.

The file is a pickle (torch/distributed/checkpoint/filesystem.py). This module replaces DCP's classes by classes that
only store their state, and refuses every other name in the pickle.

A child process with limited memory and time reads the file, because a pickle of nine bytes can make its reader allocate
gigabytes, and hashing a deeply nested tuple can crash the process. The child imports nothing from the working
directory, which may be the directory of the checkpoint.
"""

from __future__ import annotations

import gc
import io
import math
import os
import pickle  # noqa: TID251 # DCP's format; `_Reader` refuses all but a closed set of names
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from ft_transport.cli.contents import (
    ITEM_BITS,
    MAX_DIMENSIONS,
    Contents,
    StoredPart,
    TensorEntry,
    TensorPiece,
    UnreadableError,
)
from ft_transport.cli.output import escape
from ft_transport.runtime.children import child_command, child_environment
from ft_transport.runtime.regular_files import read_regular

METADATA_NAME: Final = ".metadata"

_MAX_LENGTH: Final = (1 << 63) - 1
_REFUSED: Final = 3
_WITH_POSITIONS: Final = "--with-positions"
_LEAST_MEMORY_BYTES: Final = 512 << 20
_MEMORY_FOR_EACH_BYTE: Final = 64
"""Memory that the child may use for each byte of the file, in bytes: a generous estimate of its objects and JSON."""
_METADATA: Final = "torch.distributed.checkpoint.metadata"
_ZSTD: Final = "stream.zstd/1"
"""The name of DCP's ``ZStandard`` extension (torch/distributed/checkpoint/_extension.py)."""

_contents_decoder: Final = msgspec.json.Decoder(Contents)


def read_dcp(directory: Path, *, with_positions: bool) -> Contents:
    """Return the tensors and values of a DCP checkpoint, from its metadata.

    Args:
        directory: The directory of the checkpoint.
        with_positions: Whether to include the position of each stored part in its file.

    Raises:
        UnreadableError: The file ``.metadata`` is missing or damaged, or is not DCP's.
    """
    path = directory / METADATA_NAME
    try:
        encoded = read_regular(Path(os.path.realpath(path)), max_bytes=1 << 30)
    except OSError as error:
        raise UnreadableError(f"expected a DCP checkpoint in {directory}: {error}") from error
    command = child_command(__name__, _main.__name__, *([_WITH_POSITIONS] if with_positions else []))
    try:
        done = subprocess.run(
            command, input=encoded, capture_output=True, env=child_environment(), timeout=60.0, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UnreadableError(f"the process that reads DCP's metadata from {path} failed: {error}") from error
    if done.returncode == _REFUSED:
        reason = escape(done.stdout.decode("utf-8", "replace"), 500)
        raise UnreadableError(f"expected DCP's metadata in {path}: {reason}")
    if done.returncode:
        raise UnreadableError(
            f"the process that reads DCP's metadata from {path} ended with exit code {done.returncode}; it has limited "
            "memory, and the file may be damaged"
        )
    return _contents_decoder.decode(done.stdout)


def _main() -> None:
    """Run as the child process: read the pickle from standard input, and write its content as JSON.

    If the pickle is invalid or not allowed, write the reason instead, and exit with `_REFUSED`.
    """
    encoded = sys.stdin.buffer.read()
    most = _LEAST_MEMORY_BYTES + _MEMORY_FOR_EACH_BYTE * len(encoded)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        gc.disable()  # The process is short-lived, and its memory is limited.
        answer = msgspec.json.encode(_read(encoded, with_positions=_WITH_POSITIONS in sys.argv[1:]))
    # For invalid pickles, the unpickler raises undocumented types of errors.
    except Exception as error:
        reason = str(error) if isinstance(error, UnreadableError) else f"{type(error).__name__}: {error}"
        sys.stdout.write(reason)
        sys.stdout.flush()
        os._exit(_REFUSED)
    sys.stdout.buffer.write(answer)
    sys.stdout.flush()
    # Exit without freeing each object.
    os._exit(0)


def _read(encoded: bytes, *, with_positions: bool) -> Contents:
    metadata = _fields(_Reader(io.BytesIO(encoded)).load())
    stored = metadata["state_dict_metadata"]
    positions = _positions_of(metadata.get("storage_data")) if with_positions else None
    return Contents(
        kind="DCP checkpoint",
        form="dcp",
        tensors=tuple(_tensor(name, each, positions) for name, each in stored.items() if isinstance(each, _Tensor)),
        values={
            str(name): positions.get((name, None)) if positions is not None else None
            for name, each in stored.items()
            if isinstance(each, _Bytes)
        },
    )


class _Stored:
    """Replaces a class that the pickle names; an instance only stores its pickled state."""

    __slots__ = ("state",)

    def __init__(self, *_arguments: object) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Tensor(_Stored):
    __slots__ = ()


class _Bytes(_Stored):
    __slots__ = ()


def _fields(stored: _Stored) -> dict[Any, Any]:
    """Return the pickled attributes of an object. The state of a class with slots is a tuple of two dicts."""
    state = stored.state
    if isinstance(state, dict):
        return state
    return {name: value for part in state if isinstance(part, dict) for name, value in part.items()}


@dataclass(frozen=True, slots=True)
class _DType:
    name: str


_STORED: Final = {
    _METADATA: "Metadata ChunkStorageMetadata TensorProperties MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    # The module of `TensorProperties` up to torch 2.2.
    "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "torch.serialization": "_get_layout",
    "pathlib": "Path PosixPath PurePosixPath",
    "pathlib._local": "Path PosixPath PurePosixPath",
}
"""Names that `_Stored` replaces, by module."""
_CLASSES: Final[dict[tuple[str, str], Any]] = {
    **{(module, name): _Stored for module, names in _STORED.items() for name in names.split()},
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "BytesStorageMetadata"): _Bytes,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
}


_Positions: TypeAlias = dict[tuple[str, tuple[int, ...] | None], StoredPart]
"""Positions in files, by the name of a value or tensor and, for a tensor, the first index of the box."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _CLASSES.get((module, name))
        if found is not None:
            return found
        if module == "torch" and name in ITEM_BITS:
            return _DType(name)
        refused = escape(f"{module}.{name}")
        raise UnreadableError(f"expected only names of DCP's metadata, got {refused}, which may run code")

    def persistent_load(self, pid: object) -> Any:
        raise UnreadableError(f"expected DCP's metadata without persistent ids, got one of type {type(pid).__name__}")


def _tensor(name: str, stored: _Tensor, positions: _Positions | None) -> TensorEntry:
    fields = _fields(stored)
    dtype, shape = _dtype_of(fields["properties"]), _lengths(fields["size"], name)
    num_bytes = math.prod(shape) * ITEM_BITS[dtype] // 8
    if num_bytes > _MAX_LENGTH:
        raise UnreadableError(f"the shape of a tensor exceeds 2^63 bytes: {escape(str(name))}")
    return TensorEntry(
        path=str(name),
        dtype=dtype,
        shape=shape,
        num_bytes=num_bytes,
        num_parts=len(fields["chunks"]),
        pieces=tuple(_piece(name, each, positions) for each in fields["chunks"]) if positions is not None else (),
    )


def _piece(name: str, chunk: _Stored, positions: _Positions) -> TensorPiece:
    fields = _fields(chunk)
    offsets = _lengths(fields["offsets"], name)
    return TensorPiece(offsets, _lengths(fields["sizes"], name), positions.get((name, offsets)))


def _lengths(lengths: Any, name: str) -> tuple[int, ...]:
    counts = tuple(int(length) for length in lengths)
    if any(not 0 <= length <= _MAX_LENGTH for length in counts) or len(counts) > MAX_DIMENSIONS:
        raise UnreadableError(f"the shape of a tensor, or a position in it, is invalid: {escape(str(name))}")
    return counts


def _positions_of(storage: Any) -> _Positions:
    positions: _Positions = {}
    for key, info in (storage or {}).items():
        index, stored = _fields(key), _fields(info)
        file, start, num_bytes = stored["relative_path"], stored["offset"], stored["length"]
        if not isinstance(file, str) or not isinstance(start, int) or not isinstance(num_bytes, int):
            raise UnreadableError("the file name, offset or length of a stored part is missing or invalid")
        name, offset = index["fqn"], index.get("offset")
        transforms = stored.get("transform_descriptors") or []
        if transforms not in ([], [_ZSTD]):
            raise UnreadableError(
                "expected data of torch.save, either plain or compressed by DCP's ZStandard extension, got data of "
                f"{escape(str(name))} that another extension has transformed"
            )
        at = _lengths(offset, name) if offset is not None else None
        positions[name, at] = StoredPart(file, start, num_bytes, is_raw=False, is_zstd=bool(transforms))
    return positions


def _dtype_of(properties: _Stored) -> str:
    state = properties.state
    parts = state if isinstance(state, tuple) else tuple(state.values())
    return next(part.name for part in parts if isinstance(part, _DType))
