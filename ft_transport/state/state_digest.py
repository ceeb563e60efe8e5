"""Digests of states, to compare replicas without a transfer."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from ft_transport.state.dtypes import carrier_of
from ft_transport.state.flatten import flatten
from ft_transport.state.views import as_bytes
from ft_transport.wire.chunks import Hasher


def state_digest(state: object) -> int:
    """Return the xxh3-64 digest of a state: every bit of every tensor and leaf, with types, paths, dtypes and shapes.

    Two states have the same digest if a snapshot of one restores to the other. A DTensor counts with its local shard
    and its placement. Device tensors are copied to the host, one at a time.

    Args:
        state: Any nesting of supported kinds; must not change meanwhile.

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
        _update(hasher, source)
    return hasher.intdigest()


class TensorDigests:
    """Digests of selected tensors of a state, computed later on any thread.

    Args:
        state: Any nesting of supported kinds; flattened here, on the calling thread.
        chosen: Selects tensors. The caller keeps them from changing until `compute` has returned.

    Raises:
        SnapshotError: The state cannot be flattened.
    """

    def __init__(self, state: object, chosen: Callable[[torch.Tensor], bool]) -> None:
        blocks = flatten(state).blocks
        self._chosen = [
            (f"{name} {dtype}{list(shape)}", source)
            for name, dtype, shape, source in zip(
                blocks.names, blocks.dtypes, blocks.shapes, blocks.sources, strict=True
            )
            if chosen(source)
        ]
        # Reads must come after work that is already queued on the device.
        self._events = [
            _event_on(device) for device in {source.device for _, source in self._chosen} if device.type != "cpu"
        ]

    def compute(self) -> dict[str, int]:
        """Return the xxh3-64 digest of each tensor by its path, dtype and shape. Called once."""
        for event in self._events:
            event.synchronize()
        chosen, self._chosen = self._chosen, []
        digests = {}
        for name, source in chosen:
            hasher = Hasher()
            _update(hasher, source)
            digests[name] = hasher.intdigest()
        return digests


def _event_on(device: torch.device) -> torch.Event:
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def _update(hasher: Hasher, source: torch.Tensor) -> None:
    if source.nbytes:
        host = source.detach().view(carrier_of(source.dtype)).cpu().contiguous()
        hasher.update(as_bytes(host).numpy().data)
