"""The hyperparameters of a replica's optimizers as plain values, and a warning if a loaded state replaces them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.optim import Optimizer

from manager.state.registry import StateRegistry

logger = logging.getLogger(__name__)

WITHOUT_EFFECT: Final = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Not compared: each replica chooses its kernels, and the structure of the state covers names."""
_SCHEDULED: Final = frozenset({"lr", "momentum", "betas"})
"""Values that torch's schedulers change in a group; ``initial_lr``, which schedulers add, keeps the configured one."""
_MAX_SHOWN: Final = 5
_MAX_VALUE: Final = 60


class ConfiguredHyperparameters:
    """Warns if the first state that a process loads has other hyperparameters than the process's configuration.

    A replica restarted with another learning rate continues with the old one, as the other replicas do. Later loads are
    not compared: by then the loop itself has changed the values.
    """

    def __init__(self) -> None:
        self._own: dict[str, str] | None = None

    def note(self, registry: StateRegistry, attached: Sequence[Optimizer], *, has_trained: bool) -> None:
        """Remember the present values before the first load; later calls do nothing.

        Args:
            registry: The registered optimizers.
            attached: The attached optimizers.
            has_trained: Whether a step was committed, so that the values may no longer be the configured ones.
        """
        if self._own is None:
            self._own = {} if has_trained else dict(_values(named_optimizers(registry, attached)))

    def warn_of_replaced(self, registry: StateRegistry, attached: Sequence[Optimizer], step: int) -> None:
        """Log the values that the state of ``step`` has replaced; only after the first load."""
        own, self._own = self._own, {}
        if not own:
            return
        loaded = dict(_values(named_optimizers(registry, attached)))
        replaced = [
            f"{name} {told[:_MAX_VALUE]} by {loaded[name][:_MAX_VALUE]}"
            for name, told in own.items()
            if loaded.get(name, told) != told
        ]
        if replaced:
            more = f" and {len(replaced) - _MAX_SHOWN} more" if len(replaced) > _MAX_SHOWN else ""
            logger.warning(
                "the state of step %d replaces hyperparameters that this process was started with: %s%s; where no "
                "schedule of the loop has changed them, set them on all replicas at one step, after the state is "
                "loaded (docs/changing-a-job.md)",
                step,
                ", ".join(replaced[:_MAX_SHOWN]),
                more,
            )


def plain(value: object) -> object:
    """Return a one-element CPU tensor's value, for encoders of plain values; ``None`` for other objects."""
    # Reading a device tensor would make the training thread wait for the device.
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
        return value.item()
    return None


def leaves(group: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and text of each printable hyperparameter of a parameter group."""
    for name, value in group.items():
        told = plain(value) if isinstance(value, torch.Tensor) else value
        # The text of other objects may contain their address.
        if name not in WITHOUT_EFFECT and isinstance(told, (bool, int, float, str, tuple, list, type(None))):
            yield name, repr(told)


def named_optimizers(registry: StateRegistry, attached: Sequence[Optimizer]) -> list[tuple[str, Optimizer]]:
    """Return the optimizers registered as replicated state, then those only attached, with names."""
    holders = {id(entry.holder): entry for entry in registry.entries()}
    named = [
        (entry.key, entry.holder)
        for entry in holders.values()
        if isinstance(entry.holder, Optimizer) and entry.scope == "replicated"
    ]
    return named + [
        (f"attached optimizer {index}", optimizer)
        for index, optimizer in enumerate(dict.fromkeys(attached))
        if id(optimizer) not in holders
    ]


def _values(optimizers: list[tuple[str, Optimizer]]) -> Iterator[tuple[str, str]]:
    for key, optimizer in optimizers:
        # A wrapper may be an optimizer by its class alone.
        for index, group in enumerate(getattr(optimizer, "param_groups", ())):
            scheduled = _SCHEDULED if "initial_lr" in group else ()
            yield from (
                (f"{key}.param_groups.{index}.{name}", told) for name, told in leaves(group) if name not in scheduled
            )
