"""Weights of a model in bfloat16, and what a step of reinforcement learning makes of them."""

from __future__ import annotations

import torch

Weights = dict[str, torch.Tensor]
NUM_TENSORS = 100


def first_weights() -> Weights:
    chance = torch.Generator().manual_seed(0)
    return {
        f"layers.{at}.weight": torch.randn(128, 256, generator=chance).to(torch.bfloat16) for at in range(NUM_TENSORS)
    }


def stepped(weights: Weights, seed: int, share: float = 0.01) -> Weights:
    """The weights after a step that changed a share of the elements by their lowest bits."""
    chance = torch.Generator().manual_seed(seed)
    after = {}
    for name, tensor in weights.items():
        change = torch.randint(1, 4, tensor.shape, generator=chance, dtype=torch.int16)
        change[torch.rand(tensor.shape, generator=chance) >= share] = 0
        after[name] = (tensor.view(torch.int16) ^ change).view(torch.bfloat16)
    return after


def same_bits(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name].view(torch.int16), other[name].view(torch.int16)) for name in one
    )


def num_bytes(weights: Weights) -> int:
    return sum(tensor.nbytes for tensor in weights.values())
