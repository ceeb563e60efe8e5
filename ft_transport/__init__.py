"""Fault-tolerant checkpoint transport for replicated training.

A healthy replica serves an immutable snapshot of its live state over HTTP, and a recovering one receives it straight
into its own tensors, while the healthy one goes on training.
"""

from typing import TYPE_CHECKING

from ft_transport.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointInUseError,
    CheckpointNotFoundError,
    CheckpointUntrustedError,
    CollectiveRefusedError,
    ConfigurationError,
    DeadlineExceededError,
    EngineRefusedError,
    EngineUnreachableError,
    FetchFailedError,
    FileWriteError,
    IntegrityError,
    ManifestError,
    MessageDamagedError,
    PeerAuthenticationError,
    PeerError,
    PeerNotReadyError,
    PeerProtocolError,
    PeerSilentError,
    PeerUnreachableError,
    PublishError,
    RankFailedError,
    RankGoneError,
    RecordError,
    ReplicasDivergedError,
    RestoreError,
    SaveInProgressError,
    SnapshotError,
    SnapshotLimitError,
    SnapshotReplacedError,
    StaleVersionError,
    StateMovedError,
    StateNotServedError,
    StepNotServedError,
    TransportError,
    UnknownHostError,
    UnsupportedLeafError,
    WriterFailedError,
)
from ft_transport.runtime.lazy_imports import import_on_use

if TYPE_CHECKING:
    from ft_transport.checkpoint.background_saver import SaveHandle
    from ft_transport.checkpoint.foreign import DCPCheckpoint
    from ft_transport.checkpoint.health import StoreHealth
    from ft_transport.checkpoint.load import LoadedCheckpoint
    from ft_transport.checkpoint.settings import StoreSettings
    from ft_transport.checkpoint.store import CheckpointStore
    from ft_transport.http.fetch_settings import FetchTimeout
    from ft_transport.http.fork_safety import close_in_children, delaying_forks
    from ft_transport.publish.adapter import LoRAAdapter
    from ft_transport.publish.delta_directory import DeltaDirectory
    from ft_transport.publish.engines.engine import Answer, Delivery, Engine, EngineConnection, PolledEngine
    from ft_transport.publish.engines.pulling import PullingEngine
    from ft_transport.publish.engines.sglang import SGLangEngine
    from ft_transport.publish.engines.skyrl import SkyRLEngine
    from ft_transport.publish.engines.vllm import VLLMEngine
    from ft_transport.publish.files import model_files
    from ft_transport.publish.handle import PublishHandle
    from ft_transport.publish.publisher import Publisher
    from ft_transport.publish.receiver import WeightReceiver
    from ft_transport.publish.report import EngineReport, EngineState, PublishReport
    from ft_transport.publish.weight_format import WeightFormat
    from ft_transport.settings import FetchProgress, TransportSettings
    from ft_transport.state.collectives import refusing_collectives
    from ft_transport.state.dtensors import is_dtensor
    from ft_transport.state.encodings import register_encoding
    from ft_transport.state.flatten import check_encodable
    from ft_transport.state.matching import Incoming, Mismatch
    from ft_transport.state.placements import spans_ranks
    from ft_transport.state.snapshot import HeldState, Taking
    from ft_transport.state.state_digest import TensorDigests, state_digest
    from ft_transport.tls import TLSFiles
    from ft_transport.transfer.known import PartialState, Received
    from ft_transport.transfer.server import SnapshotInProgress, SnapshotLease
    from ft_transport.transport import HTTPTransport
