"""Detects overflows: gradients that a `GradScaler` unscales too early, and parameters that are not finite.

A scaler looks for infinities while it unscales, and skips a step if it finds one. In averaged gradients the scalers of
all replicas find the same. If a loop unscales gradients before it averages them, an overflow on one replica becomes an
infinity on all of them, but only that replica's scaler has seen it: the others step, and their weights become NaN.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, Final

import torch
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from manager.errors import ManagerError
from manager.state.guarded_memory import parameters_of
from manager.state.registration_check import PLAIN, refuse_unregistered
from manager.state.registry import StateRegistry

_SCALER_MODULE: Final = GradScaler.__module__


class Scalers:
    """The scalers of a replica: registered ones, and those that have stepped one of its optimizers.

    For the training thread alone.

    Args:
        registry: The registered states.
    """

    def __init__(self, registry: StateRegistry) -> None:
        self._registry = registry
        self._seen: weakref.WeakSet[GradScaler] = weakref.WeakSet()
        self._known_in_step: list[GradScaler] = []

    def known(self) -> list[GradScaler]:
        """Return them."""
        return [*self._registered(), *self._seen]

    def check_stepping(self, optimizer: Optimizer) -> None:
        """Make sure that a scaler that is about to step this optimizer is registered. Takes some µs.

        Raises:
            RegistryError: It is not: its scale would differ on a replica that healed.
        """
        scaler = _calling_scaler()
        if scaler is None or not scaler.is_enabled() or scaler in self._seen or scaler in self._registered():
            return
        self._seen.add(scaler)
        entries = [entry for entry in self._registry.entries("replicated") if not isinstance(entry.holder, PLAIN)]
        if not any(_holds_scale(self._registry.call(entry)) for entry in entries):
            missing = f"{type(scaler).__name__}, which steps {type(optimizer).__name__}: register('scaler', scaler)"
            refuse_unregistered(self._registry, [missing])

    def look(self) -> None:
        """Note the scalers for `refuse_unscaled`, once for the thousand tensors that a step may reduce one by one."""
        self._known_in_step = self.known()

    def refuse_unscaled(
        self, tensors: Sequence[torch.Tensor], optimizers: Callable[[], Iterable[Optimizer]], *, is_first: bool
    ) -> None:
        """Make sure that gradients are averaged before they are unscaled.

        Args:
            tensors: Tensors about to be averaged.
            optimizers: Returns those that are attached.
            is_first: Whether a tensor is the first of its step; it may be a bucket of gradients. Later ones may be no
                gradients.

        Raises:
            ManagerError: A scaler has unscaled one of them, or before the first reduction of a step any gradients.
        """
        for scaler in self._known_in_step:
            # A disabled scaler has no such attribute.
            for key, state in getattr(scaler, "_per_optimizer_states", {}).items():
                if state["stage"] is not OptState.UNSCALED:
                    continue
                optimizer = next((each for each in optimizers() if id(each) == key), None)
                unscaled = {id(each.grad) for each in parameters_of([optimizer] if optimizer is not None else [])}
                if is_first or any(id(tensor) in unscaled for tensor in tensors):
                    raise ManagerError(
                        "expected gradients that are still scaled, got some that scaler.unscale_ has unscaled already: "
                        "an overflow on one replica would be an infinity on all, and its scaler alone would skip the "
                        "step; average them first, and call scaler.unscale_, clipping, scaler.step and scaler.update "
                        "inside `if manager.should_commit():`"
                    )

    def _registered(self) -> list[GradScaler]:
        holders = (entry.holder for entry in self._registry.entries("replicated"))
        return [holder for holder in holders if isinstance(holder, GradScaler)]


def nonfinite_parameters(registry: StateRegistry, optimizers: Iterable[Optimizer]) -> list[str]:
    """Return the names of optimizers' parameters with a NaN or an infinity. Reads all parameters: 0.05 s for each GiB.

    Args:
        registry: The registered modules, which give names, and optimizers.
        optimizers: The attached optimizers.
    """
    entries = registry.entries("replicated")
    names = {
        id(parameter): f"{entry.key}.{name}"
        for entry in entries
        if isinstance(module := entry.holder, torch.nn.Module)
        for name, parameter in module.named_parameters()
    }
    registered = (entry.holder for entry in entries if isinstance(entry.holder, Optimizer))
    parameters = {id(each): each for each in parameters_of([*registered, *optimizers])}
    return [
        names.get(key, f"a parameter {list(each.shape)}") for key, each in parameters.items() if not _is_finite(each)
    ]


def _is_finite(parameter: torch.Tensor) -> bool:
    local: torch.Tensor = getattr(parameter, "_local_tensor", parameter).detach()
    if not local.is_floating_point() or not local.numel():
        return True
    try:
        # A NaN makes both NaN. This allocates no tensor as large as the parameter.
        return all(bool(extreme.isfinite()) for extreme in torch.aminmax(local))
    except (NotImplementedError, RuntimeError):  # 8 bits, sparse tensors and other wrappers
        return True


def _calling_scaler() -> GradScaler | None:
    """Return the scaler in whose ``step`` this runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _SCALER_MODULE:
            caller: Any = frame.f_locals.get("self")
            return caller if isinstance(caller, GradScaler) else None
        frame = frame.f_back
    return None


def _holds_scale(value: object) -> bool:
    if isinstance(value, Mapping):
        return "growth_factor" in value or any(map(_holds_scale, value.values()))
    return isinstance(value, list) and any(map(_holds_scale, value))
