"""The trainer's side of the keeper: starts it, gives it duties, and replaces it if it dies."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Final

from ft_transport.keeper.messages import (
    Attend,
    Begin,
    End,
    Ended,
    Inherit,
    Inheritance,
    Message,
    receive,
    send,
)
from ft_transport.runtime.children import child_command, child_environment, close_in_children, making_socket
from ft_transport.runtime.signal_safe import SafeThread, ThreadRefusedError
from ft_transport.runtime.unix_sockets import is_own_user

logger = logging.getLogger(__name__)

_DIED: Final = "the keeper of this process has died; another one starts"
_ANSWER_S: Final = 1.0
"""How long a trainer waits for an answer of a keeper: it is training, and the keeper answers within a millisecond."""


class KeeperProcess:
    """The keeper of this process, which starts with the first duty. Any thread may call the methods.

    The keeper ends by itself: when this process has ended and its duties are over. A trainer never depends on it: if
    the keeper cannot be started or does not answer, a warning is logged, and the trainer goes on.

    Args:
        module: Name of a module of this distribution.
        function: Name of a function of the module, which calls ``keeper.program.run``.
    """

    def __init__(self, module: str, function: str) -> None:
        self._command = child_command(module, function)
        # Reentrant, for a signal handler that shuts a manager down.
        self._mutex = threading.RLock()
        self._pid = os.getpid()
        self._connection: socket.socket | None = None
        self._left_open: int | None = None
        self._duties: dict[str, Attend] = {}
        self._begun: set[str] = set()
        close_in_children(self)
        atexit.register(self._leave_open)

    def is_mine(self, candidate: socket.socket) -> bool:
        """Return whether the socket is this object's own. Forked children close it (``runtime.children``)."""
        return self._connection is not None and candidate.fileno() == self._connection.fileno()

    def attend(self, duty: Attend) -> None:
        """Give the keeper a duty, which it begins when this process dies."""
        with self._usable_mutex():
            self._duties[duty.name] = duty
            self._begun.discard(duty.name)
            self._tell(duty)

    def begin(self, name: str) -> None:
        """Let the keeper begin a duty now."""
        with self._usable_mutex():
            if name in self._duties:
                self._begun.add(name)
                self._tell(Begin(name))

    def end(self, name: str) -> None:
        """End a duty, and wait until the keeper has ended it."""
        with self._usable_mutex():
            if name not in self._duties:
                return
            with self._borrowed() as connection:
                if connection is not None and not _end(connection, name):
                    logger.warning("the keeper of this process did not answer within %g s", _ANSWER_S)
            self._duties.pop(name, None)
            self._begun.discard(name)

    def check(self) -> None:
        """Replace the keeper if it has died. Call this now and then."""
        with self._usable_mutex():
            self._forget_over()

    def _usable_mutex(self) -> threading.RLock:
        """Return the mutex. In a forked child, first forget the parent's keeper, and the mutex, which may be locked."""
        if self._pid != os.getpid():
            self._mutex = threading.RLock()
            self._pid = os.getpid()
            self._connection = self._left_open = None
            self._duties = {}
            self._begun = set()
        return self._mutex

    def _tell(self, message: Message) -> None:
        self._forget_over()
        with self._borrowed() as connection:
            if connection is not None:
                try:
                    send(connection, message)
                    return
                except OSError:
                    logger.warning(_DIED)
        self._restart()

    def _forget_over(self) -> None:
        """Forget begun duties whose work is over. Replace the keeper if it has died."""
        connection = self._connection
        while connection is not None and _is_readable(connection):
            message = receive(connection)
            if isinstance(message, Ended):
                if message.name in self._begun:
                    self._begun.discard(message.name)
                    self._duties.pop(message.name, None)
            elif message is None:
                logger.warning(_DIED)
                self._restart()
                return

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[socket.socket | None]:
        """Yield the connection to the keeper, also after `_leave_open`; ``None`` if there is none."""
        if self._left_open is None:
            yield self._connection
            return
        connection = socket.socket(fileno=self._left_open)
        try:
            connection.settimeout(_ANSWER_S)
            yield connection
        finally:
            connection.detach()

    def _restart(self) -> None:
        """Start a keeper, and give it all duties."""
        if self._left_open is not None:
            return  # This process ends; a second keeper would do the duties of the first once more.
        self._disconnect()
        try:
            connection = self._start()
            for duty in self._duties.values():
                send(connection, duty)
            for name in self._begun:
                send(connection, Begin(name))
        except (OSError, ThreadRefusedError) as error:
            self._disconnect()
            logger.warning(
                "the keeper of this process could not be started: %s; if this process dies, other replicas wait until "
                "its heartbeats expire",
                error,
            )

    def _leave_open(self) -> None:
        """At exit, keep the connection open until the process has ended: its end would mean another keeper.

        An open socket object would cause a ``ResourceWarning``. Other exit handlers may still use this object.
        """
        if self._connection is not None and self._pid == os.getpid():
            self._left_open = self._connection.detach()
            self._connection = None

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _start(self) -> socket.socket:
        # A child that another thread forks meanwhile would inherit the keeper's end, and hide the keeper's death.
        with making_socket:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._connection = ours
            ours.settimeout(_ANSWER_S)
            with theirs:
                started = subprocess.Popen(
                    [*self._command, str(theirs.fileno()), str(os.getpid())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    # A reader of the trainer's output must not wait for the keeper, which outlives the trainer.
                    stdout=subprocess.DEVNULL,
                    env=child_environment(),
                    start_new_session=True,
                )
        # The started process exits as soon as it has forked the keeper.
        SafeThread(target=started.wait, name="ft-transport-keeper-start", daemon=True).start()
        return ours


class Predecessor:
    """A duty of a dead trainer's keeper, which this process may end to take the trainer's place.

    Until `end`, or if this process dies before it, the keeper carries on.

    Args:
        connection: The connection to the keeper.
        inheritance: The keeper's answer.

    Attributes:
        argument: Argument of the duty, in msgpack.
    """

    def __init__(self, connection: socket.socket, inheritance: Inheritance) -> None:
        self._connection = connection
        self._name = inheritance.name
        self.argument = inheritance.argument
        close_in_children(self)

    def is_mine(self, candidate: socket.socket) -> bool:
        """Return whether the socket is this object's own. Forked children close it (``runtime.children``)."""
        return candidate.fileno() == self._connection.fileno()

    def end(self) -> None:
        """End the duty, and wait until the keeper has ended it. Idempotent."""
        if self._connection.fileno() < 0:
            return
        if not _end(self._connection, self._name):
            logger.warning("the keeper of the replica's earlier process did not answer within %g s", _ANSWER_S)
        # Only now: if a signal handler has raised above, the next call ends the duty.
        self._connection.close()

    def close(self) -> None:
        """Leave the duty to the keeper. Idempotent."""
        self._connection.close()


def find_predecessor(address: str) -> Predecessor | None:
    """Return the duty at a Unix address if its trainer has died; ``None`` if there is none."""
    try:
        with making_socket:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:  # This process has no free descriptor.
        return None
    try:
        connection.settimeout(_ANSWER_S)
        connection.connect(address)
        if is_own_user(connection):
            send(connection, Inherit())
            answer = receive(connection)
            if isinstance(answer, Inheritance):
                return Predecessor(connection, answer)
    except OSError:  # There is no keeper, or it does not answer.
        pass
    connection.close()
    return None


def _end(connection: socket.socket, name: str) -> bool:
    """End a duty. Return whether it has ended: the keeper answered, or it has exited."""
    deadline_s = time.monotonic() + _ANSWER_S
    try:
        send(connection, End(name))
        while time.monotonic() < deadline_s:
            answer = receive(connection)
            # Skip the late answer to an earlier request.
            if answer is None or answer == Ended(name):
                return True
    except TimeoutError:
        return False
    except OSError:
        return True
    return False


def _is_readable(connection: socket.socket) -> bool:
    """Return whether a message has arrived, or the connection has ended."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))
