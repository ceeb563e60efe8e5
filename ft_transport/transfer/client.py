"""The client half of a transport: it receives one peer's state, or in another layout that of all ranks of a group."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Generic, TypeVar, cast

from ft_transport.errors import (
    ConfigurationError,
    FetchFailedError,
    MessageDamagedError,
    SnapshotReplacedError,
    TransportError,
)
from ft_transport.http.chunk_client import fetch_data
from ft_transport.http.connection import Connection
from ft_transport.http.delta_client import fetch_delta
from ft_transport.http.fetch_pool import FetchSettings
from ft_transport.http.fetch_timeouts import Progress, Timeouts
from ft_transport.http.late_digests import digest_chunks, fetch_digests, find_damaged
from ft_transport.http.manifest_client import fetch_manifest, fetch_server_id
from ft_transport.http.peer_address import PeerAddress
from ft_transport.keys import Keys
from ft_transport.settings import TransportSettings, check_duration, default_num_threads
from ft_transport.state.matching import Incoming
from ft_transport.state.restore import Restore
from ft_transport.state.verify import find_differences
from ft_transport.tls import Certificates
from ft_transport.transfer.sharded import ShardedRequest, poison, receive_sharded
from ft_transport.wire.delta import Delta, decode_delta
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.routes import StepSelector

T = TypeVar("T")

logger = logging.getLogger(__name__)

_GROUP_UNREACHABLE_S: Final = 5.0
_FIRST_RESTART_PAUSE_S: Final = 0.05
_LONGEST_RESTART_PAUSE_S: Final = 1.0
_MAX_SHOWN_PATHS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Received(Generic[T]):
    """A state that arrived whole and verified, and the committed step that it shows.

    Attributes:
        step: The step.
        state: The state.
        num_bytes_fetched: How many bytes of data came over the network; ``None`` if they were not counted.
    """

    step: int
    state: T
    _manifest: Manifest
    num_bytes_fetched: int | None = None

    def differences(self, state: object) -> tuple[str, ...]:
        """Where ``state`` is not, bit for bit, what was sent; whatever load functions have made of it.

        Reads every byte of it once, and sends nothing.

        Args:
            state: The receiver's state after loading. Nothing may change it meanwhile.

        Returns:
            Paths, each with what differs; empty if nothing does.

        Raises:
            UnsupportedLeafError: A leaf of ``state`` has no safe encoding.
            ConfigurationError: It was fetched without ``is_comparable``.
        """
        if self._manifest.digests is None:
            raise ConfigurationError("expected a state that was fetched with is_comparable=True")
        return find_differences(self._manifest, state, num_threads=default_num_threads())


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRequest:
    """What to receive from one peer, and how; ``HTTPTransport.fetch`` says what each means.

    Attributes:
        source: The peer.
        step: A step, or ``latest``.
        settings: Connections, deadlines and the like.
        into: The receiver's own state.
        check: Called with what will come, before any of it does.
        verify_late: Whether digests that come after the data are compared.
        only_changed: Whether chunks that ``into`` holds already are left out.
    """

    source: PeerAddress
    step: StepSelector
    settings: FetchSettings
    into: object
    check: Callable[[Incoming], None] | None
    verify_late: bool
    only_changed: bool


class StateClient(Generic[T]):
    """Receives what others serve. Thread-safe.

    Args:
        settings: How to fetch, and what is accepted.
        timeout: The default deadline.
        num_connections: Parallel connections.
        keys: Those of the job, if it has any.
        certificates: This side's, if it has any.
    """

    def __init__(
        self,
        settings: TransportSettings,
        *,
        timeout: timedelta,
        num_connections: int,
        keys: Keys | None,
        certificates: Certificates | None,
    ) -> None:
        self._settings = settings
        self._timeout = timeout
        self._num_connections = num_connections
        self._keys = keys
        self._certificates = certificates
        self._warned_paths: set[str] = set()
        self._warned_mutex = threading.Lock()

    def fetch_settings(
        self, timeout: timedelta | None, unreachable_timeout: timedelta | None, progress_timeout: timedelta | None
    ) -> FetchSettings:
        """All that a fetch is told of time, verification and retries, as one value; the deadlines begin now.

        Raises:
            ConfigurationError: ``timeout`` is no duration.
        """
        if timeout is None:
            timeout = self._timeout
        check_duration("timeout", timeout, at_least=timedelta.min)
        settings = self._settings
        return FetchSettings(
            num_connections=self._num_connections,
            verify=settings.verify,
            max_failures=settings.max_failures,
            keys=self._keys,
            certificates=self._certificates,
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

    def group_fetch_settings(
        self, timeout: timedelta | None, unreachable_timeout: timedelta | None, progress_timeout: timedelta | None
    ) -> FetchSettings:
        """As `fetch_settings`; a source out of reach is given up earlier, because others may stand in for it."""
        settings = self.fetch_settings(timeout, unreachable_timeout, progress_timeout)
        if unreachable_timeout is not None:
            return settings
        return dataclasses.replace(settings, unreachable_s=min(settings.unreachable_s / 4, _GROUP_UNREACHABLE_S))

    def server_id_at(self, address: str, timeout: timedelta) -> str:
        """What the server at an address calls itself.

        Raises:
            TransportError: None of this package answers there in time.
        """
        settings = self.fetch_settings(timeout, None, None)
        with settings.connection_to(PeerAddress.from_url(address)) as connection:
            return fetch_server_id(connection)

    def fetch(self, request: FetchRequest) -> Received[T]:
        """Receives a state; see ``HTTPTransport.fetch``."""
        settings = request.settings

        def receive() -> Received[T]:
            started_s = time.monotonic()
            with settings.connection_to(request.source) as connection:
                manifest = fetch_manifest(connection, request.step, settings)
                settings.timeouts.note_progress()
                reached = connection.reached
                received = self._receive(connection, manifest, request)
            took_s = time.monotonic() - started_s
            num_bytes = received.num_bytes_fetched or 0
            logger.info(
                "step %d from %s at %s: %d bytes in %.2f s, %.1f MB/s",
                received.step,
                request.source,
                reached,
                num_bytes,
                took_s,
                num_bytes / max(took_s, 1e-6) / 1e6,
            )
            return received

        return with_restarts(settings, receive)

    def fetch_deltas(
        self, source: PeerAddress, base: int, version: int, *, max_bytes: int, settings: FetchSettings
    ) -> list[Delta]:
        """Receives what leads from one version to another; see ``HTTPTransport.fetch_deltas``."""
        deltas: list[Delta] = []
        max_memory_bytes = max_bytes
        with settings.connection_to(source) as connection:
            while base < version:
                encoded = fetch_delta(connection, base, max_bytes=max_bytes)
                if encoded is None:
                    return []
                max_bytes -= len(encoded)
                delta = decode_delta(encoded, max_bytes=max_memory_bytes)
                max_memory_bytes -= delta.memory_bytes
                if delta.base != base or not base < delta.version <= version:
                    return []
                deltas.append(delta)
                base = delta.version
        return deltas

    def fetch_sharded(self, request: ShardedRequest) -> Received[T]:
        """Receives this rank's part of a state; see ``HTTPTransport.fetch_sharded``."""
        return with_restarts(request.settings, lambda: self._receive_sharded(request))

    def _receive(self, connection: Connection, manifest: Manifest, request: FetchRequest) -> Received[T]:
        settings = request.settings
        restore = Restore(
            manifest,
            into=request.into,
            meshes=self._settings.meshes,
            max_bytes=self._settings.max_receive_bytes,
            check_time=settings.timeouts.check_deadline,
        )
        if request.check is not None:
            request.check(restore.incoming)
        self._warn_of_new_tensors(restore.incoming, str(connection.peer))

        def with_digests() -> Manifest:
            if manifest.digests is not None:
                return manifest
            digests = fetch_digests(connection, manifest, max_failures=settings.max_failures)
            return dataclasses.replace(manifest, digests=digests)

        try:
            chunks: Sequence[int] = range(manifest.chunks.num_chunks)
            if request.only_changed:
                manifest = with_digests()
                chunks = find_damaged(manifest, restore.present, num_threads=default_num_threads())
            settings.timeouts.note_progress()
            fetch_data([connection.peer], manifest, restore, settings, chunks=chunks)
            if manifest.digests is None:
                manifest = with_digests()
                if settings.verify and request.verify_late:
                    damaged = find_damaged(manifest, restore.buffers, num_threads=default_num_threads())
                    settings.timeouts.note_progress()
                    fetch_data([connection.peer], manifest, restore, settings, chunks=damaged)
            ranges = [manifest.chunks.range_of(chunk, chunk + 1) for chunk in chunks]
            return Received(
                step=manifest.step,
                state=cast(T, restore.finish()),
                _manifest=manifest,
                num_bytes_fetched=sum(end - start for start, end in ranges),
            )
        except BaseException as error:
            poison(restore, error)
            raise

    def _warn_of_new_tensors(self, incoming: Incoming, source: str) -> None:
        """Names the receiver's tensors that stay as they are because what comes does not fit them; each path once."""
        with self._warned_mutex:
            new = [mismatch for mismatch in incoming.mismatches if mismatch.path not in self._warned_paths]
            self._warned_paths.update(mismatch.path for mismatch in new)
        if not new:
            return
        shown = "; ".join(
            f"{each.path} is {each.own} here and {each.received} there" for each in new[:_MAX_SHOWN_PATHS]
        )
        more = f"; and {len(new) - _MAX_SHOWN_PATHS} more" if len(new) > _MAX_SHOWN_PATHS else ""
        logger.warning(
            "step %d from %s: the received state has new tensors where the receiver's own do not fit, and those stay "
            "as they are (%d): %s%s",
            incoming.step,
            source,
            len(new),
            shown,
            more,
        )

    def _receive_sharded(self, request: ShardedRequest) -> Received[T]:
        manifest, restore = receive_sharded(
            request, meshes=self._settings.meshes, max_bytes=self._settings.max_receive_bytes
        )
        self._warn_of_new_tensors(restore.incoming, ", ".join(map(str, request.sources)))
        try:
            if request.is_comparable:
                digests = digest_chunks(manifest, restore.buffers, num_threads=default_num_threads())
                manifest = dataclasses.replace(manifest, digests=tuple(digests))
            return Received(step=manifest.step, state=cast(T, restore.finish()), _manifest=manifest)
        except BaseException as error:
            poison(restore, error)
            raise


def with_restarts(settings: FetchSettings, receive: Callable[[], Received[T]]) -> Received[T]:
    """Begins again where a newer snapshot has taken the place of the one that a fetch was bound to."""
    touched = False
    pause_s = 0.0
    while True:
        try:
            return receive()
        except Exception as error:
            if not isinstance(error, TransportError):
                if touched:
                    error.destination_touched = True  # type: ignore[attr-defined]
                raise
            # What an earlier attempt did to the receiver's tensors holds for the last one as well.
            error.destination_touched = touched = touched or error.destination_touched
            last = error.failures[-1] if isinstance(error, FetchFailedError) else error
            if isinstance(last, MessageDamagedError) and last.refusal is not None:
                last = last.refusal
            if not isinstance(last, SnapshotReplacedError):
                raise
        # At once the first time, and then ever later, in case the peer says so of all that it serves.
        time.sleep(max(0.0, min(pause_s, settings.timeouts.end_s() - time.monotonic())))
        pause_s = min(max(_FIRST_RESTART_PAUSE_S, 2 * pause_s), _LONGEST_RESTART_PAUSE_S)
