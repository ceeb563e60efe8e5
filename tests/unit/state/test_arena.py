"""Arenas: reused, never while somebody reads, never more than allowed, and gone when closed."""

from __future__ import annotations

import errno
import mmap
import os
import sys
import threading
import time

import pytest

from ft_transport.errors import SnapshotError
from ft_transport.state import arena as module
from ft_transport.state import prefaulted
from ft_transport.state.arena import HEADER_ROOM_BYTES, Arena, ArenaPool


@pytest.mark.skipif(sys.platform != "linux", reason="seals are Linux's")
def test_who_has_the_descriptor_can_read_and_nothing_else() -> None:
    pool = ArenaPool(1)
    arena = pool.take(10)
    for change in (
        lambda: os.pwrite(arena.descriptor, b"x", HEADER_ROOM_BYTES),
        lambda: os.ftruncate(arena.descriptor, 0),
        lambda: os.ftruncate(arena.descriptor, 1 << 30),
        lambda: mmap.mmap(arena.descriptor, mmap.PAGESIZE),
    ):
        with pytest.raises(PermissionError):
            change()
    # Its holder goes on writing.
    arena.data[:2] = 7
    assert bytes(arena.view[:2]) == b"\7\7"
    assert os.pread(arena.descriptor, 8, arena.write_header(b"header")) == b"header\7\7"
    pool.give_back(arena)
    pool.close()


def test_the_room_for_the_header_takes_no_memory() -> None:
    pool = ArenaPool(1)
    arena = pool.take(1)
    status = os.fstat(arena.descriptor)
    assert status.st_size >= HEADER_ROOM_BYTES
    assert status.st_blocks * 512 < 1 << 20
    pool.give_back(arena)
    pool.close()


def test_an_arena_that_came_back_is_used_again() -> None:
    pool = ArenaPool(2)
    first = pool.take(5000)
    assert first.capacity_bytes >= 5000
    pool.give_back(first)
    assert pool.take(100) is first
    second = pool.take(100)
    assert second is not first
    pool.give_back(first)
    pool.give_back(second)
    # The smallest that fits.
    assert pool.take(100) is second
    assert pool.take(100) is first
    pool.give_back(first)
    pool.give_back(second)
    pool.close()


def test_an_arena_that_has_become_too_small_is_freed_for_a_larger_one() -> None:
    pool = ArenaPool(1)
    small = pool.take(1)
    descriptor = small.descriptor
    pool.give_back(small)
    large = pool.take(1 << 20)
    assert large is not small
    assert large.capacity_bytes >= 1 << 20
    # The descriptor of the small one is closed, or was given to the large one.
    if descriptor != large.descriptor:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    pool.give_back(large)
    pool.close()


def test_a_tensor_that_outlives_its_arena_keeps_its_memory() -> None:
    pool = ArenaPool(1)
    arena = pool.take(10)
    tensor = arena.data[:3]
    tensor.fill_(5)
    pool.give_back(arena)
    pool.close()
    del arena
    assert tensor.tolist() == [5, 5, 5]


@pytest.mark.parametrize("data_bytes", [1 << 60, 1 << 64])
@pytest.mark.parametrize("is_told", [True, False])
def test_memory_that_is_not_there_is_a_typed_error(
    monkeypatch: pytest.MonkeyPatch, data_bytes: int, is_told: bool
) -> None:
    if not is_told:
        monkeypatch.setattr(module, "available_bytes", lambda: None)
    pool = ArenaPool(1)
    with pytest.raises(SnapshotError, match=rf"expected {data_bytes} bytes of (free )?host memory"):
        pool.take(data_bytes)
    pool.give_back(pool.take(10))
    pool.close()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOMEM])
