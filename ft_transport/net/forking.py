"""A forked child keeps no connection of its parent's alive.

A child that the trainer forks, such as a worker of a data loader, inherits every socket. If the trainer dies, its
peers would see their connections stay open and silent for as long as one such child lives, and wait for their stall
timeouts. (A process that is spawned inherits none: PEP 446.)
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import Protocol


class SocketHolder(Protocol):
    """Whatever has sockets open."""

    def open_descriptors(self) -> Iterable[int]:
        """The descriptors of the sockets that it has open now, -1 for one that is closed. Called in the child."""


_holders: weakref.WeakSet[SocketHolder] = weakref.WeakSet()


def close_in_children(holder: SocketHolder) -> None:
    """Closes the holder's sockets in every child that is forked from now on, for as long as the holder lives."""
    _holders.add(holder)


def _close_all() -> None:
    descriptors = [number for holder in list(_holders) for number in holder.open_descriptors() if number >= 0]
    if not descriptors:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in descriptors:
        # The number stays taken: the child's copies of the Python objects will close it once more.
        os.dup2(null, number, inheritable=False)
    os.close(null)


os.register_at_fork(after_in_child=_close_all)
