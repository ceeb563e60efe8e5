"""Writes checkpoints in the format of DCP (``torch.distributed.checkpoint``), and reads those that DCP wrote.

Writing: ``.metadata`` is made of DCP's own classes (torch/distributed/checkpoint/metadata.py), so that DCP's reader and
load planner find every tensor. DCP's reader passes each slice of a data file to ``torch.load``
(torch/distributed/checkpoint/filesystem.py, ``FileSystemReader.read_data``), so each tensor is stored in the form that
``torch.save`` writes: the data, with some bytes before it and after it. Without a CRC-32 of the data, these bytes
depend only on dtype and shape. This module gets them from one ``torch.save`` of zeros for each dtype and shape. The
data itself is then written unchanged, at the speed of a bare write. With the CRC-32, which nothing reads, torch writes
only 0.3 GB/s to a disk that accepts 1.7 GB/s. The digests in ``manifest.json`` cover every byte.

Reading: DCP's metadata is a pickle. `DCPCheckpoint` refuses a pickle that names a class or function that DCP's metadata
does not use. Values are loaded with ``weights_only``. So no file of a checkpoint can run code. The files of other
programs have no digests. Reading runs no collective.
"""

from __future__ import annotations

import io
import pickle  # noqa: TID251 # DCP's format; `_MetadataReader` resolves a closed set of names
import pickletools  # reads opcodes and makes no objects
from collections.abc import Iterable, Mapping, Sequence
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
from ft_transport.state.tensors import DTYPES_BY_NAME

DCP_METADATA_NAME: Final = ".metadata"

_MAX_ENVELOPES: Final = 1 << 16
_CAPTURED_BYTES: Final = 1 << 20
"""``torch.save`` writes data of this length in a call of its own; its other writes are far smaller."""


def saved(value: object) -> bytes:
    """Return the output of ``torch.save`` for a value. DCP passes it to ``torch.load``."""
    buffer = io.BytesIO()
    torch.save(value, buffer)  # noqa: TID251 # DCP's format; what we read ourselves is never unpickled
    return buffer.getvalue()


def encode_dcp_metadata(plan: SavePlan, places: Sequence[Sequence[tuple[int, int]]]) -> bytes:
    """Return the content of DCP's ``.metadata``.

    Args:
        plan: The plan of all ranks.
        places: For each rank, the offset and length of each item, then of each value, in the rank's data file.
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
    """A file object that records what ``torch.save`` writes, except the data, which it recognises by its length."""

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
        """Do nothing: ``torch.save`` requires the method, but this file has no buffer."""


@lru_cache(_MAX_ENVELOPES)
def envelope_of(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return the bytes that ``torch.save`` writes before and after the data of a row-major tensor.

    The length of the bytes before the data is a multiple of the alignment that torch requires for the data. Turns off
    the CRC-32 of ``torch.save`` in this process.

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
        return whole[:start], whole[start + num_bytes :]
    # The zeros use no memory: no page of them is ever touched.
    template = torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
    capture = _Capture(num_bytes)
    torch.save(template, capture)  # type: ignore[arg-type] # noqa: TID251 # as above
    if capture.num_data_writes != 1:
        raise CheckpointError(f"expected torch.save to write the data of {dtype}{list(shape)} in one piece")
    return b"".join(capture.parts[: capture.data_at]), b"".join(capture.parts[capture.data_at :])


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
    """A checkpoint that another program wrote with DCP. Each rank reads the parts that it needs.

    Args:
        path: The directory of the checkpoint.
        step: The step in the name of the directory.

    Attributes:
        path: The directory of the checkpoint.
        step: The step of the checkpoint.
        tensors: Dtype and shape of each tensor, by its name in DCP.
        values: Names in DCP of all values that are not tensors.

    Raises:
        CheckpointError: The metadata was not written by DCP, or is damaged.
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
                raise CheckpointError(
                    "expected names that are text, and data files in the directory of the checkpoint itself"
                )
            self._metadata = metadata.Metadata(stored, storage_data=places)
        # The errors of an unpickler, and of DCP's classes for other content, are not documented.
        except Exception as error:
            raise CheckpointError(
                f"expected DCP's metadata in {path / DCP_METADATA_NAME}, got {type(error).__name__}: "
                f"{escape_peer_text(str(error), max_characters=_MAX_SHOWN)}",
                step=step,
            ) from error
        self.values = frozenset(stored.keys() - self.tensors.keys())

    def load(self, tensors: Mapping[str, torch.Tensor], values: Iterable[str]) -> dict[str, object]:
        """Load tensors in place, and return values, with DCP's reader and planner.

        Args:
            tensors: The tensors to load, by name in DCP. Of a DTensor, this rank's shard is loaded.
            values: Names in DCP of the values to return.

        Returns:
            The values, by name.

        Raises:
            CheckpointError: A file is damaged, or a value has a class that would run code. Some of ``tensors`` may
                already have been overwritten.
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
    """Refuse memo indices that exceed the length of the pickle: the unpickler would allocate that many entries.

    Raises:
        CheckpointError: An index is too large.
        ValueError: The bytes are not a pickle.
    """
    for opcode, argument, _ in pickletools.genops(encoded):
        if opcode.name in _MEMO_OPCODES and argument is not None and argument > len(encoded):
            raise CheckpointError(
                f"expected memo indices up to {len(encoded)}, the length of the pickle, got {argument}"
            )


class _MetadataReader(pickle.Unpickler):
    """An unpickler that resolves only the classes and functions that DCP's metadata uses.

    Each reader makes its own subclasses of DCP's classes, because a pickle can change attributes of a class.
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
            raise CheckpointError(
                f"expected only names that DCP's metadata uses, got {module}.{name}, which may run code"
            )
        return found


def _joined(*parts: str) -> str:
    return "/".join(parts)


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value as DCP's planner does, but with ``weights_only``, so that the value cannot run code."""
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, weights_only=True)  # noqa: TID251 # a closed set of types
        except pickle.UnpicklingError as error:
            raise CheckpointError("expected a value of torch's or Python's own types", path=name) from error
