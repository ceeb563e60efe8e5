"""Fan-out: one source, and receivers that start together: when is the last one done, and what has the source sent?"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from benchmarks import fleet_peers, transports
from benchmarks.fleet_peers import Peer
from benchmarks.fleet_runs import ALONE, BARE, CHAIN, DIGESTED_CHAIN, RELAYED, TORCHFT, Outcome, Way, sources, transfer
from benchmarks.network_namespaces import Link, Network, network
from benchmarks.options import Options
from benchmarks.replicas.fleet_hosts import FleetState
from benchmarks.report import Group, Named, Quantity, Sample, Verdict, ratio
from benchmarks.states import digest_of, tensors_of

RATE: Final = 800e6
"""Of each host's link, in bits per second, up and down."""
_SLOW_RATE: Final = 200e6
"""With which two cores keep up whatever the number of receivers: 3.2 Gbit/s in all with 16."""
_COMPARED: Final = 8
"""With so many receivers the others are measured."""
_MAX_SLOWDOWN: Final = 1.3
_MAX_SENT: Final = 1.2
_MIN_FASTER: Final = 2.0
TIME: Final = Quantity("last receiver done", "s")
SENT: Final = Quantity("sent by the source, of the state", "×")
BUSY: Final = Quantity("cores in use", "%")
_FLOOR: Final = Named("bytes / rate", "ceiling")


@dataclass(frozen=True, slots=True, kw_only=True)
class FanOut:
    """What is measured.

    Attributes:
        name: Names it on the command line.
        rate: Of each host's link, in bits per second, up and down.
        num_receivers: So many are measured; with the others once, unless they are in ``repeated``.
        repeated: So many are measured in every round.
        has_peers: Whether others are measured, too.
    """

    name: str
    rate: float
    num_receivers: tuple[int, ...]
    repeated: tuple[int, ...]
    has_peers: bool

    def run(self, state: FleetState, options: Options) -> Group:
        title = f"{state.num_bytes / 2**20:.0f} MiB, {self.rate / 1e6:.0f} Mbit/s per host, one source"
        group = Group("fleet", self.name, title)
        expected = state.of_source()
        digest = digest_of(expected)
        group.add(_FLOOR, TIME, Sample(0, state.num_bytes * 8 / self.rate))
        num_hosts = 1 + max(self.num_receivers)
        with network([Link(up=self.rate, down=self.rate)] * num_hosts) as hosts, contextlib.ExitStack() as stack:
            addresses: dict[object, str] = {}
            for number, (way, num_receivers) in self._rounds(options):
                if way.serve not in addresses:
                    (_, address), *_ = stack.enter_context(sources(way, hosts.hosts[:1], state)).values()
                    addresses[way.serve] = address
                receivers = hosts.hosts[1 : 1 + num_receivers]
                outcome = transfer(hosts, way, [addresses[way.serve]], receivers, state, digest=digest)
                share = outcome.traffic[hosts.hosts[0]].sent_bytes / state.num_bytes
                _add(group, variant(way, num_receivers), number, outcome, share)
            stack.close()
            if self.has_peers:
                content = [memoryview(tensor.numpy()).cast("B") for tensor in tensors_of(expected)]
                _measure_peers(group, hosts, content, options)
        group.series.sort(key=lambda series: ("ceiling", "ours", "other", "peer").index(series.variant.role))
        group.verdicts = list(self._judge(group))
        return group

    def _rounds(self, options: Options) -> Iterator[tuple[int, tuple[Way, int]]]:
        """What takes long is measured once, unless more is asked for."""
        large = [each for each in self.num_receivers if each >= _COMPARED]
        once: list[tuple[Way, int]] = [(BARE, 1), *itertools.product((CHAIN, DIGESTED_CHAIN), large)]
        if self.has_peers and transports.torchft_is_installed():
            once.append((TORCHFT, _COMPARED))
        if options.is_full:
            once.append((ALONE, _COMPARED))
        for number in range(options.size.num_samples):
            is_whole = number == 0 or options.is_full
            kept = [(RELAYED, each) for each in self.num_receivers if is_whole or each in self.repeated]
            for item in itertools.chain(kept, once if is_whole else ()):
                options.settle()
                options.say(f"{self.name} {number + 1}/{options.size.num_samples} {variant(*item).name}")
                yield number, item

    def _judge(self, group: Group) -> Iterator[Verdict]:
        floor_s = group.figure(_FLOOR, TIME)
        assert floor_s is not None, "it is computed"
        for num_receivers in self.num_receivers:
            named = variant(RELAYED, num_receivers)
            text = f"{named.name}, last one done (bytes / rate: {floor_s.value:.2f} s)"
            yield Verdict(text, group.figure(named, TIME), None, "at most")
        for num_receivers in self.num_receivers[1:]:
            figure = group.ratio(variant(RELAYED, num_receivers), variant(RELAYED, 1), TIME)
            yield Verdict.at_most(f"last of {num_receivers} receivers / one receiver", figure, _MAX_SLOWDOWN)
            for way in (CHAIN, DIGESTED_CHAIN):
                chain = group.ratio(variant(way, num_receivers), variant(RELAYED, 1), TIME)
                if chain is not None:
                    yield Verdict(f"last of {num_receivers}, {way.name} / one receiver", chain, None, "at most")
        sent = [group.figure(variant(RELAYED, num_receivers), SENT) for num_receivers in self.num_receivers]
        most = max((figure for figure in sent if figure is not None), key=lambda figure: figure.value, default=None)
        yield Verdict.at_most("sent by the source, of the state, the most of all", most, _MAX_SENT)
        if self.has_peers:
            yield from _judge_peers(group)
        for num_receivers in self.num_receivers:
            busy = group.figure(variant(RELAYED, num_receivers), BUSY)
            yield Verdict(f"cores in use, {num_receivers} receivers", busy, None, "at most")


