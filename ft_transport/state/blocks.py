"""A flattened state before its copy: a tree of nodes, and the memory of its tensors."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import torch

from ft_transport.wire.layouts import LayoutTable
from ft_transport.wire.nodes import Node


def _column() -> array[int]:
    return array("q")


@dataclass(slots=True)
class Blocks:
    """The memory to copy, one entry of the tensor table each; the lists and arrays (of 64-bit ints) run in parallel.

    Attributes:
        names: Unique names, made from the paths.
        sources: Live tensors on any device, of any stride.
        dtypes: safetensors dtype of each entry.
        shapes: Shape of each entry as it stands in the file; may be ``torch.Size``.
        num_bytes: Size of each entry.
        item_bytes: Size of one element of the source, which is also its alignment.
        addresses: Address of a row-major source on the CPU, whose bytes can be copied directly; 0 for others.
        casts: By index, the dtype to cast a source to during the copy; the other columns describe the result.
    """

    names: list[str] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    num_bytes: array[int] = field(default_factory=_column)
    item_bytes: array[int] = field(default_factory=_column)
    addresses: array[int] = field(default_factory=_column)
    casts: dict[int, torch.dtype] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatState:
    """A state ready for its copy; the tree's nodes index ``blocks`` and ``layouts``."""

    tree: Node
    blocks: Blocks
    layouts: LayoutTable
