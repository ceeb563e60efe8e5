"""Copies on several threads: every byte once, and nothing is written after the call."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_transport.tensors import copying
from ft_transport.tensors.copying import HostCopier, HostCopy, default_num_threads
from ft_transport.wire.chunks import ChunkTable
from ft_transport.wire.integrity import digest


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
    copies, start = [], 0
    for size in sizes:
        copies.append(HostCopy(target.ctypes.data + start, source.ctypes.data + start, size))
        start += size
    copier = HostCopier(num_threads)
    try:
        copier.copy(copies)
    finally:
        copier.close()
    assert np.array_equal(target[:-1], source[:-1])
    assert target[-1] == 0


@given(st.lists(st.integers(0, 100), max_size=10), st.integers(1, 120))
def test_shares_are_as_large_as_asked_and_cover_each_byte_once(sizes: list[int], share_bytes: int) -> None:
    copies = [HostCopy(1000 * index, 5000 * index, size) for index, size in enumerate(sizes)]
    shares = copying._divide(copies, share_bytes)
    assert all(sum(copy.num_bytes for copy in share) == share_bytes for share in shares[:-1])
    covered = [
        (copy.target + at, copy.source + at) for share in shares for copy in share for at in range(copy.num_bytes)
    ]
    assert covered == [(copy.target + at, copy.source + at) for copy in copies for at in range(copy.num_bytes)]


def test_after_an_error_no_thread_writes_any_more(copier: HostCopier, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, ended = threading.Event(), threading.Event()
    real_wait = copying.wait

    def copy_all(share: Sequence[HostCopy]) -> None:
        if share[0].target == 0:
            raise MemoryError
        may_end.wait(10)
        ended.set()

    def wait(futures: Collection[Future[Any]]) -> object:
        may_end.set()
        return real_wait(futures)

    monkeypatch.setattr(copying, "_copy_all", copy_all)
    monkeypatch.setattr(copying, "wait", wait)
    try:
        with pytest.raises(MemoryError):
            copier.copy([HostCopy(0, 0, 4 << 20), HostCopy(1 << 40, 0, 4 << 20)])
        assert ended.is_set()
    finally:
        may_end.set()


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000])
def test_digests_are_those_of_the_chunks_in_order(copier: HostCopier, size: int) -> None:
    data = bytes(index % 251 for index in range(size))
    chunks = ChunkTable(data_bytes=size, chunk_bytes=100)
    expected = [digest(data[at : at + 100]) for at in range(0, size, 100)]
    assert copier.digests(memoryview(data), chunks) == expected


def test_by_default_there_is_a_thread_per_core_up_to_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((1, 1), (4, 4), (64, 8), (None, 1)):
        monkeypatch.setattr(copying.os, "cpu_count", lambda cores=cores: cores)
        assert default_num_threads() == expected
