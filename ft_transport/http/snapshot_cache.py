"""The snapshots that are being served, and who still reads them.

A snapshot leaves the cache when a new one needs its place. One that is being read keeps its memory until the last
reader is done. A fetch consists of several requests, so each request also keeps its snapshot on the cache for a
moment after it ended (the lease), as long as its connection is open; otherwise a trainer that publishes every step
would replace a snapshot between two requests of the same fetch.

The lease also guards what is on its way: ``sendfile`` gives the kernel the pages of the memory file and no copy of
them, so a new snapshot in the same memory would change bytes that were sent but that the receiver has not read yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ft_transport.errors import SnapshotError, SnapshotLimitError
from ft_transport.wire.chunks import digest
from ft_transport.wire.manifest import SnapshotId
from ft_transport.wire.routes import LATEST, StepSelector
from ft_transport.wire.served import Snapshot


@dataclass(slots=True, eq=False)
class _Entry:
    snapshot: Snapshot
    sequence: int
    manifest_digest: int
    num_readers: int = 0
    was_read: bool = False
    leased_until_s: dict[Callable[[], bool], float] = field(default_factory=dict)
    retired: bool = False


@dataclass(slots=True, eq=False)
class Reading:
    """One request that reads a snapshot; a context manager that ends the reading.

    Attributes:
        snapshot: What is read.
        manifest_digest: Digest of its JSON header.
        unread_s: How long after the end some of it may still be on its way to the receiver, in seconds.
    """

    snapshot: Snapshot
    manifest_digest: int
    _cache: SnapshotCache
    _entry: _Entry
    _is_closed: Callable[[], bool]
    unread_s: float = 0.0

    def __enter__(self) -> Snapshot:
        return self.snapshot

    def __exit__(self, *_exc_info: object) -> None:
        self._cache._end_reading(self._entry, self._is_closed, self.unread_s)


@dataclass(slots=True, eq=False)
class SnapshotCache:
    """Holds at most ``max_snapshots``, the reserved places included. Thread-safe.

    Attributes:
        max_snapshots: How many snapshots may be alive at once.
        lease_s: How long after its last request a snapshot counts as still being fetched, in seconds.
        clock: Monotonic seconds.
    """

    max_snapshots: int
    lease_s: float
    clock: Callable[[], float]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _entries: list[_Entry] = field(default_factory=list)
    _leaving: list[_Entry] = field(default_factory=list)
    _num_reserved: int = 0
    _sequence: int = 0
    _failure: str | None = None
    _closed: bool = False
    _listeners: list[Callable[[], None]] = field(default_factory=list)

    def listen(self, on_change: Callable[[], None]) -> None:
        """Calls ``on_change`` after every arrival, on the thread that brought it. Set up before the first one."""
        self._listeners.append(on_change)

    def reserve(self) -> None:
        """Makes sure that one more snapshot may be taken, retiring the oldest one that nobody reads if need be.

        Raises:
            SnapshotLimitError: All places are taken by snapshots that are being read.
            SnapshotError: The cache was cleared for good.
        """
        to_close: list[_Entry] = []
        with self._lock:
            if self._closed:
                raise SnapshotError("expected a transport that serves, and this one was shut down")
            alive = len(self._entries) + len(self._leaving) + self._num_reserved
            if alive >= self.max_snapshots:
                idle = [entry for entry in self._entries if not entry.num_readers and not self._is_leased(entry)]
                if not idle:
                    readers = sum(entry.num_readers for entry in (*self._entries, *self._leaving))
                    raise SnapshotLimitError(
                        f"expected at most {self.max_snapshots} snapshots alive at once (max_snapshots): those of "
                        f"steps {[entry.snapshot.step for entry in (*self._entries, *self._leaving)]} are still being "
                        f"fetched ({readers} requests under way); it passes when they end, or raise max_snapshots"
                    )
                self._entries.remove(idle[0])
                to_close.append(idle[0])
            self._num_reserved += 1
        for entry in to_close:
            entry.snapshot.close()

    def cancel_reservation(self) -> None:
        """Gives a reserved place back without a snapshot."""
        with self._lock:
            self._num_reserved -= 1

    def put(self, snapshot: Snapshot) -> None:
        """Puts a snapshot on the reserved place and tells the listeners. The cache owns it from now on.

        After ``clear`` it is freed at once: a shutdown may overtake a snapshot that is still being copied.
        """
        manifest_digest = digest(memoryview(snapshot.header)[8:])
        with self._lock:
            self._num_reserved -= 1
            closed = self._closed
            if not closed:
                self._sequence += 1
                self._failure = None
                self._entries.append(_Entry(snapshot, self._sequence, manifest_digest))
        if closed:
            snapshot.close()
            return
        for listener in self._listeners:
            listener()

    def note_failure(self, reason: str) -> None:
        """Keeps why no snapshot has come, until one does."""
        with self._lock:
            self._failure = reason

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

    def num_readers(self) -> int:
        """Requests that are reading at this moment."""
        with self._lock:
            return sum(entry.num_readers for entry in (*self._entries, *self._leaving))

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
        is_closed: Callable[[], bool] = lambda: False,
    ) -> Reading | None:
        """Begins reading the newest snapshot that fits, or returns ``None`` if none does.

        Args:
            step: A step, or ``latest``.
            snapshot_id: Only this snapshot.
            after_sequence: Only snapshots newer than this number.
            is_closed: Whether the reader's connection is; its lease ends with that. Names the reader too: one lease
                for each distinct function. Any thread may call it.
        """
        with self._lock:
            for entry in reversed(self._entries):
                snapshot = entry.snapshot
                if (
                    (step in (LATEST, snapshot.step))
                    and (snapshot_id is None or snapshot.snapshot_id == snapshot_id)
                    and entry.sequence > after_sequence
                ):
                    entry.num_readers += 1
                    entry.was_read = True
                    return Reading(snapshot, entry.manifest_digest, self, entry, is_closed)
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

    def _is_leased(self, entry: _Entry) -> bool:
        now_s = self.clock()
        entry.leased_until_s = {
            is_closed: until_s
            for is_closed, until_s in entry.leased_until_s.items()
            if until_s > now_s and not is_closed()
        }
        return bool(entry.leased_until_s)

    def _end_reading(self, entry: _Entry, is_closed: Callable[[], bool], unread_s: float) -> None:
        with self._lock:
            entry.num_readers -= 1
            self._is_leased(entry)  # forgets those that ended
            until_s = self.clock() + max(self.lease_s, unread_s)
            entry.leased_until_s[is_closed] = max(until_s, entry.leased_until_s.get(is_closed, 0.0))
            closing = entry.retired and not entry.num_readers
            if closing:
                self._leaving.remove(entry)
        if closing:
            entry.snapshot.close()
