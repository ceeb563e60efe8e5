"""The states of optimizers move to other replicas and through checkpoints bit for bit."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from optimizer_zoo import Kind, MakeOptimizer, travels
from torch import Tensor
from torch.optim import Optimizer

pytestmark = pytest.mark.usefixtures("quorum_ready")

_MAKERS: dict[str, MakeOptimizer] = {
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "Adam": torch.optim.Adam,
    "Adam, amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "Adam, fused": partial(torch.optim.Adam, fused=True),
    "Adam, lr as a tensor": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.01), foreach=False),
    "AdamW": torch.optim.AdamW,
    "AdamW, foreach": partial(torch.optim.AdamW, foreach=True),
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "LBFGS": partial(torch.optim.LBFGS, max_iter=4),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": partial(torch.optim.RMSprop, centered=True, momentum=0.9),
    "Rprop": torch.optim.Rprop,
    "SGD": torch.optim.SGD,
    "SGD, momentum": partial(torch.optim.SGD, momentum=0.9),
}
# If parameters are not float32, torch's loader changes the dtypes of states.
_OF_TORCH = {name: Kind(make, torch.bfloat16) for name, make in _MAKERS.items()} | {
    "Muon": Kind(torch.optim.Muon, torch.bfloat16, has_vectors=False),
    "SparseAdam": Kind(torch.optim.SparseAdam, is_sparse=True),
    "AdamW in float32": Kind(torch.optim.AdamW),
    "LBFGS in float32": Kind(partial(torch.optim.LBFGS, max_iter=4)),
}


class Range(NamedTuple):
    """Two ends."""

    low: object
    high: object


class Keeping(Optimizer):
    """Keeps what torch's loader would change or fail at: other dtypes, texts, mappings, sequences that grow, arrays."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, self.state[parameter], group["lr"])

    def _update(self, parameter: Tensor, state: dict[str, Any], lr: float) -> None:
        gradient = parameter.grad
        assert gradient is not None
        exact = state.setdefault("exact", torch.zeros_like(gradient, dtype=torch.float64))
        exact.mul_(0.9).add_(gradient.double(), alpha=0.1)
        scale = exact.abs().max() / 127 + 1e-12
        state["rounded"] = (exact / scale).round().to(torch.int8)
        state["scales"] = {"largest": scale, "signs": exact > 0}
        state["kind"] = "8 bits"
        state.setdefault("last", deque(maxlen=2)).append(exact.float())
        state.setdefault("norms", []).append(exact.norm())
        state["range"] = Range(exact.min(), (exact.max(), "float64"))
        state["counts"] = [np.histogram(exact.numpy(), 3)[0], np.float32(exact.mean()), np.array(2.5)]
        state["seen"] = {Range(0, 1), "all"}
        parameter.sub_((state["rounded"] * scale * lr).to(parameter.dtype))
        parameter.sub_(torch.stack(state["norms"]).sum().to(parameter.dtype) * lr)
        assert (state["kind"], state["last"].maxlen) == ("8 bits", 2)


class Around(Optimizer):
    """Is an optimizer by its class; another one has the state."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])


_WITH_OWN_STATES = {
    f"{name} in {dtype}": Kind(make, dtype)
    for dtype in (torch.float32, torch.bfloat16)
    for name, make in {"states of its own": Keeping, "around": lambda each: Around(Keeping(each))}.items()
}


def test_every_optimizer_of_torch_has_the_same_state_and_steps_on_newcomers_and_from_a_checkpoint(
    tmp_path: Path,
) -> None:
    classes = [each for each in vars(torch.optim).values() if isinstance(each, type) and issubclass(each, Optimizer)]
    assert {each.__name__ for each in classes} - {"Optimizer"} == {re.split("[ ,]", kind)[0] for kind in _OF_TORCH}
    # In one quorum, for the replicas take longer to meet than to step.
    assert {way: parts for way, parts in travels(_OF_TORCH | _WITH_OWN_STATES, tmp_path) if parts} == {}
