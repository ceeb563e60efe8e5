"""One transfer between the hosts of the fleet benchmark: who takes part, when it begins, and what it was.

All receivers have their memory and their server before they begin together; the time ends with the last one's last
byte.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

from benchmarks.machine import Watch, own_processes
from benchmarks.network_namespaces import Host, Network, Traffic
from benchmarks.processes import Channel, Child
from benchmarks.replicas import fleet_hosts
from benchmarks.replicas.fleet_hosts import Done, FleetState, Order
from benchmarks.report import Role

TIMEOUT_S: Final = 240.0
_POLL_S: Final = 0.002


class Member(Protocol):
    """A process on a host: a `Child`, or a program of a peer."""

    @property
    def process_id(self) -> int: ...
    def say(self, message: object) -> None: ...
    def receive(self, timeout_s: float = ...) -> Any: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Way:
    """A way to move a state.

    Attributes:
        serve: Runs at a source; the first thing it says is its address.
        receive: Runs at a receiver; says its address, is told an `Order`, says `Done`.
        has_relays: Whether receivers are told of each other.
        is_checked: Whether a receiver says the digest of what has come, when it is asked.
    """

    name: str
    role: Role
    serve: Callable[[Channel, Host, FleetState], None]
    receive: Callable[[Channel, Host, FleetState], None]
    has_relays: bool = False
    is_checked: bool = True


RELAYED: Final = Way("ft_transport", "ours", fleet_hosts.serve_ours, fleet_hosts.receive_ours, has_relays=True)
ALONE: Final = Way("ft_transport, without relays", "other", fleet_hosts.serve_ours, fleet_hosts.receive_ours)
TORCHFT: Final = Way("torchft HTTPTransport", "peer", fleet_hosts.serve_torchft, fleet_hosts.receive_torchft)
BARE: Final = Way(
    "bare sendfile → recv_into", "ceiling", fleet_hosts.serve_bare, fleet_hosts.receive_bare, is_checked=False
)
CHAIN: Final = Way(
    "bare chain of recv_into and send",
    "ceiling",
    fleet_hosts.serve_bare,
    fleet_hosts.receive_bare_chain,
    has_relays=True,
    is_checked=False,
)
DIGESTED_CHAIN: Final = replace(
    CHAIN, name="bare chain that digests with a key", receive=fleet_hosts.receive_digested_chain
)


@dataclass(slots=True)
class Outcome:
    """What a transfer was.

    Attributes:
        seconds: Until the last receiver that was left had everything.
        traffic: Of each host, from the beginning until then.
        done: What the receivers said that were left.
        others_share: The share of the cores that other processes took.
        busy_share: The share of the cores that was in use at all; near 1 the cores were the limit, and not the links.
    """

    seconds: float
    traffic: Mapping[Host, Traffic]
    done: Mapping[Host, Done]
    others_share: float | None
    busy_share: float
    killed_at: list[float] = field(default_factory=list)


@contextlib.contextmanager
def sources(way: Way, hosts: Sequence[Host], state: FleetState) -> Iterator[dict[Host, tuple[Child, str]]]:
    """A source on each host, with its address."""
    with contextlib.ExitStack() as stack:
        children = {host: Child(way.serve, host, state) for host in hosts}
        for child in children.values():
            stack.callback(child.close)
        yield {host: (child, child.receive(TIMEOUT_S)) for host, child in children.items()}


def transfer(
    network: Network,
    way: Way,
    addresses: Sequence[str],
    hosts: Sequence[Host],
    state: FleetState,
    *,
    digest: str | None = None,
    only_changed: bool = False,
    meanwhile: Callable[[Killer], None] | None = None,
) -> Outcome:
    """Fetches once with fresh receivers.

    Args:
        network: Where all are.
        way: How.
        addresses: Of the sources.
        hosts: Of the receivers.
        state: What the receivers expect.
        digest: Of what they have to end up with.
        only_changed: Whether they look first at what they have.
        meanwhile: Called right after the beginning; may kill.

    Raises:
        RuntimeError: A receiver failed, or ended up with another state.
    """
    with contextlib.ExitStack() as stack:
        children: dict[Host, Member] = {host: Child(way.receive, host, state) for host in hosts}
        for child in children.values():
            stack.callback(child.close)
        own = [child.receive(TIMEOUT_S) for child in children.values()]
        order = Order(
            sources=addresses, relays=own if way.has_relays and len(own) > 1 else (), only_changed=only_changed
        )
        outcome = run(network, children, dict.fromkeys(children, order), meanwhile)
        for host in outcome.done if way.is_checked else ():
            children[host].say("digest")
            if children[host].receive(TIMEOUT_S) != digest:
                raise RuntimeError(f"{way.name!r} delivered another state to {host.address} than was sent")
    return outcome


def run(
    network: Network,
    members: Mapping[Host, Member],
    orders: Mapping[Host, object],
    meanwhile: Callable[[Killer], None] | None = None,
) -> Outcome:
    """Gives all receivers their orders at once, and waits for all that are left."""
    killer = Killer(network, members)
    before = {host: network.traffic(host) for host in network.hosts}
    busy = _BusyShare()
    with Watch(own_processes()) as watch:
        started_s = time.monotonic()
        for host, member in members.items():
            member.say(orders[host])
        if meanwhile is not None:
            meanwhile(killer)
        left = [host for host in members if host not in killer.killed]
        done = {host: members[host].receive(TIMEOUT_S) for host in left}
    busy_share = busy.since_start()
    traffic = {host: network.traffic(host).since(before[host]) for host in network.hosts}
    return Outcome(
        seconds=max(each.ended_s for each in done.values()) - started_s,
        traffic=traffic,
        done=done,
        others_share=watch.others_share,
        busy_share=busy_share,
    )


class Killer:
    """Ends processes in the middle of a transfer, as the kernel ends one that has no memory left."""

    def __init__(self, network: Network, members: Mapping[Host, Member]) -> None:
        self._network = network
        self._members = members
        self.killed: set[Host] = set()

    def wait_for_bytes(self, host: Host, num_bytes: float) -> None:
        """Returns when a host has received so much."""
        begun = self._network.traffic(host)
        deadline_s = time.monotonic() + TIMEOUT_S
        while self._network.traffic(host).since(begun).received_bytes < num_bytes:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"expected {num_bytes:.0f} bytes at {host.address} within {TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)

    def kill(self, host: Host, process_id: int | None = None) -> None:
        """``kill -9`` of the receiver on a host, or of a source that is named by its process."""
        if process_id is None:
            self.killed.add(host)
            process_id = self._members[host].process_id
        os.kill(process_id, signal.SIGKILL)


class _BusyShare:
    """How much of the cores is used, by anybody, the kernel's interrupts among them."""

    def __init__(self) -> None:
        self._begun = self._read()

    def since_start(self) -> float:
        idle, total = (now - then for now, then in zip(self._read(), self._begun, strict=True))
        return 1 - idle / total if total else 0.0

    @staticmethod
    def _read() -> tuple[int, int]:
        fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return fields[3] + fields[4], sum(fields)
