"""Memory for bytes that are not received in place: new tensors, and bytes to be copied to a device or other layout."""

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
    """One block of memory for all entries of a table without a tensor to receive into.

    Args:
        manifest: The manifest with the table.
        direct: Entries that are received in place.
        spare: May have resident memory.

    Raises:
        RestoreError: The system has not enough memory.
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
        """Return a writable part of an entry's bytes."""
        at = self._offsets[index] + offset
        return self._view[at : at + num_bytes]

    def tensor(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an entry's bytes as a one-dimensional tensor, which keeps the block alive."""
        assert self._block is not None, "an entry with bytes has memory"
        num_items = self._num_bytes[index] // dtype.itemsize
        return torch.frombuffer(self._block, dtype=dtype, count=num_items, offset=self._offsets[index])
