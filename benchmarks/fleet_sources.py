"""Many sources: one receiver reads from several at once whose links are slower than its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.fleet_fan_out import BUSY, TIME
from benchmarks.fleet_runs import RELAYED, sources, transfer
from benchmarks.network_namespaces import Link, network
from benchmarks.options import Options
from benchmarks.replicas.fleet_hosts import FleetState
from benchmarks.report import Figure, Group, Quantity, Role, Sample, Verdict
from benchmarks.states import digest_of

_UP: Final = 200e6
"""Of a source's link, in bits per second."""
_RECEIVER: Final = Link(up=800e6, down=800e6)
_NUM_RECEIVERS: Final = 8
_FAST: Final = Link(up=_UP, down=800e6)
_SLOW: Final = Link(up=_UP / 10, down=800e6)
_LOSSY: Final = Link(up=_UP, down=800e6, loss=0.01)


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    links: Sequence[Link]
    num_receivers: int = 1
    role: Role = "ours"

    @property
    def rate(self) -> float:
        """What the links allow, in bits per second: of all sources, and of a receiver."""
        return min(sum(link.up for link in self.links), _RECEIVER.down)


_ONE: Final = _Case("1 source", [_FAST])
_TWO: Final = _Case("2 sources", [_FAST] * 2)
_FOUR: Final = _Case("4 sources", [_FAST] * 4)
_WITH_SLOW: Final = _Case("4 sources, one of them a tenth as fast", [_SLOW] + [_FAST] * 3)
_WITH_LOSS: Final = _Case("4 sources, one of them loses 1% of its packets", [_LOSSY] + [_FAST] * 3)
_FOUR_TO_MANY: Final = _Case(f"4 sources, {_NUM_RECEIVERS} receivers", [_FAST] * 4, _NUM_RECEIVERS)
_CASES: Final = (_ONE, _TWO, _FOUR, _WITH_SLOW, _WITH_LOSS, _FOUR_TO_MANY)
_FLOOR: Final = Quantity("bytes / rate", "s")


def run(state: FleetState, options: Options) -> Group:
    title = f"{state.num_bytes / 2**20:.0f} MiB, sources send {_UP / 1e6:.0f} Mbit/s, a receiver takes 800 Mbit/s"
    group = Group("fleet", "sources", title)
    digest = digest_of(state.of_source())
    num_sources = max(len(case.links) for case in _CASES)
    links = [_FAST] * num_sources + [_RECEIVER] * _NUM_RECEIVERS
    with network(links) as hosts, sources(RELAYED, hosts.hosts[:num_sources], state) as served:
        addresses = [address for _, address in served.values()]
        for number, case in options.rounds("sources", _CASES):
            for host, link in zip(hosts.hosts, case.links, strict=False):
                hosts.set_link(host, link)
            receivers = hosts.hosts[num_sources : num_sources + case.num_receivers]
            outcome = transfer(hosts, RELAYED, addresses[: len(case.links)], receivers, state, digest=digest)
            group.add(case, TIME, Sample(number, outcome.seconds, outcome.others_share))
            group.add(case, BUSY, Sample(number, outcome.busy_share * 100, outcome.others_share))
            group.add(case, _FLOOR, Sample(number, state.num_bytes * 8 / case.rate))
    group.verdicts = list(_judge(group))
    return group


def _judge(group: Group) -> Iterator[Verdict]:
    for case in _CASES:
        floor = group.figure(case, _FLOOR)
        assert floor is not None, "it is computed"
        yield Verdict(f"{case.name} (bytes / rate: {floor.value:.2f} s)", group.figure(case, TIME), None, "at most")
    yield Verdict.at_least("1 source / 2 sources", group.ratio(_ONE, _TWO, TIME), 1.9)
    yield Verdict.at_least("1 source / 4 sources", group.ratio(_ONE, _FOUR, TIME), 3.6)
    # The slow one's link allows less: what is asked for is that no more is lost than that.
    share = _FOUR.rate / _WITH_SLOW.rate
    figure = group.ratio(_WITH_SLOW, _FOUR, TIME)
    yield Verdict.at_most("one source a tenth as fast / what the links allow then", _scaled(figure, 1 / share), 1.1)
    yield Verdict.at_most("one link loses 1% / none does", group.ratio(_WITH_LOSS, _FOUR, TIME), 1.25)
    yield Verdict.at_most("4 sources: 8 receivers / one", group.ratio(_FOUR_TO_MANY, _FOUR, TIME), 1.3)


def _scaled(figure: Figure | None, factor: float) -> Figure | None:
    if figure is None:
        return None
    return Figure(figure.value * factor, figure.low * factor, figure.high * factor)