FAST: Final = FanOut(name="fan-out", rate=RATE, num_receivers=(1, 2, 4, 8, 16), repeated=(1, 8, 16), has_peers=True)
SLOW: Final = FanOut(name="fan-out-slow", rate=_SLOW_RATE, num_receivers=(1, 4, 8, 16), repeated=(), has_peers=False)


def variant(way: Way, num_receivers: int) -> Named:
    return Named(f"{way.name}, {num_receivers} receiver{'s' if num_receivers > 1 else ''}", way.role)


def _measure_peers(group: Group, hosts: Network, content: list[memoryview], options: Options) -> None:
    num_bytes = sum(len(each) for each in content)
    with fleet_peers.file_of(content) as data:
        for peer in fleet_peers.PEERS:
            reason = peer.why_not()
            if reason is not None:
                group.notes.append(reason)
                continue
            for number in range(options.size.num_samples if options.is_full else 1):
                options.settle()
                options.say(f"fan-out {number + 1} {peer.name}")
                outcome = fleet_peers.measure(peer, hosts, _COMPARED, data)
                _add(group, _named(peer), number, outcome, outcome.traffic[hosts.hosts[0]].sent_bytes / num_bytes)
    if not transports.torchft_is_installed():
        group.notes.append(transports.NO_TORCHFT)


def _add(group: Group, named: Named, number: int, outcome: Outcome, sent_share: float) -> None:
    for quantity, value in (
        (TIME, outcome.seconds),
        (SENT, sent_share),
        (BUSY, outcome.busy_share * 100),
    ):
        group.add(named, quantity, Sample(number, value, outcome.others_share))


def _judge_peers(group: Group) -> Iterator[Verdict]:
    peers = [variant(TORCHFT, _COMPARED), *(_named(peer) for peer in fleet_peers.PEERS)]
    for named in peers:
        yield Verdict(named.name, group.figure(named, TIME), None, "at most")
    best = group.best(peers, TIME)
    name = best.variant.name if best is not None else "best of the others"
    yield Verdict.at_least(f"{name} / ours", ratio(best, group.find(variant(RELAYED, _COMPARED), TIME)), _MIN_FASTER)


def _named(peer: Peer) -> Named:
    return Named(f"{peer.name}, {_COMPARED} receivers", "peer")
