"""The manager of a replica: lock, optimizer hooks, snapshots at step boundaries, and the quorum of its peers."""

from typing import TYPE_CHECKING

from ft_transport.lazy_names import import_on_use
from manager.errors import (
    CommitFailedError,
    ConfigError,
    HealFailedError,
    LighthouseUnavailableError,
    LockHolder,
    LockNotHeldError,
    LockOrderError,
    LockTimeoutError,
    ManagerError,
    QuorumError,
    QuorumTimeoutError,
    RecoveryFailedError,
    RegistryError,
    ReportedError,
    StateMismatchError,
    StatesDivergedError,
    StateTornError,
)

if TYPE_CHECKING:
    from manager.checkpointed_state import Recovery
    from manager.config import ManagerConfig
    from manager.diloco import guard_diloco
    from manager.hooks import OptimizerAttachment
    from manager.lighthouse import embedded_lighthouse
    from manager.local_sgd import guard_local_sgd
    from manager.managed_work import ManagedWork
    from manager.manager import Manager
    from manager.process_group import GlooProcessGroup, ReplicaProcessGroup
    from manager.quorum import WorldSizeMode
    from manager.rng import RandomState
    from manager.state_manager import StateManager
else:
    import_on_use(
        globals(),
        {
            "manager.checkpointed_state": ("Recovery",),
            "manager.config": ("ManagerConfig",),
            "manager.diloco": ("guard_diloco",),
            "manager.hooks": ("OptimizerAttachment",),
            "manager.lighthouse": ("embedded_lighthouse",),
            "manager.local_sgd": ("guard_local_sgd",),
            "manager.managed_work": ("ManagedWork",),
            "manager.manager": ("Manager",),
            "manager.process_group": ("GlooProcessGroup", "ReplicaProcessGroup"),
            "manager.quorum": ("WorldSizeMode",),
            "manager.rng": ("RandomState",),
            "manager.state_manager": ("StateManager",),
        },
    )

__all__ = [
    "CommitFailedError",
    "ConfigError",
    "GlooProcessGroup",
    "HealFailedError",
    "LighthouseUnavailableError",
    "LockHolder",
    "LockNotHeldError",
    "LockOrderError",
    "LockTimeoutError",
    "ManagedWork",
    "Manager",
    "ManagerConfig",
    "ManagerError",
    "OptimizerAttachment",
    "QuorumError",
    "QuorumTimeoutError",
    "RandomState",
    "Recovery",
    "RecoveryFailedError",
    "RegistryError",
    "ReplicaProcessGroup",
    "ReportedError",
    "StateManager",
    "StateMismatchError",
    "StateTornError",
    "StatesDivergedError",
    "WorldSizeMode",
    "embedded_lighthouse",
    "guard_diloco",
    "guard_local_sgd",
]
