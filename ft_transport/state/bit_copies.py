"""Copies between tensors of one dtype and shape, bit for bit, across devices and strides."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ft_transport.state.bounce_buffers import BounceBuffers, Pair
from ft_transport.state.dtypes import carrier_of


def copy_bits(pairs: Sequence[Pair]) -> None:
    """Copy each source to its target; return when all copies are complete.

    Device copies are queued on the calling thread's stream, behind its earlier work.

    Args:
        pairs: A target and a source of the same dtype and shape.
    """
    to_device: list[Pair] = []
    to_host: list[Pair] = []
    others: list[Pair] = []
    for target, source in pairs:
        is_plain = target.is_cpu != source.is_cpu and _is_plain(target) and _is_plain(source)
        kind = others if not is_plain else to_host if target.is_cpu else to_device
        kind.append((target, source))
    buffers = BounceBuffers()
    buffers.to_device(to_device)
    buffers.to_host(to_host)
    try:
        for target, source in others:
            _copy_one(target, source)
    finally:
        # For another layout, torch waits only for the transfer, and then copies on the device.
        for device in {tensor.device for pair in others for tensor in pair if not tensor.is_cpu}:
            torch.accelerator.current_stream(device).synchronize()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's memory holds its values in row-major order, without lazy conjugate or negative."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _copy_one(target: torch.Tensor, source: torch.Tensor) -> None:
    target, source = target.detach(), source.detach()
    if not any(tensor.is_conj() or tensor.is_neg() for tensor in (target, source)):
        # torch has no copy kernels for many small dtypes, so copy their bits.
        carrier = carrier_of(target.dtype)
        target, source = target.view(carrier), source.view(carrier)
    target.copy_(source)
