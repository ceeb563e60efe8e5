"""The cache of served snapshots, and their readers.

A new snapshot evicts an old one, but never a snapshot with readers or leases.

Leases: A fetch consists of several requests. After each request, a lease keeps the snapshot in the cache for a moment,
while the connection is open. Otherwise a trainer that publishes every step would replace the snapshot between two
requests. A reader that waits for a future step gets its lease when the snapshot of that step arrives. Otherwise further
snapshots might evict the awaited one before the reader finds it. A lease also protects bytes in flight: with
``sendfile`` the kernel sends the pages of the memory file itself, and a new snapshot in the same memory would change
bytes that the receiver has not read yet.

Cut-off: No reader blocks a newer snapshot for ever. When the cache first has to refuse a new snapshot, the receivers of
the oldest snapshot may continue for ``lease_s`` plus the time that its bytes take at ``contended_bytes_per_s``. Then
the cache cuts them off, and they start again with a newer snapshot.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ft_transport.errors import SnapshotError, SnapshotLimitError
from ft_transport.runtime.signal_safe import Place, Places
from ft_transport.wire.chunks import digest
from ft_transport.wire.manifest import SnapshotId
from ft_transport.wire.routes import LATEST, StepSelector
from ft_transport.wire.snapshot import Snapshot


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """A reader of a snapshot, such as a receiver's connection. Any thread may call its functions.

    Attributes:
        is_closed: Returns whether the reader's connection is closed, which ends the reader's lease. The function object
            also identifies the reader: two readers have two function objects.
        cut_off: Closes the reader's connection and returns at once; calls its argument when no more bytes can reach the
            reader. ``None`` for a reader within this process, which is never cut off.
    """

    is_closed: Callable[[], bool] = lambda: False
    cut_off: Callable[[Callable[[], None]], None] | None = None


@dataclass(slots=True, eq=False)
class _Lease:
    """The lease of one reader for one snapshot. It lasts until ``until_s``, and while a request is in progress."""

    reader: Reader
    num_readings: int = 0
    until_s: float = 0.0

    def is_over(self, now_s: float) -> bool:
        return not self.num_readings and (self.until_s <= now_s or self.reader.is_closed())


@dataclass(slots=True, eq=False)
class _Entry:
    snapshot: Snapshot
    sequence: int
    manifest_digest: int
    was_read: bool = False
    leases: dict[Callable[[], bool], _Lease] = field(default_factory=dict)
    wanted_since_s: float | None = None
    wanted_at_s: float = 0.0
    cut_off: bool = False

    @property
    def num_readers(self) -> int:
        return sum(lease.num_readings for lease in self.leases.values())

    def is_held(self, now_s: float) -> bool:
        """Whether any reader reads the snapshot or has a lease. Removes expired leases."""
        self.leases = {name: lease for name, lease in self.leases.items() if not lease.is_over(now_s)}
        return bool(self.leases)


@dataclass(slots=True, eq=False)
class Reading:
    """One request that reads a snapshot; a context manager that ends the reading.

    Attributes:
        manifest_digest: Digest of the snapshot's JSON header.
        unread_s: Seconds for which bytes may still be in flight to the receiver after the end of the request.
        is_leasing: Whether the reader gets a lease after the request, because further requests may follow.
    """

    snapshot: Snapshot
    manifest_digest: int
    _cache: SnapshotCache
    _entry: _Entry
    _lease: _Lease
    unread_s: float = 0.0
    is_leasing: bool = True

    def __enter__(self) -> Snapshot:
        return self.snapshot

    def __exit__(self, *_exc_info: object) -> None:
        self._cache._end_reading(self._entry, self._lease, self.unread_s if self.is_leasing else None)


@dataclass(slots=True, eq=False)
class SnapshotCache:
    """The served snapshots, and slots for snapshots that are being taken. Thread-safe.

    Attributes:
        max_snapshots: Maximum number of snapshots and reserved slots together.
        lease_s: Length of a lease after a request, in seconds.
        contended_bytes_per_s: Minimum rate of a snapshot's receivers while a newer snapshot needs the memory.
        clock: Returns monotonic seconds.
    """

    max_snapshots: int
    lease_s: float
    contended_bytes_per_s: float
    clock: Callable[[], float]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _entries: list[_Entry] = field(default_factory=list)
    _leaving: list[_Entry] = field(default_factory=list)
    _waits: dict[Callable[[], bool], tuple[int, _Lease]] = field(default_factory=dict)
    _reserved: Places = field(default_factory=Places)
    _sequence: int = 0
    _failure: str | None = None
    _num_final_failures: int = 0
    _final_failure_s: float | None = None
    _closed: bool = False

    def reserve(self) -> Place:
        """Reserve a slot for a new snapshot, and evict the oldest snapshot without readers if necessary.

        Cuts off the receivers of a snapshot that has occupied a needed slot for too long. That takes a moment, so the
        slot is free only at a later call.

        Returns:
            The reserved slot; the caller passes it to `put` or gives it back.

        Raises:
            SnapshotLimitError: All snapshots have readers or leases.
            SnapshotError: The cache was cleared.
        """
        with self._lock:
            if self._closed:
                raise SnapshotError("expected a running transport, but this one was shut down")
            alive = self._in_memory()
            if len(alive) + self._reserved.num_taken() < self.max_snapshots:
                return self._reserved.take()
            idle = next((entry for entry in self._entries if not entry.is_held(self.clock())), None)
            if idle is not None:
                self._entries.remove(idle)
                place = self._reserved.take()
            else:
                cut_offs = self._want_oldest()
                steps, num_readers = [entry.snapshot.step for entry in alive], sum(entry.num_readers for entry in alive)
        if idle is not None:
            idle.snapshot.close()
            return place
        while cut_offs:
            cut_offs.pop()()
        # The traceback refers to this frame, and must not keep the snapshots' memory alive.
        del alive
        raise SnapshotLimitError(
            f"expected at most {self.max_snapshots} snapshots alive at once (max_snapshots): those of steps {steps} "
            f"are still being fetched ({num_readers} requests in progress); wait until they end, or raise max_snapshots"
        )

    def is_full(self) -> bool:
        """Return whether `reserve` would raise a `SnapshotLimitError`."""
        with self._lock:
            num_taken = len(self._in_memory()) + self._reserved.num_taken()
            return num_taken >= self.max_snapshots and all(entry.is_held(self.clock()) for entry in self._entries)

    def put(self, snapshot: Snapshot, place: Place) -> None:
        """Put a snapshot into a reserved slot. From now on the cache owns the snapshot.

        After `clear`, frees the snapshot at once: a shutdown may happen while a snapshot is being copied.
        """
        manifest_digest = digest(memoryview(snapshot.header)[8:])
        with self._lock:
            place.give_back()
            if not self._closed:
                self._sequence += 1
                self._failure = self._final_failure_s = None
                leases = self._grant_leases(snapshot.step)
                self._entries.append(_Entry(snapshot, self._sequence, manifest_digest, leases=leases))
                return
        snapshot.close()

    @contextmanager
    def waiting(self, step: int, reader: Reader) -> Iterator[None]:
        """Give the reader a lease if a snapshot of this step arrives in the ``with`` block, or up to ``lease_s`` later.

        The lease begins at the end of the block or at the arrival, whichever is later: receivers retry after the block.
        """
        lease = _Lease(reader, until_s=math.inf)
        with self._lock:
            now_s = self.clock()
            # Removes the waits of closed connections, which nothing else removes.
            self._waits = {name: wait for name, wait in self._waits.items() if not wait[1].is_over(now_s)}
            self._waits[reader.is_closed] = step, lease
        try:
            yield
        finally:
            with self._lock:
                lease.until_s = self.clock() + self.lease_s

    def _grant_leases(self, step: int) -> dict[Callable[[], bool], _Lease]:
        """Return the leases of the readers that waited for ``step``, now that it is served. Called under the lock."""
        now_s = self.clock()
        granted = {
            name: lease
            for name, (awaited, lease) in self._waits.items()
            if awaited == step and not lease.is_over(now_s)
        }
        for name, lease in granted.items():
            del self._waits[name]
            # While the reader's request waits, the lease has no end; `waiting` sets the end.
            if lease.until_s != math.inf:
                lease.until_s = now_s + self.lease_s
        return granted

    def note_failure(self, reason: str, *, is_final: bool = False) -> None:
        """Record, until the next `put`, why a snapshot failed. ``is_final``: further attempts would fail too."""
        with self._lock:
            self._failure = reason
            if is_final:
                self._num_final_failures += 1
                self._final_failure_s = self.clock()

    def num_final_failures(self) -> int:
        """Return the number of final failures so far."""
        with self._lock:
            return self._num_final_failures

    def has_failed_finally(self, within_s: float) -> bool:
        """Whether a final failure occurred within the last ``within_s`` seconds, and no snapshot arrived since."""
        with self._lock:
            return self._final_failure_s is not None and self.clock() - self._final_failure_s < within_s

    def failure(self) -> str | None:
        """Return why the last attempt to take a snapshot failed; ``None`` if it did not fail."""
        with self._lock:
            return self._failure

    def newest_sequence(self) -> int:
        """Return the sequence number of the newest snapshot so far; 0 before the first snapshot."""
        with self._lock:
            return self._sequence

    def newest_step(self) -> int | None:
        """Return the step of the newest snapshot; ``None`` without one."""
        newest = self.newest()
        return newest.step if newest is not None else None

    def steps(self) -> tuple[int, ...]:
        """Return the served steps, oldest first."""
        with self._lock:
            return tuple(entry.snapshot.step for entry in self._entries)

    def alive(self) -> list[tuple[int, int, int]]:
        """Return step, size in bytes and number of readers of each snapshot in memory, oldest first."""
        with self._lock:
            return [(entry.snapshot.step, entry.snapshot.total_bytes, entry.num_readers) for entry in self._in_memory()]

    def _in_memory(self) -> list[_Entry]:
        return sorted((*self._leaving, *self._entries), key=lambda entry: entry.sequence)

    def num_readers(self) -> int:
        """Return the number of requests that are reading a snapshot."""
        return sum(num_readers for _, _, num_readers in self.alive())

    def num_alive(self) -> int:
        """Return the number of snapshots in memory: served, being taken, and evicted ones that still have readers."""
        with self._lock:
            return len(self._entries) + len(self._leaving) + self._reserved.num_taken()

    def newest(self) -> Snapshot | None:
        """Return the newest snapshot, without protection from eviction; ``None`` without one."""
        with self._lock:
            return self._entries[-1].snapshot if self._entries else None

    def read(
        self,
        step: StepSelector,
        *,
        snapshot_id: SnapshotId | None = None,
        after_sequence: int = 0,
        reader: Reader | None = None,
    ) -> Reading | None:
        """Begin to read the newest snapshot that meets all conditions; return ``None`` if there is none.

        Args:
            step: The snapshot's step, or ``latest`` for any step.
            snapshot_id: The snapshot's id; ``None`` for any.
            after_sequence: The snapshot's sequence number must be higher than this.
            reader: The reader; by default a new reader within this process.
        """
        with self._lock:
            for entry in reversed(self._entries):
                snapshot = entry.snapshot
                is_match = step in (LATEST, snapshot.step) and snapshot_id in (None, snapshot.snapshot_id)
                if is_match and entry.sequence > after_sequence:
                    break
            else:
                return None
            self._forget_past_want(entry)
            reader = reader or Reader()
            lease = entry.leases.setdefault(reader.is_closed, _Lease(reader))
            lease.num_readings += 1
            entry.was_read = True
        return Reading(snapshot, entry.manifest_digest, self, entry, lease)

    def retire(self, snapshot_id: SnapshotId, *, even_if_needed: bool) -> None:
        """Evict a snapshot, and older snapshots of the same step; free each of them when it has no readers.

        Args:
            snapshot_id: Id of the snapshot. An unknown id has no effect.
            even_if_needed: Whether to evict the snapshot even if it has readers or leases, or was never read.
        """
        with self._lock:
            entry = next((entry for entry in self._entries if entry.snapshot.snapshot_id == snapshot_id), None)
            if entry is None:
                return
            if (not entry.was_read or entry.is_held(self.clock())) and not even_if_needed:
                return
            # Older snapshots of this step are from discarded attempts at the step, and must not be served again.
            step, sequence = entry.snapshot.step, entry.sequence
            leaving = [each for each in self._entries if each.snapshot.step == step and each.sequence <= sequence]
            idle = self._evict(leaving)
        for snapshot in idle:
            snapshot.close()

    def _evict(self, entries: list[_Entry]) -> list[Snapshot]:
        """Evict snapshots; return those without readers, which the caller frees. Called under the lock."""
        self._entries = [entry for entry in self._entries if entry not in entries]
        self._leaving += [entry for entry in entries if entry.num_readers]
        return [entry.snapshot for entry in entries if not entry.num_readers]

    def holds_newer(self, sequence: int) -> bool:
        """Return whether the cache has a snapshot with a sequence number above ``sequence``."""
        with self._lock:
            return bool(self._entries) and self._entries[-1].sequence > sequence

    def clear(self) -> None:
        """Evict all snapshots, and accept no more; free each snapshot when it has no readers."""
        with self._lock:
            self._closed = True
            idle = self._evict(self._entries)
        for snapshot in idle:
            snapshot.close()

    def _hold_s(self, entry: _Entry) -> float:
        """Return for how many seconds receivers may still read a snapshot whose memory is needed."""
        return self.lease_s + entry.snapshot.total_bytes / self.contended_bytes_per_s

    def _want_oldest(self) -> list[Callable[[], None]]:
        """Record that the memory of the oldest snapshot is needed; return functions that cut off late receivers."""
        now_s = self.clock()
        alive = self._in_memory()
        if any(entry.cut_off for entry in alive):
            return []
        for entry in alive:
            if all(lease.reader.cut_off is not None for lease in entry.leases.values()):
                if entry.wanted_since_s is None:
                    entry.wanted_since_s = now_s
                entry.wanted_at_s = now_s
                return self._cut_off(entry) if now_s - entry.wanted_since_s >= self._hold_s(entry) else []
        return []

    def _cut_off(self, entry: _Entry) -> list[Callable[[], None]]:
        entry.cut_off = True
        if entry not in self._leaving:
            self._entries.remove(entry)
            self._leaving.append(entry)
        cut_offs: list[Callable[[], None]] = []
        for lease in entry.leases.values():
            # The reader still counts until no more bytes can reach it, because sent bytes may be in flight.
            lease.num_readings += 1
            assert lease.reader.cut_off is not None, "a reader within this process is never cut off"
            ended = functools.partial(self._end_reading, entry, lease, None)
            cut_offs.append(functools.partial(lease.reader.cut_off, ended))
        return cut_offs

    def _forget_past_want(self, entry: _Entry) -> None:
        """Reset the time limit of a snapshot without readers whose memory has not been needed for a while."""
        if entry.wanted_since_s is None or entry.is_held(self.clock()):
            return
        if self.clock() - entry.wanted_at_s > self._hold_s(entry):
            entry.wanted_since_s = None

    def _end_reading(self, entry: _Entry, lease: _Lease, unread_s: float | None) -> None:
        with self._lock:
            now_s = self.clock()
            lease.num_readings -= 1
            if unread_s is not None and not entry.cut_off:
                lease.until_s = max(lease.until_s, now_s + max(self.lease_s, unread_s))
            entry.is_held(now_s)
            closing = entry in self._leaving and not entry.num_readers
            if closing:
                self._leaving.remove(entry)
        if closing:
            entry.snapshot.close()
