"""The hyperparameters of a replica's optimizers as plain values, and which of them the first loaded state replaces."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.optim import Optimizer

from manager.state.registry import StateRegistry

logger = logging.getLogger(__name__)

WITHOUT_EFFECT: Final = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Which kernels run is for each replica to choose; names are compared with the structure of the state."""
_SCHEDULED: Final = frozenset({"lr", "momentum", "betas"})
"""What torch's schedulers change in a group; they leave ``initial_lr`` there, which stays as it was configured."""
_MAX_SHOWN: Final = 5
_MAX_VALUE: Final = 60


class ConfiguredHyperparameters:
    """Warns where the first state that a process loads has other hyperparameters than the process was started with.

    A replica that is started again with another learning rate trains on with the old one, as the others do. Later loads
    are not compared: the loop itself has changed the values by then.
    """

    def __init__(self) -> None:
        self._own: dict[str, str] | None = None

    def note(self, registry: StateRegistry, attached: Sequence[Optimizer], *, has_trained: bool) -> None:
        """Note the values, before the first state is received, perhaps in place; does nothing from the second call on.

        Args:
            registry: Has the registered optimizers.
            attached: The attached ones.
            has_trained: Whether a step was committed: what the optimizers have is no configuration any more.
        """
        if self._own is None:
            self._own = {} if has_trained else dict(_values(named_optimizers(registry, attached)))

    def warn_of_replaced(self, registry: StateRegistry, attached: Sequence[Optimizer], step: int) -> None:
        """Name the values that the state of ``step`` has replaced, once."""
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
    """Return what an encoder that knows plain values alone can compare; ``None`` for anything else."""
    # The value of a tensor on a device would keep the training thread waiting for the device.
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
        return value.item()
    return None


def leaves(group: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and text of each hyperparameter of one parameter group that can be shown."""
    for name, value in group.items():
        told = plain(value) if isinstance(value, torch.Tensor) else value
        # Objects of other classes may print as they lie in memory.
        if name not in WITHOUT_EFFECT and isinstance(told, (bool, int, float, str, tuple, list, type(None))):
            yield name, repr(told)


def named_optimizers(registry: StateRegistry, attached: Sequence[Optimizer]) -> list[tuple[str, Optimizer]]:
    """Name the optimizers that are registered as replicated state, and those that are attached alone."""
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
