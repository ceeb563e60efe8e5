"""The server of a transport: takes snapshots of this replica's state, stores them, and serves them to receivers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Final

import torch

from ft_transport.credentials import Certificates, Keys
from ft_transport.errors import SnapshotError, TransportError
from ft_transport.http.server.server import SnapshotServer
from ft_transport.http.server.snapshot_cache import Reader, SnapshotCache
from ft_transport.runtime.signal_safe import Place, SafeEnd, SafeEvent
from ft_transport.settings import TransportSettings, default_num_threads
from ft_transport.state.copy_on_write import CopyOnWriteMemory
from ft_transport.state.copying import CopiesInFlight, Marks
from ft_transport.state.snapshot import HeldState, PendingSnapshot, Taking
from ft_transport.state.stager import Stager
from ft_transport.telemetry.metrics import Reading, weakly
from ft_transport.telemetry.process_status import ProcessStatus
from ft_transport.wire.chunks import PLAIN, Digester
from ft_transport.wire.snapshot import MemoryFile, Snapshot

_MAX_FAILURE_CHARACTERS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotLease:
    """A snapshot that a reader on this host has leased: the transport does not free it before ``release``.

    Attributes:
        step: Committed step of the state.
        descriptor: Descriptor of the memory file that contains the snapshot; the transport owns the descriptor.
        start: Position in the memory file at which the snapshot's safetensors file begins.
        num_bytes: Length of the safetensors file.
        release: Function that ends the lease; to be called once.
    """

    step: int
    descriptor: int
    start: int
    num_bytes: int
    release: Callable[[], None]


class SnapshotInProgress:
    """A snapshot whose small tensors are copied and whose large tensors (the deferred ones) may not be copied yet.

    The caller calls `copy_deferred` once under the read lock, and then `publish` once, or else calls `abandon`. Any
    thread may make these calls, one after the other.
    """

    def __init__(self, pending: PendingSnapshot, cache: SnapshotCache, http: SnapshotServer, place: Place) -> None:
        self._pending = pending
        self._cache = cache
        self._http = http
        self._place = place

    def copy_deferred(self) -> CopiesInFlight | None:
        """Copy the deferred tensors. The caller may release the read lock afterwards.

        Returns:
            The copies from devices that are not complete; see `PendingSnapshot.copy_deferred`.
        """
        try:
            return self._pending.copy_deferred()
        except BaseException:
            self._place.give_back()
            raise

    def publish(self) -> None:
        """Digest the copied state and serve it. Needs no lock."""
        try:
            snapshot = self._pending.finish()
        except BaseException:
            self._place.give_back()
            raise
        self._cache.put(snapshot, self._place)
        self._http.wake()
        # The trainer may have called `materialize` before the snapshot was in the cache.
        if self._pending.shared is not None and self._pending.shared.is_lost:
            self._cache.retire(snapshot.snapshot_id, even_if_needed=True)
            raise SnapshotError(
                "not enough memory to copy the shared tensors before the trainer changed them: the snapshot is lost"
            )

    def abandon(self) -> None:
        """Free the memory of the snapshot without serving it."""
        self._pending.abandon()
        self._place.give_back()


class StateServer:
    """Takes snapshots of one replica's state and serves them. Thread-safe unless stated otherwise.

    Args:
        settings: Settings of the transport.
        keys: The job's keys; each request must prove that its client knows them. ``None`` without a job token.
        certificates: This process's certificates, for a server that accepts only TLS; ``None`` for plain HTTP.
        max_wait_s: Longest time that a request may wait for a snapshot, in seconds.
        process_status: Status and metrics of this process.

    Attributes:
        http: The HTTP server.

    Raises:
        ConfigurationError: The server cannot listen at the address of the settings.
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
        self._keys = keys
        self._stager = Stager(
            max_snapshots=settings.limits.max_snapshots,
            num_threads=default_num_threads(),
            chunk_bytes=settings.chunk_bytes,
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
        self._shared: list[CopyOnWriteMemory] = []
        self._shared_mutex = threading.Lock()
        self._end = SafeEnd()

    def metadata(self) -> str:
        """Return the URL at which receivers reach this server: ``http(s)://host:port/checkpoint/``."""
        return f"{self.http.address}/checkpoint/"

    def prefault(self, state: object) -> None:
        """Allocate memory for snapshots of ``state`` in advance, so that the first snapshot is fast."""
        self._stager.prefault(state)

    def take(self, wanted: Taking | HeldState, *, share: bool = False) -> SnapshotInProgress:
        """Begin a snapshot of a state; the caller holds the read lock.

        Args:
            wanted: The state. A `Taking` must be passed on the thread that owns the state. A `HeldState` may be passed
                on any thread, once.
            share: Whether to serve the trainer's own tensors without a copy, if ``wanted`` is a `HeldState` and is
                ``is_shareable``. Then the caller may release the read lock after this call, and must call `materialize`
                before anything changes a tensor, including the optimizer's step.

        Raises:
            SnapshotError: The state cannot be captured, there is not enough memory, or receivers still read the maximum
                number of snapshots.
        """
        try:
            place = self._cache.reserve()
            try:
                digester = Digester.of(self._keys.current()[0]) if self._keys is not None else PLAIN
                pending = self._stager.begin(wanted, share=share, digester=digester)
                if pending.shared is not None:
                    with self._shared_mutex:
                        self._shared[:] = [earlier for earlier in self._shared if earlier.is_shared]
                        self._shared.append(pending.shared)
                return SnapshotInProgress(pending, self._cache, self.http, place)
            except BaseException:
                place.give_back()
                raise
        except TransportError as error:
            if error.step is None:
                error.step = wanted.taking.step if isinstance(wanted, HeldState) else wanted.step
            raise

    def mark(self, devices: Set[torch.device]) -> Marks:
        """Record the work that the calling thread has queued on these devices; see `Stager.mark`."""
        return self._stager.mark(devices)

    def hold(self, taking: Taking, marks: Marks | None = None) -> HeldState | None:
        """Copy everything that is not deferrable, so that `take` can begin a snapshot of this step later.

        So a trainer can decide after the step boundary (before ``forward``) whether it takes a snapshot. A held
        state needs memory only for the copies, and does not count towards ``max_snapshots``. Call this on the thread
        that owns the state, or pass the result of `mark` on that thread. The caller holds the read lock from this call
        until ``SnapshotInProgress.copy_deferred`` has returned.

        Returns:
            The held state; ``None`` if the copies would exceed ``max_held_bytes``.

        Raises:
            SnapshotError: The state cannot be captured.
        """
        return self._stager.hold(taking, marks)

    def is_sharing(self) -> bool:
        """Return whether a snapshot may be served from the trainer's own tensors."""
        return bool(self._shared)

    def materialize(self, changing: Set[int] | None = None) -> None:
        """Stop serving from the trainer's own tensors, which the caller is about to change.

        If receivers read or have requested a snapshot of these tensors, this method copies it; otherwise it drops the
        snapshot. Also ends relays that serve these tensors.

        Args:
            changing: Addresses of the storages that will change; ``None`` if any storage may change.
        """
        self.http.relays.close_all()
        if changing is None:
            self._stager.forget_lasting()
        if not self._shared:
            return
        with self._shared_mutex:
            shared = list(self._shared)
        for memory in shared:
            # Memory that is not shared any more may still be read, while another thread materializes it. The call below
            # waits for that thread.
            if changing is not None and memory.is_shared and changing.isdisjoint(memory.storages):
                continue
            if memory.snapshot_id is not None:
                self._cache.retire(memory.snapshot_id, even_if_needed=False)
            memory.materialize()
            if memory.is_lost and memory.snapshot_id is not None:
                self._cache.retire(memory.snapshot_id, even_if_needed=True)
            with self._shared_mutex, contextlib.suppress(ValueError):
                self._shared.remove(memory)

    def lease(self, step: int) -> SnapshotLease:
        """Lease the newest snapshot of a step to a reader on this host.

        Raises:
            SnapshotError: There is no snapshot of the step, or it is served from the trainer's own tensors.
        """
        released = SafeEvent()
        # When a reader on this host releases the lease, it has read everything: no bytes are still in flight.
        reading = self._cache.read(step, reader=Reader(released.is_set))
        if reading is None:
            raise SnapshotError("expected a snapshot of the step, got none", step=step)

        def release() -> None:
            released.set()
            reading.__exit__()

        memory = reading.snapshot.memory
        if not isinstance(memory, MemoryFile):
            release()
            raise SnapshotError("expected a copied snapshot, got one that shares the trainer's tensors", step=step)
        return SnapshotLease(
            step=step,
            descriptor=memory.descriptor,
            start=memory.start,
            num_bytes=reading.snapshot.total_bytes,
            release=release,
        )

    @contextlib.contextmanager
    def serving(self, snapshot: Snapshot) -> Iterator[None]:
        """Return a context in which receivers can fetch a snapshot that this object has not taken, and now owns.

        Raises:
            SnapshotError: Receivers still read the maximum number of snapshots.
        """
        try:
            place = self._cache.reserve()
        except BaseException:
            snapshot.close()
            raise
        self._cache.put(snapshot, place)
        try:
            with self._cache.read(snapshot.step, snapshot_id=snapshot.snapshot_id) or contextlib.nullcontext():
                yield
        finally:
            self._cache.retire(snapshot.snapshot_id, even_if_needed=True)

    def is_full(self) -> bool:
        """Return whether receivers still read the maximum number of snapshots, so that `take` would fail."""
        return self._cache.is_full()

    def newest_sequence(self) -> int:
        """Return the number of snapshots that were published so far."""
        return self._cache.newest_sequence()

    def newest_step(self) -> int | None:
        """Return the step of the newest snapshot; ``None`` before the first snapshot."""
        return self._cache.newest_step()

    def snapshot_failed(self, step: int, error: BaseException, *, is_final: bool = False) -> None:
        """Report to receivers why a snapshot failed, until the next snapshot is served.

        Args:
            step: Step of the snapshot.
            error: Error whose type and message the server sends to waiting receivers.
            is_final: Whether further attempts would fail too; if so, the server refuses waiting receivers at once.
        """
        reason = f"step {step}: {type(error).__name__}: {error}"[:_MAX_FAILURE_CHARACTERS]
        self._cache.note_failure(reason, is_final=is_final)
        if is_final:
            self.http.wake()

    def close(self, *, wait: bool) -> None:
        """Stop the server and free the snapshots. Idempotent.

        Args:
            wait: Whether to wait until the server's thread has ended.
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
