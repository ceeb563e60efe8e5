"""The settings of one fetch, as one value for all its parts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

from ft_transport.http.connection import Connection
from ft_transport.http.fetch_timeouts import Progress, Timeouts
from ft_transport.http.peer_address import PeerAddress
from ft_transport.keys import Keys
from ft_transport.settings import FetchProgress, TransportSettings, check_duration
from ft_transport.tls import Certificates


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchTimeout:
    """How long a fetch may take, where one duration for all of it is too coarse.

    Attributes:
        total: For everything.
        unreachable: How long a peer may be out of reach before the first byte; ``None`` for the default of the call.
        progress: How long no data may arrive, at the start or in the middle; ``None`` for ``total``.

    Raises:
        ConfigurationError: One of them is no duration, or ``progress`` is negative.
    """

    total: timedelta
    unreachable: timedelta | None = None
    progress: timedelta | None = None

    def __post_init__(self) -> None:
        check_duration("timeout", self.total, at_least=timedelta.min)
        if self.unreachable is not None:
            check_duration("unreachable timeout", self.unreachable, at_least=timedelta.min)
        if self.progress is not None:
            check_duration("progress timeout", self.progress, at_least=timedelta(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSettings:
    """Settings of one fetch.

    Attributes:
        num_connections: Parallel connections; at most one per chunk is used.
        verify: Whether each chunk is compared with its digest as it lands, if the manifest has digests.
        max_failures: Consecutive failures after which a source is given up.
        keys: The job's keys, if it has any.
        certificates: This side's certificates, if it has any.
        unreachable_s: How long a source may be out of reach before the first byte, in seconds.
        timeouts: Deadlines and the minimum throughput.
        on_progress: Called after each chunk, on the fetching threads, one call at a time; must be quick.
        replica: Name of this replica, for the sources' audit logs.
    """

    num_connections: int
    verify: bool
    max_failures: int
    keys: Keys | None
    certificates: Certificates | None
    unreachable_s: float
    timeouts: Timeouts
    on_progress: Callable[[FetchProgress], None] | None
    replica: str = ""

    @classmethod
    def of(
        cls,
        settings: TransportSettings,
        *,
        keys: Keys | None,
        certificates: Certificates | None,
        num_connections: int,
        timeout: FetchTimeout,
    ) -> FetchSettings:
        """Return the settings of one fetch from those of a transport; the deadlines begin now."""
        unreachable = timeout.total if timeout.unreachable is None else timeout.unreachable
        return cls(
            num_connections=num_connections,
            verify=settings.verify,
            max_failures=settings.max_failures,
            keys=keys,
            certificates=certificates,
            unreachable_s=unreachable.total_seconds(),
            timeouts=Timeouts(
                deadline_s=time.monotonic() + timeout.total.total_seconds(),
                connect_timeout_s=min(10.0, settings.stall_timeout.total_seconds()),
                stall_timeout_s=settings.stall_timeout.total_seconds(),
                min_bytes_per_s=settings.min_bytes_per_s,
                progress=Progress(timeout.progress.total_seconds()) if timeout.progress is not None else None,
            ),
            on_progress=settings.on_progress,
            replica=settings.replica,
        )

    def with_stall_timeout(self, longest_s: float) -> FetchSettings:
        """Return the same settings with at most this stall timeout."""
        timeouts = self.timeouts
        shorter_s = min(longest_s, timeouts.stall_timeout_s)
        return replace(
            self,
            timeouts=replace(
                timeouts, stall_timeout_s=shorter_s, connect_timeout_s=min(shorter_s, timeouts.connect_timeout_s)
            ),
        )

    def connection_to(self, peer: PeerAddress) -> Connection:
        """Return a connection that opens at its first request."""
        return Connection(
            peer,
            keys=self.keys,
            certificates=self.certificates,
            timeouts=self.timeouts,
            replica=self.replica,
        )
