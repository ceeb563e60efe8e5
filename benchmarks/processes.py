"""Fresh processes that need not import torch again: forked from a server that has imported it and done nothing else."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import multiprocessing
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, TypeVar

T = TypeVar("T")

TIMEOUT_S: Final = 900.0
_POLL_S: Final = 0.2
_SHOWN_LOG_CHARACTERS: Final = 4000
# What is missing is left out, as torchft on most platforms.
_PRELOADED: Final = (
    # The first optimizer of a process imports it, for half a second and more.
    "torch._dynamo",
    "manager.manager",
    "ft_transport.transport",
    "torchft.manager",
    "benchmarks.cap",
    "benchmarks.checkpoint",
    "benchmarks.fetch",
    "benchmarks.fleet_runs",
    "benchmarks.goodput",
    "benchmarks.gpu",
    "benchmarks.heal",
    "benchmarks.host",
    "benchmarks.keep",
    "benchmarks.keep_copies",
    "benchmarks.loop",
    "benchmarks.reading",
    "benchmarks.reshard",
    "benchmarks.same_host",
    "benchmarks.stall",
    "benchmarks.telemetry",
)


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([name for name in _PRELOADED if importlib.util.find_spec(name.partition(".")[0])])
    return context


class Channel:
    """A child's way to talk to the process that started it, whose end is also the child's."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._received: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._mutex = threading.Lock()
        threading.Thread(target=self._receive, daemon=True).start()

    def say(self, message: object) -> None:
        with self._mutex:
            self._connection.send(message)

    def wait(self) -> Any:
        """Returns the parent's next message."""
        return self._received.get()

    def wait_for_end(self) -> None:
        """Waits until the parent lets go of this process."""
        threading.Event().wait()

    def has_message(self) -> bool:
        return not self._received.empty()

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._received.put(self._connection.recv())
        # Threads and servers have nothing to say any more, and may take long to say it.
        os._exit(0)


class Child:
    """A fresh process that runs ``target(channel, *arguments)``; what it prints is kept for an error's message.

    Args:
        target: A function of a module.
        arguments: For it, after the channel.
    """

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        context = _context()
        self._connection, theirs = context.Pipe()
        descriptor, log = tempfile.mkstemp(prefix="benchmark-", suffix=".log")
        os.close(descriptor)
        self._log = Path(log)
        # Not a daemon: DCP's writers are processes of a child.
        self._process = context.Process(target=_run, args=(theirs, log, target, arguments))
        self._process.start()
        theirs.close()

    @property
    def process_id(self) -> int:
        assert self._process.pid is not None, "it was started"
        return self._process.pid

    def say(self, message: object) -> None:
        self._connection.send(message)

    def has_message(self) -> bool:
        """Whether `receive` returns, or raises, at once."""
        return self._connection.poll()

    def receive(self, timeout_s: float = TIMEOUT_S) -> Any:
        """Returns the child's next message.

        Raises:
            RuntimeError: None came; with the last lines that the child has printed.
        """
        deadline_s = time.monotonic() + timeout_s
        with contextlib.suppress(EOFError, OSError):
            while time.monotonic() < deadline_s:
                if self._connection.poll(_POLL_S):
                    return self._connection.recv()
        printed = self._log.read_text(encoding="utf-8", errors="replace")[-_SHOWN_LOG_CHARACTERS:]
        raise RuntimeError(f"expected a message of a process of this benchmark within {timeout_s:.0f} s:\n{printed}")

    def close(self) -> None:
        if self._process.is_alive():
            # Its session too, so that what it has started ends with it. The number is its own as long as it lives:
            # until the connection is closed.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process_id, signal.SIGKILL)
        self._connection.close()
        self._process.kill()
        self._process.join()
        self._log.unlink(missing_ok=True)


def _run(connection: Connection, log: str, target: Callable[..., None], arguments: tuple[object, ...]) -> None:
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    # The first full collection of a forked process takes 0.2 s, in whichever part of a measurement it falls.
    gc.collect()
    # The Lighthouse and torchft's manager log every request.
    os.environ.update(RUST_LOG="error", GLOO_SOCKET_IFNAME="lo")
    target(Channel(connection), *arguments)


def in_fresh_process(function: Callable[..., T], *arguments: object) -> T:
    """Runs ``function`` in a fresh process, ends it with all that it has started, and returns what it returned."""
    child = Child(_answer, function, *arguments)
    try:
        return child.receive()  # type: ignore[no-any-return]
    finally:
        child.close()


def _answer(channel: Channel, function: Callable[..., object], *arguments: object) -> None:
    channel.say(function(*arguments))
    channel.wait_for_end()
