"""Copies between a device and ordinary memory of the host, through page-locked buffers.

A device reads and writes page-locked memory by itself. From other memory the driver copies through buffers of its own,
on one thread: 4 GiB to an H200 took 440 ms so, and 80 in this way, on 16 cores. To lock the memory itself, to copy and
to unlock it took 207.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import torch

from ft_transport.state.device import Accelerator
from ft_transport.state.views import as_bytes

logger = logging.getLogger(__name__)

_HALF_BYTES: Final = 32 << 20
_ALIGN_BYTES: Final = 64
_LEAST_BYTES: Final = 1 << 20
"""For less, nothing is page-locked; torch keeps what was until the process ends."""

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Where to, and what."""


class BounceBuffers:
    """Two buffers by turns: the host fills or empties one while the device copies the other.

    Args:
        accelerator: Where streams and events come from.
        half_bytes: The length of each buffer, at most.
    """

    def __init__(self, accelerator: Accelerator | None = None, *, half_bytes: int = _HALF_BYTES) -> None:
        self._accelerator = accelerator if accelerator is not None else Accelerator()
        self._half_bytes = half_bytes

    def to_device(self, pairs: Sequence[Pair]) -> None:
        """Copies to each target on a device from its source on the host, all row-major; returns when all have landed.

        Queued on the calling thread's stream of each device, behind what it holds.
        """
        for device, own in _by_device(pairs, [target for target, _ in pairs]):
            halves = self._page_locked(own)
            copied: list[Any] = []
            try:
                for number, batch in enumerate(_batches(own, halves)):
                    if number >= len(halves):
                        copied[-len(halves)].synchronize()
                    event = self._accelerator.new_event(device)
                    try:
                        for bounce, target, source in batch:
                            bounce.copy_(source)
                            target.copy_(bounce, non_blocking=True)
                    finally:
                        event.record(self._accelerator.current_stream(device))
                        copied.append(event)
            finally:
                # After an error too: whoever takes this memory next must not write into what is being read.
                for event in copied[-len(halves) :]:
                    event.synchronize()

    def to_host(self, pairs: Sequence[Pair]) -> None:
        """Copies to each target on the host from its source on a device, all row-major; returns when all have landed.

        Queued as in `to_device`.
        """
        for device, own in _by_device(pairs, [source for _, source in pairs]):
            halves = self._page_locked(own)
            landing: list[tuple[Any, list[Pair]]] = []
            try:
                for batch in _batches(own, halves):
                    if len(landing) == len(halves):
                        _empty(*landing.pop(0))
                    event = self._accelerator.new_event(device)
                    landing.append((event, [(target, bounce) for bounce, target, _ in batch]))
                    try:
                        for bounce, _, source in batch:
                            bounce.copy_(source, non_blocking=True)
                    finally:
                        event.record(self._accelerator.current_stream(device))
            finally:
                for event, emptied in landing:
                    _empty(event, emptied)

    def _page_locked(self, pairs: Sequence[Pair]) -> list[torch.Tensor]:
        """The buffers; of ordinary memory where little is copied or nothing can be locked, which is slower."""
        num_bytes = min(self._half_bytes, sum(target.nbytes + _ALIGN_BYTES for target, _ in pairs))
        if num_bytes >= _LEAST_BYTES:
            try:
                return [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            except RuntimeError as error:
                logger.debug("copies to and from the device are slow, nothing can be page-locked: %s", error)
        return [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(2)]


def _batches(
    pairs: Sequence[Pair], halves: Sequence[torch.Tensor]
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
    """Parts of the copies that go through a buffer together, each with its place there; the buffers by turns."""
    half_bytes = len(halves[0])
    number = at = 0
    batch: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for target, source in pairs:
        to, from_ = as_bytes(target.detach()), as_bytes(source.detach())
        start, end = 0, to.numel()
        while start < end:
            if at >= half_bytes:
                yield batch
                number, at, batch = number + 1, 0, []
            taken = min(end - start, half_bytes - at)
            bounce = halves[number % len(halves)][at : at + taken]
            batch.append((bounce, to[start : start + taken], from_[start : start + taken]))
            start += taken
            at += -(-taken // _ALIGN_BYTES) * _ALIGN_BYTES
    if batch:
        yield batch


def _empty(event: Any, emptied: Sequence[Pair]) -> None:
    event.synchronize()
    for target, bounce in emptied:
        target.copy_(bounce)


def _by_device(pairs: Sequence[Pair], on_device: Sequence[torch.Tensor]) -> list[tuple[torch.device, list[Pair]]]:
    found: dict[torch.device, list[Pair]] = {}
    for pair, tensor in zip(pairs, on_device, strict=True):
        found.setdefault(tensor.device, []).append(pair)
    return list(found.items())
