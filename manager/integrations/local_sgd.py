"""A guard for torchft's LocalSGD (torchft/local_sgd.py): its sync changes the model inside the write lock.

torchft takes the lock for the inner optimizer's step alone, and writes the averaged parameters afterwards, while
readers are let in.
"""

from __future__ import annotations

from typing import Any

from ft_transport.state.dtensors import is_dtensor
from manager.errors import ManagerError
from manager.state.optimizer_guard import GUARD_FLAG
from manager.state_manager import StateManager


def guard_local_sgd(manager: StateManager, local_sgd: Any) -> None:
    """Make the parameters' change at every sync of ``local_sgd`` a write section of the manager.

    Call it once, after making the ``LocalSGD`` and before training. The averaging itself holds no lock. Its optimizer
    may then be attached.

    Args:
        manager: The manager of ``local_sgd``.
        local_sgd: A ``torchft.local_sgd.LocalSGD``.

    Raises:
        ManagerError: ``local_sgd`` is no ``LocalSGD``, or it belongs to another manager.
    """
    if not hasattr(local_sgd, "_average") or getattr(local_sgd, "_manager", None) is not manager:
        raise ManagerError(
            f"expected a torchft.local_sgd.LocalSGD that was made with this manager, got {type(local_sgd).__name__}"
        )

    def perform_sync() -> None:
        averages = local_sgd._average()
        if not local_sgd._manager.should_commit():
            return
        with manager.writing("LocalSGD's sync"):
            for parameter, average in zip(local_sgd._model.parameters(), averages, strict=True):
                data = parameter.data
                (data.to_local() if is_dtensor(data) else data).copy_(average)

    local_sgd._perform_sync = perform_sync
    setattr(local_sgd, GUARD_FLAG, "guard_local_sgd")
