"""The manager of a replica: lock, optimizer hooks, snapshots at step boundaries, and the quorum of its peers."""

from typing import TYPE_CHECKING

from ft_transport.runtime.lazy_imports import import_on_use
from manager.errors import (
    CommitFailedError,
    ConfigError,
    HealFailedError,
    HyperparametersDivergedError,
    LighthouseUnavailableError,
    LoaderOrderError,
    LockHolder,
    LockNotHeldError,
    LockOrderError,
    LockTimeoutError,
    ManagerClosedError,
    ManagerError,
    QuorumError,
    QuorumTimeoutError,
    RecoveryFailedError,
    ReductionMismatchError,
    RegistryError,
    ReplicaFaultError,
    ReportedError,
    StateMismatchError,
    StatesDivergedError,
    StateTornError,
    UnfinishedReductionError,
)

if TYPE_CHECKING:
    from manager.collectives.gloo import GlooProcessGroup, ReplicaProcessGroup
    from manager.collectives.managed_work import ManagedWork
    from manager.config import ManagerConfig
    from manager.integrations.diloco import guard_diloco
    from manager.integrations.local_sgd import guard_local_sgd
    from manager.manager import Manager
    from manager.quorum.decision import WorldSizeMode
    from manager.quorum.lighthouse import embedded_lighthouse
    from manager.recovery.values import Recovery
    from manager.state.optimizer_guard import OptimizerAttachment
    from manager.state.random_state import RandomState
    from manager.state_manager import StateManager
else:
    import_on_use(
        globals(),
        {
            "manager.recovery.values": ("Recovery",),
            "manager.config": ("ManagerConfig",),
            "manager.integrations.diloco": ("guard_diloco",),
            "manager.state.optimizer_guard": ("OptimizerAttachment",),
            "manager.quorum.lighthouse": ("embedded_lighthouse",),
            "manager.integrations.local_sgd": ("guard_local_sgd",),
            "manager.collectives.managed_work": ("ManagedWork",),
            "manager.manager": ("Manager",),
            "manager.collectives.gloo": ("GlooProcessGroup", "ReplicaProcessGroup"),
            "manager.quorum.decision": ("WorldSizeMode",),
            "manager.state.random_state": ("RandomState",),
            "manager.state_manager": ("StateManager",),
        },
    )

__all__ = [
    "CommitFailedError",
    "ConfigError",
    "GlooProcessGroup",
    "HealFailedError",
    "HyperparametersDivergedError",
    "LighthouseUnavailableError",
    "LoaderOrderError",
    "LockHolder",
    "LockNotHeldError",
    "LockOrderError",
    "LockTimeoutError",
    "ManagedWork",
    "Manager",
    "ManagerClosedError",
    "ManagerConfig",
    "ManagerError",
    "OptimizerAttachment",
    "QuorumError",
    "QuorumTimeoutError",
    "RandomState",
    "Recovery",
    "RecoveryFailedError",
    "ReductionMismatchError",
    "RegistryError",
    "ReplicaFaultError",
    "ReplicaProcessGroup",
    "ReportedError",
    "StateManager",
    "StateMismatchError",
    "StateTornError",
    "StatesDivergedError",
    "UnfinishedReductionError",
    "WorldSizeMode",
    "embedded_lighthouse",
    "guard_diloco",
    "guard_local_sgd",
]