else:
    import_on_use(
        globals(),
        {
            "ft_transport.checkpoint.store": ("CheckpointStore",),
            "ft_transport.http.fork_safety": ("close_in_children", "delaying_forks"),
            "ft_transport.publish.adapter": ("LoRAAdapter",),
            "ft_transport.publish.delta_directory": ("DeltaDirectory",),
            "ft_transport.publish.engines.engine": (
                "Answer",
                "Delivery",
                "Engine",
                "EngineConnection",
                "PolledEngine",
            ),
            "ft_transport.publish.engines.pulling": ("PullingEngine",),
            "ft_transport.publish.files": ("model_files",),
            "ft_transport.publish.weight_format": ("WeightFormat",),
            "ft_transport.publish.report": ("EngineReport", "EngineState", "PublishReport"),
            "ft_transport.publish.engines.sglang": ("SGLangEngine",),
            "ft_transport.publish.engines.skyrl": ("SkyRLEngine",),
            "ft_transport.publish.engines.vllm": ("VLLMEngine",),
            "ft_transport.publish.handle": ("PublishHandle",),
            "ft_transport.publish.publisher": ("Publisher",),
            "ft_transport.transfer.known": ("PartialState", "Received"),
            "ft_transport.transfer.server": ("SnapshotInProgress", "SnapshotLease"),
            "ft_transport.http.fetch_settings": ("FetchTimeout",),
            "ft_transport.settings": ("FetchProgress", "TransportSettings"),
            "ft_transport.tls": ("TLSFiles",),
            "ft_transport.checkpoint.background_saver": ("SaveHandle",),
            "ft_transport.checkpoint.foreign": ("DCPCheckpoint",),
            "ft_transport.checkpoint.health": ("StoreHealth",),
            "ft_transport.checkpoint.load": ("LoadedCheckpoint",),
            "ft_transport.checkpoint.settings": ("StoreSettings",),
            "ft_transport.state.collectives": ("refusing_collectives",),
            "ft_transport.state.dtensors": ("is_dtensor",),
            "ft_transport.state.encodings": ("register_encoding",),
            "ft_transport.state.flatten": ("check_encodable",),
            "ft_transport.state.matching": ("Incoming", "Mismatch"),
            "ft_transport.state.placements": ("spans_ranks",),
            "ft_transport.state.snapshot": ("HeldState", "Taking"),
            "ft_transport.state.state_digest": ("TensorDigests", "state_digest"),
            "ft_transport.transport": ("HTTPTransport",),
            "ft_transport.publish.receiver": ("WeightReceiver",),
        },
    )

__all__ = [
    "Answer",
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointInUseError",
    "CheckpointNotFoundError",
    "CheckpointStore",
    "CheckpointUntrustedError",
    "CollectiveRefusedError",
    "ConfigurationError",
    "DCPCheckpoint",
    "DeadlineExceededError",
    "Delivery",
    "DeltaDirectory",
    "Engine",
    "EngineConnection",
    "EngineRefusedError",
    "EngineReport",
    "EngineState",
    "EngineUnreachableError",
    "FetchFailedError",
    "FetchProgress",
    "FetchTimeout",
    "FileWriteError",
    "HTTPTransport",
    "HeldState",
    "Incoming",
    "IntegrityError",
    "LoRAAdapter",
    "LoadedCheckpoint",
    "ManifestError",
    "MessageDamagedError",
    "Mismatch",
    "PartialState",
    "PeerAuthenticationError",
    "PeerError",
    "PeerNotReadyError",
    "PeerProtocolError",
    "PeerSilentError",
    "PeerUnreachableError",
    "PolledEngine",
    "PublishError",
    "PublishHandle",
    "PublishReport",
    "Publisher",
    "PullingEngine",
    "RankFailedError",
    "RankGoneError",
    "Received",
    "RecordError",
    "ReplicasDivergedError",
    "RestoreError",
    "SGLangEngine",
    "SaveHandle",
    "SaveInProgressError",
    "SkyRLEngine",
    "SnapshotError",
    "SnapshotInProgress",
    "SnapshotLease",
    "SnapshotLimitError",
    "SnapshotReplacedError",
    "StaleVersionError",
    "StateMovedError",
    "StateNotServedError",
    "StepNotServedError",
    "StoreHealth",
    "StoreSettings",
    "TLSFiles",
    "Taking",
    "TensorDigests",
    "TransportError",
    "TransportSettings",
    "UnknownHostError",
    "UnsupportedLeafError",
    "VLLMEngine",
    "WeightFormat",
    "WeightReceiver",
    "WriterFailedError",
    "check_encodable",
    "close_in_children",
    "delaying_forks",
    "is_dtensor",
    "model_files",
    "refusing_collectives",
    "register_encoding",
    "spans_ranks",
    "state_digest",
]
