"""The trip of a state without a network: snapshot, bytes, restore."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from ft_transport.state.restore import Restore
from ft_transport.state.snapshot import Taking
from ft_transport.state.stager import Stager
from ft_transport.wire.chunks import ChunkTable
from ft_transport.wire.layouts import LayoutTable
from ft_transport.wire.manifest import Manifest, SnapshotId, TensorEntry, decode_header, encode_header
from ft_transport.wire.nodes import Node
from ft_transport.wire.snapshot import MemoryFile, Snapshot

CHUNK_BYTES = 1 << 16
SNAPSHOT_ID = SnapshotId("0123456789abcdef" * 2)


@contextlib.contextmanager
def open_stager(max_snapshots: int = 2, **settings: Any) -> Iterator[Stager]:
    stager = Stager(max_snapshots=max_snapshots, num_threads=2, chunk_bytes=CHUNK_BYTES, **settings)
    try:
        yield stager
    finally:
        stager.close()


def take(stager: Stager, step: int, state: object) -> Snapshot:
    return stager.begin(Taking(step=step, state=state)).finish()


def file_of(snapshot: Snapshot) -> bytes:
    """The safetensors file, as curl would save it."""
    if isinstance(snapshot.memory, MemoryFile):
        return os.pread(snapshot.memory.descriptor, snapshot.total_bytes, snapshot.memory.start)
    with snapshot.memory.pin(0, snapshot.total_bytes) as views:
        return b"".join(views)


def file_of_state(state: object) -> bytes:
    with open_stager() as stager:
        snapshot = take(stager, 7, state)
        try:
            return file_of(snapshot)
        finally:
            snapshot.close()


def manifest_of(file: bytes) -> Manifest:
    return decode_header(file[8 : 8 + int.from_bytes(file[:8], "little")])


def receive(file: bytes, into: object = None, **settings: Any) -> Any:
    """What a receiver makes of the file when every byte arrives, in pieces that fit nothing."""
    manifest = manifest_of(file)
    restore = Restore(manifest, into=into, **settings)
    deliver(restore, file, manifest)
    return restore.finish()


def deliver(restore: Restore, file: bytes, manifest: Manifest, start: int = 0, end: int | None = None) -> None:
    data = memoryview(file)[manifest.header_bytes :]
    end = manifest.data_bytes if end is None else end
    for first in range(start, end, 1000):
        position = first
        for view in restore.buffers(first, min(first + 1000, end)):
            view[:] = data[position : position + len(view)]
            position += len(view)


def round_trip(state: object, into: object = None, **settings: Any) -> Any:
    return receive(file_of_state(state), into, **settings)


def manifest_with(
    tree: Node,
    tensors: list[torch.Tensor] | None = None,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    layouts: LayoutTable | None = None,
) -> Manifest:
    """A manifest whose table is valid, around a tree that need not be."""
    tensors = tensors if tensors is not None else [torch.arange(8, dtype=torch.uint8), torch.arange(6.0).view(2, 3)]
    names = {torch.uint8: "U8", torch.int8: "I8", torch.float32: "F32", torch.int64: "I64"}
    entries, end = [], 0
    for index, tensor in enumerate(tensors):
        entries.append(
            TensorEntry(f"t{index}", names[tensor.dtype], tuple(tensor.shape), end, end := end + tensor.nbytes)
        )
    chunks = ChunkTable(data_bytes=end, chunk_bytes=chunk_bytes)
    header = encode_header(
        step=1,
        snapshot_id=SNAPSHOT_ID,
        tensors=entries,
        tree=tree,
        chunks=chunks,
        digests=[0] * chunks.num_chunks,
        align_bytes=64,
        layouts=layouts,
    )
    return decode_header(header[8:])


def on_host(value: Any) -> Any:
    """A copy in the memory of the host, which nothing changes any more."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: on_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(on_host(item) for item in value)
    return value
