"""The connections of one fetch: those that workers use, and those that wait for the next request to the same peer.

A new connection has to prove itself, which costs more than a chunk. A receiver of a large fleet asks more peers than it
has workers, in turn, so its workers share the connections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ft_transport.http.connection import Connection

_MAX_IDLE: Final = 128
"""That nobody uses at the moment; the servers have many to keep."""


class KeptConnections:
    """Not thread-safe: its owner calls it under one lock.

    Args:
        connect: Makes a connection to the peer with this index, which opens at its first request.
    """

    def __init__(self, connect: Callable[[int], Connection]) -> None:
        self._connect = connect
        self._used: list[Connection] = []
        # In the order in which they were given back.
        self._idle: list[tuple[int, Connection]] = []
        self._is_closed = False

    def take(self, peer: int) -> Connection:
        """A connection to this peer that nobody else has; the one that was used last if there are several."""
        found = next((at for at in reversed(range(len(self._idle))) if self._idle[at][0] == peer), None)
        connection = self._connect(peer) if found is None else self._idle.pop(found)[1]
        self._used.append(connection)
        return connection

    def give_back(self, peer: int, connection: Connection) -> None:
        """Keep it, unless it was interrupted or all is closed. One that was closed keeps what it knows of its peer."""
        self._used.remove(connection)
        if self._is_closed or connection.is_interrupted:
            connection.close()
            return
        self._idle.append((peer, connection))
        if len(self._idle) > _MAX_IDLE:
            _, oldest = self._idle.pop(0)
            oldest.close()

    def interrupt(self) -> None:
        """End what is read from any of them now, and never use one again."""
        for connection in self._used:
            connection.interrupt()
        self.close_idle()

    def close_idle(self) -> None:
        """Close what nobody uses now, and from now on what is given back."""
        self._is_closed = True
        while self._idle:
            self._idle.pop()[1].close()

    def close(self) -> None:
        """Close all, once nobody uses one: a worker that was interrupted may not have given its own back."""
        self.close_idle()
        while self._used:
            self._used.pop().close()
