"""One number for a whole state, to compare replicas without sending it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from ft_transport.state.dtypes import carrier_of
from ft_transport.state.flatten import flatten
from ft_transport.state.views import as_bytes
from ft_transport.wire.chunks import Hasher


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
        _update(hasher, source)
    return hasher.intdigest()


class TensorDigests:
    """The digest of each of some tensors of a state, computed later and on any thread.

    Args:
        state: Any nesting of supported kinds. Looked at here, on the thread that owns it.
        chosen: Says which tensors count. The caller keeps these from changing until `compute` has returned.

    Raises:
        SnapshotError: The state cannot be looked at.
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
        # Work that is queued on a device comes before what is read of it.
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
