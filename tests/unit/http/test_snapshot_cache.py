"""How long a snapshot stays, who keeps it there, and when its memory goes back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from served_memory import MemorySnapshot

from ft_transport.errors import SnapshotLimitError
from ft_transport.http.snapshot_cache import Shelf
from ft_transport.wire.integrity import digest
from ft_transport.wire.manifest import SnapshotId

LEASE_S = 5.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Connection:
    def __init__(self) -> None:
        self.closed = False

    def is_closed(self) -> bool:
        return self.closed


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def shelf(clock: Clock) -> Iterator[Shelf]:
    made = Shelf(max_snapshots=2, lease_s=LEASE_S, clock=clock)
    yield made
    made.clear()


def put(shelf: Shelf, step: int) -> MemorySnapshot:
    shelf.reserve()
    snapshot = MemorySnapshot(step, b"state")
    shelf.put(snapshot)
    return snapshot


def read_once(shelf: Shelf, step: int, connection: Connection | None = None, *, unread_s: float = 0.0) -> None:
    reading = shelf.read(step, is_closed=(connection or Connection()).is_closed)
    assert reading is not None
    with reading:
        reading.unread_s = unread_s


def test_the_oldest_that_nobody_reads_makes_room(shelf: Shelf) -> None:
    first, second = put(shelf, 1), put(shelf, 2)
    third = put(shelf, 3)

    assert (first.closed.is_set(), second.closed.is_set(), third.closed.is_set()) == (True, False, False)
    assert shelf.steps() == (2, 3)
    assert shelf.newest_step() == 3
    assert shelf.newest() is third
    assert shelf.newest_sequence() == 3


def test_one_that_is_read_stays_and_the_next_oldest_goes(shelf: Shelf) -> None:
    first, second = put(shelf, 1), put(shelf, 2)
    reading = shelf.read(1)
    assert reading is not None
    with reading:
        put(shelf, 3)
        assert (first.closed.is_set(), second.closed.is_set()) == (False, True)
        assert shelf.num_readers() == 1
    assert shelf.num_readers() == 0


def test_the_limit_counts_what_is_read_and_what_is_reserved(shelf: Shelf) -> None:
    put(shelf, 1)
    put(shelf, 2)
    readings = [shelf.read(1), shelf.read(2), shelf.read(2)]
    with pytest.raises(SnapshotLimitError, match=r"at most 2 .* steps \[1, 2\] .*3 requests"):
        shelf.reserve()
    for reading in readings:
        assert reading is not None
        reading.__exit__()


def test_reserved_places_count_and_come_back(shelf: Shelf) -> None:
    shelf.reserve()
    shelf.reserve()
    with pytest.raises(SnapshotLimitError):
        shelf.reserve()
    shelf.cancel_reservation()
    shelf.reserve()
    shelf.cancel_reservation()
    shelf.cancel_reservation()
    assert shelf.steps() == ()


def test_a_refused_reservation_takes_no_place(shelf: Shelf) -> None:
    put(shelf, 1)
    put(shelf, 2)
    readings = [shelf.read(1), shelf.read(2)]
    for _ in range(3):
        with pytest.raises(SnapshotLimitError):
            shelf.reserve()
    for reading in readings:
        assert reading is not None
        reading.__exit__()
    assert shelf.steps() == (1, 2)


def test_a_lease_lasts_its_time(shelf: Shelf, clock: Clock) -> None:
    first, second = put(shelf, 1), put(shelf, 2)
    read_once(shelf, 1)
    read_once(shelf, 2)
    clock.now_s += LEASE_S - 0.001
    with pytest.raises(SnapshotLimitError):
        shelf.reserve()
    clock.now_s += 0.001
    put(shelf, 3)
    assert (first.closed.is_set(), second.closed.is_set()) == (True, False)


def test_a_lease_ends_with_its_connection(shelf: Shelf) -> None:
    put(shelf, 1)
    second = put(shelf, 2)
    connections = [Connection(), Connection()]
    read_once(shelf, 1, connections[0])
    read_once(shelf, 2, connections[0])
    read_once(shelf, 2, connections[1])
    connections[1].closed = True
    with pytest.raises(SnapshotLimitError):
        shelf.reserve()
    connections[0].closed = True
    put(shelf, 3)
    assert not second.closed.is_set()


def test_each_request_renews_the_lease(shelf: Shelf, clock: Clock) -> None:
    put(shelf, 1)
    put(shelf, 2)
    connection = Connection()
    read_once(shelf, 1, connection)
    read_once(shelf, 2, connection)
    clock.now_s += LEASE_S - 1
    read_once(shelf, 1, connection)
    clock.now_s += LEASE_S - 1
    put(shelf, 3)
    assert shelf.steps() == (1, 3)


def test_what_may_still_be_on_its_way_outlasts_the_lease(shelf: Shelf, clock: Clock) -> None:
    put(shelf, 1)
    put(shelf, 2)
    connection = Connection()
    read_once(shelf, 1, connection, unread_s=30)
    read_once(shelf, 1, connection)  # A short answer afterwards does not take that back.
    clock.now_s += 29
    put(shelf, 3)
    assert shelf.steps() == (1, 3)
    clock.now_s += 1
    put(shelf, 4)
    assert shelf.steps() == (3, 4)


def test_reading_finds_the_newest_that_fits(shelf: Shelf) -> None:
    first, second = put(shelf, 7), put(shelf, 7)

    def found(step: int | str, **options: object) -> MemorySnapshot | None:
        reading = shelf.read(step, **options)  # type: ignore[arg-type]
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


def test_clear_frees_what_is_idle_now_and_the_rest_with_its_last_reader(shelf: Shelf) -> None:
    idle, busy = put(shelf, 1), put(shelf, 2)
    readings = [shelf.read(2), shelf.read(2)]
    shelf.clear()
    assert (idle.closed.is_set(), busy.closed.is_set()) == (True, False)
    assert shelf.read(2) is None
    for reading, closed in zip(readings, (False, True), strict=True):
        assert reading is not None
        reading.__exit__()
        assert busy.closed.is_set() is closed
    shelf.clear()


def test_a_lease_does_not_outlive_clear(shelf: Shelf) -> None:
    snapshot = put(shelf, 1)
    read_once(shelf, 1, unread_s=100)
    shelf.clear()
    assert snapshot.closed.is_set()


def test_listeners_hear_of_each_arrival_after_it_can_be_read(shelf: Shelf) -> None:
    heard: list[int | None] = []
    shelf.listen(lambda: heard.append(shelf.newest_step()))
    put(shelf, 1)
    put(shelf, 2)
    assert heard == [1, 2]


def test_what_was_read_and_is_not_needed_any_more_can_be_retired(shelf: Shelf, clock: Clock) -> None:
    snapshot = put(shelf, 1)

    def is_retired() -> bool:
        shelf.retire(snapshot.snapshot_id, even_if_needed=False)
        return not shelf.steps()

    assert not is_retired(), "somebody may have asked for it"
    reading = shelf.read(1)
    assert reading is not None
    assert not is_retired(), "somebody reads it"
    with reading:
        pass
    assert not is_retired(), "it is leased"
    clock.now_s += LEASE_S + 1
    assert is_retired()
    assert snapshot.closed.is_set()
    assert is_retired(), "it is gone"


def test_what_is_retired_although_it_is_read_is_freed_by_its_last_reader(shelf: Shelf) -> None:
    snapshot = put(shelf, 1)
    reading = shelf.read(1)
    assert reading is not None
    shelf.retire(snapshot.snapshot_id, even_if_needed=True)
    assert shelf.read(1) is None
    assert not snapshot.closed.is_set()
    with reading:
        pass
    assert snapshot.closed.is_set()


def test_who_retires_a_snapshot_uncovers_no_older_one_of_its_step(shelf: Shelf) -> None:
    older, newer = put(shelf, 1), put(shelf, 1)
    shelf.retire(newer.snapshot_id, even_if_needed=True)
    assert shelf.steps() == ()
    assert older.closed.is_set()
    assert not shelf.holds_newer(0), "it was published, and is not here any more"
    put(shelf, 2)
    assert shelf.holds_newer(2)
    assert not shelf.holds_newer(3)
