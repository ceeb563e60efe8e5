from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ft_transport.state.restore import DestinationPlan
from ft_transport.wire.chunks import ChunkTable


def test_a_range_within_one_destination_is_one_piece() -> None:
    plan = DestinationPlan([0, 10, 30], 50)
    assert list(plan.pieces(12, 20)) == [(1, 2, 8)]


def test_a_range_over_several_destinations_is_cut_at_their_ends() -> None:
    plan = DestinationPlan([0, 10, 30], 50)
    assert list(plan.pieces(5, 50)) == [(0, 5, 5), (1, 0, 20), (2, 0, 20)]


def test_an_empty_range_has_no_pieces() -> None:
    assert list(DestinationPlan([0, 10], 20).pieces(10, 10)) == []
    assert list(DestinationPlan([], 0).pieces(0, 0)) == []


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 50))
def test_the_chunks_of_any_data_cover_every_destination_once(sizes: list[int], chunk_bytes: int) -> None:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    plan = DestinationPlan(starts, sum(sizes))
    chunks = ChunkTable(data_bytes=sum(sizes), chunk_bytes=chunk_bytes)
    covered = []
    for chunk in range(chunks.num_chunks):
        start, end = chunks.range_of(chunk, chunk + 1)
        assert 0 < end - start <= chunk_bytes
        pieces = list(plan.pieces(start, end))
        assert sum(num_bytes for _, _, num_bytes in pieces) == end - start
        covered += [(slot, offset + at) for slot, offset, num_bytes in pieces for at in range(num_bytes)]
    assert covered == [(slot, at) for slot, size in enumerate(sizes) for at in range(size)]


def test_the_range_of_several_chunks_ends_with_the_data() -> None:
    chunks = ChunkTable(data_bytes=10, chunk_bytes=4)
    assert chunks.num_chunks == 3
    assert chunks.range_of(1, 3) == (4, 10)
    assert ChunkTable(data_bytes=0, chunk_bytes=4).num_chunks == 0
    assert ChunkTable(data_bytes=8, chunk_bytes=4).range_of(0, 2) == (0, 8)
