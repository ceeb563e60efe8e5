"""Memory for what is not received in place: for new tensors, and until it is copied to a device or another layout."""

from __future__ import annotations

import mmap
from collections.abc import Container
from typing import Final

import torch

from ft_transport.errors import RestoreError
from ft_transport.state.spare_memory import SpareMemory, new_block
from ft_transport.wire.manifest import Manifest

_ALIGN_BYTES: Final = 64


class FreshMemory:
    """One block for all entries of a table that have no tensor to be received into.

    Args:
        manifest: Has the table.
        direct: The entries that need none.
        spare: Has memory that is resident already, perhaps.

    Raises:
        RestoreError: The system has none.
    """

    def __init__(self, manifest: Manifest, direct: Container[int], spare: SpareMemory | None) -> None:
        self._num_bytes: dict[int, int] = {}
        self._offsets: dict[int, int] = {}
        end = 0
        for index, entry in enumerate(manifest.tensors):
            if index not in direct and entry.end > entry.start:
                self._offsets[index], self._num_bytes[index] = end, entry.end - entry.start
                end += -(-(entry.end - entry.start) // _ALIGN_BYTES) * _ALIGN_BYTES
        self._block: mmap.mmap | None = None
        if end:
            try:
                self._block = (spare.take(end) if spare is not None else None) or new_block(end)
            except OSError as error:
                raise RestoreError(
                    f"expected {end} bytes of memory to receive into: {error}", step=manifest.step
                ) from error
        self._view = memoryview(self._block) if self._block is not None else memoryview(b"")

    def view(self, index: int, offset: int, num_bytes: int) -> memoryview:
        """A part of an entry's bytes, writable."""
        at = self._offsets[index] + offset
        return self._view[at : at + num_bytes]

    def tensor(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        """All of an entry's bytes, one-dimensional; keeps the block alive."""
        assert self._block is not None, "an entry with bytes has memory"
        num_items = self._num_bytes[index] // dtype.itemsize
        return torch.frombuffer(self._block, dtype=dtype, count=num_items, offset=self._offsets[index])
