"""Engines that pull, until the input ends: ``python -m benchmarks.replicas.pulling HOST TENSORS BYTES ENGINES``.

A program of its own, because it may run in a network namespace. Writes the URL of each, one a line.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

import torch

from ft_transport import WeightReceiver


def weights_of(num_tensors: int, num_bytes: int) -> dict[str, torch.Tensor]:
    """Weights in bfloat16, not yet set."""
    num_items = num_bytes // num_tensors // 2
    return {f"layers.{at}.weight": torch.zeros(num_items, dtype=torch.bfloat16) for at in range(num_tensors)}


def main() -> None:
    host, num_tensors, num_bytes, num_engines = sys.argv[1], *map(int, sys.argv[2:5])
    with ExitStack() as stack:
        for _ in range(num_engines):
            receiver = WeightReceiver(weights_of(num_tensors, num_bytes), host=host)
            print(stack.enter_context(receiver).url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
