"""Fault-tolerant checkpoint transport for replicated training.

A healthy replica serves an immutable snapshot of its live state over HTTP, and a recovering one receives it straight
into its own tensors, while the healthy one goes on training.
"""

from ft_transport.errors import (
    CollectiveRefusedError,
    ConfigurationError,
    DeadlineExceededError,
    FetchFailedError,
    IntegrityError,
    ManifestError,
    PeerAuthenticationError,
    PeerError,
    PeerNotReadyError,
    PeerProtocolError,
    PeerUnreachableError,
    RestoreError,
    SnapshotError,
    SnapshotLimitError,
    SnapshotReplacedError,
    StepNotServedError,
    TransportError,
    UnsupportedLeafError,
)
from ft_transport.net.workers import FetchProgress
from ft_transport.receiving import Received
from ft_transport.serving import SnapshotInProgress
from ft_transport.settings import TransportSettings
from ft_transport.tensors.collectives import refusing_collectives
from ft_transport.tensors.encodings import register_encoding
from ft_transport.tensors.matching import Incoming, Mismatch
from ft_transport.tensors.placements import spans_ranks
from ft_transport.tensors.snapshot import HeldState
from ft_transport.tensors.state_digest import state_digest
from ft_transport.transport import HTTPTransport

__all__ = [
    "CollectiveRefusedError",
    "ConfigurationError",
    "DeadlineExceededError",
    "FetchFailedError",
    "FetchProgress",
    "HTTPTransport",
    "HeldState",
    "Incoming",
    "IntegrityError",
    "ManifestError",
    "Mismatch",
    "PeerAuthenticationError",
    "PeerError",
    "PeerNotReadyError",
    "PeerProtocolError",
    "PeerUnreachableError",
    "Received",
    "RestoreError",
    "SnapshotError",
    "SnapshotInProgress",
    "SnapshotLimitError",
    "SnapshotReplacedError",
    "StepNotServedError",
    "TransportError",
    "TransportSettings",
    "UnsupportedLeafError",
    "refusing_collectives",
    "register_encoding",
    "spans_ranks",
    "state_digest",
]
