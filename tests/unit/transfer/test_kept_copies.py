"""Copies of other ranks' kept snapshots: who copies whom, what is left out, and that nothing false is accepted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from ft_transport import HTTPTransport, TransportError, TransportSettings
from ft_transport.state.snapshot import Taking
from ft_transport.transfer.kept_copies import CopyMemory, Offer, offer_decoder, sources_of, twins_of
from ft_transport.wire.snapshot import MemoryFile, Snapshot

STEP = 3
TIMEOUT = timedelta(seconds=20)
CHUNK = 4 << 20
SHARED = torch.arange(3 * CHUNK // 4, dtype=torch.float32)


@pytest.mark.parametrize(
    ("domains", "copies", "sources"),
    [
        ("ab", 2, [(1,), (0,)]),
        ("aabb", 2, [(2,), (3,), (0,), (1,)]),
        ("abab", 2, [(1,), (0,), (3,), (2,)]),
        ("abcd", 2, [(3,), (0,), (1,), (2,)]),
        ("abcd", 3, [(2, 3), (0, 3), (0, 1), (1, 2)]),
        ("aaab", 2, [(3,), (), (), (0, 1, 2)]),
        ("aab", 3, [(2,), (), (0, 1)]),
        ("aa", 2, [(), ()]),
        ("a", 2, [()]),
    ],
)
def test_each_rank_has_copies_in_other_domains(domains: str, copies: int, sources: list[tuple[int, ...]]) -> None:
    found = sources_of(list(domains), copies)
    assert [tuple(sorted(each)) for each in found] == sources
    for rank, domain in enumerate(domains):
        holders = {domains[holder] for holder, each in enumerate(found) if rank in each}
        assert len(holders) == min(copies, len(set(domains))) - 1
        assert domain not in holders


def test_twins_are_in_other_domains_and_as_many_as_copies() -> None:
    offers = [
        Offer(address="", first=first, domain=domain) for first, domain in zip([5, 6, 5, 6, 5], "aabbc", strict=True)
    ]
    assert twins_of(0, offers, 2) == (2,)
    assert twins_of(0, offers, 3) == (2, 4)
    assert twins_of(1, offers, 2) == (3,)
    assert twins_of(1, offers, 3) == ()
    assert offer_decoder.decode(offers[0].encode()) == offers[0]


@pytest.fixture
def serve() -> Iterator[Callable[[dict[str, Any]], HTTPTransport[Any]]]:
    made: list[HTTPTransport[Any]] = []

    def serving(state: dict[str, Any]) -> HTTPTransport[Any]:
        made.append(HTTPTransport())
        made[-1].send_checkpoint([], STEP, state, TIMEOUT)
        return made[-1]

    yield serving
    for each in made:
        each.shutdown()


@pytest.fixture
def memory() -> Iterator[CopyMemory]:
    found = CopyMemory()
    yield found
    found.close()


def content_of(snapshot: Snapshot) -> bytes:
    assert isinstance(snapshot.memory, MemoryFile)
    return os.pread(snapshot.memory.descriptor, snapshot.total_bytes, snapshot.memory.start)


def resident_bytes(snapshot: Snapshot) -> int:
    assert isinstance(snapshot.memory, MemoryFile)
    return os.fstat(snapshot.memory.descriptor).st_blocks * 512


def test_a_copy_leaves_out_what_a_twin_has_and_is_filled_from_it(serve: Any, memory: CopyMemory) -> None:
    holder = serve({"shared": SHARED, "own": torch.zeros(1000)})
    twin = serve({"shared": SHARED.clone(), "own": torch.ones(50)})
    settings = holder.fetch_settings(TIMEOUT)
    sparse, is_whole = memory.receive(holder.metadata(), [twin.metadata()], STEP, settings, is_filled=False)
    assert not is_whole
    assert resident_bytes(sparse) < 2 * CHUNK
    # The holder is lost: from now on, only the copy and the twin exist.
    lease = holder.server.lease(STEP)
    expected = os.pread(lease.descriptor, lease.num_bytes, lease.start)
    lease.release()
    server = twin.new_server()
    with server.serving(sparse):
        filled, is_whole = memory.receive(server.metadata(), [twin.metadata()], STEP, settings, is_filled=True)
        assert is_whole
        assert content_of(filled) == expected
        with pytest.raises(TransportError, match="chunk"):
            memory.receive(server.metadata(), [], STEP, settings, is_filled=True)
    server.close(wait=True)
    filled.close()


def test_a_rank_without_twins_is_copied_whole(serve: Any, memory: CopyMemory) -> None:
    holder = serve({"own": SHARED})
    other = serve({"own": SHARED + 1})
    settings = holder.fetch_settings(TIMEOUT)
    for twins in ([], [other.metadata()]):
        copy, is_whole = memory.receive(holder.metadata(), twins, STEP, settings, is_filled=False)
        assert is_whole
        assert resident_bytes(copy) >= SHARED.nbytes
        lease = holder.server.lease(STEP)
        assert content_of(copy) == os.pread(lease.descriptor, lease.num_bytes, lease.start)
        lease.release()
        copy.close()


def test_two_twins_that_differ_do_not_count(serve: Any, memory: CopyMemory) -> None:
    holder, twin = serve({"own": SHARED}), serve({"own": SHARED.clone()})
    changed = SHARED.clone()
    changed[-1] += 1
    other = serve({"own": changed})
    settings = holder.fetch_settings(TIMEOUT)
    copy, is_whole = memory.receive(
        holder.metadata(), [twin.metadata(), other.metadata()], STEP, settings, is_filled=False
    )
    # The last chunk differs at one twin.
    assert not is_whole
    assert 1 << 20 <= resident_bytes(copy) < 2 * CHUNK
    copy.close()


def test_a_lost_twin_fails_and_keeps_no_memory(serve: Any, memory: CopyMemory) -> None:
    holder, twin = serve({"own": SHARED}), serve({"own": SHARED})
    address = twin.metadata()
    twin.shutdown()
    for _ in range(70):  # more often than there may be copies
        with pytest.raises(TransportError, match=r"127\.0\.0\.1"):
            memory.receive(
                holder.metadata(), [address], STEP, holder.fetch_settings(timedelta(milliseconds=50)), is_filled=False
            )


def test_a_step_that_is_gone_is_refused(serve: Any, memory: CopyMemory) -> None:
    holder = serve({"own": SHARED})
    with pytest.raises(TransportError, match=f"step {STEP + 1}"):
        memory.receive(
            holder.metadata(), [], STEP + 1, holder.fetch_settings(timedelta(milliseconds=200)), is_filled=False
        )


def test_an_arena_that_is_not_resident_uses_memory_only_for_what_is_written(memory: CopyMemory) -> None:
    pool = memory._pool
    arena = pool.take(64 << 20)
    assert os.fstat(arena.descriptor).st_blocks * 512 < 1 << 20
    pool.give_back(arena)


def test_a_snapshot_that_was_taken_is_whole_after_a_copy(serve: Any, memory: CopyMemory) -> None:
    """A copy is an ordinary snapshot: a further process may copy it again."""
    holder = serve({"a": SHARED, "b": [1, "two"]})
    copy, _ = memory.receive(holder.metadata(), [], STEP, holder.fetch_settings(TIMEOUT), is_filled=False)
    server = holder.new_server()
    with server.serving(copy):
        received = holder.fetch(server.metadata(), STEP)
    assert torch.equal(received.state["a"], SHARED)
    assert received.state["b"] == [1, "two"]
    server.close(wait=True)


def test_taking_and_copying_share_no_memory(serve: Any, memory: CopyMemory) -> None:
    holder = serve({"a": SHARED})
    copy, _ = memory.receive(holder.metadata(), [], STEP, holder.fetch_settings(TIMEOUT), is_filled=False)
    before = content_of(copy)
    for step in range(STEP + 1, STEP + 5):
        holder.server.take(Taking(step=step, state={"a": SHARED + step})).publish()
    assert content_of(copy) == before
    copy.close()


@pytest.mark.parametrize("holder_token", ["other-token", None])
def test_a_source_of_another_job_is_refused(memory: CopyMemory, holder_token: str | None) -> None:
    holder = HTTPTransport[Any](settings=TransportSettings(token=holder_token, host="127.0.0.1"))
    receiver = HTTPTransport[Any](settings=TransportSettings(token="own-token", host="127.0.0.1"))
    try:
        holder.send_checkpoint([], STEP, {"own": SHARED}, TIMEOUT)
        settings = receiver.fetch_settings(timedelta(seconds=2))
        with pytest.raises(TransportError):
            memory.receive(holder.metadata(), [], STEP, settings, is_filled=False)
    finally:
        holder.shutdown()
        receiver.shutdown()
