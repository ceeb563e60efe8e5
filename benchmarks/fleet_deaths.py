"""Deaths: a source or relays are killed in the middle. Do all others finish, and what is fetched twice?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from benchmarks.fleet_fan_out import BUSY, TIME
from benchmarks.fleet_runs import RELAYED, Killer, sources, transfer
from benchmarks.network_namespaces import Host, Link, network
from benchmarks.options import Options
from benchmarks.replicas.fleet_hosts import FleetState
from benchmarks.report import Figure, Group, Quantity, Role, Sample, Verdict
from benchmarks.states import digest_of
from ft_transport.wire.chunks import CHUNK_BYTES

_NUM_CONNECTIONS: Final = 4
"""Of a fetch, by default."""
_LINK: Final = Link(up=400e6, down=400e6)
MORE: Final = Quantity("more than the state came over the link, of the one with most", "MiB")
"""With acknowledgements for what was passed on, and what was sent again because a packet was lost."""


@dataclass(frozen=True, slots=True)
class _Case:
    """Who takes part, and who dies, by number, when the first one that lives has half of the state."""

    name: str
    num_sources: int
    num_receivers: int
    dead_sources: tuple[int, ...] = ()
    dead_receivers: tuple[int, ...] = ()
    role: Role = "ours"

    @property
    def num_dead(self) -> int:
        return len(self.dead_sources) + len(self.dead_receivers)


_CASES: Final = (
    _Case("2 sources, 1 receiver", 2, 1),
    _Case("2 sources, 1 receiver, a source dies", 2, 1, dead_sources=(0,)),
    _Case("1 source, 4 receivers", 1, 4),
    _Case("1 source, 4 receivers, one of them dies", 1, 4, dead_receivers=(1,)),
    _Case("1 source, 4 receivers, two of them die", 1, 4, dead_receivers=(1, 2)),
)


def run(state: FleetState, options: Options) -> Group:
    title = f"{state.num_bytes / 2**20:.0f} MiB, 400 Mbit/s per host, kill -9 at half of it"
    group = Group("fleet", "deaths", title)
    digest = digest_of(state.of_source())
    num_sources = max(case.num_sources for case in _CASES)
    num_hosts = num_sources + max(case.num_receivers for case in _CASES)
    with network([_LINK] * num_hosts) as hosts:
        for number, case in options.rounds("deaths", _CASES):
            if number > 0 and not case.num_dead and not options.is_full:
                continue  # They differ by little, and take half of the time.
            receivers = hosts.hosts[num_sources : num_sources + case.num_receivers]
            # Anew each time, for some of them die.
            with sources(RELAYED, hosts.hosts[: case.num_sources], state) as served:
                processes = [(host, child.process_id) for host, (child, _) in served.items()]

                def kill(
                    killer: Killer,
                    case: _Case = case,
                    receivers: tuple[Host, ...] = receivers,
                    processes: list[tuple[Host, int]] = processes,
                ) -> None:
                    if case.num_dead:
                        killer.wait_for_bytes(receivers[0], state.num_bytes / 2)
                    for at in case.dead_sources:
                        killer.kill(*processes[at])
                    for at in case.dead_receivers:
                        killer.kill(receivers[at])

                addresses = [address for _, address in served.values()]
                outcome = transfer(hosts, RELAYED, addresses, receivers, state, digest=digest, meanwhile=kill)
            group.add(case, TIME, Sample(number, outcome.seconds, outcome.others_share))
            group.add(case, BUSY, Sample(number, outcome.busy_share * 100, outcome.others_share))
            received = max(outcome.traffic[host].received_bytes for host in outcome.done)
            group.add(case, MORE, Sample(number, (received - state.num_bytes) / 2**20, outcome.others_share))
    group.verdicts = list(_judge(group))
    return group


def _judge(group: Group) -> Iterator[Verdict]:
    limit = CHUNK_BYTES * _NUM_CONNECTIONS / 2**20
    for case in _CASES:
        yield Verdict(f"{case.name}: the others done, verified", group.figure(case, TIME), None, "at most")
    undisturbed = None
    for case in _CASES:
        more = group.figure(case, MORE)
        if not case.num_dead:
            undisturbed = more
            yield Verdict(f"{case.name}: {MORE.name}", more, None, "at most")
        elif more is not None and undisturbed is not None:
            low, high = ((each - undisturbed.value) / case.num_dead for each in (more.low, more.high))
            text = f"{case.name}: fetched twice per death, by the one with most"
            yield Verdict.at_most(text, Figure(high, low, high, MORE.unit), limit)
