"""The server half of a transport: takes, stores and serves snapshots of this replica's own state."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Final

from ft_transport.errors import SnapshotError, TransportError
from ft_transport.http.server.leases import Reader
from ft_transport.http.server.server import SnapshotServer
from ft_transport.http.server.snapshot_cache import SnapshotCache
from ft_transport.keys import Keys
from ft_transport.runtime.signal_safe import Place, SafeEnd, SafeEvent
from ft_transport.settings import TransportSettings, default_num_threads
from ft_transport.state.copy_on_write import CopyOnWriteMemory
from ft_transport.state.snapshot import HeldState, PendingSnapshot, Taking
from ft_transport.state.stager import Stager
from ft_transport.telemetry.metrics import Reading, weakly
from ft_transport.telemetry.process_status import ProcessStatus
from ft_transport.tls import Certificates
from ft_transport.wire.chunks import PLAIN, Digester
from ft_transport.wire.manifest import SnapshotId
from ft_transport.wire.snapshot import MemoryFile

_MAX_FAILURE_CHARACTERS: Final = 1000


@dataclass(slots=True, eq=False)
class _Sharing:
    """A snapshot that is served from live memory until the owner materializes it.

    Attributes:
        memory: The memory.
        snapshot_id: The snapshot's id, once it is served.
    """

    memory: CopyOnWriteMemory
    snapshot_id: SnapshotId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotLease:
    """A snapshot that is not replaced until ``release`` is called, once.

    Attributes:
        step: The committed step of the state.
        descriptor: Descriptor of the memory file that contains it; the transport owns it.
        start: Where in the memory file the safetensors file begins.
        num_bytes: Its length.
        release: Ends the lease.
    """

    step: int
    descriptor: int
    start: int
    num_bytes: int
    release: Callable[[], None]


class SnapshotInProgress:
    """A snapshot whose small parts are copied and whose large ones may still be copied in the background.

    Each method is called once, in this order, on any one thread at a time: ``copy_deferred`` under the read lock,
    then ``publish``.
    """

    def __init__(self, pending: PendingSnapshot, cache: SnapshotCache, place: Place, sharing: _Sharing | None) -> None:
        self._pending = pending
        self._cache = cache
        self._place = place
        self._sharing = sharing

    def copy_deferred(self) -> None:
        """Copy the deferred tensors; the read lock may be released afterwards."""
        try:
            self._pending.copy_deferred()
        except BaseException:
            self._place.give_back()
            raise

    def publish(self) -> None:
        """Digest the state and serve it. Needs no lock."""
        try:
            snapshot = self._pending.finish()
        except BaseException:
            self._place.give_back()
            raise
        sharing = self._sharing
        if sharing is not None:
            sharing.snapshot_id = snapshot.snapshot_id
        self._cache.put(snapshot, self._place)
        # The owner may have materialized the memory before the snapshot could be found by its id.
        if sharing is not None and sharing.memory.is_lost:
            self._cache.retire(snapshot.snapshot_id, even_if_needed=True)
            raise SnapshotError("expected memory for a copy of what has changed meanwhile, and there is none")

    def abandon(self) -> None:
        """Free everything without a snapshot."""
        self._pending.abandon()
        self._place.give_back()


class StateServer:
    """Takes snapshots of one replica's state and serves them. Thread-safe unless stated otherwise.

    Args:
        settings: How many snapshots, where to listen, and so on.
        keys: The job's keys, if it has any; then every request requires a proof of them.
        certificates: This side's certificates, if it has any; then the server speaks only TLS.
        max_wait_s: Longest time that a request waits, in seconds.
        process_status: Status and metrics of this process.

    Attributes:
        http: The HTTP server.

    Raises:
        ConfigurationError: The address cannot be bound.
    """

    def __init__(
        self,
        settings: TransportSettings,
        *,
        keys: Keys | None,
        certificates: Certificates | None,
        max_wait_s: float,
        process_status: ProcessStatus,
    ) -> None:
        self._cache = SnapshotCache(
            max_snapshots=settings.limits.max_snapshots,
            lease_s=settings.lease.total_seconds(),
            contended_bytes_per_s=settings.contended_bytes_per_s,
            clock=time.monotonic,
        )
        self._stager = Stager(
            max_snapshots=settings.limits.max_snapshots,
            num_threads=default_num_threads(),
            chunk_bytes=settings.chunk_bytes,
            digester=lambda: Digester.of(keys.current()[0]) if keys is not None else PLAIN,
        )
        try:
            self.http = SnapshotServer(
                self._cache,
                settings,
                keys=keys,
                certificates=certificates,
                max_wait_s=max_wait_s,
                process_status=process_status,
            )
        except BaseException:
            self._stager.close()
            raise
        process_status.metrics.collect(self._stager.costs.readings)
        process_status.metrics.collect(weakly(self._readings))
        self._sharings: list[_Sharing] = []
        self._sharings_mutex = threading.Lock()
        self._end = SafeEnd()

    def prefault(self, state: object) -> None:
        """Make memory for snapshots of ``state`` ready; see ``HTTPTransport.prefault``."""
        self._stager.prefault(state)

    def take(self, wanted: Taking | HeldState, *, share: bool = False) -> SnapshotInProgress:
        """Begin a snapshot of a state, under the read lock on the thread that owns it; or, once, of a held state.

        Args:
            wanted: A held state may come from any thread.
            share: Serves a held state that ``is_shareable`` from live memory, without a copy. The owner calls
                `materialize` before anything of it changes, an optimizer's step included. The read lock may be released
                as soon as this has returned.

        Raises:
            SnapshotError: The state cannot be captured, memory for it is missing, or receivers still fetch the maximum
                number of snapshots.
        """
        try:
            place = self._cache.reserve()
            try:
                pending = self._stager.begin(wanted, share=share)
                sharing = None
                if pending.shared is not None:
                    sharing = _Sharing(pending.shared)
                    with self._sharings_mutex:
                        self._sharings[:] = [earlier for earlier in self._sharings if earlier.memory.is_shared]
                        self._sharings.append(sharing)
                return SnapshotInProgress(pending, self._cache, place, sharing)
            except BaseException:
                place.give_back()
                raise
        except TransportError as error:
            if error.step is None:
                error.step = wanted.taking.step if isinstance(wanted, HeldState) else wanted.step
            raise

    def hold(self, taking: Taking) -> HeldState | None:
        """Copy everything that is not deferrable, so that `take` can begin a snapshot of this step later.

        For an owner that learns only after the step boundary that a snapshot is needed. Takes no memory but for the
        copies, and no place among ``max_snapshots``. Called on the thread that owns the state; the caller holds the
        read lock from here until ``SnapshotInProgress.copy_deferred`` has returned.

        Returns:
            The held state; ``None`` if more than ``max_held_bytes`` would have to be copied.

        Raises:
            SnapshotError: The state cannot be captured.
        """
        return self._stager.hold(taking)

    def materialize(self, changing: Callable[[], Set[int]] | None = None) -> None:
        """End the sharing of live memory that the caller is about to change.

        Copies a snapshot first if it is being read or was requested; retires any other. Relays stop serving that
        memory.

        Args:
            changing: Returns the addresses of the storages that will change; called only while memory is shared.
                ``None`` stands for all.
        """
        self.http.relays.close_all()
        if changing is None:
            self._stager.forget_lasting()
        if not self._sharings:
            return
        with self._sharings_mutex:
            sharings = list(self._sharings)
        changed: Set[int] | None = None
        for sharing in sharings:
            # Memory that is not shared any more may still be read live: another thread materializes it, and waits.
            if changing is not None and sharing.memory.is_shared:
                changed = changed if changed is not None else changing()
                if changed.isdisjoint(sharing.memory.storages):
                    continue
            if sharing.snapshot_id is not None:
                self._cache.retire(sharing.snapshot_id, even_if_needed=False)
            sharing.memory.materialize()
            if sharing.memory.is_lost and sharing.snapshot_id is not None:
                self._cache.retire(sharing.snapshot_id, even_if_needed=True)
            with self._sharings_mutex, contextlib.suppress(ValueError):
                self._sharings.remove(sharing)

    def lease(self, step: int) -> SnapshotLease:
        """Lease the newest snapshot of a step to a reader on this host, until the lease is released.

        Raises:
            SnapshotError: There is none, or it is served from live memory.
        """
        released = SafeEvent()
        # A reader on this host has read everything when it releases the lease: nothing is on its way any more.
        reading = self._cache.read(step, reader=Reader(released.is_set))
        if reading is None:
            raise SnapshotError("expected a snapshot, there is none", step=step)

        def release() -> None:
            released.set()
            reading.__exit__()

        memory = reading.snapshot.memory
        if not isinstance(memory, MemoryFile):
            release()
            raise SnapshotError("expected a snapshot in memory of its own, it is served from live memory", step=step)
        return SnapshotLease(
            step=step,
            descriptor=memory.descriptor,
            start=memory.start,
            num_bytes=reading.snapshot.total_bytes,
            release=release,
        )

    def newest_sequence(self) -> int:
        """Number of snapshots that have been published so far."""
        return self._cache.newest_sequence()

    def newest_step(self) -> int | None:
        """The step of the newest snapshot, ``None`` before the first."""
        return self._cache.newest_step()

    def snapshot_failed(self, step: int, error: BaseException, *, is_final: bool = False) -> None:
        """Report to waiting receivers why no snapshot has come, until the next one is served.

        Args:
            step: The step that the snapshot would have shown.
            error: Its type and message are sent to the receivers.
            is_final: Whether the next attempt will fail as well: receivers that wait are refused at once.
        """
        reason = f"step {step}: {type(error).__name__}: {error}"[:_MAX_FAILURE_CHARACTERS]
        self._cache.note_failure(reason, is_final=is_final)

    def close(self, *, wait: bool) -> None:
        """Stop serving and free the snapshots. Idempotent.

        Args:
            wait: Whether to return only when the server's thread has ended.
        """
        self._end(self._close, wait=wait)

    def _readings(self) -> Iterator[Reading]:
        cache = self._cache
        yield Reading("snapshots_alive", cache.num_alive())
        yield Reading("snapshots_published_total", cache.newest_sequence())
        yield Reading("requests_reading", cache.num_readers())
        newest = cache.newest()
        yield Reading("snapshot_bytes", newest.total_bytes if newest is not None else 0)

    def _close(self) -> None:
        self.http.close(wait=True)
        self._cache.clear()
        self._stager.close()
