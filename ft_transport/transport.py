"""The main object of the package: it serves snapshots of this process's state and receives those of peers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Final, Generic, TypeVar

from ft_transport.credentials import Keys
from ft_transport.errors import ConfigurationError
from ft_transport.http.client.fetch_settings import FetchSettings, FetchTimeout, rate_limited
from ft_transport.http.client.peer_status import ask_state, connecting
from ft_transport.http.peer_address import peer_addresses
from ft_transport.http.server.snapshot_requests import FreshSnapshot
from ft_transport.settings import TransportSettings, check_duration, check_function, check_number
from ft_transport.state.matching import Incoming
from ft_transport.state.resharding import LikeFunction
from ft_transport.state.snapshot import Taking
from ft_transport.telemetry.metrics import build_readings
from ft_transport.telemetry.process_state import ProcessState
from ft_transport.telemetry.process_status import ProcessStatus
from ft_transport.telemetry.recorder import Recorder
from ft_transport.transfer.client import FetchRequest, StateClient
from ft_transport.transfer.known import Known, Received
from ft_transport.transfer.server import StateServer
from ft_transport.transfer.sources import FetchPeers, common_step
from ft_transport.wire.routes import LATEST, StepSelector

_DEFAULT_NUM_CONNECTIONS: Final = 4
_MAX_SNAPSHOTS_OF_FURTHER_SERVERS: Final = 4

T = TypeVar("T")

ReadLock = Callable[[timedelta], AbstractContextManager[object]]
"""Given a timeout, returns a context manager inside which no optimizer changes the state."""


class HTTPTransport(Generic[T]):
    """Serves this replica's state to its peers over HTTP, and receives the state of peers. Thread-safe.

    Replaces torchft's ``CheckpointTransport`` (torchft/checkpointing/transport.py): it has the same methods with the
    same meaning, and the same first constructor arguments.

    Args:
        timeout: Longest time that the server lets a request wait for its step, and the default deadline of a fetch.
        num_chunks: Number of parallel connections of a fetch; 0 means 4. The name comes from torchft, which splits the
            state into this number of chunks.
        state_dict: Returns the receiver's own state. Each ``recv_checkpoint`` calls this function, and receives
            directly into the tensors that fit. That saves a copy and its memory.
        read_lock: The lock that ``send_checkpoint`` takes while it copies the state, so that no optimizer steps
            meanwhile (``Manager.read_lock``).
        settings: All other settings.
        recorder: Records the fetches of this transport (``ft_transport.telemetry``). Default: a new recorder.

    Attributes:
        recorder: Records the fetches of this transport.
        server: Takes snapshots of this process's state and serves them.
        process_status: Collects the state of this process for ``/state`` and ``/metrics``. Objects that use this
            transport add their own state.

    Raises:
        ConfigurationError: A setting is invalid, or the server cannot listen on its address.
    """

    def __init__(
        self,
        timeout: timedelta = timedelta(seconds=60),
        num_chunks: int = 0,
        *,
        state_dict: Callable[[], object] | None = None,
        read_lock: ReadLock | None = None,
        settings: TransportSettings | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        check_duration("timeout", timeout, at_least=timedelta(0))
        num_chunks = check_number("num_chunks", num_chunks, at_least=0)
        self._state_dict = state_dict
        self._read_lock = read_lock
        if not isinstance(settings, (TransportSettings, type(None))):
            raise ConfigurationError(f"expected TransportSettings as settings, got {type(settings).__name__}")
        for name, function in (("state_dict", state_dict), ("read_lock", read_lock)):
            if function is not None:
                check_function(name, function)
        settings = settings if settings is not None else TransportSettings()
        keys = settings.keys()
        self._keys = keys
        self._settings, self._timeout = settings, timeout
        self.recorder = recorder if recorder is not None else Recorder(path=settings.records)
        self.process_status = ProcessStatus(self.recorder)
        self.process_status.metrics.collect(partial(build_readings, settings.replica))
        certificates = settings.certificates()
        self._connect = connecting(keys, certificates)
        self._certificates = certificates
        self.server = self._make_server(settings, self.process_status)
        self._client = StateClient[T](
            settings,
            timeout=timeout,
            num_connections=num_chunks or _DEFAULT_NUM_CONNECTIONS,
            keys=self._keys,
            certificates=certificates,
            relays=self.server.http.relays,
            recorder=self.recorder,
        )

    def new_server(self) -> StateServer:
        """Return a further server with the settings of this transport, on any free port. The caller closes it."""
        limits = replace(self._settings.limits, max_snapshots=_MAX_SNAPSHOTS_OF_FURTHER_SERVERS)
        settings = replace(self._settings, port=0, limits=limits)
        return self._make_server(settings, ProcessStatus(self.recorder))

    def fetch_settings(
        self, timeout: timedelta | FetchTimeout | None, max_bytes_per_s: float | None = None
    ) -> FetchSettings:
        """Return the settings of a fetch that begins now; the arguments are those of `fetch`."""
        return rate_limited(self._client.fetch_settings(timeout), max_bytes_per_s)

    def metadata(self) -> str:
        """Return the URL at which receivers reach this transport: ``http(s)://host:port/checkpoint/``."""
        return self.server.metadata()

    def check_address(self, timeout: timedelta) -> None:
        """Check that the advertised address leads to this transport, by a request to that address.

        Call this at the start, so that a wrong address is detected before a replica has to recover: a name that does
        not resolve, a network interface that is down, or another server on the port.

        Args:
            timeout: Longest time of the whole check.

        Raises:
            ConfigurationError: No server responds at the address, or another server does.
        """
        check_duration("timeout", timeout, at_least=timedelta.min)
        self._client.check_own_address(self.metadata(), self.server.http.server_id, timeout)

    @property
    def keys(self) -> Keys | None:
        """The keys that authenticate all requests to and from this transport; ``None`` without a job token."""
        return self._keys

    def send_checkpoint(
        self, dst_ranks: Sequence[int], step: int, state_dict: T | Callable[[], T], timeout: timedelta
    ) -> None:
        """Take a snapshot of a state, and return when peers can fetch the snapshot.

        Args:
            dst_ranks: Ignored: any peer with the job token may fetch the snapshot. torchft passes the fetching ranks.
            step: The committed step of the state.
            state_dict: The state, or a function that returns the state and is called under the read lock.
            timeout: Longest wait for the read lock.

        Raises:
            SnapshotError: The state cannot be captured, or too many snapshots are still being fetched.
        """
        del dst_ranks
        step = check_number("step", step, at_least=0)
        check_duration("timeout", timeout, at_least=timedelta.min)
        with self._read_lock(timeout) if self._read_lock is not None else contextlib.nullcontext():
            state = state_dict() if callable(state_dict) else state_dict
            in_progress = self.server.take(Taking(step=step, state=state))
        in_progress.publish()

    def allow_checkpoint(self, step: int) -> None:
        """Do nothing: the server serves each snapshot as soon as it is complete. torchft calls this method."""

    def disallow_checkpoint(self) -> None:
        """Do nothing: a training step cannot change a served snapshot, so no fetch has to end before the step."""

    def serve_fresh(self, fresh_snapshot: FreshSnapshot | None) -> None:
        """Set the function by which the server requests a new snapshot from the owner of the state.

        Args:
            fresh_snapshot: Requests a snapshot of the given step, or of the current state if the argument is ``None``,
                and returns at once. Returns a sequence number (``server.newest_sequence()``): any snapshot with a
                higher number is new enough. Returns ``None`` if the step is past and no snapshot of it is being taken.
                Without such a function, a request for ``latest`` gets the newest existing snapshot.

        Raises:
            ConfigurationError: Another owner has set its function; two owners would replace each other's snapshots.
        """
        if fresh_snapshot is not None and self.server.http.requests.fresh_snapshot is not None:
            raise ConfigurationError(
                "expected a transport without an owner, but this transport serves another owner's snapshots"
            )
        self.server.http.requests.fresh_snapshot = fresh_snapshot

    @property
    def is_owned(self) -> bool:
        """Whether an owner of the state has set its function with `serve_fresh`."""
        return self.server.http.requests.fresh_snapshot is not None

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Receive the state of one step from one peer.

        Args:
            src_rank: Ignored: the URL identifies the peer. torchft passes the peer's rank.
            metadata: The result of the peer's ``metadata()``.
            step: The step whose state to receive.
            timeout: Longest time of the whole fetch, from the first connection to the last byte.

        Returns:
            The received state. Where a tensor of the receiver's own state fits, this tensor now has the received data,
            and is part of the result.

        Raises:
            DeadlineExceededError: The fetch did not end in time.
            FetchFailedError: The peer could not deliver the state.
            TransportError: The fetch failed for another reason (``ft_transport.errors``).
        """
        del src_rank
        into = self._state_dict() if self._state_dict is not None else None
        return self.fetch(metadata, step, timeout=timeout, into=into).state

    def fetch(
        self,
        metadata: str | Sequence[str],
        step: StepSelector = "latest",
        *,
        relays: Sequence[str] = (),
        timeout: timedelta | FetchTimeout | None = None,
        into: object = None,
        check: Callable[[Incoming], None] | None = None,
        is_comparable: bool = False,
        known: Known = None,
        max_bytes_per_s: float | None = None,
    ) -> Received[T]:
        """Receive the state of a peer, or of several peers with the same state, and return it with its step.

        Args:
            metadata: The result of the peer's ``metadata()``, or the results of several peers with the same state. The
                fetch reads from all of them at once, and more from faster peers. It leaves out peers whose state
                differs from that of most peers. In a tie between two states, all receivers choose the same state.
            step: A step; or ``latest``: the peer takes a new snapshot if its state has changed since the last one.
            relays: The ``metadata()`` of each receiver that fetches this state now; the same list for all receivers.
                Each receiver relays verified data to the others, so that every byte leaves the sources about once. This
                process continues to relay for some seconds after the fetch. It stops earlier if its memory is about to
                change (`StateServer.materialize`), or if it fetches again. Receivers detect changed data by its
                digests.
            timeout: Longest time of the whole fetch; by default the transport's ``timeout``. The peer may be
                unreachable for all of this time, so that a receiver can start before its source. A `FetchTimeout` sets
                shorter times for an unreachable peer and for a transfer without progress.
            into: The receiver's own state, into which the fetch writes. The caller must not use its tensors until this
                method returns. Device work on them that is still queued must be on this thread's stream. The fetch does
                not change a tensor that differs from the incoming tensor in dtype or shape; a warning names it once.
            check: Called with the incoming manifest before any data arrives. If it raises, the fetch ends and ``into``
                is unchanged.
            is_comparable: Whether the caller will call `Received.differences`. Then that call, and not the fetch,
                compares the digests that a source sends after the data.
            known: The data that the receiver has already, so that only the rest is fetched:

                - ``"into"``: The fetch digests every byte of ``into``, and receives the chunks whose digests differ.
                  This suits weights that change little from version to version.
                - A `PartialState`: Data of failed fetches. The fetch digests this data, and receives the chunks that
                  are missing or differ. The fetched state may be of a later step, with the same tensors. If this fetch
                  fails too, its data stays in ``into`` and is not overwritten. So the caller must not use ``into``
                  until a fetch has succeeded.
                - A `Received`: The result of an earlier fetch into ``into``. The fetch receives the data that may have
                  changed here since (`Received.but_for`), and the chunks whose digests at the source have changed. It
                  does not digest ``into``, so the result is unverified. The caller must compare the result
                  (`Received.differences`), and fetch the whole state if there is a difference.
                - An `AllBut`: The tensors that it leaves out stay as they are.
            max_bytes_per_s: Maximum rate of the fetch, in bytes per second, so that it hardly disturbs the peer.

        Raises:
            ConfigurationError: An argument is invalid.
            TransportError: The errors of `recv_checkpoint`. If bytes had been written into ``into``, they were
                overwritten with NaN patterns, unless ``known`` is a `PartialState`.
        """
        if check is not None:
            check_function("check", check)
        peers = FetchPeers.of(metadata, relays=relays, own=self.metadata())
        return self._client.fetch(
            FetchRequest(
                peers=peers,
                step=_checked_step(step),
                settings=self.fetch_settings(timeout, max_bytes_per_s),
                into=into,
                check=check,
                is_comparable=is_comparable,
                known=known,
            )
        )

    def keep_delta(self, base: int, delta: bytes) -> None:
        """Serve a delta to receivers that have the state of step ``base``. The server caches the latest 4 deltas."""
        self.server.http.deltas.keep(base, delta)

    def fetch_sharded(
        self,
        sources: Sequence[str],
        step: StepSelector = "latest",
        *,
        into: object = None,
        group_rank: int = 0,
        timeout: timedelta | FetchTimeout | None = None,
        check: Callable[[Incoming], None] | None = None,
        like: LikeFunction | None = None,
        is_comparable: bool = False,
    ) -> Received[T]:
        """Receive this rank's shards of a state that is sharded over several ranks, perhaps in another layout.

        Each DTensor of ``into`` determines which part of a tensor this rank needs. The fetch receives each byte of that
        part once, from a rank that has it. It spreads parts that several ranks have (HSDP) over these ranks, and if one
        rank fails, uses another. For a plain tensor of ``into`` it receives the whole tensor. Equal paths at two
        sources mean the same tensor. So the states of pipeline stages need unique names, such as those that
        ``torch.distributed.checkpoint.state_dict`` gives.

        No collective runs: each rank of the receiving group calls this method independently. If all ranks need the same
        step, call `common_step` and pass its result; with ``latest``, ranks may receive different steps.

        Args:
            sources: The ``metadata()`` of each rank of the sending group. Ranks may be left out if the others have all
                the data that this rank needs.
            step: A step; or ``latest``: the latest step that all sources reach.
            into: This rank's own state. The caller must not use its tensors until this method returns. Without ``into``
                and ``like``, the fetch receives whole tensors, as a consolidated checkpoint or an inference engine
                needs them.
            group_rank: Index of this rank in its group. This rank receives unsharded data from the source with this
                index (modulo the number of sources). So the ranks of a group use different sources.
            timeout: As for `fetch`. But without a `FetchTimeout`, a source may be unreachable for only 5 seconds, or a
                quarter of ``timeout`` if that is less. If a source is unreachable for longer, or hangs, the fetch uses
                the other sources, if they have all the data.
            check: Called with the incoming manifest before any data arrives. If it raises, the fetch ends and ``into``
                is unchanged.
            like: Given the path of a tensor that ``into`` lacks, returns a tensor of this rank with the same layout.
                Optimizers that have not stepped yet need it. By default, such a tensor gets the layout that this
                rank uses for a tensor which has the same shape and layout at the sources.
            is_comparable: Whether the caller will call `Received.differences`. If so, the fetch digests every received
                byte once more.

        Raises:
            RestoreError: The sources contradict each other or lack some of the data, or ``into`` does not determine the
                layout of a tensor. The message names the path, and nothing was received.
            TransportError: The errors of `fetch`.
        """
        group_rank = check_number("group_rank", group_rank, at_least=0)
        peers = peer_addresses(sources)
        first = group_rank % len(peers)
        return self._client.fetch_sharded(
            FetchRequest(
                peers=FetchPeers(sources=peers[first:] + peers[:first]),
                step=_checked_step(step),
                settings=self._client.group_fetch_settings(timeout),
                into=into,
                like=like,
                check=check,
                is_comparable=is_comparable,
            )
        )

    def common_step(self, sources: Sequence[str], *, timeout: timedelta | FetchTimeout | None = None) -> int:
        """Request a snapshot of the same step from all sources, and return the step.

        For receivers that need the same step: one receiver calls this method and sends the step to the others, and all
        of them call `fetch_sharded` with the step. The sources serve these snapshots until newer ones replace them.

        The arguments and errors are those of `fetch_sharded`.
        """
        peers = peer_addresses(sources)
        return common_step(peers, self._client.group_fetch_settings(timeout))

    def ask_state(self, address: str, timeout: timedelta) -> ProcessState:
        """Request the status of a peer's process (``/state``). The peer takes no snapshot for this.

        Args:
            address: The result of the peer's ``metadata()``.
            timeout: Longest time of the whole request.

        Raises:
            TransportError: The peer does not respond in time, or does not prove that it knows the job token.
        """
        return ask_state(address, self._connect, timeout.total_seconds())

    def prefault_receive(self, num_bytes: int) -> None:
        """Make memory resident for the next fetch, for its data that has no destination in ``into``.

        Blocks until the memory is ready. Does nothing if ``num_bytes`` is half of the free memory, or more. The next
        fetch, or a call with 0, releases the memory that was not used.
        """
        self._client.prefaulted.prepare(num_bytes)

    def prefault(self, state: object) -> None:
        """Start to make memory resident for ``max_snapshots`` snapshots of ``state``, so that none waits for memory.

        Returns at once; another thread makes the memory resident. The first write to fresh memory is about ten times
        slower than a write to resident memory. Call this method again if the state grows; otherwise the next snapshots
        have to wait for the additional memory.

        Args:
            state: A state of the same size as the later states. The calling thread owns it.

        Raises:
            SnapshotError: The state cannot be captured.
        """
        self.server.prefault(state)

    def shutdown(self, wait: bool = True) -> None:
        """Stop the server and free the snapshots. May be called twice.

        Args:
            wait: Whether to return only after the server's thread has ended.
        """
        self.server.close(wait=wait)

    def _make_server(self, settings: TransportSettings, process_status: ProcessStatus) -> StateServer:
        return StateServer(
            settings,
            keys=self._keys,
            certificates=self._certificates,
            max_wait_s=self._timeout.total_seconds(),
            process_status=process_status,
        )


def _checked_step(step: StepSelector) -> StepSelector:
    return step if step == LATEST else check_number("step", step, at_least=0)
