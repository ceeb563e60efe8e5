"""The manager of a replica: a lock around its state, hooks for its optimizers, snapshots at step boundaries."""

from manager.errors import (
    LockHolder,
    LockNotHeldError,
    LockOrderError,
    LockTimeoutError,
    ManagerError,
    RegistryError,
    StateTornError,
)
from manager.hooks import OptimizerAttachment
from manager.manager import Manager, Recovery
from manager.rng import RandomState

__all__ = [
    "LockHolder",
    "LockNotHeldError",
    "LockOrderError",
    "LockTimeoutError",
    "Manager",
    "ManagerError",
    "OptimizerAttachment",
    "RandomState",
    "Recovery",
    "RegistryError",
    "StateTornError",
]
