"""The program of a keeper: waits for the messages and for the death of its trainer, and carries out the duties.

The trainer passes the number of a descriptor, one of two connected sockets. The keeper belongs neither to the trainer's
process group nor to its children, so a launcher that ends the trainer does not end the keeper too. The kernel reports
the trainer's death through ``pidfd_open(2)`` at once, even if a forked child still has the trainer's sockets open.

A duty may include files, which the keeper holds open for the trainer's successor: memory files exist as long as a
process has them open.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import pkgutil
import resource
import select
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeAlias, cast

from ft_transport.keeper.messages import (
    ANSWER_S,
    Attend,
    Begin,
    Drop,
    End,
    Ended,
    Hold,
    Inherit,
    Inheritance,
    Listen,
    Message,
    end_duty,
    receive,
    receive_with_files,
    send,
)
from ft_transport.runtime.signal_safe import SafeEvent, SafeThread
from ft_transport.runtime.unix_sockets import is_own_user

_STDERR: Final = 2
_MAX_DIGITS: Final = 20
_DEAD_STATES: Final = "ZXx"
_FLAGS: Final = 5
"""Position of the flags in ``/proc/PID/stat``, counted after the state (``man 5 proc``)."""
_PF_EXITING: Final = 0x4  # include/linux/sched.h


class Duty(Protocol):
    """Work that the keeper does in the trainer's place. The keeper's main thread calls the methods."""

    def begin(self) -> None:
        """Begin the work on another thread, and return. Called at most once."""

    def end(self) -> None:
        """End the work, and return when none of it goes on. Called at most once, perhaps before `begin`."""


DutyFactory: TypeAlias = Callable[[bytes, Callable[[], object]], Duty]
"""Makes a duty from its argument, and from a function that the duty's thread calls when the work is over."""


class Holding:
    """A duty that only holds files for a successor, and is over some time after the trainer's death.

    Args:
        argument: The time in seconds, as text.
        note_over: Called when the time is over.
    """

    def __init__(self, argument: bytes, note_over: Callable[[], object]) -> None:
        self._held_s = float(argument)
        self._note_over = note_over
        self._ended = SafeEvent()

    def begin(self) -> None:
        """Begin to wait for the end of the time, on a thread."""
        SafeThread(target=self._wait, name="ft-transport-holding", daemon=True).start()

    def end(self) -> None:
        """End the wait."""
        self._ended.set()

    def _wait(self) -> None:
        if not self._ended.wait(self._held_s):
            with contextlib.suppress(OSError):
                self._note_over()


HOLDING: Final = f"{__name__}:{Holding.__name__}"
"""The kind of a `Holding` (``messages.Attend``)."""


class _Kept:
    """A duty in a keeper, its held files, and the connections of possible successors."""

    def __init__(self, number: int, attend: Attend, duty: Duty) -> None:
        self.number = number
        self.attend = attend
        self.duty = duty
        self.has_begun = False
        self.is_left = False
        self.files: dict[int, tuple[bytes, int]] = {}
        self.listening: socket.socket | None = None
        self.successor: socket.socket | None = None

    def hold(self, number: int, about: bytes, descriptor: int) -> None:
        """Hold a file in place of an earlier one with this number."""
        self.drop(number)
        self.files[number] = about, descriptor

    def drop(self, number: int) -> None:
        """Close a held file."""
        _about, descriptor = self.files.pop(number, (b"", None))
        if descriptor is not None:
            os.close(descriptor)


