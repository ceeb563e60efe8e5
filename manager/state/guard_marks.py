"""Marks guarded LocalSGD and DiLoCo objects of torchft, and warns of unguarded ones."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, Final

from torch.optim import Optimizer

logger = logging.getLogger(__name__)

_LOCAL_UPDATES: Final = "torchft.local_sgd"
GUARD_MARK: Final = "_ft_transport_guard"
"""Attribute that marks a guarded object."""

_SELDOM_MARK: Final = "_ft_transport_steps_seldom"


def mark_seldom(optimizers: Iterable[Optimizer]) -> None:
    """Mark optimizers that step only at rare synchronisations: their tensors stay unchanged in between."""
    for optimizer in optimizers:
        setattr(optimizer, _SELDOM_MARK, True)


def often_stepping(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Return the optimizers that step in every training step."""
    return [optimizer for optimizer in optimizers if not hasattr(optimizer, _SELDOM_MARK)]


def local_updates_of(optimizer: Optimizer) -> Iterator[Any]:
    """Yield torchft's LocalSGD and DiLoCo objects that count the optimizer's steps, which need not follow commits."""
    # A wrapper may be an optimizer by its class alone.
    for hook in getattr(optimizer, "_optimizer_step_post_hooks", {}).values():
        owner = getattr(hook, "__self__", None)
        if type(owner).__module__ == _LOCAL_UPDATES:
            yield owner


def warn_of_unguarded(optimizers: Iterable[Optimizer]) -> None:
    """Warn once of each LocalSGD or DiLoCo of torchft that steps an attached optimizer without a guard."""
    for optimizer in optimizers:
        for owner in local_updates_of(optimizer):
            if hasattr(owner, GUARD_MARK):
                continue
            kind = type(owner).__name__
            logger.warning(
                "torchft's %s changes the model outside the lock when it synchronizes, and a snapshot that is taken "
                "meanwhile may mix two steps; after making it, call manager.%s(manager, ...)",
                kind,
                "guard_local_sgd" if kind == "LocalSGD" else "guard_diloco",
            )
            setattr(owner, GUARD_MARK, "none, and that has been said")
