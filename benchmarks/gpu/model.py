"""The model of the GPU benchmarks, on the CUDA device; small and on the CPU where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import torch

from benchmarks.report import Named
from benchmarks.states import tensors_of

_WIDTH: Final = {True: 4096, False: 256}
_NUM_ROWS: Final = {True: 20_480, False: 64}
"""By whether there is a GPU. With one, forward and backward of a batch with so many rows take longer than a copy of
weights and optimizer to the host over PCIe 5."""
_LAYER_BYTES: Final = 12 * 4096 * 4096
"""The size of one layer on a GPU: a float32 weight and the two moments of AdamW."""


def has_gpu() -> bool:
    return torch.cuda.is_available()


def synchronize() -> None:
    """Waits until the device has done all that is queued."""
    if has_gpu():
        torch.cuda.synchronize()


def device() -> str:
    return "cuda" if has_gpu() else "cpu"


def device_name() -> str:
    return torch.cuda.get_device_name() if has_gpu() else "the CPU"


@contextmanager
def noting_failure(variant: Named, failures: dict[str, str]) -> Iterator[None]:
    """A peer that fails must not lose the figures of the others."""
    try:
        yield
    except Exception as error:
        if variant.role != "peer":
            raise
        if has_gpu():
            # CUDA keeps some errors for the next kernel launch, which would be that of the next variant.
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")
        failures[variant.name] = f"{type(error).__name__}: {error}"[-1000:]


def failure_notes(failures: dict[str, str]) -> list[str]:
    return [f"{name} could not be measured: {text}" for name, text in failures.items()]


class DeviceModel:
    """A stack of linear layers under AdamW, after its first step.

    Args:
        state_bytes: Of weights and optimizer on a GPU.
    """

    def __init__(self, state_bytes: int) -> None:
        is_gpu = has_gpu()
        width = _WIDTH[is_gpu]
        torch.backends.cuda.matmul.allow_tf32 = True
        num_layers = max(2, round(state_bytes / _LAYER_BYTES))
        with torch.device(device()):
            layers = [torch.nn.Linear(width, width, bias=False) for _ in range(num_layers)]
            self.model = torch.nn.Sequential(*layers)
            self._batch = torch.randn(_NUM_ROWS[is_gpu], width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> list[torch.Tensor]:
        return list(tensors_of(self.state()))

    def sums(self) -> list[float]:
        """Tells whether a state is the expected one; computed outside of every measured interval."""
        return [float(tensor.double().sum()) for tensor in self.tensors()]

    def step(self, before_optimizer: Callable[[], None] = lambda: None) -> None:
        self.optimizer.zero_grad()
        self.model(self._batch).square().mean().backward()
        before_optimizer()
        self.optimizer.step()
