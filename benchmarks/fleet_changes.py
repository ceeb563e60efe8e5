"""Only what differs: a receiver that has most of the state already fetches the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from benchmarks.fleet_fan_out import BUSY, RATE, TIME
from benchmarks.fleet_runs import ALONE, sources, transfer
from benchmarks.network_namespaces import Link, network
from benchmarks.options import Options
from benchmarks.replicas.fleet_hosts import FleetState, Kind
from benchmarks.report import Figure, Group, Named, Quantity, Sample, Verdict
from benchmarks.states import digest_of, num_bytes_of

SENT: Final = Quantity("sent by the source, of the state", "%")
_NAMES: Final[dict[Kind, Named]] = {
    "whole": Named("nothing is there yet", "other"),
    "mostly the same": Named("5% of the bytes differ", "ours"),
    "adapter": Named("an adapter and its Adam on frozen weights", "ours"),
}
_MAX_PERCENT: Final = 7.0
_MORE_PERCENT: Final = 2.0
"""Above the adapter and its optimizer's state."""


def run(state: FleetState, options: Options) -> Group:
    group = Group("fleet", "changes", f"{state.num_bytes / 2**20:.0f} MiB, {RATE / 1e6:.0f} Mbit/s per host")
    kinds = {named: FleetState(kind, state.num_bytes) for kind, named in _NAMES.items()}
    link = Link(up=RATE, down=RATE)
    percent = {}
    with network([link] * 2) as hosts:
        source, receiver = hosts.hosts
        for number, named in options.rounds("changes", tuple(kinds)):
            moved = kinds[named]
            expected = moved.of_source()
            num_bytes = num_bytes_of(expected)
            percent[named] = moved.new_bytes / num_bytes * 100
            with sources(ALONE, [source], moved) as served:
                (_, address), *_ = served.values()
                outcome = transfer(
                    hosts, ALONE, [address], [receiver], moved, digest=digest_of(expected), only_changed=True
                )
            share = outcome.traffic[source].sent_bytes / num_bytes * 100
            group.add(named, TIME, Sample(number, outcome.seconds, outcome.others_share))
            group.add(named, SENT, Sample(number, share, outcome.others_share))
            group.add(named, BUSY, Sample(number, outcome.busy_share * 100, outcome.others_share))
    group.verdicts = list(_judge(group, percent))
    return group


def _judge(group: Group, percent: dict[Named, float]) -> Iterator[Verdict]:
    mostly, adapter = _NAMES["mostly the same"], _NAMES["adapter"]
    for named in _NAMES.values():
        yield Verdict(f"{named.name}: done", group.figure(named, TIME), None, "at most")
    yield Verdict.at_most(f"{mostly.name}: sent by the source", _highest(group.figure(mostly, SENT)), _MAX_PERCENT)
    limit = percent[adapter] + _MORE_PERCENT
    text = f"{adapter.name}, {percent[adapter]:.2f} % of the state: sent by the source"
    yield Verdict.at_most(text, _highest(group.figure(adapter, SENT)), limit)


def _highest(figure: Figure | None) -> Figure | None:
    return Figure(figure.high, figure.low, figure.high, figure.unit) if figure is not None else None
