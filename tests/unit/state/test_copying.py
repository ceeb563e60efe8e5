"""Host memory is copied and digested by all threads; digests of unchanged memory are cached."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from state_tools import CHUNK_BYTES, open_stager

from ft_transport.state import host_copying
from ft_transport.state.copy_on_write import CopyOnWriteMemory
from ft_transport.state.host_copying import HostCopier, HostCopies
from ft_transport.state.snapshot import Taking
from ft_transport.state.stager import Stager
from ft_transport.wire.chunks import PLAIN, Digester
from ft_transport.wire.manifest import decode_digests, decode_header


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


def test_after_an_error_no_thread_writes_any_more(copier: HostCopier, monkeypatch: pytest.MonkeyPatch) -> None:
    has_failed, has_ended = threading.Event(), threading.Event()

    def copy_all(share: HostCopies) -> None:
        if share.targets[0] == 0:
            has_failed.set()
            raise MemoryError
        has_failed.wait(10)
        time.sleep(0.2)  # a copy that takes longer
        has_ended.set()

    monkeypatch.setattr(host_copying, "_copy_all", copy_all)
    with pytest.raises(MemoryError):
        copier.copy(HostCopies(np.array([0, 1 << 40]), np.array([0, 0]), np.array([4 << 20, 4 << 20])))
    assert has_ended.is_set()


NUM_CHUNKS = 8


@dataclass
class Owner:
    """Frozen memory of several chunks, and a trained part of one."""

    stager: Stager
    frozen: torch.Tensor = field(default_factory=lambda: torch.randn(NUM_CHUNKS * CHUNK_BYTES // 4))
    trained: torch.Tensor = field(default_factory=lambda: torch.randn(CHUNK_BYTES // 4))

    def digests(self) -> tuple[int, ...]:
        """Those that a snapshot sends which shares the memory."""
        held = self.stager.hold(
            Taking(
                step=1,
                state={"frozen": self.frozen, "trained": self.trained},
                deferrable=lambda _: True,
                lasting=lambda tensor: tensor is self.frozen,
            )
        )
        assert held is not None
        snapshot = self.stager.begin(held, share=True).finish()
        try:
            assert isinstance(snapshot.memory, CopyOnWriteMemory)
            return decode_digests(snapshot.memory.encoded_digests(), NUM_CHUNKS + 1, peer="")
        finally:
            snapshot.close()

    def true_digests(self) -> tuple[int, ...]:
        snapshot = self.stager.begin(Taking(step=1, state={"frozen": self.frozen, "trained": self.trained})).finish()
        try:
            digests = decode_header(snapshot.header[8:]).digests
            assert digests is not None
            return digests
        finally:
            snapshot.close()


@pytest.fixture
def owner() -> Iterator[Owner]:
    with open_stager() as stager:
        yield Owner(stager)


@pytest.fixture
def num_digested(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each chunk that is digested."""
    counted: list[int] = []
    digest_of = Digester.digest_of

    def noted(self: Digester, pieces: Iterator[memoryview]) -> int:
        counted.append(1)
        return digest_of(self, pieces)

    monkeypatch.setattr(Digester, "digest_of", noted)
    return counted


def test_the_next_snapshot_digests_what_is_trained_and_a_sample_of_the_rest(
    owner: Owner, num_digested: list[int]
) -> None:
    first = owner.digests()
    assert len(num_digested) == NUM_CHUNKS + 1
    owner.trained.neg_()
    second = owner.digests()
    assert len(num_digested) == NUM_CHUNKS + 1 + 1 + 2
    assert second[:-1] == first[:-1]
    assert second == owner.true_digests()
    assert PLAIN.digest(memoryview(owner.trained.numpy().tobytes())) == second[-1]


@pytest.mark.parametrize("how", ["announced", "counted", "unseen, all of it", "other memory"])
def test_memory_that_has_changed_is_digested_anew(owner: Owner, how: str) -> None:
    owner.digests()
    match how:
        case "announced":
            owner.stager.forget_lasting()
            owner.frozen.data.neg_()
        case "counted":
            owner.frozen[:5].neg_()
        case "unseen, all of it":
            owner.frozen.numpy()[:] *= -1
        case "other memory":
            owner.frozen = owner.frozen.neg()
    assert owner.digests() == owner.true_digests()


def test_what_was_digested_before_a_change_was_announced_is_not_kept(owner: Owner) -> None:
    held = owner.stager.hold(
        Taking(step=1, state={"w": owner.frozen}, deferrable=lambda _: True, lasting=lambda _: True)
    )
    assert held is not None
    snapshot = owner.stager.begin(held, share=True).finish()
    owner.stager.forget_lasting()
    assert isinstance(snapshot.memory, CopyOnWriteMemory)
    snapshot.memory.encoded_digests()
    snapshot.close()
    owner.frozen.numpy()[:] *= -1
    assert owner.digests() == owner.true_digests()
