"""Fault-tolerant checkpoint transport for replicated training.

A healthy replica serves an immutable snapshot of its state over HTTP while it continues to train. A recovering replica
receives the snapshot directly into its own tensors.
"""

from typing import TYPE_CHECKING

from ft_transport.errors import CheckpointDamagedError as CheckpointDamagedError
from ft_transport.errors import CheckpointError as CheckpointError
from ft_transport.errors import CheckpointExistsError as CheckpointExistsError
from ft_transport.errors import CheckpointInUseError as CheckpointInUseError
from ft_transport.errors import CheckpointNotFoundError as CheckpointNotFoundError
from ft_transport.errors import CheckpointUntrustedError as CheckpointUntrustedError
from ft_transport.errors import CollectiveRefusedError as CollectiveRefusedError
from ft_transport.errors import ConfigurationError as ConfigurationError
from ft_transport.errors import DeadlineExceededError as DeadlineExceededError
from ft_transport.errors import EngineRefusedError as EngineRefusedError
from ft_transport.errors import EngineUnreachableError as EngineUnreachableError
from ft_transport.errors import FetchFailedError as FetchFailedError
from ft_transport.errors import FileWriteError as FileWriteError
from ft_transport.errors import IntegrityError as IntegrityError
from ft_transport.errors import ManifestError as ManifestError
from ft_transport.errors import MessageDamagedError as MessageDamagedError
from ft_transport.errors import PeerAuthenticationError as PeerAuthenticationError
from ft_transport.errors import PeerError as PeerError
from ft_transport.errors import PeerNotReadyError as PeerNotReadyError
from ft_transport.errors import PeerProtocolError as PeerProtocolError
from ft_transport.errors import PeerSilentError as PeerSilentError
from ft_transport.errors import PeerUnreachableError as PeerUnreachableError
from ft_transport.errors import PublishError as PublishError
from ft_transport.errors import RankFailedError as RankFailedError
from ft_transport.errors import RankGoneError as RankGoneError
from ft_transport.errors import RecordError as RecordError
from ft_transport.errors import ReplicasDivergedError as ReplicasDivergedError
from ft_transport.errors import RestoreError as RestoreError
from ft_transport.errors import SaveInProgressError as SaveInProgressError
from ft_transport.errors import SnapshotError as SnapshotError
from ft_transport.errors import SnapshotLimitError as SnapshotLimitError
from ft_transport.errors import SnapshotReplacedError as SnapshotReplacedError
from ft_transport.errors import StaleVersionError as StaleVersionError
from ft_transport.errors import StateMovedError as StateMovedError
from ft_transport.errors import StateNotServedError as StateNotServedError
from ft_transport.errors import StepNotServedError as StepNotServedError
from ft_transport.errors import TransportError as TransportError
from ft_transport.errors import UnknownHostError as UnknownHostError
from ft_transport.errors import UnsupportedLeafError as UnsupportedLeafError
from ft_transport.errors import WriterFailedError as WriterFailedError
from ft_transport.runtime.lazy_imports import import_on_use

if TYPE_CHECKING:
    from ft_transport.checkpoint.dcp_checkpoint import DCPCheckpoint as DCPCheckpoint
    from ft_transport.checkpoint.load import LoadedCheckpoint as LoadedCheckpoint
    from ft_transport.checkpoint.saver import SaveHandle as SaveHandle
    from ft_transport.checkpoint.saver import StoreHealth as StoreHealth
    from ft_transport.checkpoint.settings import StoreSettings as StoreSettings
    from ft_transport.checkpoint.store import CheckpointStore as CheckpointStore
    from ft_transport.checkpoint.uploading import Upload as Upload
    from ft_transport.credentials import TLSFiles as TLSFiles
    from ft_transport.http.client.fetch_settings import FetchTimeout as FetchTimeout
    from ft_transport.publish.adapter import LoRAAdapter as LoRAAdapter
    from ft_transport.publish.content import WeightFormat as WeightFormat
    from ft_transport.publish.content import model_files as model_files
    from ft_transport.publish.delta_directory import DeltaDirectory as DeltaDirectory
    from ft_transport.publish.engines.engine import Answer as Answer
    from ft_transport.publish.engines.engine import Delivery as Delivery
    from ft_transport.publish.engines.engine import Engine as Engine
    from ft_transport.publish.engines.engine import EngineConnection as EngineConnection
    from ft_transport.publish.engines.engine import PolledEngine as PolledEngine
    from ft_transport.publish.engines.pulling import PullingEngine as PullingEngine
    from ft_transport.publish.engines.sglang import SGLangEngine as SGLangEngine
    from ft_transport.publish.engines.vllm import SkyRLEngine as SkyRLEngine
    from ft_transport.publish.engines.vllm import VLLMEngine as VLLMEngine
    from ft_transport.publish.publisher import Publisher as Publisher
    from ft_transport.publish.receiver import WeightReceiver as WeightReceiver
    from ft_transport.publish.report import EngineReport as EngineReport
    from ft_transport.publish.report import EngineState as EngineState
    from ft_transport.publish.report import PublishHandle as PublishHandle
    from ft_transport.publish.report import PublishReport as PublishReport
    from ft_transport.settings import FetchProgress as FetchProgress
    from ft_transport.settings import Limits as Limits
    from ft_transport.settings import TransportSettings as TransportSettings
    from ft_transport.state.comparison import state_digest as state_digest
    from ft_transport.state.encodings import register_encoding as register_encoding
    from ft_transport.state.flatten import check_encodable as check_encodable
    from ft_transport.transfer.known import AllBut as AllBut
    from ft_transport.transfer.known import PartialState as PartialState
    from ft_transport.transfer.known import Received as Received
    from ft_transport.transport import HTTPTransport as HTTPTransport

import_on_use(globals())
