"""The client half of a transport: receives the state of one peer or, in another layout, of all ranks of a group."""

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
from ft_transport.keys import Keys
from ft_transport.settings import TransportSettings, default_num_threads
from ft_transport.state.matching import Incoming
from ft_transport.state.prefaulted import PrefaultedMemory
from ft_transport.state.resharding import LikeFunction, reshard
from ft_transport.state.restore import Restore
from ft_transport.telemetry.record import Transfer
from ft_transport.telemetry.recorder import Recorder, current, phase
from ft_transport.tls import Certificates
from ft_transport.transfer.known import Known, PartialState, Plan, Received
from ft_transport.transfer.sources import AgreedSources, FetchPeers, ask_group, ask_sources, with_restarts
from ft_transport.wire.routes import StepSelector

T = TypeVar("T")

logger = logging.getLogger(__name__)

_GROUP_UNREACHABLE_S: Final = 5.0
_MAX_SHOWN_PATHS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRequest:
    """The parameters of a fetch; ``HTTPTransport.fetch`` and ``HTTPTransport.fetch_sharded`` explain them.

    Attributes:
        peers: The peers that have the state, and its receivers.
        step: A step, or ``latest``.
        settings: Connections, deadlines and the like.
        into: The receiver's own state.
        check: Called with the manifest's data before any data comes.
        is_comparable: Whether the caller compares the state, so that late digests need no comparison here.
        known: Data that need not be fetched.
        like: For a fetch in another layout: see `reshard`.
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
        settings: How to fetch, and which states are accepted.
        timeout: The default deadline.
        num_connections: Parallel connections.
        keys: The job's keys, if it has any.
        certificates: This side's certificates, if it has any.
        relays: Serves received chunks to other receivers; ``None`` without a server.
        recorder: Records each fetch.

    Attributes:
        prefaulted: Memory that the next state may use.
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
    ) -> None:
        self._settings = settings
        self._timeout = timeout
        self._num_connections = num_connections
        self._keys = keys
        self._certificates = certificates
        self._relays = relays
        self._recorder = recorder
        self.prefaulted = PrefaultedMemory()
        self._warned_paths: set[str] = set()
        self._warned_mutex = threading.Lock()

    def fetch_settings(self, timeout: timedelta | FetchTimeout | None) -> FetchSettings:
        """Return the settings of one fetch; the deadlines begin now.

        Args:
            timeout: The deadline; ``None`` for the transport's own.

        Raises:
            ConfigurationError: ``timeout`` is no duration.
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
        """Return `fetch_settings` that give up sooner on an unreachable source, because others may replace it."""
        settings = self.fetch_settings(timeout)
        if isinstance(timeout, FetchTimeout) and timeout.unreachable is not None:
            return settings
        return dataclasses.replace(settings, unreachable_s=min(settings.unreachable_s / 4, _GROUP_UNREACHABLE_S))

    def check_own_address(self, address: str, server_id: str, timeout: timedelta) -> None:
        """Check that the advertised address leads to a server of this process.

        Args:
            address: The URL.
            server_id: The server's id.
            timeout: For all of it.

        Raises:
            ConfigurationError: The address leads nowhere, or to another server.
        """
        try:
            settings = self.fetch_settings(timeout)
            with Connection.of(PeerAddress.from_url(address), settings) as connection:
                found = fetch_status(connection).server
        except TransportError as error:
            raise ConfigurationError(
                f"expected to reach this transport at the address that peers are told, {address}: {error}; set "
                "TransportSettings.advertise or FT_TRANSPORT_ADVERTISE to a host, an address or a network interface"
            ) from error
        if found != server_id:
            raise ConfigurationError(
                f"expected this transport at the address that peers are told, {address}, and another server answers "
                "there; set TransportSettings.advertise or FT_TRANSPORT_ADVERTISE"
            )

    def fetch(self, request: FetchRequest) -> Received[T]:
        """Receive a state; see ``HTTPTransport.fetch``."""
        known = request.known
        part = known if isinstance(known, PartialState) else PartialState(known)
        with self._recorder.begin("fetch", replica=self._settings.replica, phase="manifest"):
            try:
                return with_restarts(request.settings, lambda: self._receive(request, part))
            except BaseException as error:
                part.failed(error, is_kept=part is known)
                raise

    def fetch_sharded(self, request: FetchRequest) -> Received[T]:
        """Receive this rank's part of a state; see ``HTTPTransport.fetch_sharded``."""
        with self._recorder.begin("fetch", replica=self._settings.replica, phase="manifest"):
            return with_restarts(request.settings, lambda: self._receive_sharded(request))

    def _receive(self, request: FetchRequest, part: PartialState) -> Received[T]:
        peers, settings, started_s = request.peers, request.settings, time.monotonic()
        phase("manifest")
        with contextlib.ExitStack() as held:
            agreed = ask_sources(
                peers.sources,
                request.step,
                settings,
                held,
                is_relayed=bool(peers.receivers),
                is_this_host_first=self._settings.same_host,
            )
            phase("plan")
            restore = self._restore(agreed, request)
            plan = part.plan(agreed, restore, settings)
            received = self._fetch(agreed, plan, part, restore, request)
            took_s = time.monotonic() - started_s
            num_bytes = received.num_bytes_fetched or 0
            logger.info(
                "step %d from %s at %s%s: %d bytes in %.2f s, %.1f MB/s",
                received.step,
                ", ".join(str(file.peer) for file in agreed.files),
                agreed.connection.reached,
                f" and {len(peers.receivers) - 1} relays" if peers.receivers else "",
                num_bytes,
                took_s,
                num_bytes / max(took_s, 1e-6) / 1e6,
            )
            return received

    def _restore(self, agreed: AgreedSources, request: FetchRequest) -> Restore:
        """Allocate memory for the state, after the caller has accepted it; earlier relays end."""
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
            # Relays of an earlier state may read the tensors that receive this one.
            self._relays.close_all()
        return restore

    def _fetch(
        self, agreed: AgreedSources, plan: Plan, part: PartialState, restore: Restore, request: FetchRequest
    ) -> Received[T]:
        """Fetch the plan's data, verify data that came without digests, and build the state."""
        settings, relays = request.settings, self._relays
        if plan.ranges is not None:
            phase("transfer")
            # Meanwhile the source may still compute its digests.
            fetch_ranges(Source(agreed.connection.peer, plan.manifest), plan.ranges, restore, settings)
            plan = part.plan_rest(plan, agreed, restore, settings)
        receivers: Receivers | None = None
        can_pass_on = not plan.ranges and (plan.ranges is None or restore.is_all_here)
        try:
            if request.peers.receivers and relays is not None and can_pass_on:
                receivers = _pass_on(relays, agreed, request.peers, restore, plan.chunks)
            phase("transfer")
            left = self._copy(agreed, plan, part, restore, settings)
            if receivers is not None:
                receivers.relay.landed_except(left)
            fetch_data(
                agreed.files, plan.manifest, restore, settings, chunks=left, receivers=receivers, on_landed=part.note
            )
            phase("verify")
            manifest = plan.manifest
            if manifest.digests is None:
                manifest = agreed.manifest_with_digests(settings)
                if settings.verify and not request.is_comparable:
                    damaged = find_damaged(manifest, restore.present, num_threads=default_num_threads())
                    settings.timeouts.note_progress()
                    fetch_data(agreed.files, manifest, restore, settings, chunks=damaged)
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

    def _copy(
        self, agreed: AgreedSources, plan: Plan, part: PartialState, restore: Restore, settings: FetchSettings
    ) -> Sequence[int]:
        """Copy chunks out of the memory of a source on this host, and return the chunks that are left to fetch."""
        if not self._settings.same_host:
            return plan.chunks
        began_s = time.monotonic()
        left = fetch_from_memory(
            agreed.connection,
            plan.manifest,
            restore,
            settings,
            chunks=plan.chunks,
            num_threads=default_num_threads(),
        )
        copied = set(plan.chunks).difference(left)
        for chunk in copied:
            part.note(chunk)
        recording = current()
        if copied and recording is not None:
            recording.transfer(
                Transfer(
                    peer=str(agreed.connection.peer),
                    role="same_host",
                    num_bytes=sum(map(plan.manifest.chunks.length_of, copied)),
                    length_s=time.monotonic() - began_s,
                )
            )
        return left

    def _warn_of_new_tensors(self, incoming: Incoming, source: str) -> None:
        """Log the receiver's tensors that stay unchanged because the incoming state does not fit; each path once."""
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

    def _receive_sharded(self, request: FetchRequest) -> Received[T]:
        settings, check_time = request.settings, request.settings.timeouts.check_deadline
        restore: Restore | None = None
        try:
            with ask_group(request.peers.sources, request.step, settings) as (sources, unreachable):
                try:
                    manifests = [source.manifest for source in sources]
                    names = [str(source.peer) for source in sources]
                    resharding = reshard(manifests, request.into, like=request.like, names=names, check_time=check_time)
                    manifest = resharding.manifest
                    restore = Restore(
                        manifest,
                        into=request.into,
                        meshes=self._settings.meshes,
                        check_time=check_time,
                    )
                    if request.check is not None:
                        request.check(restore.incoming)
                    fetch_slices(sources, resharding.wanted, restore, settings)
                except TransportError as error:
                    error.step = error.step if error.step is not None else manifests[0].step
                    if unreachable:
                        error.message += f"; out of reach: {', '.join(map(str, unreachable))}"
                    raise
            self._warn_of_new_tensors(restore.incoming, ", ".join(map(str, request.peers.sources)))
            if request.is_comparable:
                digests = digest_chunks(manifest, restore.present, num_threads=default_num_threads())
                manifest = dataclasses.replace(manifest, digests=tuple(digests))
            return Received(step=manifest.step, state=cast(T, restore.finish()), _manifest=manifest)
        except BaseException as error:
            if restore is not None:
                _poison(restore, error)
            raise


def _pass_on(
    relays: Relays, agreed: AgreedSources, peers: FetchPeers, restore: Restore, missing: Sequence[int]
) -> Receivers:
    """Begin to serve verified chunks to the other receivers."""
    assert agreed.content is not None, "several have agreed on it"
    manifest = agreed.manifest
    relay = Relay(agreed.content, step=manifest.step, chunks=manifest.chunks, views=restore.present, missing=missing)
    relays.open(relay)
    return Receivers(peers=peers.receivers, own=peers.own, relay=relay)


def _poison(restore: Restore, error: BaseException) -> None:
    """Overwrite the data that landed before ``error``, so that no trainer uses it."""
    if restore.destination_touched:
        # Errors of other packages, such as those of a device, need these attributes as well.
        error.destination_touched = True  # type: ignore[attr-defined]
        try:
            restore.poison()
        except BaseException as another:
            another.destination_touched = True  # type: ignore[attr-defined]
            raise
