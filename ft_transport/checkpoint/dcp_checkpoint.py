"""Reads checkpoints that other programs wrote with DCP (``torch.distributed.checkpoint``).

DCP's metadata is a pickle. `DCPCheckpoint` refuses a pickle that names a class or function that DCP's metadata does not
use. Values are loaded with ``weights_only``. So no file of a checkpoint can run code. The files of other programs have
no digests. Reading runs no collective.
"""

from __future__ import annotations

import io
import pickle  # noqa: TID251 # DCP's format; `_MetadataReader` resolves a closed set of names
import pickletools  # reads opcodes and makes no objects
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from ft_transport.checkpoint.dcp_metadata import DCP_METADATA_NAME
from ft_transport.errors import CheckpointError, escape_peer_text
from ft_transport.runtime.regular_files import read_regular
from ft_transport.state.tensors import DTYPES_BY_NAME

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
