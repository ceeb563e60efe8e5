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


def test_all_goes_round() -> None:
    ring = _ring()
    _go_on(ring, num_own=32, relayed_each=7)
    assert ring.num_asked == 0
    assert not ring.has_left


def test_where_sources_have_most_of_the_link_the_ring_brings_less_and_nobody_leaves() -> None:
    ring = _ring(num_own_requests=4)
    for _ in range(8):
        _go_on(ring, num_own=4, relayed_each=0)
        ring.relayed_landed()
    assert not ring.has_left


def test_who_begins_a_moment_later_is_waited_for() -> None:
    ring = _ring()
    _go_on(ring, num_own=5, relayed_each=0)
    _go_on(ring, num_own=27, relayed_each=8)
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


def test_who_stops_is_left() -> None:
    ring = _ring()
    _go_on(ring, num_own=12, relayed_each=7)
    _go_on(ring, num_own=16, relayed_each=0)
    assert ring.has_left


def test_who_brings_less_than_others_have_is_left() -> None:
    ring = _ring()
    for heard in range(0, 256, 16):
        _go_on(ring, num_own=2, relayed_each=2, heard=heard)
    assert ring.has_left


def test_who_was_late_and_brings_enough_by_now_is_not_left() -> None:
    ring = _ring()
    _go_on(ring, num_own=8, relayed_each=2, heard=24)
    for heard in range(80, 240, 16):
        _go_on(ring, num_own=2, relayed_each=7, heard=heard)
    assert not ring.has_left


def test_nobody_leaves_for_what_has_come() -> None:
    ring = _ring(num_relayed=8)
    _go_on(ring, num_own=8, relayed_each=1)
    ring.report_progress(40)
    _go_on(ring, num_own=24, relayed_each=0)
    assert not ring.is_left_open
    assert not ring.has_left
