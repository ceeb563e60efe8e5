"""Child processes: what forked ones close, and how programs of this package start as children.

A child that the trainer forks, such as a worker of a data loader, inherits every descriptor. If the trainer dies, its
peers would see their connections stay open and silent for as long as one such child lives, and wait for their stall
timeouts; and memory is freed only when its last descriptor is closed. (A process that is spawned inherits none: PEP
446.)

A program of this package imports the same modules as its parent. With ``-m`` and ``-c`` Python searches the working
directory first (https://docs.python.org/3/library/sys.html, ``sys.path``). There a child of a training run would import
the user's ``queue.py`` instead of the standard library's, and in a checkpoint directory it would run any code placed
beside the checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, Protocol

from ft_transport.runtime.signal_safe import Place, Places, SafeCondition

_DESCRIPTORS: Final = "/dev/fd"
_LONGEST_DELAY_S: Final = 5.0
"""Longest wait of a fork for `delaying_forks`; then the fork goes on, and its child may keep a socket."""


class SocketHolder(Protocol):
    """An object with open sockets."""

    def is_mine(self, candidate: socket.socket) -> bool:
        """Returns whether a socket is the holder's. Called in the child."""


class FileHolder(Protocol):
    """An object with open files that are not its own."""

    def is_my_file(self, status: os.stat_result) -> bool:
        """Returns whether an open file is one of the holder's. Called in the child."""


making_socket: Final = threading.RLock()
"""Held from the creation of a socket or file until its holder has it; forks wait for it."""
_holders: weakref.WeakSet[SocketHolder] = weakref.WeakSet()
_file_holders: weakref.WeakSet[FileHolder] = weakref.WeakSet()


class _Gate:
    """Lets a fork wait until no thread is making sockets that have no holder yet."""

    def __init__(self) -> None:
        self._changed = SafeCondition()
        self._inside = Places()

    def enter(self) -> Place:
        with self._changed:
            place = self._inside.take()
        return place  # noqa: RET504 - inside the block a handler could still raise after it

    def leave(self, place: Place) -> None:
        with self._changed:
            place.give_back()
            self._changed.notify_all()

    def close(self) -> None:
        self._changed.acquire()
        self._changed.wait_for(lambda: not self._inside.num_taken(), timeout=_LONGEST_DELAY_S)

    def open(self) -> None:
        self._changed.release()


_gate = _Gate()


@contextlib.contextmanager
def delaying_forks() -> Iterator[None]:
    """Delay forks of other threads, for a while, until the end of the block.

    For code that makes sockets inside a library, where they get a holder only when the library is done. Several threads
    may be inside at once.
    """
    gate = _gate
    place = gate.enter()
    try:
        yield
    finally:
        gate.leave(place)


def close_in_children(holder: SocketHolder) -> None:
    """Close the holder's sockets in every child forked from now on, while the holder lives."""
    _holders.add(holder)


def close_files_in_children(holder: FileHolder) -> None:
    """Close the holder's files in every child forked from now on, while the holder lives."""
    _file_holders.add(holder)


def _before_fork() -> None:
    # The gate first: a fork that waits for a library must not keep other threads from making sockets.
    _gate.close()
    making_socket.acquire()


def _after_fork() -> None:
    making_socket.release()
    _gate.open()


def _close_all() -> None:
    global _gate  # noqa: PLW0603 - no thread inside the parent's gate leaves it here
    making_socket.release()
    _gate = _Gate()
    holders, file_holders = list(_holders), list(_file_holders)
    asked = _open_descriptors() if holders or file_holders else ()
    mine = [number for number in asked if _is_of_any(holders, file_holders, number)]
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
    except OSError:  # The table is full, or the directory does not exist.
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return range(soft_limit if 0 <= soft_limit < 1 << 16 else 1 << 16)


def _is_of_any(holders: list[SocketHolder], file_holders: list[FileHolder], number: int) -> bool:
    """Return whether a descriptor is a holder's, by asking the system: the fork may have split an update."""
    try:
        status = os.fstat(number)
    except OSError:
        return False
    if not stat.S_ISSOCK(status.st_mode):
        return any(holder.is_my_file(status) for holder in file_holders)
    with contextlib.suppress(OSError):
        candidate = socket.socket(fileno=number)
        try:
            return candidate.family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX) and any(
                holder.is_mine(candidate) for holder in holders
            )
        finally:
            candidate.detach()
    return False


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_close_all)


_PROGRAM: Final = """
import sys
sys.path[:] = [place for place in sys.path if place]
from {module} import {function} as run
run()
"""


def child_command(module: str, function: str, *arguments: str) -> tuple[str, ...]:
    """Return a command that calls a function of a module in its own process.

    Args:
        module: A module of this distribution.
        function: Its name; it takes no arguments and reads ``sys.argv[1:]``.
        arguments: Arguments of the command.
    """
    return (sys.executable, "-c", _PROGRAM.format(module=module, function=function), *arguments)


def child_environment() -> dict[str, str]:
    """Return this process's environment, completed so that a child finds this package."""
    here = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": paths}
