"""A forked child keeps no connection of its parent's alive.

A child that the trainer forks, such as a worker of a data loader, inherits every socket. If the trainer dies, its
peers would see their connections stay open and silent for as long as one such child lives, and wait for their stall
timeouts. (A process that is spawned inherits none: PEP 446.)
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import weakref
from collections.abc import Iterable
from typing import Final, Protocol

_DESCRIPTORS: Final = "/dev/fd"


class SocketHolder(Protocol):
    """Whatever has sockets open."""

    def is_mine(self, candidate: socket.socket) -> bool:
        """Whether a socket belongs to it. Called in the child."""


making_socket: Final = threading.RLock()
"""Held from the moment that a socket exists until its holder knows it; a fork waits for that."""
_holders: weakref.WeakSet[SocketHolder] = weakref.WeakSet()


def close_in_children(holder: SocketHolder) -> None:
    """Closes the holder's sockets in every child that is forked from now on, for as long as the holder lives."""
    _holders.add(holder)


def _close_all() -> None:
    making_socket.release()
    holders = list(_holders)
    mine = [number for number in _open_descriptors() if _is_of_any(holders, number)] if holders else []
    if not mine:
        return
    # The numbers stay taken: the child's copies of the Python objects will close them once more. One is closed first,
    # because the table of descriptors may be full.
    os.close(mine[0])
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in mine:
        if number != null:
            os.dup2(null, number, inheritable=False)
    if null not in mine:
        os.close(null)


def _open_descriptors() -> Iterable[int]:
    try:
        return [int(name) for name in os.listdir(_DESCRIPTORS)]
    except OSError:  # The table is full, or there is no such directory.
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return range(soft_limit if 0 <= soft_limit < 1 << 16 else 1 << 16)


def _is_of_any(holders: list[SocketHolder], number: int) -> bool:
    """Asks the system what the descriptor is, and not the objects that know of it: the fork may have come between."""
    with contextlib.suppress(OSError):
        candidate = socket.socket(fileno=number)
        try:
            return candidate.family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX) and any(
                holder.is_mine(candidate) for holder in holders
            )
        finally:
            candidate.detach()
    return False


os.register_at_fork(before=making_socket.acquire, after_in_parent=making_socket.release, after_in_child=_close_all)
