"""Makes torchft's DiLoCo and LocalSGD (torchft/local_sgd.py) change parameters only while they hold the write lock.

torchft itself holds the lock only for the step of the inner optimizer. A reader could copy the state in the middle of a
sync: while LocalSGD writes the averaged parameters, or while DiLoCo restores the global parameters, steps the outer
optimizer and saves the result. DiLoCo's state functions also copy their backup of the global parameters at every call,
although only a sync changes the backup.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from torch.optim import Optimizer

from ft_transport.state.placements import is_dtensor
from manager.errors import ManagerError
from manager.snapshots.scheduler import SnapshotScheduler
from manager.state.optimizer_guard import GUARD_FLAG, OptimizerAttachment, flag_seldom
from manager.state_manager import StateManager

_CHANGING_METHODS: Final = ("restore_parameters", "save_parameters", "_merge_parameters")


def guard_diloco(manager: StateManager, diloco: Any) -> OptimizerAttachment:
    """Make ``diloco`` hold the manager's write lock whenever it changes the state.

    Peers can then read DiLoCo's backup of the global parameters without a copy. Call this function once, after making
    the ``DiLoCo`` and before training. Attach the inner optimizer with ``manager.attach``.

    Args:
        manager: The manager with which ``diloco`` was made.
        diloco: A ``torchft.local_sgd.DiLoCo``.

    Returns:
        The attachment of the outer optimizers.

    Raises:
        ManagerError: ``diloco`` is not a ``DiLoCo``, or it was made with another manager.
    """
    fragments = getattr(diloco, "_fragments", None)
    if not isinstance(fragments, list) or getattr(diloco, "_manager", None) is not manager:
        raise ManagerError(
            f"expected a torchft.local_sgd.DiLoCo that was made with this manager, got {type(diloco).__name__}"
        )
    outer_optimizers: dict[int, Optimizer] = {}
    snapshots = manager._replica.snapshots
    for fragment in fragments:
        for name in _CHANGING_METHODS:
            setattr(fragment, name, _inside_write_section(manager, getattr(fragment, name), name))
        if snapshots is not None:
            fragment.perform_sync = _followed(fragment.perform_sync, snapshots)
        outer_optimizers[id(fragment._outer_optimizer)] = fragment._outer_optimizer
        manager._state.registry.replace(
            f"StreamingDiLoCoFragment_{fragment._fragment_id}", functools.partial(_live_state, fragment), is_stable=True
        )
    setattr(diloco, GUARD_FLAG, "guard_diloco")
    flag_seldom(outer_optimizers.values())
    attachment: OptimizerAttachment = manager.attach(*outer_optimizers.values())
    return attachment


def _inside_write_section(manager: StateManager, change: Callable[[], object], name: str) -> Callable[[], object]:
    @functools.wraps(change)
    def guarded() -> object:
        with manager.writing(f"DiLoCo's {name}"):
            return change()

    return guarded


def _followed(sync: Callable[[], bool], snapshots: SnapshotScheduler) -> Callable[[], bool]:
    """Return a function that calls ``sync``, and then takes a snapshot if one was requested.

    Receivers can read this snapshot in place until the next sync.
    """

    @functools.wraps(sync)
    def followed() -> bool:
        is_committed = sync()
        snapshots.boundary(is_sync=True)
        return is_committed

    return followed


def _live_state(fragment: Any) -> dict[str, object]:
    """Return the same dict as the fragment's own state function, but with live tensors instead of copies."""
    return {
        "outer_optimizer": fragment._outer_optimizer.state_dict(),
        "original_parameters": dict(fragment.original_parameters),
    }


def guard_local_sgd(manager: StateManager, local_sgd: Any) -> None:
    """Make ``local_sgd`` hold the manager's write lock while a sync writes the averaged parameters.

    A sync computes the averages without the lock. Call this function once, after making the ``LocalSGD`` and before
    training. Afterwards the optimizer of ``local_sgd`` may be attached.

    Args:
        manager: The manager with which ``local_sgd`` was made.
        local_sgd: A ``torchft.local_sgd.LocalSGD``.

    Raises:
        ManagerError: ``local_sgd`` is not a ``LocalSGD``, or it was made with another manager.
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
