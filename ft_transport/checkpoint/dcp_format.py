"""The DCP files of a checkpoint: writing them for DCP, and reading what DCP wrote for another program.

``.metadata`` uses the classes of DCP (torch/distributed/checkpoint/metadata.py), so that DCP's reader and load planner
find every tensor.

DCP's reader (torch/distributed/checkpoint/filesystem.py, ``FileSystemReader.read_data``) passes each slice of a file to
``torch.load``. The output of ``torch.save`` depends only on dtype and shape, except for the data in the middle, as long
as it computes no CRC-32 of the data. So this module calls it once for each dtype and shape, on a tensor of zeros, and
cuts the result where the data belongs. The data is then written unchanged, at the speed of a bare write. With the
checksum, which nothing reads, torch writes 0.3 GB/s where the disk takes 1.7; the digests of the manifest cover every
byte.

DCP's metadata is a pickle. A `DCPCheckpoint` lets it name only the classes of which DCP's metadata consists; values are
loaded with ``weights_only``. So no file of a checkpoint runs code. No digest covers these files. No collective runs.
"""

from __future__ import annotations

import io
import pickle  # noqa: TID251 # DCP's format; `_MetadataReader` resolves a closed set of names
import pickletools  # reads opcodes and makes no objects
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from ft_transport.checkpoint.manifest import data_file_name
from ft_transport.checkpoint.plan import SavePlan
from ft_transport.checkpoint.write_items import Key, WriteItem
from ft_transport.errors import CheckpointError, escape_peer_text
from ft_transport.runtime.regular_files import read_regular
from ft_transport.state.dtypes import DTYPES_BY_NAME

DCP_METADATA_NAME: Final = ".metadata"

_MAX_ENVELOPES: Final = 1 << 16
_CAPTURED_BYTES: Final = 1 << 20
"""torch writes data of this length in a separate call; all other parts of an envelope are far smaller."""


@dataclass(frozen=True, slots=True)
class TorchEnvelope:
    """The bytes before and after the data of a tensor.

    Attributes:
        before: Bytes before the data, which is aligned as torch requires if the envelope is.
        after: Bytes after the data.
    """

    before: bytes
    after: bytes


def saved(value: object) -> bytes:
    """Return the output of ``torch.save`` for a value that is no tensor, which DCP passes to ``torch.load``."""
    buffer = io.BytesIO()
    torch.save(value, buffer)  # noqa: TID251 # DCP's format; what we read ourselves is never unpickled
    return buffer.getvalue()


def encode_dcp_metadata(plan: SavePlan, places: Sequence[Sequence[tuple[int, int]]]) -> bytes:
    """Return the content of DCP's ``.metadata``.

    Args:
        plan: The plan of all ranks.
        places: By rank, offset and length in its data file of its items and then of its values.
    """
    stored: dict[Key, _StorageInfo] = {}
    state: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for rank, (rank_plan, each) in enumerate(zip(plan.rank_plans, places, strict=True)):
        infos = [_StorageInfo(data_file_name(rank), offset, length) for offset, length in each]
        described = plan.described[rank]
        for position, info in zip(rank_plan.items, infos, strict=False):
            stored[described.items[position].key] = info
        for position, info in zip(rank_plan.values, infos[len(rank_plan.items) :], strict=True):
            name = described.values[position].name
            state[name] = BytesStorageMetadata()
            storage[MetadataIndex(name)] = info
    chunks: dict[str, dict[tuple[int, ...], WriteItem]] = {}
    for described in plan.described:
        for item in described.items:
            for name in item.names:
                chunks.setdefault(name, {}).setdefault(item.offset, item)
    for name, by_offset in chunks.items():
        first = next(iter(by_offset.values()))
        boxes = []
        for offset, item in sorted(by_offset.items()):
            size = torch.Size(offset)
            storage[MetadataIndex(name, size)] = stored[item.key]
            boxes.append(ChunkStorageMetadata(size, torch.Size(item.shape)))
        state[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=DTYPES_BY_NAME[first.dtype]),
            size=torch.Size(first.global_shape),
            chunks=boxes,
        )
    metadata = Metadata(
        state_dict_metadata=state,
        planner_data={name: path for each in plan.described for name, path in each.paths.items()},
        storage_data=storage,
        version=CURRENT_DCP_VERSION,
    )
    buffer = io.BytesIO()
    pickle.dump(metadata, buffer)
    return buffer.getvalue()


