"""The snapshots that are being served, and who still reads them.

A snapshot leaves the cache when a new one needs its place. One that is being read keeps its memory until the last
reader is done. A fetch consists of several requests, so each request also keeps its snapshot on the cache for a
moment after it ended (the lease), as long as its connection is open; otherwise a trainer that publishes every step
would replace a snapshot between two requests of the same fetch. Whoever waits for a step that is to come has that lease
from the moment that the snapshot is put here, and not only from when it is found.

The lease also guards what is on its way: ``sendfile`` gives the kernel the pages of the memory file and no copy of
them, so a new snapshot in the same memory would change bytes that were sent but that the receiver has not read yet.

Nobody holds memory for ever that a newer snapshot wants. From the first time that one is refused a place, the oldest
snapshot in its way has ``lease_s`` and as long as its bytes take at ``contended_bytes_per_s``; then its receivers are
cut off, and start again with a newer one. Where nothing newer is wanted, a receiver may be slower than that.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ft_transport.errors import SnapshotError, SnapshotLimitError
from ft_transport.http.awaited_steps import AwaitedSteps
from ft_transport.runtime.handler_safety import Place, Places
from ft_transport.wire.chunks import digest
from ft_transport.wire.manifest import SnapshotId
from ft_transport.wire.routes import LATEST, StepSelector
from ft_transport.wire.served import Snapshot


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """Who reads a snapshot. Any thread may call its functions.

    Attributes:
        is_closed: Whether the reader's connection is; its lease ends with that. Names the reader too: one lease for
            each distinct function.
        cut_off: Ends the connection, and calls what it is given when nothing more can reach the reader; returns at
            once. ``None`` for a reader of this process, which is never cut off.
    """

    is_closed: Callable[[], bool] = lambda: False
    cut_off: Callable[[Callable[[], None]], None] | None = None


@dataclass(slots=True, eq=False)
class _Entry:
    snapshot: Snapshot
    sequence: int
    manifest_digest: int
    was_read: bool = False
    readers: list[Reader] = field(default_factory=list)
    leases: dict[Callable[[], bool], tuple[Reader, float]] = field(default_factory=dict)
    wanted_since_s: float | None = None
    wanted_at_s: float = 0.0
    retired: bool = False
    cut_off: bool = False

    @property
    def num_readers(self) -> int:
        return len(self.readers)


@dataclass(slots=True, eq=False)
class Reading:
    """One request that reads a snapshot; a context manager that ends the reading.

    Attributes:
        snapshot: What is read.
        manifest_digest: Digest of its JSON header.
        unread_s: How long after the end some of it may still be on its way to the receiver, in seconds.
        is_leasing: Whether more may be asked for afterwards, so that the snapshot is kept for a moment.
    """

    snapshot: Snapshot
    manifest_digest: int
    _cache: SnapshotCache
    _entry: _Entry
    _reader: Reader
    unread_s: float = 0.0
    is_leasing: bool = True

    def __enter__(self) -> Snapshot:
        return self.snapshot

    def __exit__(self, *_exc_info: object) -> None:
        self._cache._end_reading(self._entry, self._reader, self.unread_s if self.is_leasing else None)


@dataclass(slots=True, eq=False)
class SnapshotCache:
    """Holds at most ``max_snapshots``, the reserved places included. Thread-safe.

    Attributes:
        max_snapshots: How many snapshots may be alive at once.
        lease_s: How long after its last request a snapshot counts as still being fetched, in seconds.
        contended_bytes_per_s: How fast the receivers of a snapshot have to be where a newer one wants its memory.
        clock: Monotonic seconds.
    """

    max_snapshots: int
    lease_s: float
    contended_bytes_per_s: float
    clock: Callable[[], float]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _entries: list[_Entry] = field(default_factory=list)
    _leaving: list[_Entry] = field(default_factory=list)
    _awaited: AwaitedSteps[Reader] = field(default_factory=AwaitedSteps)
    _reserved: Places = field(default_factory=Places)
    _sequence: int = 0
    _failure: str | None = None
    _num_final_failures: int = 0
    _final_failure_s: float | None = None
    _closed: bool = False
    _listeners: list[Callable[[], None]] = field(default_factory=list)

    def listen(self, on_change: Callable[[], None]) -> None:
        """Calls ``on_change`` after every arrival and final failure, on the thread of either. Set up early."""
        self._listeners.append(on_change)

    def reserve(self) -> Place:
        """Makes sure that one more snapshot may be taken, retiring the oldest one that nobody reads if need be.

        One that has been in the way for too long is taken from its receivers. That takes a moment, so it makes room for
        the next call.

        Returns:
            The place of that snapshot, for `put`, or to be given back.

        Raises:
            SnapshotLimitError: All places are taken by snapshots that are being read.
            SnapshotError: The cache was cleared for good.
        """
        to_close: list[_Entry] = []
        cut_offs: list[Callable[[], None]] = []
        refused: SnapshotLimitError | None = None
        place: Place | None = None
        with self._lock:
            if self._closed:
                raise SnapshotError("expected a transport that serves, and this one was shut down")
            alive = len(self._entries) + len(self._leaving) + self._reserved.num_taken()
            if alive >= self.max_snapshots:
                idle = [entry for entry in self._entries if not entry.num_readers and not self._is_leased(entry)]
                if not idle:
                    cut_offs = self._want_oldest()
                    readers = sum(entry.num_readers for entry in (*self._entries, *self._leaving))
                    refused = SnapshotLimitError(
                        f"expected at most {self.max_snapshots} snapshots alive at once (max_snapshots): those of "
                        f"steps {[entry.snapshot.step for entry in (*self._entries, *self._leaving)]} are still being "
                        f"fetched ({readers} requests under way); it passes when they end, or raise max_snapshots"
                    )
                else:
                    self._entries.remove(idle[0])
                    to_close.append(idle[0])
            if refused is None:
                place = self._reserved.take()
        for entry in to_close:
            entry.snapshot.close()
        for cut_off in cut_offs:
            cut_off()
        if refused is not None:
            raise refused
        assert place is not None, "nothing refused it"
        return place

    def put(self, snapshot: Snapshot, place: Place) -> None:
        """Puts a snapshot on a reserved place and tells the listeners. The cache owns it from now on.

        After ``clear`` it is freed at once: a shutdown may overtake a snapshot that is still being copied.
        """
        manifest_digest = digest(memoryview(snapshot.header)[8:])
        with self._lock:
            place.give_back()
            closed = self._closed
            if not closed:
                self._sequence += 1
                self._failure = self._final_failure_s = None
                leases = self._awaited.come(snapshot.step, now_s=self.clock(), lease_s=self.lease_s)
                self._entries.append(_Entry(snapshot, self._sequence, manifest_digest, leases=leases))
        if closed:
            snapshot.close()
            return
        for listener in self._listeners:
            listener()

    @contextmanager
    def waiting(self, step: int, reader: Reader) -> Iterator[None]:
        """Keeps a snapshot of this step for a reader if it is put here inside, until the lease after the end.

        If it comes after the end, it is kept for a lease as long as the reader might have had one: receivers ask again.
        """
        with self._lock:
            self._awaited.begin(step, reader, now_s=self.clock())
        try:
            yield
        finally:
            with self._lock:
                until_s = self.clock() + self.lease_s
                self._awaited.end(reader, until_s=until_s)
                for entry in self._entries:
                    _, leased_s = entry.leases.get(reader.is_closed, (reader, 0.0))
                    if leased_s == math.inf:
                        entry.leases[reader.is_closed] = reader, until_s

    def note_failure(self, reason: str, *, is_final: bool = False) -> None:
        """Keeps why no snapshot has come, until one does. A final reason wakes the listeners."""
        with self._lock:
            self._failure = reason
            if is_final:
                self._num_final_failures += 1
                self._final_failure_s = self.clock()
        if is_final:
            for listener in self._listeners:
                listener()

    def num_final_failures(self) -> int:
        """How many attempts at a snapshot have failed for a reason that stays."""
        with self._lock:
            return self._num_final_failures

    def has_failed_finally(self, within_s: float) -> bool:
        """Whether the last attempt at a snapshot failed for a reason that stays, not longer than ``within_s`` ago."""
        with self._lock:
            return self._final_failure_s is not None and self.clock() - self._final_failure_s < within_s

    def failure(self) -> str | None:
        """Why the last attempt at a snapshot failed, ``None`` if it did not."""
        with self._lock:
            return self._failure

    def newest_sequence(self) -> int:
        """Number of the newest snapshot ever put here, 0 before the first; grows with each one."""
        with self._lock:
            return self._sequence

    def newest_step(self) -> int | None:
        """Step of the newest snapshot."""
        with self._lock:
            return self._entries[-1].snapshot.step if self._entries else None

    def steps(self) -> tuple[int, ...]:
        """The steps that are served, oldest first."""
        with self._lock:
            return tuple(entry.snapshot.step for entry in self._entries)

    def alive(self) -> list[tuple[int, int, int]]:
        """Step, size in bytes and number of readers of each that is in memory, oldest first."""
        with self._lock:
            return [
                (entry.snapshot.step, entry.snapshot.total_bytes, entry.num_readers)
                for entry in sorted((*self._leaving, *self._entries), key=lambda entry: entry.sequence)
            ]

    def num_readers(self) -> int:
        """Requests that are reading at this moment."""
        with self._lock:
            return sum(entry.num_readers for entry in (*self._entries, *self._leaving))

    def num_alive(self) -> int:
        """Snapshots that take memory, those that are being made or only read among them."""
        with self._lock:
            return len(self._entries) + len(self._leaving) + self._reserved.num_taken()

    def newest(self) -> Snapshot | None:
        """The newest snapshot, without reading it."""
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
        """Begins reading the newest snapshot that fits, or returns ``None`` if none does.

        Args:
            step: A step, or ``latest``.
            snapshot_id: Only this snapshot.
            after_sequence: Only snapshots newer than this number.
            reader: Who reads; one of this process if not given.
        """
        with self._lock:
            entry = self._newest(step, snapshot_id, after_sequence)
            if entry is None:
                return None
            self._forget_past_want(entry)
            who = reader or Reader()
            entry.readers.append(who)
            entry.was_read = True
        return Reading(entry.snapshot, entry.manifest_digest, self, entry, who)

    def _newest(self, step: StepSelector, snapshot_id: SnapshotId | None, after_sequence: int) -> _Entry | None:
        for entry in reversed(self._entries):
            if (
                (step in (LATEST, entry.snapshot.step))
                and (snapshot_id is None or entry.snapshot.snapshot_id == snapshot_id)
                and entry.sequence > after_sequence
            ):
                return entry
        return None

    def retire(self, snapshot_id: SnapshotId, *, even_if_needed: bool) -> None:
        """Takes a snapshot off the cache, and older ones of the same step; they are freed after their last readers.

        Args:
            snapshot_id: Which; nothing happens if it is not there.
            even_if_needed: Also if it is being read, or may still be: somebody has asked for it, and has not begun.
        """
        with self._lock:
            entry = next((entry for entry in self._entries if entry.snapshot.snapshot_id == snapshot_id), None)
            if entry is None:
                return
            is_needed = not entry.was_read or bool(entry.num_readers) or self._is_leased(entry)
            if is_needed and not even_if_needed:
                return
            # An older one of this step shows another attempt at it, and was never to be served again.
            leaving = [
                each
                for each in self._entries
                if each.snapshot.step == entry.snapshot.step and each.sequence <= entry.sequence
            ]
            for each in leaving:
                self._entries.remove(each)
                each.retired = bool(each.num_readers)
            self._leaving.extend(each for each in leaving if each.retired)
            idle = [each for each in leaving if not each.retired]
        for each in idle:
            each.snapshot.close()

    def holds_newer(self, sequence: int) -> bool:
        """Whether a snapshot with a higher number is here."""
        with self._lock:
            return bool(self._entries) and self._entries[-1].sequence > sequence

    def clear(self) -> None:
        """Retires everything for good; what is being read is freed when its readers are done."""
        with self._lock:
            self._closed = True
            entries, self._entries = self._entries, []
            busy = [entry for entry in entries if entry.num_readers]
            for entry in busy:
                entry.retired = True
            self._leaving.extend(busy)
        for entry in entries:
            if entry not in busy:
                entry.snapshot.close()

    def _hold_s(self, entry: _Entry) -> float:
        """How long receivers may go on with a snapshot whose memory is wanted."""
        return self.lease_s + entry.snapshot.total_bytes / self.contended_bytes_per_s

    def _want_oldest(self) -> list[Callable[[], None]]:
        """Notes that the oldest snapshot is in the way; returns what cuts its receivers off when its time is over."""
        now_s = self.clock()
        alive = sorted((*self._leaving, *self._entries), key=lambda entry: entry.sequence)
        if any(entry.cut_off for entry in alive):
            return []
        for entry in alive:
            readers = [*entry.readers, *(reader for reader, _ in entry.leases.values())]
            if any(reader.cut_off is None for reader in readers):
                continue
            if entry.wanted_since_s is None:
                entry.wanted_since_s = now_s
            entry.wanted_at_s = now_s
            if now_s - entry.wanted_since_s < self._hold_s(entry):
                return []
            return self._take_away(entry)
        return []

    def _take_away(self, entry: _Entry) -> list[Callable[[], None]]:
        entry.cut_off = True
        if not entry.retired:
            self._entries.remove(entry)
            entry.retired = True
            self._leaving.append(entry)
        leases, entry.leases = entry.leases, {}
        cut_offs: list[Callable[[], None]] = [functools.partial(_cut_off, each, _nothing) for each in entry.readers]
        for reader, _until_s in leases.values():
            # What was sent to it may be on its way still: it counts as reading until that can't reach it any more.
            entry.readers.append(reader)
            ended = functools.partial(self._end_reading, entry, reader, None)
            cut_offs.append(functools.partial(_cut_off, reader, ended))
        return cut_offs

    def _forget_past_want(self, entry: _Entry) -> None:
        """Whoever begins to read what nobody has held for a while, or wanted, has all of its time before him."""
        if entry.wanted_since_s is None or entry.readers or self._is_leased(entry):
            return
        if self.clock() - entry.wanted_at_s > self._hold_s(entry):
            entry.wanted_since_s = None

    def _is_leased(self, entry: _Entry) -> bool:
        now_s = self.clock()
        entry.leases = {
            is_closed: (reader, until_s)
            for is_closed, (reader, until_s) in entry.leases.items()
            if until_s > now_s and not is_closed()
        }
        return bool(entry.leases)

    def _end_reading(self, entry: _Entry, reader: Reader, unread_s: float | None) -> None:
        with self._lock:
            entry.readers.remove(reader)
            self._is_leased(entry)  # forgets those that ended
            if unread_s is not None and not entry.cut_off:
                until_s = self.clock() + max(self.lease_s, unread_s)
                _, earlier_s = entry.leases.get(reader.is_closed, (reader, 0.0))
                entry.leases[reader.is_closed] = reader, max(until_s, earlier_s)
            closing = entry.retired and not entry.readers
            if closing:
                self._leaving.remove(entry)
        if closing:
            entry.snapshot.close()


def _cut_off(reader: Reader, ended: Callable[[], None]) -> None:
    assert reader.cut_off is not None, "a reader of this process is never cut off"
    reader.cut_off(ended)


def _nothing() -> None:
    pass
