"""A connection pool for one fetch: connections in use, and idle ones for the next request to the same peer.

Authenticating a new connection costs more than a chunk. A receiver of a large fleet asks more peers than it has
workers, in turn, so its workers share the connections.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ft_transport.http.bind_address import interfaces
from ft_transport.http.client.connection import Connection
from ft_transport.http.peer_address import PeerAddress
from ft_transport.telemetry.record import Transfer

_MAX_IDLE: Final = 128
"""Maximum number of idle connections; servers have to keep many."""


@dataclass(slots=True)
class _Flow:
    began_s: float
    ended_s: float
    num_bytes: int = 0
    num_connections: int = 0
    local_address: str = ""
    peer_address: str = ""


class ConnectionPool:
    """Connections by peer, and how much came over them. Not thread-safe: its owner calls it under one lock.

    Args:
        peers: The peers, by the index that the methods take.
        connect: Makes a connection to a peer, which opens at its first request.
        num_sources: The first this many of ``peers`` are sources; the others are relays.
    """

    def __init__(self, peers: Sequence[PeerAddress], connect: Callable[[int], Connection], *, num_sources: int) -> None:
        self._peers = peers
        self._connect = connect
        self._num_sources = num_sources
        self._used: dict[Connection, int] = {}
        """How often each of them was opened before its request."""
        # In the order in which they were returned.
        self._idle: list[tuple[int, Connection]] = []
        self._flows: dict[int, _Flow] = {}
        self._is_closed = False

    def take(self, peer: int) -> Connection:
        """Return an unused connection to this peer, for one request: the last one used if there are several."""
        found = next((at for at in reversed(range(len(self._idle))) if self._idle[at][0] == peer), None)
        connection = self._connect(peer) if found is None else self._idle.pop(found)[1]
        self._used[connection] = connection.num_opened
        now_s = time.monotonic()
        self._flows.setdefault(peer, _Flow(began_s=now_s, ended_s=now_s))
        return connection

    def received(self, peer: int, num_bytes: int) -> None:
        """Note ``num_bytes`` more verified bytes from a peer."""
        flow = self._flows[peer]
        flow.num_bytes += num_bytes
        flow.ended_s = time.monotonic()

    def give_back(self, peer: int, connection: Connection) -> None:
        """Return a connection after a request; drop it if it was interrupted or the pool is closed."""
        flow = self._flows[peer]
        flow.ended_s = time.monotonic()
        flow.num_connections += connection.num_opened - self._used.pop(connection)
        flow.local_address = connection.local_address or flow.local_address
        flow.peer_address = connection.reached or flow.peer_address
        if self._is_closed or connection.is_interrupted:
            connection.close()
            return
        self._idle.append((peer, connection))
        if len(self._idle) > _MAX_IDLE:
            _, oldest = self._idle.pop(0)
            oldest.close()

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

    def interrupt(self) -> None:
        """Interrupt every connection in use, and never reuse one."""
        for connection in self._used:
            connection.interrupt()
        self.close_idle()

    def close_idle(self) -> None:
        """Close idle connections now, and the others when they return."""
        self._is_closed = True
        while self._idle:
            self._idle.pop()[1].close()

    def close(self) -> None:
        """Close all connections, in use or not, since an interrupted worker may not have returned its own."""
        self.close_idle()
        while self._used:
            self._used.popitem()[0].close()


def interface_of(local_address: str, by_address: dict[str, str]) -> str:
    """Return the interface with this local address; every address that begins with 127 is the loopback's."""
    plain = local_address.partition("%")[0]
    try:
        is_loopback = ipaddress.ip_address(plain).is_loopback
    except ValueError:  # no connection was made
        return ""
    return by_address.get(plain, "lo" if is_loopback else "")
