"""Writes ``.metadata`` of DCP (``torch.distributed.checkpoint``), without torch, so that DCP finds every tensor.

The file is a pickle of DCP's classes (torch/distributed/checkpoint/metadata.py, and ``_StorageInfo`` of filesystem.py).
DCP passes each slice of a data file to ``torch.load`` (``FileSystemReader.read_data``), so each tensor and value is
stored in the form of ``torch.save`` (``torch_save``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ft_transport.checkpoint.plan import SavePlan
from ft_transport.checkpoint.torch_save import Call, Instance, Name, Pairs, pickled
from ft_transport.checkpoint.write_items import Key, WriteItem

DCP_METADATA_NAME: Final = ".metadata"
_VERSION: Final = "1.0.0"
"""``CURRENT_DCP_VERSION`` of torch/distributed/checkpoint/filesystem.py."""

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_INDEX: Final = Name(_METADATA, "MetadataIndex")
_CHUNK: Final = Name(_METADATA, "ChunkStorageMetadata")
_PROPERTIES: Final = Name(_METADATA, "TensorProperties")
_TENSOR: Final = Name(_METADATA, "TensorStorageMetadata")
_STORAGE_INFO: Final = Name("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_SIZE: Final = Name("torch", "Size")
_BYTES: Final = Instance(Name(_METADATA, "BytesStorageMetadata"), None)
_STRIDED: Final = Call(Name("torch.serialization", "_get_layout"), ("torch.strided",))
_ROW_MAJOR: Final = Call(Name(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))


def encode_dcp_metadata(plan: SavePlan, places: Sequence[Sequence[tuple[str, int, int]]]) -> bytes:
    """Return the content of DCP's ``.metadata``.

    Args:
        plan: The plan of all ranks.
        places: For each rank, the place of each item, then of each value: name of the data file, offset and length.
    """
    stored: dict[Key, Instance] = {}
    state: dict[str, Instance] = {}
    storage: list[tuple[Instance, Instance]] = []
    for rank_plan, described, each in zip(plan.rank_plans, plan.described, places, strict=True):
        infos = [_storage_info(*place) for place in each]
        for position, info in zip(rank_plan.items, infos, strict=False):
            stored[described.items[position].key] = info
        for position, info in zip(rank_plan.values, infos[len(rank_plan.items) :], strict=True):
            name = described.values[position].name
            state[name] = _BYTES
            storage.append((_index(name, None), info))
    chunks: dict[str, dict[tuple[int, ...], WriteItem]] = {}
    for described in plan.described:
        for item in described.items:
            for name in item.names:
                chunks.setdefault(name, {}).setdefault(item.offset, item)
    for name, by_offset in chunks.items():
        first = next(iter(by_offset.values()))
        boxes = []
        for offset, item in sorted(by_offset.items()):
            size = _size(offset)
            storage.append((_index(name, size), stored[item.key]))
            boxes.append(Instance(_CHUNK, {"offsets": size, "sizes": _size(item.shape)}))
        # `TensorProperties.__getstate__`
        properties = (Name("torch", first.dtype), _STRIDED, False, _ROW_MAJOR, False)
        state[name] = Instance(
            _TENSOR,
            {
                "properties": Instance(_PROPERTIES, properties),
                "size": _size(first.global_shape),
                "chunks": boxes,
            },
        )
    metadata = Instance(
        Name(_METADATA, "Metadata"),
        {
            "state_dict_metadata": state,
            "planner_data": {name: path for each in plan.described for name, path in each.paths.items()},
            "storage_data": Pairs(storage),
            "storage_meta": None,
            "version": _VERSION,
        },
    )
    return pickled(metadata)


def _storage_info(path: str, offset: int, length: int) -> Instance:
    state = {"relative_path": path, "offset": offset, "length": length, "transform_descriptors": None}
    return Instance(_STORAGE_INFO, state)


def _index(name: str, offset: Call | None) -> Instance:
    return Instance(_INDEX, {"fqn": name, "offset": offset, "index": None})


def _size(numbers: tuple[int, ...]) -> Call:
    return Call(_SIZE, (numbers,))
