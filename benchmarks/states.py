"""The states that are moved: many equal tensors, many small ones, and what a real training leaves behind.

Sender and receiver build the same structure from the same name, so that nothing but the bytes has to travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
import xxhash
from torch import nn

State = dict[str, object]

COUNTED_STATES: Final = {"256 tensors": 256, "1000 tensors": 1000, "3000 tensors": 3000}
"""States of one size in so many tensors."""

_BIG_TENSOR_BYTES: Final = 3_000_000  # what torchft's own benchmark moves
_BIG_TOTAL_BYTES: Final = 2_000_000_000
_SMALL_TENSOR_BYTES: Final = 64 << 10
_SMALL_TOTAL_BYTES: Final = 1_000_000_000
_COUNTED_TOTAL_BYTES: Final = 1 << 30
_NESTED_PARAMETERS: Final = 2_500
_NESTED_ITEMS: Final = 21_333
_VOCABULARY: Final = 8192
_WIDTH: Final = 768
_NUM_LAYERS: Final = 6


@dataclass(frozen=True)
class StateSpec:
    """A state by name and size; travels to the receiver as two command line arguments."""

    name: str
    scale: float = 1.0

    @property
    def title(self) -> str:
        match self.name:
            case "big":
                return "tensors of 3 MB"
            case "small":
                return "tensors of 64 KiB"
            case "nested":
                return "parameters of 85 KB as AdamW leaves them"
            case counted if counted in COUNTED_STATES:
                return counted
            case _:
                return "transformer with AdamW"


STATE_NAMES: Final = ("big", "small", "adamw")
CHECKPOINT_STATE_NAMES: Final = ("big", "adamw", "nested")


def build_source(spec: StateSpec) -> State:
    """The state of the replica that sends. Random bytes, because pages of zeros could be shared or guessed."""
    generator = torch.Generator().manual_seed(1)
    if spec.name == "adamw":
        model, optimizer = _model_and_optimizer(spec.scale)
        tokens = torch.randint(_VOCABULARY, (2, 16), generator=generator)
        model(tokens).square().mean().backward()
        return _after_one_step(model, optimizer)
    if spec.name == "nested":
        return _nested(spec, lambda: torch.rand(_NESTED_ITEMS, generator=generator))
    return {name: torch.rand(num_items, generator=generator) for name, num_items in _equal_tensors(spec)}


def build_destination(spec: StateSpec) -> State:
    """The receiver's own stale state: same structure, other bytes, every page touched."""
    if spec.name == "adamw":
        model, optimizer = _model_and_optimizer(spec.scale)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        return _after_one_step(model, optimizer)
    if spec.name == "nested":
        return _nested(spec, lambda: torch.full((_NESTED_ITEMS,), -1.0))
    return {name: torch.full((num_items,), -1.0) for name, num_items in _equal_tensors(spec)}


def tensors_of(state: object) -> Iterator[torch.Tensor]:
    """All tensors, in the order of the structure."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors_of(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from tensors_of(value)


def num_bytes_of(state: object) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(state))


def digest_of(state: object) -> str:
    """Tells whether what arrived is what was sent; computed outside of every measured interval."""
    hasher = xxhash.xxh3_64()
    for tensor in tensors_of(state):
        hasher.update(tensor.detach().reshape(-1).view(torch.uint8).numpy())
    return hasher.hexdigest()


def _equal_tensors(spec: StateSpec) -> Iterator[tuple[str, int]]:
    if spec.name in COUNTED_STATES:
        count = COUNTED_STATES[spec.name]
        for index in range(count):
            yield f"tensor/{index}", round(_COUNTED_TOTAL_BYTES * spec.scale / count / 4)
        return
    tensor_bytes, total_bytes = (
        (_BIG_TENSOR_BYTES, _BIG_TOTAL_BYTES) if spec.name == "big" else (_SMALL_TENSOR_BYTES, _SMALL_TOTAL_BYTES)
    )
    for index in range(max(1, round(total_bytes * spec.scale / tensor_bytes))):
        yield f"chunk/{index}", tensor_bytes // 4


def _nested(spec: StateSpec, make: Callable[[], torch.Tensor]) -> State:
    """10,000 tensors, each with memory of its own: of each parameter the weight, two averages, and its step."""
    count = max(1, round(_NESTED_PARAMETERS * spec.scale))
    return {
        "model": {f"layers.{number}.weight": make() for number in range(count)},
        "optimizer": {
            "state": {
                number: {"step": torch.tensor(1.0), "exp_avg": make(), "exp_avg_sq": make()} for number in range(count)
            },
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": list(range(count))}],
        },
        "step": 1,
    }


class _Transformer(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        layer = nn.TransformerEncoderLayer(_WIDTH, nhead=12, dim_feedforward=4 * _WIDTH, batch_first=True, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens)))


def _model_and_optimizer(scale: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _Transformer(max(1, round(_NUM_LAYERS * scale)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _after_one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Adam has no state before its first step."""
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
