"""Guards for torchft's DiLoCo and LocalSGD (torchft/local_sgd.py): their syncs change the state inside the write lock.

torchft takes the lock for the inner optimizer's step alone, and lets readers in while a sync changes state: LocalSGD
writes the averaged parameters; DiLoCo restores the global parameters, lets the outer optimizer step and saves the
result. DiLoCo's state functions copy the backup of the global parameters at every call, although it changes at a sync.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch.optim import Optimizer

from ft_transport.state.placements import is_dtensor
from manager.errors import ManagerError
from manager.snapshots.scheduler import SnapshotScheduler
from manager.state.optimizer_guard import GUARD_FLAG, OptimizerAttachment, flag_seldom
from manager.state_manager import StateManager

_CHANGING_METHODS: Final = ("restore_parameters", "save_parameters", "_merge_parameters")


class DiLoCoFragment(Protocol):
    """The parts of torchft's ``_StreamingDiLoCoFragment`` that the guard needs."""

    original_parameters: dict[str, torch.Tensor]
    _fragment_id: int
    _outer_optimizer: Optimizer


def guard_diloco(manager: StateManager, diloco: Any) -> OptimizerAttachment:
    """Make every change that ``diloco`` makes to the state a write section of the manager, and its backup stable.

    Call it once, after making the ``DiLoCo`` and before training. Attach the inner optimizer as well.

    Args:
        manager: The manager of ``diloco``.
        diloco: A ``torchft.local_sgd.DiLoCo``.

    Returns:
        The attachment of its outer optimizers.

    Raises:
        ManagerError: ``diloco`` is no ``DiLoCo``, or it belongs to another manager.
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
        manager.replace_state_dict_fn(
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
    """Return ``sync``, followed by a snapshot if one is requested: until the next sync it can be read in place."""

    @functools.wraps(sync)
    def followed() -> bool:
        is_committed = sync()
        snapshots.boundary(is_sync=True)
        return is_committed

    return followed


def _live_state(fragment: DiLoCoFragment) -> dict[str, object]:
    """Return the result of the fragment's own state function, without its copies."""
    return {
        "outer_optimizer": fragment._outer_optimizer.state_dict(),
        "original_parameters": dict(fragment.original_parameters),
    }


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
