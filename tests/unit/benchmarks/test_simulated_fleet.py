"""The simulation of a fleet: its links share as links do, and its receivers are those of a real fetch."""

from __future__ import annotations

import pytest

from benchmarks.simulated_fleet import Host, SimulatedFetch

_RATE = 1e8
_CHUNK_BYTES = 4 << 20
_CHUNK_S = _CHUNK_BYTES / _RATE


def _fetch(sources: list[Host], receivers: list[Host], num_chunks: int) -> SimulatedFetch:
    return SimulatedFetch(
        sources=sources, receivers=receivers, num_chunks=num_chunks, request_s=0.0, connection_s=0.0, resolution=0.001
    )


def test_one_receiver_takes_as_long_as_its_link() -> None:
    outcome = _fetch([Host(rate=_RATE)], [Host(rate=_RATE / 2)], 32).run()
    assert outcome.last_s == pytest.approx(64 * _CHUNK_S, rel=0.01)
    assert outcome.from_sources_bytes == [32 * _CHUNK_BYTES]


def test_sources_add_up_until_the_receivers_own_link_is_full() -> None:
    sources = [Host(rate=_RATE)] * 4
    assert _fetch(sources, [Host(rate=8 * _RATE)], 32).run().last_s == pytest.approx(8 * _CHUNK_S, rel=0.01)
    assert _fetch(sources, [Host(rate=_RATE)], 32).run().last_s == pytest.approx(32 * _CHUNK_S, rel=0.01)


def test_two_receivers_share_the_source_and_pass_on_the_rest() -> None:
    # Chunk 0 and 1 arrive together, at half the rate each; then they are exchanged.
    outcome = _fetch([Host(rate=_RATE)], [Host(rate=_RATE)] * 2, 2).run()
    assert outcome.last_s == pytest.approx(3 * _CHUNK_S, rel=0.01)
    assert outcome.relayed_bytes == [_CHUNK_BYTES, _CHUNK_BYTES]


def test_a_host_that_dies_sends_nothing_more_and_receives_nothing() -> None:
    receivers = [Host(rate=_RATE), Host(rate=_RATE, death_s=0.0)]
    outcome = _fetch([Host(rate=_RATE)], receivers, 8).run()
    assert list(outcome.end_s) == [0]
    assert not outcome.errors
    assert outcome.relayed_bytes == [0, 0]
