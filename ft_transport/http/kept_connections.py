"""A connection pool for one fetch: connections in use, and idle ones for the next request to the same peer.

Authenticating a new connection costs more than a chunk. A receiver of a large fleet asks more peers than it has
workers, in turn, so its workers share the connections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ft_transport.http.connection import Connection

_MAX_IDLE: Final = 128
"""Maximum number of idle connections; servers have to keep many."""


class KeptConnections:
    """Connections by peer. Not thread-safe: its owner calls it under one lock.

    Args:
        connect: Makes a connection to the peer with this index, which opens at its first request.
    """

    def __init__(self, connect: Callable[[int], Connection]) -> None:
        self._connect = connect
        self._used: list[Connection] = []
        # In the order in which they were returned.
        self._idle: list[tuple[int, Connection]] = []
        self._is_closed = False

    def take(self, peer: int) -> Connection:
        """Return an unused connection to this peer: the last one used if there are several."""
        found = next((at for at in reversed(range(len(self._idle))) if self._idle[at][0] == peer), None)
        connection = self._connect(peer) if found is None else self._idle.pop(found)[1]
        self._used.append(connection)
        return connection

    def give_back(self, peer: int, connection: Connection) -> None:
        """Return a connection to the pool; drop it if it was interrupted or the pool is closed."""
        self._used.remove(connection)
        if self._is_closed or connection.is_interrupted:
            connection.close()
            return
        self._idle.append((peer, connection))
        if len(self._idle) > _MAX_IDLE:
            _, oldest = self._idle.pop(0)
            oldest.close()

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
            self._used.pop().close()