class Keeper:
    """Carries out the duties of one trainer. One thread calls its methods.

    Args:
        trainer: The connection to the trainer.
        trainer_pid: The trainer's process id.
    """

    def __init__(self, trainer: socket.socket, trainer_pid: int) -> None:
        self._trainer: socket.socket | None = trainer
        self._kept: dict[str, _Kept] = {}
        self._num_attended = 0
        self._events = selectors.DefaultSelector()
        self._over, self._note_over = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._watch(self._over, self._drop_over)
        self._watch(trainer, self._read_trainer)
        self._trainer_pid = trainer_pid
        self._death: int | None = None
        with contextlib.suppress(OSError):  # Linux before 5.3: only the end of the connection shows the death.
            self._death = os.pidfd_open(trainer_pid)
            self._events.register(self._death, selectors.EVENT_READ, self._note_death)

    def run(self) -> None:
        """Handle events until the trainer is dead and all duties are over."""
        while self._trainer is not None or self._kept:
            for key, _ in self._events.select():
                # An earlier event of the same round may have closed this socket, and its number may be in use again.
                if self._events.get_map().get(key.fd) is key:
                    key.data()

    def _watch(self, connection: socket.socket, handler: Callable[[], None]) -> None:
        connection.setblocking(False)
        self._events.register(connection, selectors.EVENT_READ, handler)

    def _close(self, connection: socket.socket | None) -> None:
        if connection is not None:
            with contextlib.suppress(KeyError):  # It is not watched now.
                self._events.unregister(connection)
            connection.close()

    # ---------------------------------------------------------------------------------------------------- the trainer

    def _read_trainer(self) -> None:
        """Perform all messages that have arrived from the trainer, and note its death."""
        with contextlib.suppress(BlockingIOError):
            while (trainer := self._trainer) is not None:
                message, descriptors = receive_with_files(trainer)
                if message is not None:
                    self._perform(message, descriptors, trainer)
                elif self._is_trainer_dying():
                    self._note_death()
                else:
                    # The trainer has replaced this keeper, which did not answer.
                    for name in tuple(self._kept):
                        self._end(name)
                    self._part()

    def _is_trainer_dying(self) -> bool:
        """Return whether the trainer is dead, or will be when the kernel has freed its memory, which may take seconds.

        A dying process has closed its connections, and can send nothing any more.
        """
        if self._death is not None and select.select([self._death], [], [], 0)[0]:
            return True
        try:
            fields = Path(f"/proc/{self._trainer_pid}/stat").read_text(encoding="ascii", errors="replace")
            state, *rest = fields.rpartition(")")[2].split()
            return state in _DEAD_STATES or bool(int(rest[_FLAGS]) & _PF_EXITING)
        except (OSError, ValueError, IndexError):
            return True

    def _perform(self, message: Message, descriptors: list[int], trainer: socket.socket) -> None:
        match message:
            case Listen():
                self._listen(message, descriptors)
            case Hold():
                kept = self._kept.get(message.name)
                # No descriptor has arrived if this process may not have more of them.
                if kept is not None and descriptors:
                    kept.hold(message.number, message.about, descriptors.pop())
            case Drop():
                kept = self._kept.get(message.name)
                if kept is not None:
                    kept.drop(message.number)
            case Attend():
                self._end(message.name)
                self._attend(message)
            case Begin():
                self._begin(message.name)
                if message.is_left and message.name in self._kept:
                    self._kept[message.name].is_left = True
            case End():
                self._end(message.name)
                with contextlib.suppress(OSError):
                    send(trainer, Ended(message.name))
            case Inherit() | Ended() | Inheritance():
                raise AssertionError(f"a trainer never sends {message}")
        for descriptor in descriptors:
            os.close(descriptor)

    def _note_death(self) -> None:
        """Perform the last messages of the trainer, which is dead, and begin its duties."""
        trainer = self._trainer
        if trainer is None:
            return
        with contextlib.suppress(BlockingIOError):
            while True:
                message, descriptors = receive_with_files(trainer)
                if message is None:
                    break
                self._perform(message, descriptors, trainer)
        self._part()
        for name in tuple(self._kept):
            self._begin(name)

    def _part(self) -> None:
        """Stop watching the trainer."""
        trainer, self._trainer = self._trainer, None
        self._close(trainer)
        if self._death is not None:
            self._events.unregister(self._death)
            os.close(self._death)
            self._death = None

    # ----------------------------------------------------------------------------------------------------- the duties

    def _attend(self, attend: Attend) -> None:
        number = self._num_attended = self._num_attended + 1
        note_over = partial(self._note_over.send, str(number).encode())
        # Only the trainer chooses the class: `_read_successor` accepts no duties.
        make = cast("DutyFactory", pkgutil.resolve_name(attend.kind))
        duty = make(attend.argument, note_over)
        self._kept[attend.name] = _Kept(number, attend, duty)

    def _listen(self, message: Listen, descriptors: list[int]) -> None:
        """Take over the offer of a duty from the predecessor's keeper, if there is one, and listen for successors."""
        kept = self._kept.get(message.name)
        if kept is None or len(descriptors) != 1 + bool(message.predecessor):
            return
        if message.predecessor:
            with socket.socket(fileno=descriptors.pop()) as connection:
                connection.settimeout(ANSWER_S)
                end_duty(connection, message.predecessor)
        listening = socket.socket(fileno=descriptors.pop())
        kept.listening = listening
        self._watch(listening, partial(self._accept, kept, listening))

    def _begin(self, name: str) -> None:
        kept = self._kept.get(name)
        if kept is not None and not kept.has_begun:
            kept.has_begun = True
            # A launcher that reads the trainer's output waits until every process has closed it.
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, _STDERR)
            os.close(silence)
            kept.duty.begin()

    def _end(self, name: str) -> None:
        kept = self._kept.pop(name, None)
        if kept is not None:
            self._close(kept.listening)
            kept.duty.end()
            for number in tuple(kept.files):
                kept.drop(number)
            if kept.successor is not None:
                with contextlib.suppress(OSError):
                    send(kept.successor, Ended(name))
                self._close(kept.successor)

    def _drop_over(self) -> None:
        """Forget duties whose work is over."""
        with contextlib.suppress(BlockingIOError):
            while number := self._over.recv(_MAX_DIGITS):
                # By number: a later duty may have the same name.
                for name in [name for name, kept in self._kept.items() if kept.number == int(number)]:
                    self._end(name)
                    if self._trainer is not None:
                        with contextlib.suppress(OSError):
                            send(self._trainer, Ended(name))

    # ------------------------------------------------------------------------------------------------- the successors

    def _accept(self, kept: _Kept, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listening.accept()
            # A successor may be faster than the report of the death.
            self._read_trainer()
            if self._trainer is not None and self._is_trainer_dying():
                self._note_death()
            # Before the trainer has died or left the duty, there is nothing to inherit.
            if (self._trainer is not None and not kept.is_left) or not is_own_user(connection):
                connection.close()
                return
            # Others wait: this successor's keeper may be about to accept connections instead of this one.
            self._events.unregister(listening)
            kept.successor = connection
            self._watch(connection, partial(self._read_successor, kept, connection))

    def _read_successor(self, kept: _Kept, connection: socket.socket) -> None:
        try:
            message = receive(connection)
        except BlockingIOError:
            return
        match message:
            case Inherit() if hmac.compare_digest(message.secret, kept.attend.secret):
                held = tuple((number, about) for number, (about, _) in kept.files.items())
                files = [descriptor for _, descriptor in kept.files.values()]
                assert kept.listening is not None, "the successor has connected there"
                with contextlib.suppress(OSError):
                    send(
                        connection,
                        Inheritance(kept.attend.name, kept.attend.argument, held),
                        [kept.listening.fileno(), *files],
                    )
            case End():
                self._end(kept.attend.name)
            case _:  # The successor has died before it took over, or does not know the secret: the duty goes on.
                kept.successor = None
                self._close(connection)
                if kept.listening is not None:
                    self._watch(kept.listening, partial(self._accept, kept, kept.listening))


def main() -> None:
    """Run a keeper, with the descriptor and the process id of its trainer as the arguments of the command."""
    trainer = socket.socket(fileno=int(sys.argv[1]))
    if os.fork():
        # The parent of the trainer's child exits: the trainer need not wait for its keeper.
        os._exit(0)
    # An interrupt from the terminal is for the trainer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.chdir("/")
    _soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    Keeper(trainer, int(sys.argv[2])).run()
    # A thread of a duty that has ended may still wait for a server.
    os._exit(0)
