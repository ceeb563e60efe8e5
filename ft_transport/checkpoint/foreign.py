"""A checkpoint that ``torch.distributed.checkpoint`` wrote for another program: its content, and loading from it.

DCP's metadata is a pickle. This module lets it name only the classes of which DCP's metadata consists; values are
loaded with ``weights_only``. So no file of a checkpoint runs code. No digest covers these files. No collective runs.
"""

from __future__ import annotations

import io
import pickle  # noqa: TID251 # DCP's format; `_MetadataReader` resolves a closed set of names
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from ft_transport.checkpoint.dcp_format import DCP_METADATA_NAME
from ft_transport.errors import CheckpointError, escape_peer_text
from ft_transport.runtime.regular_files import read_regular
from ft_transport.state.dtypes import DTYPES_BY_NAME

_MAX_METADATA_BYTES: Final = 1 << 30
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
