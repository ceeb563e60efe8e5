"""The manager of a replica: state lock, optimizer hooks, snapshots at step boundaries, and the quorum with peers."""

from typing import TYPE_CHECKING

from ft_transport.runtime.lazy_imports import import_on_use
from manager.errors import CommitFailedError as CommitFailedError
from manager.errors import ConfigError as ConfigError
from manager.errors import HealFailedError as HealFailedError
from manager.errors import HyperparametersDivergedError as HyperparametersDivergedError
from manager.errors import LighthouseUnavailableError as LighthouseUnavailableError
from manager.errors import LoaderOrderError as LoaderOrderError
from manager.errors import LockHolder as LockHolder
from manager.errors import LockNotHeldError as LockNotHeldError
from manager.errors import LockOrderError as LockOrderError
from manager.errors import LockTimeoutError as LockTimeoutError
from manager.errors import ManagerClosedError as ManagerClosedError
from manager.errors import ManagerError as ManagerError
from manager.errors import QuorumError as QuorumError
from manager.errors import QuorumTimeoutError as QuorumTimeoutError
from manager.errors import RecoveryFailedError as RecoveryFailedError
from manager.errors import ReductionMismatchError as ReductionMismatchError
from manager.errors import RegistryError as RegistryError
from manager.errors import ReplicaFaultError as ReplicaFaultError
from manager.errors import ReportedError as ReportedError
from manager.errors import StateMismatchError as StateMismatchError
from manager.errors import StatesDivergedError as StatesDivergedError
from manager.errors import StateTornError as StateTornError
from manager.errors import UnfinishedReductionError as UnfinishedReductionError

if TYPE_CHECKING:
    from manager.collectives.gloo import GlooProcessGroup as GlooProcessGroup
    from manager.collectives.managed_work import ManagedWork as ManagedWork
    from manager.collectives.process_group import ReplicaProcessGroup as ReplicaProcessGroup
    from manager.config import ManagerConfig as ManagerConfig
    from manager.elastic_batches import ElasticBatches as ElasticBatches
    from manager.local_updates import guard_diloco as guard_diloco
    from manager.local_updates import guard_local_sgd as guard_local_sgd
    from manager.manager import Manager as Manager
    from manager.quorum.decision import WorldSizeMode as WorldSizeMode
    from manager.quorum.lighthouse import embedded_lighthouse as embedded_lighthouse
    from manager.recovery.peers import Recovery as Recovery
    from manager.recovery.preemption import PreemptedExit as PreemptedExit
    from manager.state.data_order import RandomState as RandomState
    from manager.state.elastic_sampler import ElasticSampler as ElasticSampler
    from manager.state.optimizer_guard import OptimizerAttachment as OptimizerAttachment
    from manager.state_manager import StateManager as StateManager

import_on_use(globals())
