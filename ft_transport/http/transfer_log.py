"""Sums up the transfers of one fetch for its record: bytes, peer, interface and time."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ft_transport.http.connection import Connection
from ft_transport.http.peer_address import PeerAddress
from ft_transport.http.reachability import interfaces
from ft_transport.telemetry.record import Transfer


@dataclass(slots=True)
class _Flow:
    began_s: float
    ended_s: float
    num_bytes: int = 0
    num_connections: int = 0
    local_address: str = ""
    peer_address: str = ""


class TransferLog:
    """Sums up requests by peer. Not thread-safe: its owner calls it under one lock.

    Args:
        peers: The peers, by the index that the methods take.
        num_sources: The first this many of ``peers`` are sources; the others are relays.
    """

    def __init__(self, peers: Sequence[PeerAddress], *, num_sources: int) -> None:
        self._peers = peers
        self._num_sources = num_sources
        self._flows: dict[int, _Flow] = {}

    def begun(self, peer: int) -> None:
        """Note the start of a request to a peer."""
        now_s = time.monotonic()
        self._flows.setdefault(peer, _Flow(began_s=now_s, ended_s=now_s))

    def received(self, peer: int, num_bytes: int) -> None:
        """Note ``num_bytes`` more verified bytes from a peer."""
        flow = self._flows[peer]
        flow.num_bytes += num_bytes
        flow.ended_s = time.monotonic()

    def ended(self, peer: int, connection: Connection, *, num_opened_before: int) -> None:
        """Note the end of a request to a peer, successful or not."""
        flow = self._flows[peer]
        flow.ended_s = time.monotonic()
        flow.num_connections += connection.num_opened - num_opened_before
        flow.local_address = connection.local_address or flow.local_address
        flow.peer_address = connection.reached or flow.peer_address

    def transfers(self) -> list[Transfer]:
        """Return the transfers from each requested peer."""
        by_address = {str(address): name for address, name in interfaces().items()}
        return [
            Transfer(
                peer=str(self._peers[peer]),
                role="source" if peer < self._num_sources else "relay",
                num_bytes=flow.num_bytes,
                length_s=flow.ended_s - flow.began_s,
                local_address=flow.local_address,
                peer_address=flow.peer_address,
                interface=interface_of(flow.local_address, by_address),
                num_connections=flow.num_connections,
            )
            for peer, flow in sorted(self._flows.items())
        ]


def interface_of(local_address: str, by_address: dict[str, str]) -> str:
    """Return the interface with this local address; every address that begins with 127 is the loopback's."""
    plain = local_address.partition("%")[0]
    try:
        is_loopback = ipaddress.ip_address(plain).is_loopback
    except ValueError:  # no connection was made
        return ""
    return by_address.get(plain, "lo" if is_loopback else "")
