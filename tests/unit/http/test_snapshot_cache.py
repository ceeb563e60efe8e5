"""How long a snapshot stays, who keeps it there, and when its memory goes back."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from clocks import Clock
from interruptions import at_every_place
from served_memory import MemorySnapshot

from ft_transport.errors import SnapshotError, SnapshotLimitError
from ft_transport.http.server.snapshot_cache import Reader, Reading, SnapshotCache
from ft_transport.wire.chunks import digest
from ft_transport.wire.manifest import SnapshotId

LEASE_S = 5.0
RATE = 10.0
AT_ONCE_S = 5.0


class Connection:
    def __init__(self) -> None:
        self.closed = False

    def is_closed(self) -> bool:
        return self.closed


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(clock: Clock) -> Iterator[SnapshotCache]:
    made = SnapshotCache(max_snapshots=2, lease_s=LEASE_S, contended_bytes_per_s=RATE, clock=clock)
    yield made
    made.clear()


def put(cache: SnapshotCache, step: int) -> MemorySnapshot:
    place = cache.reserve()
    snapshot = MemorySnapshot(step, b"state")
    cache.put(snapshot, place)
    return snapshot


def reading_of(cache: SnapshotCache, step: int, reader: Reader | None = None) -> Reading:
    reading = cache.read(step, reader=reader)
    assert reading is not None
    return reading


def read_once(cache: SnapshotCache, step: int, connection: Connection | None = None, *, unread_s: float = 0.0) -> None:
    reading = reading_of(cache, step, Reader((connection or Connection()).is_closed))
    reading.unread_s = unread_s
    reading.__exit__()


def test_the_oldest_that_nobody_reads_makes_room(cache: SnapshotCache) -> None:
    first, second, third = (put(cache, step) for step in (1, 2, 3))
    assert (first.closed.is_set(), second.closed.is_set(), third.closed.is_set()) == (True, False, False)
    assert cache.steps() == (2, 3)
    assert cache.newest_step() == 3
    assert cache.newest() is third
    assert cache.newest_sequence() == 3
    with reading_of(cache, 2):
        put(cache, 4)
        assert cache.steps() == (2, 4)
        assert cache.num_readers() == 1
    assert cache.num_readers() == 0


def test_the_limit_counts_what_is_read_and_what_is_reserved(cache: SnapshotCache) -> None:
    put(cache, 1)
    put(cache, 2)
    assert not cache.is_full()
    readings = [reading_of(cache, step) for step in (1, 2, 2)]
    for _ in range(3):
        with pytest.raises(SnapshotLimitError, match=r"at most 2 .* steps \[1, 2\] .*3 requests"):
            cache.reserve()
    assert cache.is_full()
    for reading in readings:
        reading.__exit__()
    assert cache.steps() == (1, 2)


def test_a_refusal_that_is_kept_with_its_traceback_keeps_no_snapshot_alive(cache: SnapshotCache) -> None:
    snapshots = [weakref.ref(put(cache, step)) for step in (1, 2)]
    readings = [reading_of(cache, step) for step in (1, 2)]
    with pytest.raises(SnapshotLimitError) as caught:
        cache.reserve()
    for reading in readings:
        reading.__exit__()
    del readings, reading
    cache.clear()
    assert [snapshot() for snapshot in snapshots] == [None, None]
    assert caught.value.__traceback__ is not None


def test_reserved_places_count_and_come_back(cache: SnapshotCache) -> None:
    places = [cache.reserve(), cache.reserve()]
    with pytest.raises(SnapshotLimitError):
        cache.reserve()
    places.pop().give_back()
    places.append(cache.reserve())
    with pytest.raises(SnapshotLimitError):
        cache.reserve()
    # One that an exception drops counts no more either.
    del places[0]
    assert cache.num_alive() == 1
    places[0].give_back()
    assert cache.num_alive() == 0
    assert cache.steps() == ()


def test_a_lease_lasts_its_time(cache: SnapshotCache, clock: Clock) -> None:
    first, second = put(cache, 1), put(cache, 2)
    read_once(cache, 1)
    read_once(cache, 2)
    clock.now_s += LEASE_S - 0.001
    with pytest.raises(SnapshotLimitError):
        cache.reserve()
    clock.now_s += 0.001
    put(cache, 3)
    assert (first.closed.is_set(), second.closed.is_set()) == (True, False)


def test_a_lease_ends_with_its_connection(cache: SnapshotCache) -> None:
    put(cache, 1)
    second = put(cache, 2)
    connections = [Connection(), Connection()]
    read_once(cache, 1, connections[0])
    read_once(cache, 2, connections[0])
    read_once(cache, 2, connections[1])
    connections[1].closed = True
    with pytest.raises(SnapshotLimitError):
        cache.reserve()
    connections[0].closed = True
    put(cache, 3)
    assert not second.closed.is_set()


def test_one_that_was_waited_for_is_kept_until_the_lease_after_the_wait(cache: SnapshotCache, clock: Clock) -> None:
    with cache.waiting(2, Reader(Connection().is_closed)):
        awaited = put(cache, 2)
        clock.now_s += 10 * LEASE_S
        for step in (3, 4):
            put(cache, step)
    clock.now_s += LEASE_S / 2
    put(cache, 5)
    assert not awaited.closed.is_set()
    clock.now_s += LEASE_S
    put(cache, 6)
    assert awaited.closed.is_set()


@pytest.mark.parametrize(("late_s", "is_open", "is_kept"), [(0.5, True, True), (1.5, True, False), (0.5, False, False)])
def test_who_has_waited_may_ask_once_more(
    cache: SnapshotCache, clock: Clock, late_s: float, is_open: bool, is_kept: bool
) -> None:
    connection = Connection()
    with cache.waiting(2, Reader(connection.is_closed)):
        put(cache, 1)
    clock.now_s += late_s * LEASE_S
    connection.closed = not is_open
    awaited = put(cache, 2)
    for step in (3, 4):
        put(cache, step)
    assert awaited.closed.is_set() != is_kept


def test_each_request_renews_the_lease(cache: SnapshotCache, clock: Clock) -> None:
    put(cache, 1)
    put(cache, 2)
    connection = Connection()
    read_once(cache, 1, connection)
    read_once(cache, 2, connection)
    clock.now_s += LEASE_S - 1
    read_once(cache, 1, connection)
    clock.now_s += LEASE_S - 1
    put(cache, 3)
    assert cache.steps() == (1, 3)


def test_what_may_still_be_on_its_way_outlasts_the_lease(cache: SnapshotCache, clock: Clock) -> None:
    put(cache, 1)
    put(cache, 2)
    connection = Connection()
    read_once(cache, 1, connection, unread_s=30)
    read_once(cache, 1, connection)  # A short answer afterwards does not take that back.
    clock.now_s += 29
    put(cache, 3)
    assert cache.steps() == (1, 3)
    clock.now_s += 1
    put(cache, 4)
    assert cache.steps() == (3, 4)


def test_reading_finds_the_newest_that_fits(cache: SnapshotCache) -> None:
    first, second = put(cache, 7), put(cache, 7)

    def found(step: int | str, **options: object) -> MemorySnapshot | None:
        reading = cache.read(step, **options)  # type: ignore[arg-type]
        if reading is None:
            return None
        with reading as snapshot:
            assert reading.manifest_digest == digest(snapshot.header[8:])
            assert isinstance(snapshot, MemorySnapshot)
            return snapshot

    assert found(7) is second
    assert found("latest") is second
    assert found(7, snapshot_id=first.snapshot_id) is first
    assert found(8) is None
    assert found(8, snapshot_id=first.snapshot_id) is None
    assert found(7, snapshot_id=SnapshotId("0" * 32)) is None
    assert found("latest", after_sequence=1) is second
    assert found("latest", after_sequence=2) is None


def test_clear_frees_what_is_idle_now_and_the_rest_with_its_last_reader(cache: SnapshotCache) -> None:
    idle, busy = put(cache, 1), put(cache, 2)
    read_once(cache, 1, unread_s=100)  # A lease does not outlive it.
    readings = [reading_of(cache, 2), reading_of(cache, 2)]
    cache.clear()
    assert (idle.closed.is_set(), busy.closed.is_set()) == (True, False)
    assert cache.read(2) is None
    for reading, closed in zip(readings, (False, True), strict=True):
        reading.__exit__()
        assert busy.closed.is_set() is closed
    cache.clear()


def test_a_snapshot_that_is_finished_after_clear_is_freed(cache: SnapshotCache) -> None:
    place = cache.reserve()
    cache.clear()
    snapshot = MemorySnapshot(5, b"late")
    cache.put(snapshot, place)
    assert snapshot.closed.is_set()
    with pytest.raises(SnapshotError, match="shut down"):
        cache.reserve()


def test_what_was_read_and_is_not_needed_any_more_can_be_retired(cache: SnapshotCache, clock: Clock) -> None:
    snapshot = put(cache, 1)

    def is_retired() -> bool:
        cache.retire(snapshot.snapshot_id, even_if_needed=False)
        return not cache.steps()

    assert not is_retired(), "somebody may have asked for it"
    with reading_of(cache, 1):
        assert not is_retired(), "somebody reads it"
    assert not is_retired(), "it is leased"
    clock.now_s += LEASE_S + 1
    assert is_retired()
    assert snapshot.closed.is_set()
    assert is_retired(), "it is gone"


def test_what_is_retired_although_it_is_read_is_freed_by_its_last_reader(cache: SnapshotCache) -> None:
    snapshot = put(cache, 1)
    with reading_of(cache, 1):
        cache.retire(snapshot.snapshot_id, even_if_needed=True)
        assert cache.read(1) is None
        assert not snapshot.closed.is_set()
    assert snapshot.closed.is_set()


def test_who_retires_a_snapshot_uncovers_no_older_one_of_its_step(cache: SnapshotCache) -> None:
    older, newer = put(cache, 1), put(cache, 1)
    cache.retire(newer.snapshot_id, even_if_needed=True)
    assert cache.steps() == ()
    assert older.closed.is_set()
    assert not cache.holds_newer(0), "it was published, and is not here any more"
    put(cache, 2)
    assert cache.holds_newer(2)
    assert not cache.holds_newer(3)


class Receiver:
    """A connection that the cache may cut off; it is gone when the test says so."""

    def __init__(self) -> None:
        self.ends: list[Callable[[], None]] = []
        self.reader = Reader(lambda: False, self.ends.append)


@pytest.fixture
def begin(cache: SnapshotCache) -> Iterator[Callable[..., Reading]]:
    """Begins a reading that ends with the test."""
    with ExitStack() as stack:

        def begin(step: int, reader: Reader | None = None) -> Reading:
            reading = reading_of(cache, step, reader)
            stack.enter_context(reading)
            return reading

        yield begin


Begin = Callable[..., Reading]


def test_who_holds_what_a_newer_one_wants_has_as_long_as_its_bytes_take(
    cache: SnapshotCache, clock: Clock, begin: Begin
) -> None:
    first, second = put(cache, 1), put(cache, 2)
    receiver, other = Receiver(), Receiver()
    reading = reading_of(cache, 1, receiver.reader)
    begin(2, other.reader)
    clock.now_s += 1e6  # For as long as it likes, while nobody wants the place.
    with pytest.raises(SnapshotLimitError):
        cache.reserve()
    clock.now_s += LEASE_S + first.total_bytes / RATE - 0.001
    with pytest.raises(SnapshotLimitError):
        cache.reserve()
    assert receiver.ends == []
    clock.now_s += 0.001
    with pytest.raises(SnapshotLimitError):
        cache.reserve()
    assert (len(receiver.ends), len(other.ends)) == (1, 0), "the next one has its own time"
    assert cache.read(1) is None
    assert not first.closed.is_set(), "its receiver may still be sent some of it"
    receiver.ends[0]()
    reading.__exit__()
    assert first.closed.is_set()
    put(cache, 3)
    assert not second.closed.is_set()
    assert cache.steps() == (2, 3)


def test_a_lease_that_is_renewed_for_ever_ends_with_its_connection(cache: SnapshotCache, clock: Clock) -> None:
    first = put(cache, 1)
    put(cache, 2)
    receiver, waited_s = Receiver(), 0.0
    while not receiver.ends:
        for step in (1, 2):
            reading = cache.read(step, reader=receiver.reader)
            if reading is not None:
                reading.__exit__()
        with pytest.raises(SnapshotLimitError):
            cache.reserve()
        clock.now_s += LEASE_S / 2
        waited_s += LEASE_S / 2
        assert waited_s <= 2 * LEASE_S + first.total_bytes / RATE
    assert not first.closed.is_set()
    receiver.ends[0]()
    assert first.closed.is_set()
    put(cache, 3)


def test_one_who_asks_what_there_is_holds_nothing(cache: SnapshotCache) -> None:
    put(cache, 1)
    put(cache, 2)
    for step in (1, 2):
        reading = reading_of(cache, step, Receiver().reader)
        reading.is_leasing = False
        reading.__exit__()
    put(cache, 3)


def test_a_reader_of_this_process_is_never_cut_off(cache: SnapshotCache, clock: Clock, begin: Begin) -> None:
    first = put(cache, 1)
    put(cache, 2)
    receiver, other = Receiver(), Receiver()
    begin(1)
    begin(1, receiver.reader)
    begin(2, other.reader)
    for _ in range(2):
        with pytest.raises(SnapshotLimitError):
            cache.reserve()
        clock.now_s += 1e6
    assert (len(receiver.ends), len(other.ends)) == (0, 1)
    assert not first.closed.is_set()
    other.ends[0]()


def test_a_new_receiver_has_its_whole_time_after_a_pause(cache: SnapshotCache, clock: Clock, begin: Begin) -> None:
    put(cache, 1)
    put(cache, 2)
    for step in (1, 2):
        read_once(cache, step)
    with pytest.raises(SnapshotLimitError):
        cache.reserve()
    clock.now_s += 1e6
    late, other = Receiver(), Receiver()
    begin(1, late.reader)
    begin(2, other.reader)
    with pytest.raises(SnapshotLimitError):
        cache.reserve()
    assert late.ends == []


def test_a_handler_that_raises_while_a_reader_looks_for_its_snapshot_leaves_the_cache_open() -> None:
    put_there: list[MemorySnapshot] = []

    def made() -> SnapshotCache:
        cache = SnapshotCache(max_snapshots=2, lease_s=LEASE_S, contended_bytes_per_s=RATE, clock=Clock())
        put_there.extend((put(cache, 1), put(cache, 2)))
        return cache

    caches = [made()]

    def still_there() -> None:
        cache = caches.pop()
        waiting = threading.Thread(target=cache.clear, daemon=True)
        waiting.start()
        waiting.join(AT_ONCE_S)
        assert not waiting.is_alive()
        caches.append(made())

    at_every_place(lambda: caches[0].read(1), still_there, at_least=5)
    caches[0].clear()
    for each in put_there:
        # An interrupted reader may hold it.
        if not each.closed.is_set():
            each.close()
