"""Random fleets, without processes: whoever lives ends with everything, whatever dies when."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import num_examples

from benchmarks.simulated_fleet import Host, Outcome, SimulatedFetch

_CHUNK_BYTES = 4 << 20
_RATE = 1e8
_NEVER = float("inf")
_PATIENCE_S = 60.0
"""For all that a receiver waits in vain: dry relays, and pauses before it asks again."""

RATES = st.sampled_from([_RATE, _RATE, _RATE, _RATE / 10, 4 * _RATE])
MOMENTS = st.one_of(st.just(0.0), st.floats(0.0, 8.0))


@st.composite
def fleets(draw: st.DrawFn) -> SimulatedFetch:
    """One of the sources lives; of the others, and of the receivers, any may die."""
    deaths = st.one_of(st.just(_NEVER), MOMENTS)
    source = st.builds(Host, rate=RATES, death_s=deaths)
    receiver = st.builds(Host, rate=RATES, start_s=MOMENTS, death_s=deaths)
    return SimulatedFetch(
        sources=draw(st.permutations([Host(rate=_RATE), *draw(st.lists(source, max_size=3))])),
        receivers=[Host(rate=draw(RATES)), *draw(st.lists(receiver, max_size=9))],
        num_chunks=draw(st.integers(1, 150)),
        num_connections=draw(st.integers(1, 6)),
        relay_wait_s=draw(st.sampled_from([0.1, 1.0])),
        longest_s=10_000.0,
        resolution=0.5,
    )


@given(fleets())
@settings(max_examples=num_examples(1000), deadline=None)
def test_whoever_lives_ends_with_everything(fetch: SimulatedFetch) -> None:
    outcome = fetch.run()
    _check_all_ended(fetch, outcome)
    # Not even a receiver whom nobody helps waits for longer than all of them together need.
    slowest = min(host.rate for host in [*fetch.sources, *fetch.receivers])
    alone_s = fetch.num_chunks * _CHUNK_BYTES / slowest
    assert outcome.last_s <= 8.0 + _PATIENCE_S + (len(fetch.receivers) + 1) * alone_s


@given(fleets())
@settings(max_examples=num_examples(200), deadline=None)
def test_each_receiver_takes_each_chunk_once(fetch: SimulatedFetch) -> None:
    outcome = fetch.run()
    sent_bytes = sum(outcome.from_sources_bytes) + sum(outcome.relayed_bytes)
    assert len(outcome.end_s) * fetch.total_bytes <= sent_bytes <= len(fetch.receivers) * fetch.total_bytes


def _check_all_ended(fetch: SimulatedFetch, outcome: Outcome) -> None:
    assert not outcome.errors
    ended = outcome.end_s.keys()
    # Who died may have ended before.
    assert {number for number, host in enumerate(fetch.receivers) if host.death_s == _NEVER} <= ended
