"""What replicas train: tensors of one size under AdamW."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model by name and size; travels to the replicas' processes.

    Attributes:
        name: Names it on the command line.
        num_tensors: How many parameters are trained.
        num_items: Numbers in each.
        num_frozen_items: Numbers beside each that are not trained.
        is_foreach: Whether the optimizer steps all tensors at once; ``None`` leaves it to torch.
    """

    name: str
    num_tensors: int
    num_items: int
    num_frozen_items: int = 0
    is_foreach: bool | None = True

    @property
    def state_bytes(self) -> int:
        """Of model and optimizer: AdamW keeps two numbers for each one that is trained."""
        return 4 * self.num_tensors * (3 * self.num_items + self.num_frozen_items)

    @property
    def title(self) -> str:
        return f"{self.num_tensors:,} tensors of {self.num_items:,} numbers under AdamW"


class Training:
    """The model and its optimizer."""

    def __init__(self, model: Model) -> None:
        self.trained = [torch.nn.Parameter(torch.randn(model.num_items)) for _ in range(model.num_tensors)]
        frozen = [
            torch.nn.Parameter(torch.randn(model.num_frozen_items), requires_grad=False)
            for _ in range(model.num_tensors if model.num_frozen_items else 0)
        ]
        self.model = torch.nn.ParameterList([*self.trained, *frozen])
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-3, foreach=model.is_foreach)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        torch.stack([parameter.square().mean() for parameter in self.trained]).sum().backward()
