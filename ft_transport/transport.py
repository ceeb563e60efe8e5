"""The facade: one object that serves snapshots and receives them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TypeVar

from ft_transport.errors import (
    ConfigurationError,
    TransportError,
)
from ft_transport.http.connection import Connection
from ft_transport.http.manifest_client import fetch_server_id
from ft_transport.http.peer_address import PeerAddress
from ft_transport.http.server import FreshSnapshot, SnapshotServer
from ft_transport.http.snapshot_cache import SnapshotCache
from ft_transport.http.token import JobToken
from ft_transport.settings import TransportSettings, check_duration, check_number
from ft_transport.state.snapshot import Stager
from ft_transport.transfer.client import SnapshotReceiving
from ft_transport.transfer.server import SnapshotServing

T = TypeVar("T")

ReadLock = Callable[[timedelta], AbstractContextManager[object]]
"""Holds the state still: given a timeout, a context manager inside which no optimizer steps."""


class HTTPTransport(SnapshotServing, SnapshotReceiving[T]):
    """Serves this replica's state to others over HTTP, and receives theirs.

    A drop-in for torchft's ``CheckpointTransport`` (torchft/checkpointing/transport.py): same methods, same meaning,
    same first constructor arguments. Thread-safe.

    Args:
        timeout: Longest time that a request is held on the server, and the default deadline.
        num_chunks: Parallel connections when receiving; 0 takes 4. (torchft's name: it splits into as many chunks.)
        state_dict: The receiver's own state. Tensors that fit are then received into directly, which saves their
            memory and the copy; called afresh for each ``recv_checkpoint``.
        read_lock: Held while a snapshot is copied, so that no optimizer steps meanwhile (``Manager.read_lock``).
        settings: Everything else.

    Raises:
        ConfigurationError: A setting cannot work, or the address cannot be bound.
    """

    def __init__(
        self,
        timeout: timedelta = timedelta(seconds=60),
        num_chunks: int = 0,
        *,
        state_dict: Callable[[], object] | None = None,
        read_lock: ReadLock | None = None,
        settings: TransportSettings | None = None,
    ) -> None:
        check_duration("timeout", timeout, at_least=timedelta(0))
        num_chunks = check_number("num_chunks", num_chunks, at_least=0)
        self._state_dict = state_dict
        self._read_lock = read_lock
        if not isinstance(settings, (TransportSettings, type(None))):
            raise ConfigurationError(f"expected TransportSettings as settings, got {type(settings).__name__}")
        for name, function in (("state_dict", state_dict), ("read_lock", read_lock)):
            if function is not None and not callable(function):
                raise ConfigurationError(f"expected a function as {name}, got {type(function).__name__}")
        settings = settings if settings is not None else TransportSettings()
        token = JobToken(settings.token) if settings.token is not None else JobToken.from_environment()
        SnapshotReceiving.__init__(self, timeout, num_chunks, settings, token)
        SnapshotServing.__init__(
            self,
            SnapshotCache(
                max_snapshots=self._settings.max_snapshots,
                lease_s=self._settings.lease.total_seconds(),
                clock=time.monotonic,
            ),
            Stager(
                max_snapshots=self._settings.max_snapshots,
                num_threads=self._settings.num_copy_threads,
                chunk_bytes=self._settings.chunk_bytes,
            ),
        )
        try:
            self._server = SnapshotServer(
                self._cache,
                host=self._settings.host,
                port=self._settings.port,
                advertise=self._settings.advertise,
                replica=self._settings.replica,
                token=self._token,
                max_wait_s=timeout.total_seconds(),
                stall_timeout_s=self._settings.stall_timeout.total_seconds(),
                fresh_snapshot=None,
            )
        except BaseException:
            self._stager.close()
            raise
        self._shutdown_lock = threading.Lock()
        self._is_shut_down = False

    def metadata(self) -> str:
        """What a receiver needs to find this transport: ``http://host:port/checkpoint/``."""
        return f"{self._server.address}/checkpoint/"

    def address(self) -> str:
        """The same as ``metadata`` (torchft's name)."""
        return self.metadata()

    def check_address(self, timeout: timedelta) -> None:
        """Makes sure that the address which peers are told leads to this very transport, by asking there.

        A name that nobody resolves, an interface that is down or another server on the port is found at the start, and
        not when a replica has to recover.

        Args:
            timeout: For everything.

        Raises:
            ConfigurationError: It leads nowhere, or to somebody else.
        """
        check_duration("timeout", timeout, at_least=timedelta.min)
        settings = self._fetch_settings(time.monotonic() + timeout.total_seconds())
        try:
            with Connection(
                PeerAddress.from_url(self.metadata()), token=self._token, timeouts=settings.timeouts
            ) as own:
                server_id = fetch_server_id(own)
        except TransportError as error:
            raise ConfigurationError(
                f"expected to reach this transport at the address that peers are told, {self.metadata()}: {error}; set "
                "TransportSettings.advertise or FT_TRANSPORT_ADVERTISE to a host, an address or a network interface"
            ) from error
        if server_id != self._server.server_id:
            raise ConfigurationError(
                f"expected this transport at the address that peers are told, {self.metadata()}, and another server "
                "answers there; set TransportSettings.advertise or FT_TRANSPORT_ADVERTISE"
            )

    def token_proof(self) -> str:
        """Return what is equal on transports with the same job token, and tells nobody the token (RFC 7914, scrypt)."""
        return self._token.proof() if self._token is not None else "none"

    def send_checkpoint(
        self, dst_ranks: Sequence[int], step: int, state_dict: T | Callable[[], T], timeout: timedelta
    ) -> None:
        """Takes a snapshot and serves it from now on; returns when it can be fetched.

        Args:
            dst_ranks: Who will fetch it; anybody with the token may.
            step: The committed step that the state shows.
            state_dict: The state, or a function that returns it, called under the read lock.
            timeout: For taking the read lock.

        Raises:
            SnapshotError: The state cannot be captured, or too many snapshots are still being fetched.
        """
        del dst_ranks
        check_duration("timeout", timeout, at_least=timedelta.min)
        with self._read_lock(timeout) if self._read_lock is not None else contextlib.nullcontext():
            state = state_dict() if callable(state_dict) else state_dict
            in_progress = self.begin_snapshot(step, state)
        in_progress.publish()

    def allow_checkpoint(self, step: int) -> None:
        """Does nothing: a snapshot is served from the moment it is whole, under the step it was taken at."""

    def disallow_checkpoint(self) -> None:
        """Returns at once: no step can change what is served, so nobody has to be waited for."""

    def serve_fresh(self, fresh_snapshot: FreshSnapshot | None) -> None:
        """Lets a request for ``latest`` ask for a new snapshot.

        Args:
            fresh_snapshot: Asks the owner of the state for a snapshot, of the step that it is given if that is not
                ``None``, and returns at once: the number (``newest_sequence``) after which a snapshot is new enough,
                or ``None`` if that step is past. Without such a function, whatever is there is served.

        Raises:
            ConfigurationError: Another owner was set before; two would replace each other's snapshots.
        """
        if fresh_snapshot is not None and self._server.fresh_snapshot is not None:
            raise ConfigurationError("expected a transport that serves nobody's snapshots yet, got one with an owner")
        self._server.fresh_snapshot = fresh_snapshot

    @property
    def is_owned(self) -> bool:
        """Whether somebody's state is served (`serve_fresh`)."""
        return self._server.fresh_snapshot is not None

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Receives the state of ``step`` from the peer that ``metadata`` names.

        Args:
            src_rank: The peer's rank, for messages.
            metadata: What its ``metadata()`` returned.
            step: The step.
            timeout: For everything, from the first connection to the last byte.

        Returns:
            The state; its tensors are the receiver's own where they were received in place.

        Raises:
            DeadlineExceededError: It took too long.
            FetchFailedError: The peer could not deliver.
            TransportError: Anything else; see ``ft_transport.errors``.
        """
        del src_rank
        into = self._state_dict() if self._state_dict is not None else None
        return self.fetch(metadata, step, timeout=timeout, into=into).state

    def shutdown(self, wait: bool = True) -> None:
        """Stops serving and frees the snapshots. May be called twice.

        Args:
            wait: Whether to return only when the server's thread has ended.
        """
        with self._shutdown_lock:
            is_first = not self._is_shut_down
            self._is_shut_down = True
        self._server.close(wait=wait)
        if is_first:
            self._cache.clear()
            self._stager.close()
