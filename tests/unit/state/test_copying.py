"""Copies on several threads: every byte once, and nothing is written after the call."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_transport.state import copying
from ft_transport.state.copying import HostCopier, HostCopies
from ft_transport.wire.chunks import ChunkTable, digest


@pytest.fixture
def copier() -> Iterator[HostCopier]:
    copier = HostCopier(3)
    yield copier
    copier.close()


@given(sizes=st.lists(st.integers(0, 3 << 20), max_size=5), num_threads=st.integers(1, 4))
@settings(max_examples=25)
def test_all_copies_arrive_however_they_are_divided(sizes: list[int], num_threads: int) -> None:
    source = np.random.default_rng(0).integers(0, 255, sum(sizes) + 1, dtype=np.uint8)
    target = np.zeros_like(source)
    starts = np.cumsum([0, *sizes])[:-1]
    copies = HostCopies(target.ctypes.data + starts, source.ctypes.data + starts, np.array(sizes, dtype=np.int64))
    copier = HostCopier(num_threads)
    try:
        copier.copy(copies)
    finally:
        copier.close()
    assert np.array_equal(target[:-1], source[:-1])
    assert target[-1] == 0


@given(st.lists(st.integers(0, 100), max_size=10), st.integers(1, 120))
def test_shares_are_as_large_as_asked_and_cover_each_byte_once(sizes: list[int], share_bytes: int) -> None:
    numbers = np.arange(len(sizes))
    shares = copying._divide(HostCopies(1000 * numbers, 5000 * numbers, np.array(sizes, dtype=np.int64)), share_bytes)
    assert all(share.num_bytes.sum() == share_bytes for share in shares[:-1])
    covered = [
        (target + at, source + at)
        for share in shares
        for target, source, num_bytes in zip(share.targets, share.sources, share.num_bytes, strict=True)
        for at in range(num_bytes)
    ]
    assert covered == [(1000 * index + at, 5000 * index + at) for index, size in enumerate(sizes) for at in range(size)]


def test_after_an_error_no_thread_writes_any_more(copier: HostCopier, monkeypatch: pytest.MonkeyPatch) -> None:
    has_failed, has_ended = threading.Event(), threading.Event()

    def copy_all(share: HostCopies) -> None:
        if share.targets[0] == 0:
            has_failed.set()
            raise MemoryError
        has_failed.wait(10)
        time.sleep(0.2)  # a copy that takes longer
        has_ended.set()

    monkeypatch.setattr(copying, "_copy_all", copy_all)
    with pytest.raises(MemoryError):
        copier.copy(HostCopies(np.array([0, 1 << 40]), np.array([0, 0]), np.array([4 << 20, 4 << 20])))
    assert has_ended.is_set()


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000])
def test_digests_are_those_of_the_chunks_in_order(copier: HostCopier, size: int) -> None:
    data = bytes(index % 251 for index in range(size))
    chunks = ChunkTable(data_bytes=size, chunk_bytes=100)
    expected = [digest(data[at : at + 100]) for at in range(0, size, 100)]
    assert copier.digests(memoryview(data), chunks) == expected
