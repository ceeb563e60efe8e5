"""A fleet on simulated links: when the last receiver is done, and how much leaves the sources.

Nothing is sent. The machines that decide are those of a real fetch; the links and the clock are ``simulated_fleet``'s,
so hundreds of hosts take a minute, and a figure is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks import fleet_planning
from benchmarks.options import Benchmark, Options, Size
from benchmarks.report import Figure, Group, Quantity, Role, Sample, Verdict
from benchmarks.simulated_fleet import Host, Outcome, SimulatedFetch
from ft_transport.wire.chunks import CHUNK_BYTES, chunk_bytes_for

_MBIT: Final = 1e6 / 8
_SMALL_BYTES: Final = 256 << 20
_SMALL_RATE: Final = 800 * _MBIT
_LARGE_BYTES: Final = 20_000_000_000
_LARGE_RATE: Final = 25_000 * _MBIT
_LARGE_CHUNK_BYTES: Final = 16 << 20
_NUM_JOINING: Final = 100
_NUM_REPLICAS: Final = 1_000
_SOURCES_EACH: Final = 8
_LAST: Final = Quantity("last receiver / alone", "×")
_LAST_S: Final = Quantity("last receiver", "s")
_COPIES: Final = Quantity("copies that left the sources", "×")
_GOOD: Final = Host(rate=_SMALL_RATE)
_SLOW: Final = Host(rate=_SMALL_RATE / 10)


@dataclass(frozen=True, slots=True)
class Fleet:
    """One fetch by all.

    Attributes:
        name: What it is like.
        fetch: Who takes part.
        judged: The receivers whose last one is timed; all that live by default.
        role: How it is drawn.
    """

    name: str
    fetch: SimulatedFetch
    judged: Sequence[int] | None = None
    role: Role = "ours"

    @property
    def alone_s(self) -> float:
        """How long the whole state takes over a whole link of the first receiver."""
        return self.fetch.total_bytes / self.fetch.receivers[0].rate

    def last_s(self, outcome: Outcome) -> float:
        """When the last one of those that are judged was done."""
        if self.judged is None:
            return outcome.last_s
        return max(outcome.end_s[number] for number in self.judged)


def _fleet(
    name: str,
    receivers: Sequence[Host],
    options: Options,
    *,
    sources: Sequence[Host] = (_GOOD,),
    judged: Sequence[int] | None = None,
    chunk_bytes: int | None = None,
) -> Fleet:
    chunk_bytes = chunk_bytes or chunk_bytes_for(_SMALL_BYTES, most=CHUNK_BYTES)
    num_chunks = max(1, int(_SMALL_BYTES * options.scale) // chunk_bytes)
    fetch = SimulatedFetch(sources=sources, receivers=receivers, num_chunks=num_chunks, chunk_bytes=chunk_bytes)
    return Fleet(name, fetch, judged)


def _fan_out(options: Options) -> Group:
    group = Group("fleet-simulation", "fan-out", "256 MiB from one source, links of 800 Mbit/s")
    fleets = {number: _fleet(f"receivers: {number}", [_GOOD] * number, options) for number in (1, 2, 4, 8, 16)}
    large = _fleet("receivers: 16, chunks of 4 MiB", [_GOOD] * 16, options, chunk_bytes=4 << 20)
    _simulate(group, [*fleets.values(), large], options)
    group.verdicts = [
        *(
            Verdict.at_most(f"{fleets[number].name}: the last / alone", group.figure(fleets[number], _LAST), 1.15)
            for number in (8, 16)
        ),
        Verdict(f"{large.name}: the last / alone", group.figure(large, _LAST), None, "at most"),
        Verdict.at_most("copies that left the source", _most(group, _COPIES), 1.2),
    ]
    return group


def _joining(options: Options) -> Group:
    num_sources = _NUM_REPLICAS - _NUM_JOINING
    group = Group(
        "fleet-simulation",
        "joining",
        f"20 GB to {_NUM_JOINING} receivers at once, links of 25 Gbit/s, chunks of 16 MiB",
    )
    num_chunks = max(1, int(_LARGE_BYTES * options.scale) // _LARGE_CHUNK_BYTES)
    fleets = []
    for number, name in (
        (num_sources, f"{num_sources} sources, each receiver told of {_SOURCES_EACH}"),
        (1, "1 source"),
    ):
        fetch = SimulatedFetch(
            sources=[Host(rate=_LARGE_RATE)] * number,
            receivers=[Host(rate=_LARGE_RATE)] * _NUM_JOINING,
            num_chunks=num_chunks,
            chunk_bytes=_LARGE_CHUNK_BYTES,
            num_sources_each=_SOURCES_EACH,
            resolution=0.25,
        )
        fleets.append(Fleet(name, fetch))
    _simulate(group, fleets, options)
    group.verdicts = [
        *(Verdict.at_most(f"{each.name}: the last / alone", group.figure(each, _LAST), 1.25) for each in fleets),
        Verdict.at_most("copies that left the sources", _most(group, _COPIES), 1.2),
    ]
    return group


def _deaths(options: Options) -> Group:
    group = Group("fleet-simulation", "deaths", "256 MiB from one source, links of 800 Mbit/s")
    half_s = 0.5 * _SMALL_BYTES * options.scale / _SMALL_RATE
    dying, absent = Host(rate=_SMALL_RATE, death_s=half_s), Host(rate=_SMALL_RATE, death_s=0.0)
    fleets = [
        _fleet("1 of 3 dies half-way", [_GOOD, dying, _GOOD], options),
        _fleet("2 of 3 die half-way", [_GOOD, dying, dying], options),
        _fleet("1 of 8 dies half-way", [*[_GOOD] * 7, dying], options),
        _fleet("3 of 8 die half-way", [*[_GOOD] * 5, *[dying] * 3], options),
        _fleet("1 of 8 never comes", [*[_GOOD] * 7, absent], options),
    ]
    _simulate(group, fleets, options)
    group.verdicts = [
        Verdict.at_most("the last of those who live / alone", _most(group, _LAST), 1.5),
        Verdict.at_most("copies that left the source", _most(group, _COPIES), 1.2),
    ]
    return group


def _uneven(options: Options) -> Group:
    group = Group("fleet-simulation", "uneven", "256 MiB, links of 800 Mbit/s")
    state_s = _SMALL_BYTES * options.scale / _SMALL_RATE
    wide = Host(rate=8 * _SMALL_RATE)
    three = _fleet("3 sources to one wide link", [wide], options, sources=[_GOOD] * 3)
    and_slow = _fleet("and one of a tenth of the rate", [wide], options, sources=[*[_GOOD] * 3, _SLOW])
    slow = _fleet("8 receivers, one of a tenth (the others)", [*[_GOOD] * 7, _SLOW], options, judged=range(7))
    late = _fleet(
        "4 receivers, one begins half-way (the others)",
        [*[_GOOD] * 3, Host(rate=_SMALL_RATE, start_s=state_s / 2)],
        options,
        judged=range(3),
    )
    apart = _fleet("8 receivers, 0.2 s apart", [Host(rate=_SMALL_RATE, start_s=0.2 * n) for n in range(8)], options)
    _simulate(group, [three, and_slow, slow, late, apart], options)
    group.verdicts = [
        Verdict.at_most("a slow source beside three / without it", group.ratio(and_slow, three, _LAST_S), 1.1),
        Verdict.at_most(f"{slow.name}: the last / alone", group.figure(slow, _LAST), 1.3),
        Verdict.at_most(f"{late.name}: the last / alone", group.figure(late, _LAST), 1.3),
        Verdict.at_most("copies that left the sources", _most(group, _COPIES), 1.25),
    ]
    return group


def _simulate(group: Group, fleets: Sequence[Fleet], options: Options) -> None:
    """Once each: nothing in it is random."""
    for fleet in fleets:
        options.say(f"fleet-simulation {group.state} {fleet.name}")
        outcome = fleet.fetch.run()
        last_s = fleet.last_s(outcome)
        group.add(fleet, _LAST, Sample(0, last_s / fleet.alone_s))
        group.add(fleet, _LAST_S, Sample(0, last_s))
        group.add(fleet, _COPIES, Sample(0, sum(outcome.from_sources_bytes) / fleet.fetch.total_bytes))


def _most(group: Group, quantity: Quantity) -> Figure:
    figures = [series.figure for series in group.series if series.quantity == quantity]
    return max(figures, key=lambda figure: figure.value)


_SCENARIOS: Final[dict[str, Callable[[Options], Group]]] = {
    "fan-out": _fan_out,
    "joining": _joining,
    "deaths": _deaths,
    "uneven": _uneven,
    "planning": fleet_planning.measure,
}


def run(options: Options) -> Iterator[Group]:
    """Simulates one scenario after the other."""
    for name in options.states:
        yield _SCENARIOS[name](options)


BENCHMARK: Final = Benchmark(
    name="fleet-simulation",
    question="How long until a fleet has the state, on simulated links?",
    run=run,
    states=tuple(_SCENARIOS),
    default=Size(scale=1.0, num_samples=1),
    misses={
        "deciding": "This machine is half as fast as the one that the target was set on.",
    },
)
