"""Memory that is shared is read in place until it is materialized, and reads the same afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from state_tools import CHUNK_BYTES, file_of, open_stager

from ft_transport.errors import SnapshotError
from ft_transport.state.copy_on_write import CopyOnWriteMemory
from ft_transport.state.copying import HostCopies
from ft_transport.state.snapshot import Snapshot
from ft_transport.state.stager import Stager
from ft_transport.wire.manifest import decode_digests, decode_header

LONG_S = 20.0


class Lender:
    """A state of many sizes, and snapshots of it that share its memory."""

    def __init__(self, stager: Stager) -> None:
        self.stager = stager
        self.large = torch.arange(100_000, dtype=torch.int64)
        self.small = torch.arange(7, dtype=torch.float16)
        self.empty = torch.empty(0)
        self.state = {"large": self.large, "small": self.small, "empty": self.empty, "step": 3}

    def share_all(self) -> Snapshot:
        held = self.stager.hold(3, self.state, deferrable=lambda tensor: True, max_bytes=0)
        assert held is not None
        assert held.is_shareable
        return self.stager.share_held(held).finish()

    def lend_large(self) -> Snapshot:
        pending = self.stager.begin(3, self.state, shareable=lambda tensor: tensor is self.large)
        pending.copy_deferred()
        return pending.finish()

    def change(self) -> None:
        self.large.neg_()
        self.small.neg_()


@pytest.fixture
def lender() -> Iterator[Lender]:
    with open_stager() as stager:
        yield Lender(stager)


@pytest.fixture(params=["share_all", "lend_large"])
def snapshot(lender: Lender, request: pytest.FixtureRequest) -> Iterator[Snapshot]:
    made: Snapshot = getattr(lender, request.param)()
    yield made
    made.close()


def memory_of(snapshot: Snapshot) -> CopyOnWriteMemory:
    assert isinstance(snapshot.memory, CopyOnWriteMemory)
    return snapshot.memory


def data_of(snapshot: Snapshot) -> bytes:
    return file_of(snapshot)[len(snapshot.header) :]


def copied_data(lender: Lender) -> bytes:
    snapshot = lender.stager.begin(3, lender.state).finish()
    try:
        return data_of(snapshot)
    finally:
        snapshot.close()


def test_what_is_lent_reads_like_a_copy(lender: Lender) -> None:
    expected = copied_data(lender)
    for share in (lender.share_all, lender.lend_large):
        snapshot = share()
        assert data_of(snapshot) == expected
        snapshot.close()


def test_any_part_of_it_can_be_borrowed(snapshot: Snapshot) -> None:
    whole = file_of(snapshot)
    for start, end in ((0, 1), (5, len(snapshot.header) + 3), (len(whole) - 1, len(whole)), (CHUNK_BYTES, CHUNK_BYTES)):
        with memory_of(snapshot).pin(start, end) as views:
            assert b"".join(views) == whole[start:end]


def test_after_a_recall_it_shows_the_state_as_it_was(lender: Lender, snapshot: Snapshot) -> None:
    before = file_of(snapshot)
    memory_of(snapshot).materialize()
    lender.change()
    memory_of(snapshot).materialize()
    assert file_of(snapshot) == before


def test_without_a_recall_a_change_would_show(lender: Lender, snapshot: Snapshot) -> None:
    before = file_of(snapshot)
    lender.change()
    assert file_of(snapshot) != before


def test_a_recall_waits_for_who_reads_and_lets_the_tensors_go(lender: Lender, snapshot: Snapshot) -> None:
    memory = memory_of(snapshot)
    before = file_of(snapshot)
    materialized = threading.Event()
    start = len(snapshot.header)
    with memory.pin(start, start + 8 * 1000) as views:
        recalling = threading.Thread(target=lambda: (memory.materialize(), materialized.set()))
        recalling.start()
        while memory.is_shared:
            assert not materialized.is_set()
        assert not materialized.wait(0.05), "somebody is reading"
        assert b"".join(views) == before[start : start + 8 * 1000]
    recalling.join(LONG_S)
    assert materialized.is_set()
    assert memory._owners == []


def test_a_recall_does_not_wait_for_who_reads_the_copy(snapshot: Snapshot, caplog: pytest.LogCaptureFixture) -> None:
    memory = memory_of(snapshot)
    memory.materialize()
    with memory.pin(0, snapshot.total_bytes):
        memory.materialize()
    assert not caplog.records, "it would say that it gave up waiting"


def test_the_digests_are_those_of_the_chunks_whenever_they_are_computed(lender: Lender, snapshot: Snapshot) -> None:
    copied = lender.stager.begin(3, lender.state).finish()
    manifest = decode_header(memoryview(copied.header)[8:])
    copied.close()
    assert decode_header(memoryview(snapshot.header)[8:]).digests is None
    memory = memory_of(snapshot)
    start = len(snapshot.header) + 3 * CHUNK_BYTES - 5
    with memory.pin(start, start + CHUNK_BYTES):
        pass
    memory.materialize()
    lender.change()
    assert decode_digests(memory.encoded_digests(), manifest.chunks.num_chunks, peer=None) == manifest.digests


def test_without_memory_for_a_copy_the_snapshot_is_lost_and_the_owner_goes_on(lender: Lender) -> None:
    first, snapshot, third = lender.share_all(), lender.share_all(), lender.share_all()
    memory_of(first).materialize()
    memory_of(third).materialize()  # Two arenas are all that there are.
    memory_of(snapshot).materialize()
    assert memory_of(snapshot).is_lost
    with pytest.raises(SnapshotError, match="gone"):
        file_of(snapshot)
    for each in (first, snapshot, third):
        each.close()


def test_an_interrupted_recall_can_be_made_again(lender: Lender, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = lender.share_all()
    before = file_of(snapshot)
    copy = lender.stager._workshop.copier.copy

    def interrupt(_copies: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lender.stager._workshop.copier, "copy", interrupt)
    with pytest.raises(KeyboardInterrupt):
        memory_of(snapshot).materialize()
    monkeypatch.setattr(lender.stager._workshop.copier, "copy", copy)
    assert memory_of(snapshot).is_shared
    memory_of(snapshot).materialize()
    lender.change()
    assert file_of(snapshot) == before
    snapshot.close()
    # Both arenas are free again.
    for each in [lender.stager.begin(4, lender.state).finish() for _ in range(2)]:
        each.close()


def test_who_recalls_while_another_copies_waits_for_the_copy(lender: Lender, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = lender.share_all()
    before = file_of(snapshot)
    copy = lender.stager._workshop.copier.copy
    copying, may_copy = threading.Event(), threading.Event()

    def held_back(copies: HostCopies) -> None:
        copying.set()
        assert may_copy.wait(LONG_S)
        copy(copies)

    monkeypatch.setattr(lender.stager._workshop.copier, "copy", held_back)
    changed = threading.Event()

    def change() -> None:
        memory_of(snapshot).materialize()
        lender.change()
        changed.set()

    first, second = threading.Thread(target=memory_of(snapshot).materialize), threading.Thread(target=change)
    first.start()
    assert copying.wait(LONG_S)
    second.start()
    assert not changed.wait(0.1), "what he wants to change is being copied"
    may_copy.set()
    first.join(LONG_S)
    second.join(LONG_S)
    assert changed.is_set()
    assert file_of(snapshot) == before
    assert lender.stager._pool._num_taken == 1
    snapshot.close()


def test_memory_that_is_borrowed_is_freed_by_who_borrows_it(lender: Lender) -> None:
    for share in (lender.share_all, lender.lend_large):
        snapshot = share()
        memory_of(snapshot).materialize()
        before = file_of(snapshot)
        with memory_of(snapshot).pin(0, snapshot.total_bytes) as views:
            snapshot.close()
            assert lender.stager._pool._num_taken == 1
            assert b"".join(views) == before
        assert lender.stager._pool._num_taken == 0


def test_what_is_closed_is_neither_copied_nor_read_any_more(lender: Lender) -> None:
    snapshot = lender.share_all()
    snapshot.close()
    memory_of(snapshot).materialize()
    assert memory_of(snapshot)._arena is None
    with pytest.raises(SnapshotError, match="gone"):
        file_of(snapshot)


def test_what_does_not_lie_as_the_file_wants_it_is_copied(lender: Lender) -> None:
    transposed = torch.arange(12.0).view(3, 4).t()
    pending = lender.stager.begin(3, {"t": transposed}, shareable=lambda tensor: True)
    assert pending.shared is None
    pending.abandon()
    held = lender.stager.hold(3, {"t": transposed}, deferrable=lambda tensor: True, max_bytes=0)
    assert held is not None
    assert not held.is_shareable
