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
    """Two buffers by turns: the host fills or empties one while the device copies the other. Not thread-safe.

    Args:
        accelerator: Where streams and events come from.
        half_bytes: The length of each buffer.
    """

    def __init__(self, accelerator: Accelerator | None = None, *, half_bytes: int = _HALF_BYTES) -> None:
        self._accelerator = accelerator if accelerator is not None else Accelerator()
        self._half_bytes = half_bytes
        self._halves: list[torch.Tensor] = []

    def to_device(self, copies: Sequence[Pair]) -> None:
        """Copies each ``(target on a device, source on the host)``, all row-major; returns when they have landed.

        Queued on the calling thread's stream of each device, behind what it holds.
        """
        for device, pairs in _by_device(copies, [target for target, _ in copies]):
            if not self._are_there(pairs):
                for target, source in pairs:
                    target.copy_(source)
                continue
            copied: list[Any] = []
            try:
                for number, parts in enumerate(self._filled(pairs)):
                    if number >= len(self._halves):
                        copied[-len(self._halves)].synchronize()
                    event = self._accelerator.new_event(device)
                    try:
                        for bounce, target, source in parts:
                            bounce.copy_(source)
                            target.copy_(bounce, non_blocking=True)
                    finally:
                        event.record(self._accelerator.current_stream(device))
                        copied.append(event)
            finally:
                # After an error too: whoever takes this memory next must not write into what is being read.
                for event in copied[-len(self._halves) :]:
                    event.synchronize()

    def to_host(self, copies: Sequence[Pair]) -> None:
        """Copies each ``(target on the host, source on a device)``, all row-major; returns when they have landed.

        Queued as in `to_device`.
        """
        for device, pairs in _by_device(copies, [source for _, source in copies]):
            if not self._are_there(pairs):
                for target, source in pairs:
                    target.copy_(source)
                continue
            landing: list[tuple[Any, list[Pair]]] = []
            try:
                for parts in self._filled(pairs):
                    if len(landing) == len(self._halves):
                        _empty(*landing.pop(0))
                    event = self._accelerator.new_event(device)
                    landing.append((event, [(target, bounce) for bounce, target, _ in parts]))
                    try:
                        for bounce, _, source in parts:
                            bounce.copy_(source, non_blocking=True)
                    finally:
                        event.record(self._accelerator.current_stream(device))
            finally:
                for event, emptied in landing:
                    _empty(event, emptied)

    def _are_there(self, pairs: Sequence[Pair]) -> bool:
        if sum(target.nbytes for target, _ in pairs) < _LEAST_BYTES:
            return False
        try:
            while len(self._halves) < 2:
                self._halves.append(torch.empty(self._half_bytes, dtype=torch.uint8, pin_memory=True))
        except RuntimeError as error:
            logger.debug("copies to and from the device are slow, nothing can be page-locked: %s", error)
            return False
        return True

    def _filled(self, pairs: Sequence[Pair]) -> Iterator[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
        """Parts of the copies that fill a buffer together, each with its place there; the buffers by turns."""
        number = at = 0
        parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for target, source in pairs:
            to, from_ = as_bytes(target.detach()), as_bytes(source.detach())
            start, end = 0, to.numel()
            while start < end:
                if at >= self._half_bytes:
                    yield parts
                    number, at, parts = number + 1, 0, []
                taken = min(end - start, self._half_bytes - at)
                bounce = self._halves[number % len(self._halves)][at : at + taken]
                parts.append((bounce, to[start : start + taken], from_[start : start + taken]))
                start += taken
                at += -(-taken // _ALIGN_BYTES) * _ALIGN_BYTES
        if parts:
            yield parts


def _empty(event: Any, emptied: Sequence[Pair]) -> None:
    event.synchronize()
    for target, bounce in emptied:
        target.copy_(bounce)


def _by_device(copies: Sequence[Pair], on_device: Sequence[torch.Tensor]) -> list[tuple[torch.device, list[Pair]]]:
    found: dict[torch.device, list[Pair]] = {}
    for pair, tensor in zip(copies, on_device, strict=True):
        found.setdefault(tensor.device, []).append(pair)
    return list(found.items())
