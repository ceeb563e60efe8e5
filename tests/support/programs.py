"""Python programs that tests launch, started by a fork of a process that has imported torch.

`Program` is a ``subprocess.Popen``, and `run` a ``subprocess.run``, for ``[sys.executable, …]``. Where there is no fork
to be had (another system, an option that only an interpreter understands, ``FT_TESTS_FORK=0`` in the environment) they
start an interpreter. A test of how an interpreter starts uses ``subprocess``, one of how it ends `run` with
`ends_as_interpreter`.

What differs: all programs of a session have the hash seed of one process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import program_server

_ADDRESS_VARIABLE = "FT_TESTS_PROGRAM_SERVER"
_SWITCH_VARIABLE = "FT_TESTS_FORK"
_STATUS_BYTES = 4


class _Server:
    """Starts the server when it is first needed; programs use that of the test process that started them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._alive: int | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def connect(self) -> socket.socket:
        with self._lock:
            address = os.environ.get(_ADDRESS_VARIABLE) or self._start()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(f"\0{address}")
        return connection

    def _start(self) -> str:
        address = f"ft-transport-tests-{os.getpid()}"
        reading, self._alive = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{address}")
            listener.listen(64)
            self.process = subprocess.Popen(
                [sys.executable, program_server.__file__, str(listener.fileno()), str(reading)],
                pass_fds=(listener.fileno(), reading),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt from the keyboard is for the tests alone
            )
        os.close(reading)
        os.environ[_ADDRESS_VARIABLE] = address
        atexit.register(self._stop, os.getpid())
        return address

    def _stop(self, owner: int) -> None:
        if os.getpid() == owner and self._alive is not None and self.process is not None:
            os.close(self._alive)
            self.process.wait(10)

    def descriptor(self) -> str | None:
        """The one that is open as long as the server, as ``/proc`` names it."""
        return os.readlink(f"/proc/self/fd/{self._alive}") if self._alive is not None else None


SERVER = _Server()


def _understood(command: Sequence[str], directory: str) -> dict[str, Any] | None:
    """What the server has to know of a command line; ``None`` if it is not for the server."""
    can_fork = hasattr(os, "pidfd_open") and os.environ.get(_SWITCH_VARIABLE) != "0"
    if not can_fork or not command or command[0] != sys.executable:
        return None
    filters, rest = [], list(command[1:])
    while rest and rest[0] == "-W":
        filters.append(rest[1])
        del rest[:2]
    match rest:
        case ["-c", program, *arguments]:
            kind, argv, place = "code", ["-c", *arguments], ""
        case ["-m", program, *arguments]:
            kind, argv, place = "module", ["-m", *arguments], directory
        case [program, *arguments] if not program.startswith("-"):
            kind, argv, place = "script", [program, *arguments], str(Path(directory, program).parent)
        case _:
            return None
    return {"kind": kind, "program": program, "argv": argv, "first_place": place, "filters": filters}


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current


class Program(subprocess.Popen[Any]):
    """A ``subprocess.Popen`` that has a Python program forked by the server.

    It overrides the two ends of what ``Popen`` asks the system for: to start a process, and to tell how it ended.
    """

    _connection: socket.socket | None = None

    def _execute_child(  # type: ignore[override]  # noqa: PLR0917
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int,
        errread: int, errwrite: int, restore_signals: Any, gid: Any, gids: Any, uid: Any, umask: Any,
        start_new_session: bool, *rest: Any,
    ) -> None:  # fmt: skip
        directory = os.fspath(cwd) if cwd is not None else os.getcwd()
        request = None if shell or preexec_fn else _understood([os.fspath(each) for each in args], directory)
        if request is None:
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
                start_new_session, *rest,
            )  # fmt: skip
            return
        given = [p2cread, c2pwrite, errwrite]
        streams = [number if descriptor == -1 else descriptor for number, descriptor in enumerate(given)]
        request |= {
            "environment": dict(env if env is not None else os.environ),
            "directory": directory,
            "descriptors": [0, 1, 2, *pass_fds],
            "is_new_session": start_new_session,
            "umask": umask if umask >= 0 else _umask(),
        }
        connection = SERVER.connect()
        try:
            encoded = json.dumps(request).encode()
            socket.send_fds(connection, [len(encoded).to_bytes(4, "big")], [*streams, *pass_fds])
            connection.sendall(encoded)
            self.pid = int.from_bytes(program_server.receive_exactly(connection, _STATUS_BYTES), "big")
        except BaseException:
            connection.close()
            raise
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]
        self._connection = connection
        self._child_created = True

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        connection = self._connection
        if connection is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc,no-any-return]
        if wait_flags & os.WNOHANG and not select.select([connection], [], [], 0)[0]:
            return 0, 0
        status = program_server.receive_exactly(connection, _STATUS_BYTES)
        connection.close()
        return self.pid, int.from_bytes(status, "big")

    def _internal_poll(self, *args: Any, **kwargs: Any) -> int | None:
        if self._connection is None:
            return super()._internal_poll(*args, **kwargs)  # type: ignore[misc,no-any-return]
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


def run(
    command: Sequence[str], *, timeout: float, check: bool = False, ends_as_interpreter: bool = False, **options: Any
) -> Any:
    """``subprocess.run`` that keeps what the program prints, as text, unless `options` say otherwise."""
    if ends_as_interpreter:
        options["env"] = {**options.get("env", os.environ), program_server.END_VARIABLE: "1"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    with Program(command, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


def fork_writers() -> None:
    """Has checkpoint stores of this process fork their writers, where it isn't tested how a writer starts."""
    from ft_transport.checkpoint import writer_process

    writer_process.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=Program, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )


@contextlib.contextmanager
def start_writers() -> Iterator[None]:
    """Undoes `fork_writers` for a while."""
    from ft_transport.checkpoint import writer_process

    before, writer_process.subprocess = writer_process.subprocess, subprocess
    try:
        yield
    finally:
        writer_process.subprocess = before
