"""Which tensors of a state only an optimizer, or only a write section, changes: told by the memory that they lie in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Final, TypeAlias

import torch
from torch.optim import Optimizer

MIN_DEFERRED_BYTES: Final = 64 << 10
"""Smaller tensors are copied at the boundary: that takes no longer than handing them to another thread."""

Memory: TypeAlias = tuple[torch.device, int, int]
"""Where a tensor lies: device, address, length in bytes."""


def belongs_to(guarded: Set[Memory], at_least_bytes: int = MIN_DEFERRED_BYTES) -> Callable[[torch.Tensor], bool]:
    """Says of a tensor whether it is large and its memory is among ``guarded``.

    It has to be the very memory: what merely shares a storage with it may be changed by others.
    """

    def belongs(tensor: torch.Tensor) -> bool:
        return tensor.nbytes >= at_least_bytes and _memory(tensor) in guarded

    return belongs


def memory_of_optimizers(optimizers: Iterable[Optimizer]) -> set[Memory]:
    """Where their parameters and states lie."""
    return set(filter(None, map(_memory, _tensors_of_optimizers(optimizers))))


def storages_of_optimizers(optimizers: Iterable[Optimizer]) -> set[int]:
    """The addresses of the storages that their steps change, whatever part of them."""
    return set(filter(None, map(storage_of, _tensors_of_optimizers(optimizers))))


def storage_of(tensor: torch.Tensor) -> int | None:
    """The address of the tensor's storage, which others may be views of; ``None`` if it has none."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    try:
        return local.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors and other wrappers
        return None


def _tensors_of_optimizers(optimizers: Iterable[Optimizer]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
        for values in optimizer.state.values():
            yield from _tensors_of(values)


def memory_of(parts: Iterable[object]) -> set[Memory]:
    """Where the tensors in them lie."""
    return set(filter(None, map(_memory, _tensors_of(list(parts)))))


def _tensors_of(values: object) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _tensors_of(value)
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors_of(value)


def _memory(tensor: torch.Tensor) -> Memory | None:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    try:
        return local.device, local.data_ptr(), local.nbytes
    except RuntimeError:  # sparse tensors and other wrappers have no memory of their own
        return None
