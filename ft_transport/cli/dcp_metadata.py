"""The ``.metadata`` of a DCP checkpoint, read without running what stands in it.

It is a pickle (torch/distributed/checkpoint/filesystem.py). Of the names that a pickle may call, those of which DCP's
metadata consists stand here for classes of our own that keep their state; every other one is refused by name. Nothing
of torch is imported.

It is read in a process of its own, whose memory and time are bounded: nine bytes of a pickle make its reader
allocate gigabytes, and a tuple that is nested deeply enough ends the process that hashes it. That process imports
nothing from the working directory, which may be the checkpoint's.
"""

from __future__ import annotations

import io
import math
import os
import pickle  # noqa: TID251 # DCP's format; `_Reader` refuses all but a closed set of names
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from ft_transport.cli.contents import Contents, StoredPart, TensorEntry, UnreadableError
from ft_transport.errors import escape_peer_text
from ft_transport.runtime.child_python import child_command, child_environment
from ft_transport.runtime.regular_files import read_regular

METADATA_NAME: Final = ".metadata"

_MAX_BYTES: Final = 1 << 30
_MAX_NAME: Final = 200
_MAX_LENGTH: Final = (1 << 63) - 1
_MAX_DIMENSIONS: Final = 64
_MAX_MESSAGE: Final = 500
_TIMEOUT_S: Final = 60.0
_REFUSED: Final = 3
_LEAST_MEMORY_BYTES: Final = 512 << 20
_MEMORY_FOR_EACH_BYTE: Final = 64
"""What a byte of metadata takes as objects, and as JSON, many times over."""
_METADATA: Final = "torch.distributed.checkpoint.metadata"
_DTYPES: Final = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
"""Those of torch, with the bytes of an element."""


def read_dcp(directory: Path) -> Contents:
    """What a DCP checkpoint has.

    Raises:
        UnreadableError: It has no ``.metadata``, or one that is none of DCP's.
    """
    path = directory / METADATA_NAME
    try:
        encoded = read_regular(path, max_bytes=_MAX_BYTES)
    except OSError as error:
        raise UnreadableError(f"expected a DCP checkpoint in {directory}: {error}") from error
    try:
        done = subprocess.run(
            child_command(__name__, _main.__name__),
            input=encoded,
            capture_output=True,
            env=child_environment(),
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UnreadableError(f"expected DCP's metadata in {path}: it could not be read: {error}") from error
    if done.returncode == _REFUSED:
        told = escape_peer_text(done.stdout.decode("utf-8", "replace"), max_characters=_MAX_MESSAGE)
        raise UnreadableError(f"expected DCP's metadata in {path}: {told}")
    if done.returncode:
        raise UnreadableError(f"expected DCP's metadata in {path}: its reader ended with {done.returncode}")
    return msgspec.json.decode(done.stdout, type=Contents)


def _main() -> None:
    """Reads metadata from standard input, and says in JSON what it is, or with `_REFUSED` why it is none."""
    encoded = sys.stdin.buffer.read()
    most = _LEAST_MEMORY_BYTES + _MEMORY_FOR_EACH_BYTE * len(encoded)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        answer = msgspec.json.encode(_read(encoded))
    # What a file that is no pickle makes of the reader is not documented.
    except Exception as error:
        told = str(error) if isinstance(error, UnreadableError) else f"{type(error).__name__}: {error}"
        sys.stdout.write(told)
        sys.stdout.flush()
        os._exit(_REFUSED)
    sys.stdout.buffer.write(answer)
    sys.stdout.flush()
    # What was built is not taken down again, one object after the other.
    os._exit(0)


def _read(encoded: bytes) -> Contents:
    metadata = _Reader(io.BytesIO(encoded)).load()
    stored = metadata.state_dict_metadata
    return Contents(
        kind="DCP checkpoint",
        tensors=tuple(_tensor(name, each) for name, each in stored.items() if isinstance(each, _Tensor)),
        values=tuple(str(name) for name, each in stored.items() if isinstance(each, _Bytes)),
        parts=tuple(_part(info) for info in (metadata.storage_data or {}).values()),
    )


class _Kept:
    """Stands for a class of DCP's, and keeps what the pickle says of it."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        # A dataclass with slots has two parts: its __dict__, and the slots. `TensorProperties` has a tuple of its own.
        parts = state if isinstance(state, tuple) else (state,)
        self.state = state
        for part in parts:
            if isinstance(part, dict):
                self.__dict__.update({str(name): value for name, value in part.items()})


class _Metadata(_Kept):
    state_dict_metadata: dict[str, object]
    storage_data: dict[object, _Kept] | None


class _Tensor(_Kept):
    properties: _Kept
    size: tuple[int, ...]
    chunks: list[object]


class _Bytes(_Kept):
    pass


@dataclass(frozen=True, slots=True)
class _DType:
    name: str


_CLASSES: Final[dict[tuple[str, str], Any]] = {
    (_METADATA, "Metadata"): _Metadata,
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "BytesStorageMetadata"): _Bytes,
    **{
        (_METADATA, name): _Kept
        for name in ("ChunkStorageMetadata", "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Kept,
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"): _Kept,
    ("torch.serialization", "_get_layout"): _Kept,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    **{("pathlib", name): _Kept for name in ("Path", "PosixPath", "PurePosixPath")},
    **{("pathlib._local", name): _Kept for name in ("Path", "PosixPath", "PurePosixPath")},
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _CLASSES.get((module, name))
        if found is not None:
            return found
        if module == "torch" and name in _DTYPES:
            return _DType(name)
        asked = escape_peer_text(f"{module}.{name}", max_characters=_MAX_NAME)
        raise UnreadableError(f"expected DCP's metadata, which has no {asked}: it is not read, for it may run code")

    def persistent_load(self, pid: object) -> Any:
        raise UnreadableError(f"expected DCP's metadata, which refers to nothing outside, got {type(pid).__name__}")


def _tensor(name: str, stored: _Tensor) -> TensorEntry:
    dtype = _dtype_of(stored.properties)
    shape = tuple(int(length) for length in stored.size)
    if any(not 0 <= length <= _MAX_LENGTH for length in shape) or len(shape) > _MAX_DIMENSIONS:
        shown = escape_peer_text(str(name), max_characters=_MAX_NAME)
        raise UnreadableError(f"expected the shape of a tensor, {shown} has none")
    num_items = math.prod(shape)
    return TensorEntry(
        path=str(name), dtype=dtype, shape=shape, num_bytes=num_items * _DTYPES[dtype], num_parts=len(stored.chunks)
    )


def _part(info: _Kept) -> StoredPart:
    file, start, num_bytes = info.__dict__["relative_path"], info.__dict__["offset"], info.__dict__["length"]
    if not isinstance(file, str) or not isinstance(start, int) or not isinstance(num_bytes, int):
        raise UnreadableError("expected file, offset and length of what is stored")
    return StoredPart(file, start, num_bytes)


def _dtype_of(properties: _Kept) -> str:
    state = properties.state
    parts = state if isinstance(state, tuple) else tuple(state.values())
    return next(part.name for part in parts if isinstance(part, _DType))