class _Capture:
    """A file that records what is written to it, except writes as long as the data."""

    def __init__(self, data_bytes: int) -> None:
        self._data_bytes = data_bytes
        self.parts: list[bytes] = []
        self.num_data_writes = 0

    def write(self, data: memoryview) -> int:
        if len(data) == self._data_bytes:
            self.num_data_writes += 1
            self.parts.append(b"")
            self.data_at = len(self.parts)
        else:
            self.parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Do nothing: this file buffers nothing."""


@lru_cache(_MAX_ENVELOPES)
def envelope_of(dtype: torch.dtype, shape: tuple[int, ...]) -> TorchEnvelope:
    """Return the envelope of a row-major tensor. Turns torch's checksums off in this process.

    Raises:
        CheckpointError: This version of torch writes an unexpected format.
    """
    torch.serialization.set_crc32_options(False)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if num_bytes < _CAPTURED_BYTES:
        template = (
            torch.zeros(num_bytes, dtype=torch.uint8).view(dtype).view(shape)
            if num_bytes
            else torch.empty(shape, dtype=dtype)
        )
        whole = saved(template)
        reader: Any = torch._C.PyTorchFileReader(io.BytesIO(whole))
        start = reader.get_record_offset("data/0")
        return TorchEnvelope(whole[:start], whole[start + num_bytes :])
    # Memory that is never touched, and freed at once.
    template = torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
    capture = _Capture(num_bytes)
    torch.save(template, capture)  # type: ignore[arg-type] # noqa: TID251 # as above
    if capture.num_data_writes != 1:
        raise CheckpointError(f"expected torch.save to write the data of {dtype}{list(shape)} in one piece")
    return TorchEnvelope(b"".join(capture.parts[: capture.data_at]), b"".join(capture.parts[capture.data_at :]))


_MAX_METADATA_BYTES: Final = 1 << 30
_MEMO_OPCODES: Final = ("PUT", "BINPUT", "LONG_BINPUT")
_MAX_SHOWN: Final = 500
_CLASSES: Final = (
    metadata.Metadata,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.TensorProperties,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    filesystem._StorageInfo,
    filesystem._StoragePrefix,
)
_OTHERS: Final[dict[tuple[str, str], Any]] = {
    (metadata.__name__, "_MEM_FORMAT_ENCODING"): metadata._MEM_FORMAT_ENCODING,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): dict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    **{("torch", name): dtype for name, dtype in DTYPES_BY_NAME.items()},
}


class DCPCheckpoint:
    """One checkpoint, of which any rank reads the parts that it needs.

    Args:
        path: Its directory.
        step: Its step, from the directory's name.

    Attributes:
        path: As the argument.
        step: As the argument.
        tensors: By DCP's name, dtype and shape of each tensor.
        values: DCP's names of values other than tensors.

    Raises:
        CheckpointError: The metadata is not DCP's.
        OSError: The metadata cannot be read.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self.step = step
        encoded = read_regular(path / DCP_METADATA_NAME, max_bytes=_MAX_METADATA_BYTES)
        try:
            _check_memo(encoded)
            read: metadata.Metadata = _MetadataReader(io.BytesIO(encoded)).load()
            stored = read.state_dict_metadata
            self.tensors = {
                name: (each.properties.dtype, each.size)
                for name, each in stored.items()
                if isinstance(each, metadata.TensorStorageMetadata)
            }
            places = {
                metadata.MetadataIndex(each.fqn, each.offset, each.index): info
                for each, info in read.storage_data.items()
            }
            files = {Path(info.relative_path) for info in places.values()}
            if not all(isinstance(name, str) for name in stored) or any(len(file.parts) != 1 for file in files):
                raise CheckpointError("expected text as names, and files in the directory of the checkpoint")
            self._metadata = metadata.Metadata(stored, storage_data=places)
        # The errors that a reader raises for a file that is no pickle, or another pickle, are not documented.
        except Exception as error:
            raise CheckpointError(
                f"expected DCP's metadata in {path / DCP_METADATA_NAME}, got {type(error).__name__}: "
                f"{escape_peer_text(str(error), max_characters=_MAX_SHOWN)}",
                step=step,
            ) from error
        self.values = frozenset(stored.keys() - self.tensors.keys())

    def load(self, tensors: Mapping[str, torch.Tensor], values: Iterable[str]) -> dict[str, object]:
        """Read by name, with the reader and the planner of DCP.

        Args:
            tensors: Loaded in place; of a DTensor, this rank's part.
            values: Names of values other than tensors.

        Returns:
            The values, by name.

        Raises:
            CheckpointError: A file is damaged, or a value has a class that only unpickling could make. Part of
                ``tensors`` may be overwritten then.
        """
        state: dict[str, Any] = {**tensors, **dict.fromkeys(values)}
        reader, planner = (
            filesystem.FileSystemReader(self.path),
            _Planner(flatten_state_dict=False, flatten_sharded_tensors=False),
        )
        try:
            planner.set_up_planner(state, self._metadata, is_coordinator=True)
            reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        except Exception as error:
            raise CheckpointError(
                f"expected to load {self.path} with DCP's reader, got {type(error).__name__}: {error}", step=self.step
            ) from error
        return {name: planner.state_dict[name] for name in values}


def _check_memo(encoded: bytes) -> None:
    """Refuse an index for which the unpickler would allocate more entries than the pickle has bytes.

    Raises:
        CheckpointError: Names the index.
        ValueError: The bytes are no pickle.
    """
    for opcode, argument, _ in pickletools.genops(encoded):
        if opcode.name in _MEMO_OPCODES and argument is not None and argument > len(encoded):
            raise CheckpointError(f"expected at most {len(encoded)} entries of the pickle's memo, got index {argument}")


class _MetadataReader(pickle.Unpickler):
    """Resolves only the names of which DCP's metadata consists.

    A pickle may set attributes of a class that it names. So each reader has classes of its own.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._found: dict[tuple[str, str], Any] = {
            **_OTHERS,
            **{(each.__module__, each.__name__): type(each.__name__, (each,), {}) for each in _CLASSES},
            **{(module, name): _joined for module in ("pathlib", "pathlib._local") for name in ("Path", "PosixPath")},
            ("torch.serialization", "_get_layout"): lambda name: {str(torch.strided): torch.strided}[name],
        }

    def find_class(self, module: str, name: str) -> Any:
        found = self._found.get((module, name))
        if found is None:
            raise CheckpointError(f"expected names of DCP alone, got {module}.{name}, which may run code")
        return found


def _joined(*parts: str) -> str:
    return "/".join(parts)


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value as DCP's planner does, but never run code."""
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, weights_only=True)  # noqa: TID251 # a closed set of types
        except pickle.UnpicklingError as error:
            raise CheckpointError("expected a value of torch's or Python's own types", path=name) from error
