"""The trainer's side of the keeper: starts it, gives it duties and files, and replaces it if it dies."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from ft_transport.keeper.messages import (
    ANSWER_S,
    Attend,
    Begin,
    Drop,
    Ended,
    Hold,
    Listen,
    Message,
    end_duty,
    receive,
    send,
)
from ft_transport.keeper.predecessor import Predecessor
from ft_transport.runtime.children import child_command, child_environment, close_in_children, making_socket
from ft_transport.runtime.signal_safe import SafeThread, ThreadRefusedError

logger = logging.getLogger(__name__)

_DIED: Final = "the keeper of this process has died; another one starts"


class KeeperProcess:
    """The keeper of this process, which starts with the first duty. Any thread may call the methods.

    The keeper ends by itself: when this process has ended and its duties are over. A trainer never depends on it: if
    the keeper cannot be started or does not answer, a warning is logged, and the trainer goes on.
    """

    def __init__(self) -> None:
        self._command = child_command("ft_transport.keeper.program", "main")
        # Reentrant, for a signal handler that shuts a manager down.
        self._mutex = threading.RLock()
        self._pid = os.getpid()
        self._connection: socket.socket | None = None
        self._left_open: int | None = None
        self._duties: dict[str, Attend] = {}
        self._listening: dict[str, int] = {}
        self._files: dict[tuple[str, int], tuple[bytes, int]] = {}
        self._begun: set[str] = set()
        close_in_children(self)
        atexit.register(self._leave_open)

    def is_mine(self, candidate: socket.socket) -> bool:
        """Return whether the socket is this object's own. Forked children close it (``runtime.children``)."""
        own = self._connection.fileno() if self._connection is not None else None
        return candidate.fileno() in {own, *self._listening.values()}

    def attends(self, name: str) -> bool:
        """Return whether the keeper has a duty of this name."""
        with self._usable_mutex():
            return name in self._duties

    def attend(self, duty: Attend) -> None:
        """Give the keeper a duty, which it begins when this process dies."""
        with self._usable_mutex():
            self._forget(duty.name)
            self._duties[duty.name] = duty
            self._tell(duty)

    def listen(self, name: str, address: str, predecessor: Predecessor | None = None) -> bool:
        """Let a successor of this process inherit a duty.

        Args:
            name: Name of the duty.
            address: Unix address at which the successor finds the keeper.
            predecessor: The duty at this address that this process has inherited, if any. It ends.

        Returns:
            Whether a successor can inherit the duty. If not, another process has the address.
        """
        with self._usable_mutex():
            if predecessor is None:
                listening = _listening_at(address)
                if listening is None:
                    return False
                self._listening[name] = listening
                self._tell(Listen(name), [listening])
                return True
            self._listening[name] = listening = os.dup(predecessor.listening.fileno())
            self._tell(Listen(name, predecessor.name), [listening, predecessor.connection.fileno()])
            return True

    def hold(self, name: str, number: int, about: bytes, descriptor: int) -> None:
        """Let the keeper hold a file, from now until `drop` or the end of a duty.

        Args:
            name: Name of the duty.
            number: Identifies the file within the duty.
            about: Describes the file to a successor, in msgpack.
            descriptor: Descriptor of the file. The caller keeps it open until `drop`, for a keeper that replaces one.
        """
        with self._usable_mutex():
            if name in self._duties:
                self._files[name, number] = about, descriptor
                self._tell(Hold(name, number, about), [descriptor])

    def drop(self, name: str, number: int) -> None:
        """Let the keeper close a file, which the caller may change after this call."""
        with self._usable_mutex():
            if self._files.pop((name, number), None) is not None:
                self._tell(Drop(name, number))

    def begin(self, name: str) -> None:
        """Let the keeper begin a duty now. If that keeper dies, the next one continues, but nobody can inherit it."""
        with self._usable_mutex():
            if name in self._duties:
                self._begun.add(name)
                self._tell(Begin(name))
                self._stop_listening(name)

    def leave(self, name: str) -> None:
        """Let the keeper begin a duty now, and leave the duty with its files to it: another keeper gets neither."""
        with self._usable_mutex():
            if name in self._duties:
                self._tell(Begin(name, is_left=True))
                self._forget(name)

    def end(self, name: str) -> None:
        """End a duty, and wait until the keeper has ended it."""
        with self._usable_mutex():
            if name not in self._duties:
                return
            with self._borrowed() as connection:
                if connection is not None and not end_duty(connection, name):
                    logger.warning("the keeper of this process did not answer within %g s", ANSWER_S)
            self._forget(name)

    def end_if_idle(self) -> None:
        """End the keeper if it has no duties."""
        with self._usable_mutex():
            if not self._duties:
                self._disconnect()

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
            self._listening = {}
            self._files = {}
            self._begun = set()
        return self._mutex

    def _forget(self, name: str) -> None:
        """Forget a duty, its address and its files."""
        self._duties.pop(name, None)
        self._stop_listening(name)
        self._begun.discard(name)
        self._files = {key: held for key, held in self._files.items() if key[0] != name}

    def _stop_listening(self, name: str) -> None:
        listening = self._listening.pop(name, None)
        if listening is not None:
            os.close(listening)

    def _tell(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        self._forget_over()
        with self._borrowed() as connection:
            if connection is not None:
                try:
                    send(connection, message, descriptors)
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
                    self._forget(message.name)
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
            connection.settimeout(ANSWER_S)
            yield connection
        finally:
            connection.detach()

    def _restart(self) -> None:
        """Start a keeper, and give it all duties and files."""
        if self._left_open is not None:
            return  # This process ends; a second keeper would do the duties of the first once more.
        self._disconnect()
        try:
            connection = self._start()
            for duty in self._duties.values():
                send(connection, duty)
            for name, listening in self._listening.items():
                send(connection, Listen(name), [listening])
            for (name, number), (about, descriptor) in self._files.items():
                send(connection, Hold(name, number, about), [descriptor])
            for name in self._begun:
                send(connection, Begin(name))
        except (OSError, ThreadRefusedError) as error:
            self._disconnect()
            logger.warning(
                "the keeper of this process could not be started: %s; if this process dies, its kept state is lost, "
                "and other replicas wait until its heartbeats expire",
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
            ours.settimeout(ANSWER_S)
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


def _listening_at(address: str) -> int | None:
    """Return a socket that listens at a Unix address; ``None`` if another process has the address."""
    with making_socket:
        try:
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:  # This process has no free descriptor.
            return None
        try:
            listening.bind(address)
            listening.listen()
        except OSError:
            listening.close()
            return None
        # An open socket object would cause a `ResourceWarning` at the end of the process.
        return listening.detach()


def _is_readable(connection: socket.socket) -> bool:
    """Return whether a message has arrived, or the connection has ended."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


keeper: Final = KeeperProcess()
"""The keeper of this process."""
