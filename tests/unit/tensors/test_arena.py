"""Arenas: reused, never while somebody reads, never more than allowed, and gone when closed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest
import torch

from ft_transport.errors import SnapshotError, SnapshotLimitError
from ft_transport.tensors import arena as module
from ft_transport.tensors.arena import HEADER_ROOM_BYTES, Arena, ArenaPool


def _content(arena: Arena, num_bytes: int) -> bytes:
    return os.pread(arena.descriptor, num_bytes, HEADER_ROOM_BYTES)


def test_what_is_written_to_the_tensor_is_in_the_file_behind_the_header() -> None:
    pool = ArenaPool(1)
    arena = pool.take(10)
    arena.data[:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    assert _content(arena, 4) == b"\1\2\3\4"
    assert bytes(arena.view[:4]) == b"\1\2\3\4"
    start = arena.write_header(b"header")
    assert os.pread(arena.descriptor, 10, start) == b"header\1\2\3\4"
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


def test_beyond_the_limit_the_error_names_it() -> None:
    pool = ArenaPool(2)
    taken = [pool.take(1), pool.take(1)]
    with pytest.raises(SnapshotLimitError, match=r"at most 2 snapshots alive at once \(max_snapshots\)") as caught:
        pool.take(1)
    assert caught.value.retryable
    pool.give_back(taken.pop())
    taken.append(pool.take(1))
    for arena in taken:
        pool.give_back(arena)
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


def test_a_closed_pool_lets_readers_finish_and_takes_nobody_new() -> None:
    pool = ArenaPool(2)
    read, free = pool.take(10), pool.take(10)
    read.data[:3] = 7
    pool.give_back(free)
    pool.close()
    assert _content(read, 3) == b"\7\7\7"
    with pytest.raises(SnapshotError, match="shut down"):
        pool.take(10)
    descriptor = read.descriptor
    pool.give_back(read)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_tensor_that_outlives_its_arena_keeps_its_memory() -> None:
    pool = ArenaPool(1)
    arena = pool.take(10)
    tensor = arena.data[:3]
    tensor.fill_(5)
    pool.give_back(arena)
    pool.close()
    del arena
    assert tensor.tolist() == [5, 5, 5]


def test_an_arena_is_pinned_once_and_unpinned_when_it_goes() -> None:
    events: list[str] = []

    def pin(data: torch.Tensor) -> Callable[[], None]:
        events.append(f"pin {data.numel()}")
        return lambda: events.append("unpin")

    pool = ArenaPool(1, pin=pin)
    arena = pool.take(4096)
    pool.give_back(arena)
    pool.give_back(pool.take(4096))
    assert events == ["pin 4096"]
    pool.close()
    assert events == ["pin 4096", "unpin"]


def test_an_arena_that_cannot_be_pinned_leaves_nothing_and_blocks_nobody() -> None:
    def pin(data: torch.Tensor) -> Callable[[], None]:
        raise SnapshotError("no pages to lock")

    pool = ArenaPool(1, pin=pin)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(SnapshotError, match="no pages to lock"):
            pool.take(10)
    assert len(os.listdir("/proc/self/fd")) == before
    pool.close()


@pytest.mark.parametrize("data_bytes", [1 << 60, 1 << 64])
def test_memory_that_is_not_there_is_a_typed_error(data_bytes: int) -> None:
    pool = ArenaPool(1)
    with pytest.raises(SnapshotError, match=f"expected {data_bytes} bytes of host memory"):
        pool.take(data_bytes)
    pool.give_back(pool.take(10))
    pool.close()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOMEM])
def test_an_old_kernel_is_served_page_by_page_and_one_without_memory_is_not(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    class Mapping(module.mmap.mmap):  # type: ignore[misc, name-defined]
        def madvise(self, *_: int) -> None:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module.mmap, "mmap", Mapping)
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
