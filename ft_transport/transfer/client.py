"""The client of a transport: receives a state from peers with the whole state, or from ranks with another layout."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Generic, TypeVar, cast

from ft_transport.credentials import Certificates, Keys
from ft_transport.errors import ConfigurationError, TransportError
from ft_transport.http.client.chunks import Receivers, fetch_data
from ft_transport.http.client.connection import Connection
from ft_transport.http.client.fetch_settings import FetchSettings, FetchTimeout
from ft_transport.http.client.manifests import digest_chunks, find_damaged
from ft_transport.http.client.peer_status import fetch_status
from ft_transport.http.client.same_host import fetch_from_memory
from ft_transport.http.client.slices import Source, fetch_ranges, fetch_slices
from ft_transport.http.peer_address import PeerAddress
from ft_transport.http.relays import Relay, Relays
from ft_transport.settings import TransportSettings
from ft_transport.state.matching import Incoming
from ft_transport.state.prefaulted import PrefaultedMemory
from ft_transport.state.resharding import LikeFunction, reshard
from ft_transport.state.restore import Restore
from ft_transport.telemetry.record import Transfer
from ft_transport.telemetry.recorder import Recorder, current, phase
from ft_transport.transfer.known import Known, PartialState, Plan, Received
from ft_transport.transfer.sources import AgreedSources, FetchPeers, ask_group, ask_sources, with_restarts
from ft_transport.wire.routes import StepSelector

T = TypeVar("T")

logger = logging.getLogger(__name__)

_GROUP_UNREACHABLE_S: Final = 5.0
_MAX_SHOWN_PATHS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRequest:
    """The parameters of ``HTTPTransport.fetch`` or ``HTTPTransport.fetch_sharded``.

    Attributes:
        peers: The sources of the state, and its receivers.
        step: A step or ``latest``.
        settings: Connections, deadlines and limits of the fetch.
        into: The receiver's state, whose tensors receive the data; ``None`` for new tensors.
        check: Function to call with a description of the state before any data is fetched; it raises an error to
            refuse the state.
        is_comparable: Whether the caller will verify the state with `Received.differences`. Then the fetch itself does
            not verify data that arrived before its digests.
        known: Data that the receiver already has.
        like: Function that returns the receiver's tensors for a fetch in another layout; see `reshard`.
    """

    peers: FetchPeers
    step: StepSelector
    settings: FetchSettings
    into: object
    check: Callable[[Incoming], None] | None
    is_comparable: bool = False
    known: Known = None
    like: LikeFunction | None = None


class StateClient(Generic[T]):
    """Receives the states of peers. Thread-safe.

    Args:
        settings: Settings of the transport.
        timeout: Default timeout of a fetch.
        num_connections: Maximum number of parallel connections of a fetch.
        keys: The job's keys; ``None`` without a job token.
        certificates: This process's certificates; ``None`` without TLS.
        relays: Serves received chunks to other receivers; ``None`` without a server.
        recorder: Records each fetch.
        prefaulted: Provides the memory of received tensors that have no place in the receiver's state.

    Attributes:
        prefaulted: The argument, or else memory that was allocated in advance for the next received state.
    """

    def __init__(
        self,
        settings: TransportSettings,
        *,
        timeout: timedelta,
        num_connections: int,
        keys: Keys | None,
        certificates: Certificates | None,
        relays: Relays | None = None,
        recorder: Recorder,
        prefaulted: PrefaultedMemory | None = None,
    ) -> None:
        self._settings = settings
        self._timeout = timeout
        self._num_connections = num_connections
        self._keys = keys
        self._certificates = certificates
        self._relays = relays
        self._recorder = recorder
        self.prefaulted = prefaulted or PrefaultedMemory()
        self._warned_paths: set[str] = set()
        self._warned_mutex = threading.Lock()

    def fetch_settings(self, timeout: timedelta | FetchTimeout | None) -> FetchSettings:
        """Return the settings of a fetch that begins now.

        Args:
            timeout: Timeout of the fetch; ``None`` for the transport's default.

        Raises:
            ConfigurationError: ``timeout`` is not a duration.
        """
        timeout = self._timeout if timeout is None else timeout
        return FetchSettings.of(
            self._settings,
            keys=self._keys,
            certificates=self._certificates,
            num_connections=self._num_connections,
            timeout=timeout if isinstance(timeout, FetchTimeout) else FetchTimeout(total=timeout),
        )

    def group_fetch_settings(self, timeout: timedelta | FetchTimeout | None) -> FetchSettings:
        """Return `fetch_settings` with a shorter timeout for unreachable sources, which other sources can replace."""
        settings = self.fetch_settings(timeout)
        if isinstance(timeout, FetchTimeout) and timeout.unreachable is not None:
            return settings
        return dataclasses.replace(settings, unreachable_s=min(settings.unreachable_s / 4, _GROUP_UNREACHABLE_S))

    def check_own_address(self, address: str, server_id: str, timeout: timedelta) -> None:
        """Check that the address that this transport advertises to peers leads to this transport's server.

        Args:
            address: The advertised URL.
            server_id: Id of this transport's server.
            timeout: Timeout of the check.

        Raises:
            ConfigurationError: No server, or another server, responds at the address.
        """
        try:
            settings = self.fetch_settings(timeout)
            with Connection.of(PeerAddress.from_url(address), settings) as connection:
                found = fetch_status(connection).server
        except TransportError as error:
            raise ConfigurationError(
                f"expected to reach this transport at its advertised address, {address}: {error}; set "
                "TransportSettings.advertise or FT_TRANSPORT_ADVERTISE to a host, an address or a network interface"
            ) from error
        if found != server_id:
            raise ConfigurationError(
                f"expected this transport at its advertised address, {address}, got another server; set "
                "TransportSettings.advertise or FT_TRANSPORT_ADVERTISE"
            )

    def fetch(self, request: FetchRequest) -> Received[T]:
        """Receive a state from sources that each have the whole state."""
        known = request.known
        part = known if isinstance(known, PartialState) else PartialState(known)
        with self._recorder.begin("fetch", replica=self._settings.replica, phase="manifest"):
            try:
                return with_restarts(request.settings, lambda: self._receive(request, part))
            except BaseException as error:
                part.failed(error, is_kept=part is known)
                raise

    def fetch_sharded(self, request: FetchRequest) -> Received[T]:
        """Receive this rank's part of a state from the ranks of a group with another layout."""
        with self._recorder.begin("fetch", replica=self._settings.replica, phase="manifest"):
            return with_restarts(request.settings, lambda: self._receive_sharded(request))

    def _receive(self, request: FetchRequest, part: PartialState) -> Received[T]:
        """Receive a state: ask the sources, plan what is needed besides the data that the receiver has, fetch that."""
        phase("manifest")
        began_s = time.monotonic()
        with contextlib.ExitStack() as connections:
            agreed = ask_sources(
                request.peers.sources,
                request.step,
                request.settings,
                connections,
                is_relayed=bool(request.peers.receivers),
                is_this_host_first=self._settings.same_host,
            )
            phase("plan")
            plan = part.plan(agreed, self._restore(agreed, request), request.settings)
            received = self._fetch(plan, part, request)
        took_s, num_bytes = time.monotonic() - began_s, received.num_bytes_fetched or 0
        logger.info(
            "received step %d from %s at %s%s: %d bytes in %.2f s, %.1f MB/s",
            received.step,
            ", ".join(str(file.peer) for file in agreed.files),
            agreed.connection.reached,
            f" and {len(request.peers.receivers) - 1} relays" if request.peers.receivers else "",
            num_bytes,
            took_s,
            num_bytes / max(took_s, 1e-6) / 1e6,
        )
        return received

    def _restore(self, agreed: AgreedSources, request: FetchRequest) -> Restore:
        """Prepare the receiver's memory for the state, call the caller's check, and end relays of earlier states."""
        manifest = agreed.manifest
        recording = current()
        if recording is not None:
            recording.describe(step=manifest.step, num_bytes=manifest.data_bytes)
        restore = Restore(
            manifest,
            into=request.into,
            meshes=self._settings.meshes,
            check_time=request.settings.timeouts.check_deadline,
            prefaulted=self.prefaulted,
        )
        if request.check is not None:
            request.check(restore.incoming)
        self._warn_of_new_tensors(restore.incoming, str(agreed.connection.peer))
        if self._relays is not None:
            # Relays of an earlier state may read the tensors that receive this state.
            self._relays.close_all()
        return restore

    def _fetch(self, plan: Plan, part: PartialState, request: FetchRequest) -> Received[T]:
        """Fetch the data of a plan, verify data that arrived without digests, and build the state."""
        agreed, restore, settings = plan.agreed, plan.restore, request.settings
        if plan.ranges is not None:
            phase("transfer")
            # Fetch first, and request digests later, because the source may still be computing them.
            fetch_ranges(Source(agreed.connection.peer, plan.manifest), plan.ranges, restore, settings)
            if plan.is_whole:
                plan = part.plan_rest(plan, settings)
        receivers = None
        can_relay = not plan.ranges and (plan.ranges is None or restore.is_all_here)
        try:
            if request.peers.receivers and self._relays is not None and can_relay:
                receivers = _begin_relay(self._relays, plan, request.peers)
            phase("transfer")
            missing = self._copy(plan, part, settings)
            if receivers is not None:
                receivers.relay.landed_except(missing)
            fetch_data(
                agreed.files, plan.manifest, restore, settings, chunks=missing, receivers=receivers, on_landed=part.note
            )
            phase("verify")
            manifest = plan.manifest
            if manifest.digests is None and plan.is_whole:
                manifest = agreed.manifest_with_digests(settings)
                if settings.verify and not request.is_comparable:
                    damaged = find_damaged(manifest, restore.present)
                    settings.timeouts.note_progress()
                    fetch_data(agreed.files, manifest, restore, settings, chunks=damaged, on_landed=part.note)
            phase("load")
            received = Received(
                step=manifest.step,
                state=cast(T, restore.finish()),
                _manifest=manifest,
                num_bytes_fetched=plan.num_bytes,
            )
            part.complete()
        except BaseException:
            if receivers is not None:
                receivers.relay.close()
            raise
        if receivers is not None:
            receivers.relay.complete()
        return received

    def _copy(self, plan: Plan, part: PartialState, settings: FetchSettings) -> Sequence[int]:
        """Copy chunks from the memory of a source on this host; return the chunks that are still missing."""
        if not self._settings.same_host:
            return plan.chunks
        began_s, connection = time.monotonic(), plan.agreed.connection
        missing = fetch_from_memory(
            connection, plan.manifest, plan.restore, settings, chunks=plan.chunks, on_landed=part.note
        )
        copied = set(plan.chunks).difference(missing)
        recording = current()
        if copied and recording is not None:
            recording.transfer(
                Transfer(
                    peer=str(connection.peer),
                    role="same_host",
                    num_bytes=sum(map(plan.manifest.chunks.length_of, copied)),
                    length_s=time.monotonic() - began_s,
                )
            )
        return missing

    def _warn_of_new_tensors(self, incoming: Incoming, source: str) -> None:
        """Log a warning, once for each of the receiver's tensors whose shape or type differs from the data."""
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
            "step %d from %s: the received state has new tensors where the receiver's own tensors do not fit; %d of "
            "the receiver's tensors stayed unchanged: %s%s",
            incoming.step,
            source,
            len(new),
            shown,
            more,
        )

    def _receive_sharded(self, request: FetchRequest) -> Received[T]:
        """Receive this rank's part of a state: ask all ranks of the group, plan which rank sends which bytes, fetch."""
        settings, check_time = request.settings, request.settings.timeouts.check_deadline
        part = PartialState()
        try:
            with ask_group(request.peers.sources, request.step, settings) as (sources, unreachable):
                try:
                    manifests = [source.manifest for source in sources]
                    names = [str(source.peer) for source in sources]
                    resharding = reshard(manifests, request.into, like=request.like, names=names, check_time=check_time)
                    manifest = resharding.manifest
                    restore = Restore(manifest, into=request.into, meshes=self._settings.meshes, check_time=check_time)
                    part.own(restore)
                    if request.check is not None:
                        request.check(restore.incoming)
                    fetch_slices(sources, resharding.wanted, restore, settings)
                except TransportError as error:
                    error.step = error.step if error.step is not None else manifests[0].step
                    if unreachable:
                        error.message += f"; unreachable sources: {', '.join(map(str, unreachable))}"
                    raise
            self._warn_of_new_tensors(restore.incoming, ", ".join(map(str, request.peers.sources)))
            if request.is_comparable:
                digests = digest_chunks(manifest, restore.present)
                manifest = dataclasses.replace(manifest, digests=tuple(digests))
            return Received(step=manifest.step, state=cast(T, restore.finish()), _manifest=manifest)
        except BaseException as error:
            part.failed(error, is_kept=False)
            raise


def _begin_relay(relays: Relays, plan: Plan, peers: FetchPeers) -> Receivers:
    """Begin to serve received and verified chunks to the other receivers."""
    content, manifest = plan.agreed.content, plan.manifest
    assert content is not None, "sources of several receivers are asked for their content"
    views = plan.restore.present
    relay = Relay(content, step=manifest.step, chunks=manifest.chunks, views=views, missing=plan.chunks)
    relays.open(relay)
    return Receivers(peers=peers.receivers, own=peers.own, relay=relay)
