"""One number for a whole state, to compare replicas without sending it."""

from __future__ import annotations

import msgspec
import torch

from ft_transport.tensors.dtypes import carrier_of
from ft_transport.tensors.flatten import flatten
from ft_transport.wire.integrity import Hasher


def state_digest(state: object) -> int:
    """The xxh3-64 digest of a state: every bit of every tensor and leaf, their types, places, dtypes and shapes.

    Two states have the same digest if a snapshot of one restores to the other. Of a DTensor, the local shard and its
    place in the mesh count. Device tensors are copied to the host for it, one at a time.

    Args:
        state: Any nesting of supported kinds. The caller keeps it from changing meanwhile.

    Returns:
        An unsigned 64-bit number.

    Raises:
        UnsupportedLeafError: A leaf has no safe encoding.
    """
    flat = flatten(state)
    hasher = Hasher()
    hasher.update(msgspec.json.encode(flat.tree))
    blocks = flat.blocks
    for name, dtype, shape, source in zip(blocks.names, blocks.dtypes, blocks.shapes, blocks.sources, strict=True):
        hasher.update(f"{name}\0{dtype}\0{tuple(shape)}\0".encode())
        if source.nbytes:
            host = source.detach().view(carrier_of(source.dtype)).cpu().contiguous()
            # A single element may have any stride, which the view as bytes does not take.
            flat_host = host.as_strided((host.numel(),), (1,))
            hasher.update(flat_host.view(torch.uint8).numpy().data)
    return hasher.intdigest()
