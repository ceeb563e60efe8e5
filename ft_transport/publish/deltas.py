"""Deltas between two versions of weights: made from their tensors, and applied to an engine's own.

The receiver never trusts a delta. It compares the result, chunk by chunk, with the digests of the version, so a delta
that was lost, repeated, damaged or made for other weights costs as much as no delta, and does not change the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ft_transport.state.views import as_bytes
from ft_transport.wire.delta import Delta, TensorChanges, TensorPair, apply_changes, encode_delta

_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes that devices have operations for, by the size of an element in bytes."""


@dataclass(frozen=True, slots=True)
class OwnChange:
    """The changes in one of an engine's tensors."""

    tensor: torch.Tensor
    changes: TensorChanges


def delta_between(
    version: int, weights: Mapping[str, torch.Tensor], base: int, base_weights: Mapping[str, torch.Tensor]
) -> bytes | None:
    """Return the delta that leads from one version to another.

    Args:
        version: The version that the delta leads to.
        weights: Tensors of that version, in host memory.
        base: The version that the delta applies to.
        base_weights: Tensors of that version.

    Returns:
        The delta; ``None`` if the two differ in more than values, or in so many values that chunks are smaller.
    """
    if _kinds(weights) != _kinds(base_weights):
        return None
    return encode_delta(version, base, list(_pairs(weights, base_weights)))


def changes_of(deltas: Sequence[Delta], weights: Mapping[str, torch.Tensor]) -> list[OwnChange]:
    """Return the changes that deltas make in an engine's tensors; computed before any tensor changes.

    Args:
        deltas: The deltas, in the order in which they apply.
        weights: The engine's tensors by each of their names; several may be the same.

    Returns:
        Each change with its tensor; empty if the deltas do not fit the tensors.

    Raises:
        ManifestError: A delta contradicts itself.
    """
    changes: list[OwnChange] = []
    for delta in deltas:
        taken: set[int] = set()
        for change in delta.changes():
            tensor = weights.get(change.tensor.name)
            if tensor is None or not tensor.is_contiguous():
                return []
            if (tensor.nbytes, tensor.itemsize) != (change.tensor.num_bytes, change.bits.itemsize):
                return []
            # A delta lists a tied tensor under each of its names.
            if id(tensor) not in taken:
                taken.add(id(tensor))
                changes.append(OwnChange(tensor, change))
    return changes


class AppliedChanges:
    """The changes applied to an engine's tensors; can be undone."""

    def __init__(self) -> None:
        self._changes: list[OwnChange] = []

    def apply(self, changes: Sequence[OwnChange]) -> None:
        """Change tensors in place."""
        for change in changes:
            _apply(change)
            self._changes.append(change)

    def undo(self) -> None:
        """Restore the tensors' previous values, bit by bit."""
        while self._changes:
            _apply(self._changes.pop())


def _apply(change: OwnChange) -> None:
    tensor, changes = change.tensor, change.changes
    if tensor.device.type == "cpu":
        apply_changes(changes, _bytes_of(tensor))
        return
    elements = as_bytes(tensor).view(_SIGNED[tensor.itemsize])
    positions = torch.from_numpy(changes.positions).to(tensor.device)
    bits = torch.from_numpy(changes.bits.view(f"<i{tensor.itemsize}" if tensor.itemsize > 1 else "u1"))
    elements[positions] ^= bits.to(tensor.device)


def _kinds(weights: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}


def _pairs(weights: Mapping[str, torch.Tensor], base: Mapping[str, torch.Tensor]) -> Iterator[TensorPair]:
    for name, tensor in weights.items():
        item_bytes = tensor.itemsize if tensor.itemsize in _SIGNED else 1
        yield TensorPair(name, item_bytes, _bytes_of(base[name]), _bytes_of(tensor))


def _bytes_of(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    data: np.ndarray[tuple[int], np.dtype[np.uint8]] = as_bytes(tensor).numpy()
    return data
