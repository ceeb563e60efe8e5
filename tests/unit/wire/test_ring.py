"""When a receiver leaves the ring: not while the one before it passes on what others have, soon where it does not."""

from __future__ import annotations

import pytest

from ft_transport.wire.ring import Ring, has_ring


def _ring(*, num_own: int = 32, num_relayed: int = 224, num_own_requests: int = 1) -> Ring:
    ring = Ring(
        num_chunks=num_own + num_relayed, num_own=num_own, num_relayed=num_relayed, num_own_requests=num_own_requests
    )
    ring.num_asked = num_relayed
    return ring


def _go_on(ring: Ring, *, num_own: int, relayed_each: int, heard: int | None = None) -> None:
    """So many chunks from the sources, and after each so many from the ring."""
    for _ in range(num_own):
        ring.own_landed()
        for _ in range(relayed_each):
            if heard is not None:
                ring.report_progress(heard)
            ring.relayed_landed()


@pytest.mark.parametrize(
    ("num_receivers", "num_chunks", "is_one"),
    [(2, 256, False), (3, 31, False), (3, 32, True), (16, 256, True), (100, 256, False), (100, 1600, True)],
)
def test_a_ring_is_for_as_many_chunks_as_go_round_it_in_little_time(
    num_receivers: int, num_chunks: int, is_one: bool
) -> None:
    assert has_ring(num_receivers=num_receivers, num_chunks=num_chunks) == is_one


@pytest.mark.parametrize(
    ("course", "has_left"),
    [
        pytest.param([(32, 7, None)], False, id="all goes round"),
        pytest.param([(5, 0, None), (27, 8, None)], False, id="it begins a moment later"),
        pytest.param([(12, 7, None), (16, 0, None)], True, id="it stops"),
        pytest.param([(2, 2, heard) for heard in range(0, 256, 16)], True, id="it brings less than others have"),
        pytest.param(
            [(8, 2, 24), *((2, 7, heard) for heard in range(80, 240, 16))],
            False,
            id="it was late and brings enough by now",
        ),
    ],
)
def test_the_one_before_is_left_where_it_does_not_keep_up(
    course: list[tuple[int, int, int | None]], has_left: bool
) -> None:
    ring = _ring()
    for num_own, relayed_each, heard in course:
        _go_on(ring, num_own=num_own, relayed_each=relayed_each, heard=heard)
    assert ring.has_left is has_left


def test_where_sources_have_most_of_the_link_the_ring_brings_less_and_nobody_leaves() -> None:
    ring = _ring(num_own_requests=4)
    for _ in range(8):
        _go_on(ring, num_own=4, relayed_each=0)
        ring.relayed_landed()
    assert not ring.has_left


def test_who_brings_nothing_is_left_and_what_it_was_asked_for_is_still_open() -> None:
    ring = _ring()
    _go_on(ring, num_own=16, relayed_each=0)
    assert ring.has_left
    assert ring.is_left_open


def test_whoever_the_sources_serve_first_waits_while_nobody_is_known_to_have_much_more() -> None:
    ring = _ring(num_own=16, num_relayed=240)
    _go_on(ring, num_own=5, relayed_each=0)
    _go_on(ring, num_own=1, relayed_each=1, heard=10)
    assert not ring.has_left


def test_who_brings_little_is_left_as_soon_as_another_has_much_more() -> None:
    ring = _ring()
    _go_on(ring, num_own=10, relayed_each=0)
    _go_on(ring, num_own=2, relayed_each=1, heard=28)
    assert not ring.has_left
    ring.report_progress(32)
    ring.own_landed()
    assert ring.has_left


def test_nobody_leaves_for_what_has_come() -> None:
    ring = _ring(num_relayed=8)
    _go_on(ring, num_own=8, relayed_each=1)
    ring.report_progress(40)
    _go_on(ring, num_own=24, relayed_each=0)
    assert not ring.is_left_open
    assert not ring.has_left