def test_an_old_kernel_is_served_page_by_page_and_one_without_memory_is_not(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def populate(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(prefaulted, "_populate", populate)
    pool = ArenaPool(1)
    if number == errno.ENOMEM:
        with pytest.raises(SnapshotError, match="Cannot allocate memory"):
            pool.take(10_000)
    else:
        arena = pool.take(10_000)
        assert os.fstat(arena.descriptor).st_blocks * 512 >= 10_000
        pool.give_back(arena)
        del arena
    pool.close()


def _until_prepared(pool: ArenaPool) -> None:
    preparing = pool._preparing
    if preparing is not None:
        preparing.join(20)
        assert not preparing.is_alive()


def test_prepared_arenas_are_taken_and_no_others_made(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ArenaPool(2)
    pool.prefault(10_000)
    _until_prepared(pool)
    monkeypatch.setattr(module, "Arena", None)
    arenas = [pool.take(10_000), pool.take(10_000)]
    pool.prefault(10_000)  # All there may be are there.
    assert pool._preparing is None
    for arena in arenas:
        pool.give_back(arena)
    pool.close()


def test_what_is_too_small_is_replaced_when_more_is_prepared() -> None:
    pool = ArenaPool(2)
    pool.prefault(100)
    _until_prepared(pool)
    pool.prefault(1 << 20)
    _until_prepared(pool)
    assert [arena.capacity_bytes for arena in pool._free] == [1 << 20, 1 << 20]
    pool.close()


def _slow_populate(monkeypatch: pytest.MonkeyPatch, go_on: threading.Event) -> threading.Event:
    """Preparation waits for ``go_on`` before each piece; returns the event of its beginning."""
    begun = threading.Event()
    populate = prefaulted._populate

    def slowly(address: int, num_bytes: int) -> None:
        if threading.current_thread().name == "ft-transport-arena":
            begun.set()
            assert go_on.wait(20)
        populate(address, num_bytes)

    monkeypatch.setattr(prefaulted, "_populate", slowly)
    return begun


def test_the_first_arena_is_taken_while_the_second_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)
    populate = prefaulted._populate

    def slowly(address: int, num_bytes: int) -> None:
        begun.release()
        assert go_on.acquire(timeout=20)
        populate(address, num_bytes)

    monkeypatch.setattr(prefaulted, "_populate", slowly)
    pool = ArenaPool(2)
    assert not pool.must_wait
    pool.prefault(5000)
    assert begun.acquire(timeout=20)
    assert pool.must_wait
    go_on.release()
    assert begun.acquire(timeout=20)  # now the second one
    assert not pool.must_wait
    arena = pool.take(5000)
    assert pool.must_wait
    go_on.release()
    _until_prepared(pool)
    assert not pool.must_wait
    pool.give_back(arena)
    pool.close()


def test_urgent_memory_is_made_without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    def populate(_address: int, _num_bytes: int) -> None:
        end_s = time.thread_time() + 0.01
        while time.thread_time() < end_s:
            pass

    monkeypatch.setattr(prefaulted, "_populate", populate)
    monkeypatch.setattr(module, "_REST_SHARE", 1e6)
    pool = ArenaPool(1)
    pool.prefault(64 << 20, is_urgent=True)
    _until_prepared(pool)
    assert len(pool._free) == 1
    pool.close()


def test_who_comes_meanwhile_waits_for_the_arena_that_is_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    begun = _slow_populate(monkeypatch, go_on)
    pool = ArenaPool(1)
    pool.prefault(5000)
    assert begun.wait(20)
    taken: list[Arena] = []
    taking = threading.Thread(target=lambda: taken.append(pool.take(5000)), daemon=True)
    taking.start()
    go_on.set()
    taking.join(20)
    assert len(taken) == 1
    pool.give_back(taken[0])
    pool.close()


def test_closing_ends_the_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    begun = _slow_populate(monkeypatch, go_on)
    pool = ArenaPool(2)
    pool.prefault(64 << 20)
    assert begun.wait(20)
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    go_on.set()
    closing.join(20)
    assert not closing.is_alive()
    assert pool._free == []
    with pytest.raises(SnapshotError, match="shut down"):
        pool.take(1)


def test_memory_that_cannot_be_prepared_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def populate(*_: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    pool = ArenaPool(1)
    with monkeypatch.context() as patch:
        patch.setattr(prefaulted, "_populate", populate)
        pool.prefault(5000)
        _until_prepared(pool)
    assert "no memory could be prefaulted for snapshots of 5000 bytes" in caplog.text
    pool.give_back(pool.take(5000))
    pool.close()


def test_memory_that_others_need_is_not_taken_ahead(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = [10 << 20, 6 << 20]
    monkeypatch.setattr(module, "available_bytes", lambda: left[0] if len(left) == 1 else left.pop(0))
    pool = ArenaPool(2)
    pool.prefault(4 << 20)
    _until_prepared(pool)
    # As much stays free: one fits in 10 MiB that way, and another not in the 6 that are left.
    assert len(pool._free) == 1
    assert "6291456 are left" in caplog.text
    # Whoever asks for a snapshot gets one as long as there is memory at all.
    arenas = [pool.take(4 << 20), pool.take(4 << 20)]
    for arena in arenas:
        pool.give_back(arena)
    pool.close()


def test_a_state_that_has_grown_does_not_wait_for_what_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    begun = _slow_populate(monkeypatch, go_on)
    pool = ArenaPool(2)
    pool.prefault(1 << 20)
    assert begun.wait(20)
    arena = pool.take(2 << 20)
    go_on.set()
    _until_prepared(pool)
    # What was under way is dropped, and no further one is made.
    assert pool._free == []
    pool.give_back(arena)
    pool.close()


def test_an_arena_that_comes_back_is_taken_before_the_one_that_is_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    pool = ArenaPool(2)
    first = pool.take(5000)
    begun = _slow_populate(monkeypatch, go_on)
    pool.prefault(5000)
    assert begun.wait(20)
    taken: list[Arena] = []
    taking = threading.Thread(target=lambda: taken.append(pool.take(5000)), daemon=True)
    taking.start()
    pool.give_back(first)
    taking.join(20)
    assert taken == [first]
    go_on.set()
    pool.give_back(first)
    pool.close()
