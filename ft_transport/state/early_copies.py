"""Copies received tensors to the receiver's devices while other tensors still arrive.

Otherwise, the copies would begin when all bytes have arrived, and would add their whole time to the fetch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

import torch

from ft_transport.state.bounce_buffers import BitCopier, Pair
from ft_transport.state.tensors import has_memory


class EarlyCopies:
    """Counts the bytes of tensors as they arrive, and copies tensors when they are complete. Thread-safe.

    Args:
        sizes: Number of bytes of each tensor that is copied early, by its index.
        devices: The devices of all targets, also of those that are not copied early.

    Attributes:
        copier: Makes the copies.
        written: The targets of all copies that have begun.
        is_needed: Whether any tensor is copied early.
    """

    def __init__(self, sizes: Mapping[int, int], devices: Iterable[torch.device]) -> None:
        self.copier = BitCopier(devices)
        self.written: list[torch.Tensor] = []
        self.is_needed = bool(sizes)
        self._missing = dict(sizes)
        self._mutex = threading.Lock()
        self._landed: set[int] = set()
        self._begun: set[int] = set()

    def landed(self, chunk: int, parts: Sequence[tuple[int, int]]) -> list[int]:
        """Note that a chunk has arrived, and return the indices of the tensors that are complete now.

        If the chunk has arrived before, its first bytes were damaged: its tensors are no longer `is_begun`.

        Args:
            chunk: Index of the chunk.
            parts: The tensors in the chunk: index, and number of bytes in the chunk.
        """
        with self._mutex:
            return self._count(chunk, parts)

    def _count(self, chunk: int, parts: Sequence[tuple[int, int]]) -> list[int]:
        if chunk in self._landed:
            self._begun.difference_update([index for index, _ in parts])
            return []
        self._landed.add(chunk)
        counted = [(index, num_bytes) for index, num_bytes in parts if index in self._missing]
        for index, num_bytes in counted:
            self._missing[index] -= num_bytes
        return [index for index, _ in counted if not self._missing[index]]

    def begin(self, index: int, pairs: Sequence[Pair]) -> None:
        """Begin to copy a complete tensor to its targets. If a target has lost its memory, do nothing."""
        if all(has_memory(target) for target, _ in pairs):
            self.written += [target for target, _ in pairs]
            self._begun.add(index)
            self.copier.begin(pairs)

    def begin_fill(self, tensors: Sequence[torch.Tensor], byte: int) -> BitCopier:
        """Begin to overwrite tensors, after all copies.

        Returns:
            The copier that overwrites: another one if `copier` is no longer open.
        """
        copier = self.copier if self.copier.is_open else BitCopier({tensor.device for tensor in tensors})
        copier.begin_fill(tensors, byte)
        return copier

    def is_begun(self, index: int) -> bool:
        """Return whether the copy of a complete tensor has begun."""
        return index in self._begun

    def copy(self, pairs: Sequence[Pair]) -> None:
        """Make other copies. Return when all copies are complete.

        Raises:
            Exception: A copy failed, also an early one.
        """
        self.written += [target for target, _ in pairs]
        self.copier.copy(pairs)
