"""The trainer's end of a writer process: it starts the process, sends requests, detects its death, and ends it."""

from __future__ import annotations

import select
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Final

from ft_transport.checkpoint.writer_messages import Cancel, Failed, WriterAnswer, WriterRequest, receive_answer, send
from ft_transport.coordination.votes import rebuild
from ft_transport.errors import WriterFailedError
from ft_transport.http.fork_safety import close_in_children, making_socket
from ft_transport.runtime.child_python import child_command, child_environment
from ft_transport.runtime.regular_files import PRIVATE_UMASK

_TICK_S: Final = 0.1
_CANCEL_S: Final = 10.0
_END_S: Final = 5.0
_COMMAND: Final = child_command("ft_transport.checkpoint.writer", "main")


class WriterProcess:
    """One writer process. Any thread may call `is_alive`, one thread at a time the rest.

    Args:
        command: The command to run; the number of its socket's descriptor is appended.
        is_private: Whether only the owner may read the written files; else the umask decides.
    """

    def __init__(self, command: Sequence[str] = _COMMAND, *, is_private: bool = False) -> None:
        self._command = tuple(command)
        self._umask = PRIVATE_UMASK if is_private else -1
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self.number = 0
        close_in_children(self)

    def is_mine(self, candidate: socket.socket) -> bool:
        """See ``http.fork_safety``."""
        return self._connection is not None and candidate.fileno() == self._connection.fileno()

    @property
    def process_id(self) -> int | None:
        """The ID of the process; ``None`` if it does not exist."""
        return self._process.pid if self._process is not None else None

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        process = self._process
        return process is not None and process.poll() is None

    def start(self, timeout_s: float) -> None:
        """Start a process in place of any earlier one, and wait until it has imported its modules.

        Raises:
            WriterFailedError: The process could not be started, or was not ready in time.
        """
        self.close()
        with making_socket:
            ours, theirs = socket.socketpair()
            self._connection = ours
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [*self._command, str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env=child_environment(),
                    start_new_session=True,
                    umask=self._umask,
                )
        except OSError as error:
            self.close()
            raise WriterFailedError(f"expected to start the writer process {self._command}: {error}") from error
        self.number += 1
        self._answer(time.monotonic() + timeout_s, "to be ready", lambda: None)

    def call(
        self,
        request: WriterRequest,
        descriptors: Sequence[int] = (),
        *,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> WriterAnswer:
        """Send a request to the writer, and return its answer.

        Args:
            request: The request.
            descriptors: Descriptors of the snapshots in the request, if it has any.
            timeout_s: Time after which the writer counts as stuck, and is ended.
            check: Called now and then meanwhile; if it raises, the writer aborts and this raises the same error.

        Raises:
            WriterFailedError: The writer died, or did not answer in time.
            Exception: The writer's error.
        """
        deadline_s = time.monotonic() + timeout_s
        what = f"to answer {type(request).__name__}"
        self._send(request, descriptors, what, deadline_s)
        try:
            answer = self._answer(deadline_s, what, check)
        except WriterFailedError:
            raise
        except BaseException:
            self._cancel()
            raise
        if isinstance(answer, Failed):
            raise rebuild(answer.failure)
        return answer

    def close(self) -> None:
        """End the process. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _send(self, request: WriterRequest, descriptors: Sequence[int], what: str, deadline_s: float) -> None:
        if self._connection is None:
            raise WriterFailedError(f"expected a writer process {what}, there is none")
        try:
            self._connection.settimeout(max(deadline_s - time.monotonic(), _TICK_S))
            send(self._connection, request, descriptors)
        except OSError as error:  # a timeout is an OSError
            raise self._died(what) from error

    def _answer(self, deadline_s: float, what: str, check: Callable[[], None]) -> WriterAnswer:
        connection = self._connection
        assert connection is not None, "it was sent something"
        while not select.select([connection], [], [], _TICK_S)[0]:
            if time.monotonic() > deadline_s:
                if self._process is not None:
                    self._process.kill()
                raise self._died(f"{what} in time")
            check()
        try:
            connection.settimeout(max(deadline_s - time.monotonic(), _TICK_S))
            return receive_answer(connection)
        except (OSError, EOFError) as error:
            raise self._died(what) from error

    def _cancel(self) -> None:
        """Abort the writer's request, and read both answers, so that the next answer is for the next request."""
        try:
            deadline_s = time.monotonic() + _CANCEL_S
            self._send(Cancel(), (), "to give up", deadline_s)
            for _ in range(2):
                self._answer(deadline_s, "to give up", lambda: None)
        except WriterFailedError:
            self.close()

    def _died(self, what: str) -> WriterFailedError:
        process = self._process
        status = _end(process) if process is not None else None
        number = process.pid if process is not None else None
        return WriterFailedError(f"expected the writer process {number} {what}, it ended with status {status}")


def _end(process: subprocess.Popen[bytes]) -> int | None:
    """End a process that was asked to exit. Return its status, ``None`` if the system does not end it."""
    try:
        return process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
    try:
        return process.wait(_END_S)
    except subprocess.TimeoutExpired:
        # The process hangs in the system, for example on a file server that does not answer, and ends when that call
        # does.
        return None
