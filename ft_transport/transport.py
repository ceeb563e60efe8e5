"""The facade: one object that serves snapshots and receives them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Final, Generic, TypeVar

from ft_transport.errors import ConfigurationError
from ft_transport.http.client.fetch_settings import FetchTimeout, paced
from ft_transport.http.client.rate_probe import ask_state, connecting
from ft_transport.http.peer_address import peer_addresses
from ft_transport.http.server.snapshot_requests import FreshSnapshot
from ft_transport.keys import Keys
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

T = TypeVar("T")

ReadLock = Callable[[timedelta], AbstractContextManager[object]]
"""Holds the state still: given a timeout, a context manager inside which no optimizer steps."""


class HTTPTransport(Generic[T]):
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
        recorder: Keeps records of what is received (``ft_transport.telemetry``); one of its own by default.

    Attributes:
        recorder: See the argument.
        server: Takes snapshots of this process's state and serves them.
        process_status: The state of this process, for the server's ``/state`` and ``/metrics``. Its owners add parts.

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
        self.recorder = recorder if recorder is not None else Recorder(path=settings.records)
        self.process_status = ProcessStatus(self.recorder)
        self.process_status.metrics.collect(partial(build_readings, settings.replica))
        certificates = settings.certificates()
        self._connect = connecting(keys, certificates)
        self.server = StateServer(
            settings,
            keys=self._keys,
            certificates=certificates,
            max_wait_s=timeout.total_seconds(),
            process_status=self.process_status,
        )
        self._client = StateClient[T](
            settings,
            timeout=timeout,
            num_connections=num_chunks or _DEFAULT_NUM_CONNECTIONS,
            keys=self._keys,
            certificates=certificates,
            relays=self.server.http.relays,
            recorder=self.recorder,
        )

    def metadata(self) -> str:
        """Address at which receivers find this transport: ``http://host:port/checkpoint/``, with TLS ``https://``."""
        return f"{self.server.http.address}/checkpoint/"

    def check_address(self, timeout: timedelta) -> None:
        """Check that the advertised address leads to this very transport, by a request to it.

        Finds an unresolvable name, an interface that is down or another server on the port at the start, and not when a
        replica has to recover. All of it ends within ``timeout``.

        Raises:
            ConfigurationError: The address leads nowhere, or to another server.
        """
        check_duration("timeout", timeout, at_least=timedelta.min)
        self._client.check_own_address(self.metadata(), self.server.http.server_id, timeout)

    @property
    def keys(self) -> Keys | None:
        """The keys of the job token, which authenticate all requests to and from this transport."""
        return self._keys

    def send_checkpoint(
        self, dst_ranks: Sequence[int], step: int, state_dict: T | Callable[[], T], timeout: timedelta
    ) -> None:
        """Take a snapshot and serve it from now on; return when it can be fetched.

        Args:
            dst_ranks: Ranks that will fetch it; any peer with the job token may.
            step: The committed step of the state.
            state_dict: The state, or a function that returns it, called under the read lock.
            timeout: For taking the read lock.

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
        """Do nothing: the server serves a snapshot, under its step, as soon as it is complete."""

    def disallow_checkpoint(self) -> None:
        """Return at once: no step can change a served snapshot, so there is no receiver to wait for."""

    def serve_fresh(self, fresh_snapshot: FreshSnapshot | None) -> None:
        """Let requests for ``latest`` request a new snapshot.

        Args:
            fresh_snapshot: Requests a snapshot from the owner of the state, of the given step if that is not ``None``,
                and returns at once. It returns the number (``server.newest_sequence()``) after which a snapshot is new
                enough; or ``None`` if that step is past, and no snapshot of it is being taken. Without such a function,
                the server serves the newest existing snapshot.

        Raises:
            ConfigurationError: Another owner was set before; two would replace each other's snapshots.
        """
        if fresh_snapshot is not None and self.server.http.requests.fresh_snapshot is not None:
            raise ConfigurationError("expected a transport that serves nobody's snapshots yet, got one with an owner")
        self.server.http.requests.fresh_snapshot = fresh_snapshot

    @property
    def is_owned(self) -> bool:
        """Whether the state of an owner is served (`serve_fresh`)."""
        return self.server.http.requests.fresh_snapshot is not None

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Receive the state of ``step`` from the peer that ``metadata`` names.

        Args:
            src_rank: Accepted as torchft has it; the address identifies the peer.
            metadata: The result of the peer's ``metadata()``.
            step: The step.
            timeout: For everything, from the first connection to the last byte.

        Returns:
            The state; tensors that were received in place are the receiver's own.

        Raises:
            DeadlineExceededError: It took too long.
            FetchFailedError: The peer could not deliver.
            TransportError: Anything else; see ``ft_transport.errors``.
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
        """Receive a state and return it with its step.

        Args:
            metadata: The result of the peer's ``metadata()``; or those of several peers with the same state, which are
                then read from at once, faster ones more. Peers whose state differs from most are left out; if as many
                peers have one state as another, all receivers take the same one.
            step: A step, or ``latest``: the peer then takes a new snapshot if its state has moved on.
            relays: The ``metadata()`` of each receiver that receives this state now, the same list for all of them.
                Each relays its verified data to the others, so that every byte leaves the sources about once. This one
                goes on with that for seconds after the end, until its memory is about to change
                (`StateServer.materialize`) or it fetches again. Digests detect data that has changed all the same.
            timeout: For everything; the transport's own by default. A peer may be out of reach for as long, so that a
                receiver can start before its source; `FetchTimeout` sets a shorter time for that, and for a transfer in
                which no data arrives.
            into: The receiver's own state to receive into. The caller does not use its tensors until this returns, and
                has queued work for them on this thread's stream of a device only. The fetch does not change a tensor of
                another dtype or shape than the incoming one, and a warning names it once.
            check: Called with the incoming manifest before any data; if it raises, the fetch ends, and ``into`` is
                unchanged.
            is_comparable: Whether the caller will call `Received.differences`, which compares digests that come after
                the data; otherwise the fetch compares them.
            known: The receiver's known parts of the state, so that only the rest is fetched. ``"into"``: every byte of
                ``into`` is digested first, and chunks whose digests differ are fetched: for weights of which little
                changes from version to version. A `PartialState`: data that landed in failed fetches. It is digested
                again, and chunks are fetched that never landed, or that differ in this state: it may be a later one of
                the same tensors. If this fetch fails with any error, it leaves the landed data there and does not
                overwrite ``into``: only for callers that use ``into`` for nothing until another fetch has succeeded. A
                `Received`: the result of an earlier fetch into ``into``. Data that may have changed since
                (`Received.but_for`) is fetched, and of the rest chunks whose digests at the source are others than
                then; ``into`` is not digested. The result is unverified: the caller compares it
                (`Received.differences`), and fetches all of it if it differs.
            max_bytes_per_s: Throughput limit, so that the peer notices little of the fetch.

        Raises:
            ConfigurationError: An argument is not of its kind.
            TransportError: As for ``recv_checkpoint``. If bytes had landed in ``into`` they were overwritten with NaN
                patterns, unless ``known`` is a `PartialState`.
        """
        if check is not None:
            check_function("check", check)
        peers = FetchPeers.of(metadata, relays=relays, own=self.metadata())
        return self._client.fetch(
            FetchRequest(
                peers=peers,
                step=_checked_step(step),
                settings=paced(self._client.fetch_settings(timeout), max_bytes_per_s),
                into=into,
                check=check,
                is_comparable=is_comparable,
                known=known,
            )
        )

    def keep_delta(self, base: int, delta: bytes) -> None:
        """Serve a delta (``ft_transport.wire.delta``) to receivers that have the step ``base``; caches the latest 4."""
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
        """Receive a state whose parts several ranks have, in the layout of this rank, which may differ from theirs.

        Each DTensor of ``into`` shows which part of a tensor is needed here. That part is fetched, from the ranks that
        have it, each byte once. Parts that several ranks have (HSDP) are spread over them, and one of them substitutes
        for another that fails. A plain tensor of ``into`` takes a whole one. The same path at two sources is the same
        tensor: states of pipeline stages need names, as ``torch.distributed.checkpoint.state_dict`` makes them.

        No collective runs: each rank of the receiving group calls this for itself. If all ranks need the same step,
        they pass one (`common_step`): the latest may be another one for each.

        Args:
            sources: The ``metadata()`` of each rank of the sending group; all of them, unless fewer have everything
                that is needed here.
            step: A step, or ``latest``: the same for all sources, although they do not reach it at one moment.
            into: This rank's own state. Its tensors must not be used until this returns. Without one, and without
                ``like``, all tensors come whole: as a consolidated checkpoint or an inference engine needs them.
            group_rank: This rank's number in its group. Unsharded data comes from the source of that number (modulo
                their number), so that the ranks of a group do not all ask one source for it.
            timeout: As for `fetch`. A source may be out of reach for 5 seconds, or a quarter of ``timeout`` if that is
                less, unless `FetchTimeout` sets another time. After that, or if a source hangs, the fetch uses the
                other sources alone, if they have everything that is needed.
            check: Called with the incoming manifest before any data; if it raises, the fetch ends, and ``into`` is
                unchanged.
            like: Returns, for the path of a tensor that ``into`` does not have, a tensor of this rank that is divided
                in the same way: for optimizers that have not stepped yet. By default tensors of the same shape and
                layout at the sources show how.
            is_comparable: Whether `Received.differences` will be called. It costs another look at every byte.

        Raises:
            RestoreError: The sources contradict each other, do not have all that is needed, or ``into`` does not show
                how a tensor is to be divided; the path is named, and nothing was received.
            TransportError: As for `fetch`.
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
        """Have all sources take a snapshot of one step, and return the step; it is served until newer ones replace it.

        For receivers that need the same step: one of them calls this and passes the step on, and all of them call
        `fetch_sharded` with it.

        The arguments and errors are those of `fetch_sharded`.
        """
        peers = peer_addresses(sources)
        return common_step(peers, self._client.group_fetch_settings(timeout))

    def ask_state(self, address: str, timeout: timedelta) -> ProcessState:
        """Request a peer's ``/state``; the peer takes no snapshot for that.

        Args:
            address: The result of its ``metadata()``.
            timeout: For all of it.

        Raises:
            TransportError: It does not answer in time, or does not prove the job token.
        """
        return ask_state(address, self._connect, timeout.total_seconds())

    def prefault_receive(self, num_bytes: int) -> None:
        """Make memory resident for data of the next fetch that has no place in ``into``. Blocks.

        Does nothing if that would take half of the free memory, or more. The next fetch, or a call with 0, gives unused
        memory back.
        """
        self._client.prefaulted.prepare(num_bytes)

    def prefault(self, state: object) -> None:
        """Make the memory for ``max_snapshots`` snapshots of ``state`` ready, so that none of them waits for it.

        The first use of memory is about ten times slower than a copy to it. A state that has become larger needs
        another call; otherwise its next snapshots make room for themselves.

        Args:
            state: A state of the same size as the later ones. The calling thread owns it; another thread makes the
                memory ready, after this has returned.

        Raises:
            SnapshotError: The state cannot be captured.
        """
        self.server.prefault(state)

    def shutdown(self, wait: bool = True) -> None:
        """Stop serving and free the snapshots; with ``wait``, wait for the server's thread. May be called twice."""
        self.server.close(wait=wait)


def _checked_step(step: StepSelector) -> StepSelector:
    return step if step == LATEST else check_number("step", step, at_least=0)
