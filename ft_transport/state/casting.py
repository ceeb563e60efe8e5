"""Casts floating-point tensors to another dtype while a snapshot copies them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

import msgspec
import torch

from ft_transport.state.blocks import FlatState
from ft_transport.state.dtypes import SAFETENSORS_NAMES, name_of
from ft_transport.wire.nodes import LayoutNode, Node

CASTABLE: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Other dtypes need scales (float8) or are not floating-point."""


def cast_floating(flat: FlatState, dtype: torch.dtype) -> FlatState:
    """Return the state with floating-point tensors to be cast to ``dtype``; changes the blocks of ``flat``.

    Args:
        flat: The state.
        dtype: One of `CASTABLE`.
    """
    blocks = flat.blocks
    for index, source in enumerate(blocks.sources):
        if source.dtype is dtype or source.dtype not in CASTABLE:
            continue
        blocks.dtypes[index] = SAFETENSORS_NAMES[dtype]
        blocks.num_bytes[index] = math.prod(blocks.shapes[index]) * dtype.itemsize
        blocks.item_bytes[index] = dtype.itemsize
        # A cast source cannot be copied as bytes.
        blocks.addresses[index] = 0
        blocks.casts[index] = dtype
    return replace(flat, tree=_cast_layouts(flat.tree, blocks.casts)) if blocks.casts else flat


def _cast_layouts(node: Any, casts: dict[int, torch.dtype]) -> Node:
    """Return the tree with the new dtypes, which only nodes of strided tensors have."""
    if isinstance(node, LayoutNode):
        cast: Node = msgspec.structs.replace(node, dtype=name_of(casts[node.index])) if node.index in casts else node
        return cast
    changed: dict[str, object] = {}
    for field in ("items", "value", "local", "values"):
        below = getattr(node, field, None)
        if isinstance(below, list):
            changed[field] = [_cast_layouts(item, casts) for item in below]
        elif isinstance(below, msgspec.Struct):
            changed[field] = _cast_layouts(below, casts)
    unchanged: Node = node
    return msgspec.structs.replace(node, **changed) if changed else unchanged
