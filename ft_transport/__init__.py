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
    CollectiveRefusedError,
    ConfigurationError,
    DeadlineExceededError,
    EngineRefusedError,
    EngineUnreachableError,
    FetchFailedError,
    IntegrityError,
    ManifestError,
    PeerAuthenticationError,
    PeerError,
    PeerNotReadyError,
    PeerProtocolError,
    PeerUnreachableError,
    PublishError,
    RankFailedError,
    RankGoneError,
    ReplicasDivergedError,
    RestoreError,
    SaveInProgressError,
    SnapshotError,
    SnapshotLimitError,
    SnapshotReplacedError,
    StaleVersionError,
    StateMovedError,
    StepNotServedError,
    TransportError,
    UnknownHostError,
    UnsupportedLeafError,
    WriterFailedError,
)
from ft_transport.lazy_names import import_on_use

if TYPE_CHECKING:
    from ft_transport.checkpoint_store import CheckpointStore
    from ft_transport.net.forking import close_in_children, delaying_forks
    from ft_transport.net.workers import FetchProgress
    from ft_transport.publish.adapter import LoRAAdapter
    from ft_transport.publish.engine import Answer, Delivery, Engine, EngineConnection
    from ft_transport.publish.pulling import PullingEngine
    from ft_transport.publish.report import EngineReport, PublishReport
    from ft_transport.publish.sglang import SGLangEngine
    from ft_transport.publish.skyrl import SkyRLEngine
    from ft_transport.publish.vllm import VLLMEngine
    from ft_transport.publisher import Publisher, PublishHandle
    from ft_transport.receiving import Received
    from ft_transport.serving import SnapshotInProgress, SnapshotLease
    from ft_transport.settings import TransportSettings
    from ft_transport.storage.handles import SaveHandle, StoreHealth
    from ft_transport.storage.loading import LoadedCheckpoint
    from ft_transport.storage.settings import StoreSettings
    from ft_transport.tensors.collectives import refusing_collectives
    from ft_transport.tensors.dtensors import is_dtensor
    from ft_transport.tensors.encodings import register_encoding
    from ft_transport.tensors.matching import Incoming, Mismatch
    from ft_transport.tensors.placements import spans_ranks
    from ft_transport.tensors.snapshot import HeldState
    from ft_transport.tensors.state_digest import TensorDigests, state_digest
    from ft_transport.transport import HTTPTransport
    from ft_transport.weight_receiver import WeightReceiver
else:
    import_on_use(
        globals(),
        {
            "ft_transport.checkpoint_store": ("CheckpointStore",),
            "ft_transport.net.forking": ("close_in_children", "delaying_forks"),
            "ft_transport.net.workers": ("FetchProgress",),
            "ft_transport.publish.adapter": ("LoRAAdapter",),
            "ft_transport.publish.engine": ("Answer", "Delivery", "Engine", "EngineConnection"),
            "ft_transport.publish.pulling": ("PullingEngine",),
            "ft_transport.publish.report": ("EngineReport", "PublishReport"),
            "ft_transport.publish.sglang": ("SGLangEngine",),
            "ft_transport.publish.skyrl": ("SkyRLEngine",),
            "ft_transport.publish.vllm": ("VLLMEngine",),
            "ft_transport.publisher": ("Publisher", "PublishHandle"),
            "ft_transport.receiving": ("Received",),
            "ft_transport.serving": ("SnapshotInProgress", "SnapshotLease"),
            "ft_transport.settings": ("TransportSettings",),
            "ft_transport.storage.handles": ("SaveHandle", "StoreHealth"),
            "ft_transport.storage.loading": ("LoadedCheckpoint",),
            "ft_transport.storage.settings": ("StoreSettings",),
            "ft_transport.tensors.collectives": ("refusing_collectives",),
            "ft_transport.tensors.dtensors": ("is_dtensor",),
            "ft_transport.tensors.encodings": ("register_encoding",),
            "ft_transport.tensors.matching": ("Incoming", "Mismatch"),
            "ft_transport.tensors.placements": ("spans_ranks",),
            "ft_transport.tensors.snapshot": ("HeldState",),
            "ft_transport.tensors.state_digest": ("TensorDigests", "state_digest"),
            "ft_transport.transport": ("HTTPTransport",),
            "ft_transport.weight_receiver": ("WeightReceiver",),
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
    "CollectiveRefusedError",
    "ConfigurationError",
    "DeadlineExceededError",
    "Delivery",
    "Engine",
    "EngineConnection",
    "EngineRefusedError",
    "EngineReport",
    "EngineUnreachableError",
    "FetchFailedError",
    "FetchProgress",
    "HTTPTransport",
    "HeldState",
    "Incoming",
    "IntegrityError",
    "LoRAAdapter",
    "LoadedCheckpoint",
    "ManifestError",
    "Mismatch",
    "PeerAuthenticationError",
    "PeerError",
    "PeerNotReadyError",
    "PeerProtocolError",
    "PeerUnreachableError",
    "PublishError",
    "PublishHandle",
    "PublishReport",
    "Publisher",
    "PullingEngine",
    "RankFailedError",
    "RankGoneError",
    "Received",
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
    "StepNotServedError",
    "StoreHealth",
    "StoreSettings",
    "TensorDigests",
    "TransportError",
    "TransportSettings",
    "UnknownHostError",
    "UnsupportedLeafError",
    "VLLMEngine",
    "WeightReceiver",
    "WriterFailedError",
    "close_in_children",
    "delaying_forks",
    "is_dtensor",
    "refusing_collectives",
    "register_encoding",
    "spans_ranks",
    "state_digest",
]
