"""Child processes: closes sockets and files in forked children, and builds the commands that start child programs.

A child that the trainer forks, such as a data loader's worker, inherits every descriptor. If the trainer dies and the
child lives on, the child keeps the trainer's connections open, so peers wait for their stall timeouts. The child's
descriptors also keep the trainer's shared memory allocated. (Spawned processes inherit no descriptors: PEP 446.)

A child program must import the same modules as its parent. With ``-m`` and ``-c`` Python searches the working directory
first (https://docs.python.org/3/library/sys.html, ``sys.path``). From there the child might import the user's
``queue.py`` instead of the standard library's, or run code that someone placed beside a checkpoint.
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
"""Longest time that a fork waits for blocks of `delaying_forks`. After that, the child may inherit a socket."""


class SocketHolder(Protocol):
    """An object that owns open sockets."""

    def is_mine(self, candidate: socket.socket) -> bool:
        """Returns whether this object owns the socket. Called in the forked child."""


class FileHolder(Protocol):
    """An object that uses open files."""

    def is_my_file(self, status: os.stat_result) -> bool:
        """Returns whether this object uses the open file with this status. Called in the forked child."""


making_socket: Final = threading.RLock()
"""Acquire this lock while a new socket or file has no registered holder yet. Forks wait for the lock."""
_holders: weakref.WeakSet[SocketHolder] = weakref.WeakSet()
_file_holders: weakref.WeakSet[FileHolder] = weakref.WeakSet()


class _Gate:
    """Makes a fork wait until no thread is inside a block of `delaying_forks`."""

    def __init__(self) -> None:
        self._changed = SafeCondition()
        self._inside = Places()

    def enter(self) -> Place:
        with self._changed:
            place = self._inside.take()
        return place  # noqa: RET504 - a signal handler could raise between a return inside the block and its end

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
    """Delay forks by other threads until the end of the block, for 5 seconds at most.

    Use this around a library call that opens sockets: their holder can be registered only after the call.
    Several threads may be in such blocks at the same time.
    """
    gate = _gate
    place = gate.enter()
    try:
        yield
    finally:
        gate.leave(place)


def close_in_children(holder: SocketHolder) -> None:
    """Close the holder's sockets in every child that is forked during the lifetime of the holder."""
    _holders.add(holder)


def close_files_in_children(holder: FileHolder) -> None:
    """Close the holder's files in every child that is forked during the lifetime of the holder."""
    _file_holders.add(holder)


def _before_fork() -> None:
    # Wait at the gate first: a fork that waits for a library must not block other threads that create sockets.
    _gate.close()
    making_socket.acquire()


def _after_fork() -> None:
    making_socket.release()
    _gate.open()


def _close_all() -> None:
    global _gate  # noqa: PLW0603 - the parent's threads do not exist in the child, so they never leave the old gate
    making_socket.release()
    _gate = _Gate()
    holders, file_holders = list(_holders), list(_file_holders)
    candidates = _open_descriptors() if holders or file_holders else ()
    inherited = [number for number in candidates if _is_of_any(holders, file_holders, number)]
    if not inherited:
        return
    # Replace each descriptor by /dev/null instead of closing it, because the child's copies of the Python objects will
    # close the same numbers later. Close one descriptor first, because the descriptor table may be full.
    os.close(inherited[0])
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in inherited:
        if number != null:
            os.dup2(null, number, inheritable=False)
    if null not in inherited:
        os.close(null)


def _open_descriptors() -> Iterable[int]:
    try:
        return [int(name) for name in os.listdir(_DESCRIPTORS)]
    except OSError:  # The descriptor table is full, or /dev/fd does not exist.
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return range(soft_limit if 0 <= soft_limit < 1 << 16 else 1 << 16)


def _is_of_any(holders: list[SocketHolder], file_holders: list[FileHolder], number: int) -> bool:
    """Return whether any holder uses a descriptor. Ask the kernel, because Python's own data may be half updated."""
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
    """Return a command that calls a function in a new Python process.

    Args:
        module: Name of a module of this distribution.
        function: Name of a function of the module, without parameters. It reads ``sys.argv[1:]``.
        arguments: Arguments of the command.
    """
    return (sys.executable, "-c", _PROGRAM.format(module=module, function=function), *arguments)


def child_environment() -> dict[str, str]:
    """Return this process's environment, with a ``PYTHONPATH`` from which a child can import this package."""
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": paths}
