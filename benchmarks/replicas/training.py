"""What replicas train: tensors of one size under AdamW."""

from __future__ import annotations

import time
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
        width: Of frozen square layers, each beside an adapter of low rank that is trained; 0 for tensors alone.
        is_warm: Whether a replica computes once before it joins, as docs/quorum-loop.md advises.
        device: Where the tensors are, if there are no layers.
    """

    name: str
    num_tensors: int
    num_items: int
    num_frozen_items: int = 0
    is_foreach: bool | None = True
    width: int = 0
    is_warm: bool = False
    device: str = "cpu"

    @property
    def state_bytes(self) -> int:
        """Of model and optimizer: AdamW keeps two numbers for each one that is trained."""
        return 4 * self.num_tensors * (3 * self.num_items + self.num_frozen_items)

    @property
    def title(self) -> str:
        return f"{self.num_tensors:,} tensors of {self.num_items:,} numbers under AdamW"


class LowRankTraining:
    """Frozen layers, each with an adapter beside it (Hu et al., LoRA, 2021). As `Training` for those who use it."""

    _num_rows = 48
    """Of a batch: a step takes about a second for each gigabyte, as those of small batches do."""

    def __init__(self, model: Model) -> None:
        rank = max(1, model.num_items // (2 * model.width))
        self._layers = [
            (
                torch.nn.Parameter(torch.randn(model.width, model.width) / model.width**0.5, requires_grad=False),
                torch.nn.Parameter(torch.randn(rank, model.width) / model.width**0.5),
                torch.nn.Parameter(torch.randn(model.width, rank) / model.width**0.5),
            )
            for _ in range(model.num_tensors)
        ]
        self.trained = [each for _, down, up in self._layers for each in (down, up)]
        # Adapters lie between the weights that they belong to, as in a model of layers.
        self.model = torch.nn.ParameterList([each for layer in self._layers for each in layer])
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-3, foreach=model.is_foreach)
        self._batch = torch.randn(self._num_rows, model.width)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        hidden = self._batch
        for weight, down, up in self._layers:
            hidden = torch.tanh(hidden @ weight.T + hidden @ down.T @ up.T)
        hidden.square().mean().backward()


class Resting(LowRankTraining):
    """The same state, and nothing is computed: a replica that others join and that uses no core meanwhile."""

    _step_s = 0.3
    """Shorter than a step that computes, so that whoever has joined need not wait for it."""

    def backward(self) -> None:
        time.sleep(self._step_s)
        for parameter in self.trained:
            parameter.grad = torch.zeros_like(parameter)


def make_training(model: Model) -> Training | LowRankTraining:
    """What the model says."""
    return LowRankTraining(model) if model.width else Training(model)


class Training:
    """The model and its optimizer."""

    def __init__(self, model: Model) -> None:
        with torch.device(model.device):
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
