"""How one fetch goes about it, as one value that all its parts are handed."""

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
class FetchSettings:
    """How to fetch.

    Attributes:
        num_connections: Parallel connections, at most one per chunk is used.
        verify: Whether each chunk is compared with its digest as it lands, where the manifest has them.
        max_failures: Failures in a row after which a source is given up.
        keys: Those of the job, if it has any.
        certificates: This side's, if it has any.
        unreachable_s: How long a source may be out of reach before the first byte, in seconds.
        timeouts: Deadlines and the least throughput.
        on_progress: Called after each chunk, from the fetching threads, one call at a time; must be quick.
        replica: What the sources are told of who fetches, for their audit.
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
        timeout: timedelta,
        unreachable_timeout: timedelta | None,
        progress_timeout: timedelta | None,
    ) -> FetchSettings:
        """The settings of a transport as those of one fetch; the deadlines begin now.

        Raises:
            ConfigurationError: One of them is no duration, or there is to be progress in less than no time.
        """
        check_duration("timeout", timeout, at_least=timedelta.min)
        if unreachable_timeout is not None:
            check_duration("unreachable_timeout", unreachable_timeout, at_least=timedelta.min)
        if progress_timeout is not None:
            check_duration("progress_timeout", progress_timeout, at_least=timedelta(0))
        return cls(
            num_connections=num_connections,
            verify=settings.verify,
            max_failures=settings.max_failures,
            keys=keys,
            certificates=certificates,
            unreachable_s=(timeout if unreachable_timeout is None else unreachable_timeout).total_seconds(),
            timeouts=Timeouts(
                deadline_s=time.monotonic() + timeout.total_seconds(),
                connect_timeout_s=settings.connect_timeout.total_seconds(),
                stall_timeout_s=settings.stall_timeout.total_seconds(),
                min_bytes_per_s=settings.min_bytes_per_s,
                progress=Progress(progress_timeout.total_seconds()) if progress_timeout is not None else None,
            ),
            on_progress=settings.on_progress,
            replica=settings.replica,
        )

    def with_stall_timeout(self, longest_s: float) -> FetchSettings:
        """The same, but for less patience with a silent peer."""
        timeouts = self.timeouts
        shorter_s = min(longest_s, timeouts.stall_timeout_s)
        return replace(
            self,
            timeouts=replace(
                timeouts, stall_timeout_s=shorter_s, connect_timeout_s=min(shorter_s, timeouts.connect_timeout_s)
            ),
        )

    def connection_to(self, peer: PeerAddress) -> Connection:
        """A connection that is made at its first request."""
        return Connection(
            peer,
            keys=self.keys,
            certificates=self.certificates,
            timeouts=self.timeouts,
            replica=self.replica,
        )
