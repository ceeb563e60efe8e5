"""Memory that is shared is read in place until it is materialized, and reads the same afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from state_tools import CHUNK_BYTES, file_of, open_stager

from ft_transport.errors import SnapshotError
from ft_transport.state.copy_on_write import CopyOnWriteMemory
from ft_transport.state.host_copying import HostCopies
from ft_transport.state.snapshot import Taking
from ft_transport.state.stager import Stager
from ft_transport.wire.manifest import decode_digests, decode_header
from ft_transport.wire.snapshot import Snapshot

LONG_S = 20.0


class Owner:
    """A state of many sizes, and snapshots of it that share its memory."""

    def __init__(self, stager: Stager) -> None:
        self.stager = stager
        self.large = torch.arange(100_000, dtype=torch.int64)
        self.small = torch.arange(7, dtype=torch.float16)
        self.empty = torch.empty(0)
        self.state = {"large": self.large, "small": self.small, "empty": self.empty, "step": 3}

    def share_all(self) -> Snapshot:
        held = self.stager.hold(Taking(step=3, state=self.state, deferrable=lambda tensor: True))
        assert held is not None
        assert held.is_shareable
        return self.stager.begin(held, share=True).finish()

    def share_large(self) -> Snapshot:
        pending = self.stager.begin(Taking(step=3, state=self.state, lasting=lambda tensor: tensor is self.large))
        pending.copy_deferred()
        return pending.finish()

    def change(self) -> None:
        self.large.neg_()
        self.small.neg_()


@pytest.fixture
def owner() -> Iterator[Owner]:
    with open_stager() as stager:
        yield Owner(stager)


@pytest.fixture(params=["share_all", "share_large"])
def snapshot(owner: Owner, request: pytest.FixtureRequest) -> Iterator[Snapshot]:
    made: Snapshot = getattr(owner, request.param)()
    yield made
    made.close()


def memory_of(snapshot: Snapshot) -> CopyOnWriteMemory:
    assert isinstance(snapshot.memory, CopyOnWriteMemory)
    return snapshot.memory


def data_of(snapshot: Snapshot) -> bytes:
    return file_of(snapshot)[len(snapshot.header) :]


def copied_data(owner: Owner) -> bytes:
    snapshot = owner.stager.begin(Taking(step=3, state=owner.state)).finish()
    try:
        return data_of(snapshot)
    finally:
        snapshot.close()


def test_shared_memory_reads_like_a_copy(owner: Owner, snapshot: Snapshot) -> None:
    assert data_of(snapshot) == copied_data(owner)


def test_any_part_of_it_can_be_borrowed(snapshot: Snapshot) -> None:
    whole = file_of(snapshot)
    for start, end in ((0, 1), (5, len(snapshot.header) + 3), (len(whole) - 1, len(whole)), (CHUNK_BYTES, CHUNK_BYTES)):
        with memory_of(snapshot).pin(start, end) as views:
            assert b"".join(views) == whole[start:end]


def test_once_materialized_it_shows_the_state_as_it_was(owner: Owner, snapshot: Snapshot) -> None:
    before = file_of(snapshot)
    memory_of(snapshot).materialize()
    owner.change()
    memory_of(snapshot).materialize()
    assert file_of(snapshot) == before


def test_a_change_that_is_not_announced_would_show(owner: Owner, snapshot: Snapshot) -> None:
    before = file_of(snapshot)
    owner.change()
    assert file_of(snapshot) != before


def test_materializing_waits_for_readers_and_lets_the_tensors_go(owner: Owner, snapshot: Snapshot) -> None:
    memory = memory_of(snapshot)
    before = file_of(snapshot)
    materialized = threading.Event()
    start = len(snapshot.header)
    with memory.pin(start, start + 8 * 1000) as views:
        materializing = threading.Thread(target=lambda: (memory.materialize(), materialized.set()))
        materializing.start()
        while memory.is_shared:
            assert not materialized.is_set()
        assert not materialized.wait(0.05), "somebody is reading"
        assert b"".join(views) == before[start : start + 8 * 1000]
    materializing.join(LONG_S)
    assert materialized.is_set()
    assert memory._owners == []


def test_a_recall_does_not_wait_for_who_reads_the_copy(snapshot: Snapshot, caplog: pytest.LogCaptureFixture) -> None:
    memory = memory_of(snapshot)
    memory.materialize()
    with memory.pin(0, snapshot.total_bytes):
        memory.materialize()
    assert not caplog.records, "it would say that it gave up waiting"


def test_the_digests_are_those_of_the_chunks_whenever_they_are_computed(owner: Owner, snapshot: Snapshot) -> None:
    copied = owner.stager.begin(Taking(step=3, state=owner.state)).finish()
    manifest = decode_header(memoryview(copied.header)[8:])
    copied.close()
    assert decode_header(memoryview(snapshot.header)[8:]).digests is None
    memory = memory_of(snapshot)
    start = len(snapshot.header) + 3 * CHUNK_BYTES - 5
    with memory.pin(start, start + CHUNK_BYTES):
        pass
    memory.materialize()
    owner.change()
    assert decode_digests(memory.encoded_digests(), manifest.chunks.num_chunks, peer=None) == manifest.digests


def test_without_memory_for_a_copy_the_snapshot_is_lost_and_the_owner_goes_on(owner: Owner) -> None:
    first, snapshot, third = owner.share_all(), owner.share_all(), owner.share_all()
    memory_of(first).materialize()
    memory_of(third).materialize()  # Two arenas are all that there are.
    memory_of(snapshot).materialize()
    assert memory_of(snapshot).is_lost
    with pytest.raises(SnapshotError, match="can still be read"):
        file_of(snapshot)
    for each in (first, snapshot, third):
        each.close()


def test_an_interrupted_materialization_can_be_repeated(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = owner.share_all()
    before = file_of(snapshot)
    copy = owner.stager._resources.copier.copy

    def interrupt(_copies: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(owner.stager._resources.copier, "copy", interrupt)
    with pytest.raises(KeyboardInterrupt):
        memory_of(snapshot).materialize()
    monkeypatch.setattr(owner.stager._resources.copier, "copy", copy)
    assert memory_of(snapshot).is_shared
    memory_of(snapshot).materialize()
    owner.change()
    assert file_of(snapshot) == before
    snapshot.close()
    # Both arenas are free again.
    for each in [owner.stager.begin(Taking(step=4, state=owner.state)).finish() for _ in range(2)]:
        each.close()


def test_a_second_thread_that_materializes_waits_for_the_copy(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = owner.share_all()
    before = file_of(snapshot)
    copy = owner.stager._resources.copier.copy
    copying, may_copy = threading.Event(), threading.Event()

    def held_back(copies: HostCopies) -> None:
        copying.set()
        assert may_copy.wait(LONG_S)
        copy(copies)

    monkeypatch.setattr(owner.stager._resources.copier, "copy", held_back)
    changed = threading.Event()

    def change() -> None:
        memory_of(snapshot).materialize()
        owner.change()
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
    assert owner.stager._pool.num_taken() == 1
    snapshot.close()


def test_shared_memory_is_freed_when_its_last_reader_is_gone(owner: Owner, snapshot: Snapshot) -> None:
    memory_of(snapshot).materialize()
    before = file_of(snapshot)
    with memory_of(snapshot).pin(0, snapshot.total_bytes) as views:
        snapshot.close()
        assert owner.stager._pool.num_taken() == 1
        assert b"".join(views) == before
    assert owner.stager._pool.num_taken() == 0


def test_what_is_closed_is_neither_copied_nor_read_any_more(owner: Owner) -> None:
    snapshot = owner.share_all()
    snapshot.close()
    memory_of(snapshot).materialize()
    assert memory_of(snapshot)._arena is None
    with pytest.raises(SnapshotError, match="can still be read"):
        file_of(snapshot)


def test_what_does_not_lie_as_the_file_wants_it_is_copied(owner: Owner) -> None:
    transposed = torch.arange(12.0).view(3, 4).t()
    pending = owner.stager.begin(Taking(step=3, state={"t": transposed}, lasting=lambda tensor: True))
    assert pending.shared is None
    pending.abandon()
    held = owner.stager.hold(Taking(step=3, state={"t": transposed}, deferrable=lambda tensor: True))
    assert held is not None
    assert not held.is_shareable
