"""The threads of a fetch: each asks the fetch's machine what to do next, and does it over connections of its own.

The decisions are those of ``wire.fetch`` and ``wire.slice_fetch``. Reads block and release the GIL, so a receiver's
threads move bytes as fast as the kernel hands them out.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

from ft_transport.errors import DeadlineExceededError, TransportError
from ft_transport.http.connection import Connection, Timeouts
from ft_transport.http.peer_address import PeerAddress
from ft_transport.http.token import JobToken
from ft_transport.runtime.handler_safety import SafeCondition
from ft_transport.wire.fetch import Aborted, RequestFailed, SourceIndex, Stop, Wait, WorkerIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchProgress:
    """How far a fetch is: bytes received so far, bytes in all, seconds since it began.

    They are verified, unless their digests come after the data; what was damaged then is fetched again, counted anew.
    """

    done_bytes: int
    total_bytes: int
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSettings:
    """How to fetch.

    Attributes:
        num_connections: Parallel connections, at most one per chunk is used.
        verify: Whether each chunk is compared with its digest as it lands, where the manifest has them.
        max_failures: Failures in a row after which a source is given up.
        token: The job token, if the sources ask for one.
        unreachable_s: How long a source may be out of reach before the first byte, in seconds.
        timeouts: Deadlines and the least throughput.
        on_progress: Called after each chunk, from the fetching threads, one call at a time; must be quick.
    """

    num_connections: int
    verify: bool
    max_failures: int
    token: JobToken | None
    unreachable_s: float
    timeouts: Timeouts
    on_progress: Callable[[FetchProgress], None] | None


class _ProgressError(Exception):
    """The caller's ``on_progress`` raised; never to be taken for a failure of a source."""


class Request(Protocol):
    """An instruction to fetch something."""

    @property
    def source(self) -> SourceIndex:
        """Which source to ask."""

    @property
    def delay_s(self) -> float:
        """How long to wait before, in seconds."""


_Request = TypeVar("_Request", bound=Request)
_Request_co = TypeVar("_Request_co", bound=Request, covariant=True)


class Machine(Protocol[_Request_co]):
    """What the threads need of a machine."""

    @property
    def stopped(self) -> Stop | None:
        """The outcome, once there is one."""

    def next(self, worker: WorkerIndex) -> _Request_co | Wait | Stop:
        """What to do."""

    def receive(self, event: RequestFailed | Aborted) -> None:
        """Takes note of a failure."""


class Fetch(ABC, Generic[_Request]):
    """The threads of one fetch around its machine.

    Args:
        sources: Who serves, by the index that the machine uses.
        machine: Decides; called under ``changed`` only.
        settings: How to fetch.
        num_workers: How many threads.
        step: The step, for errors.
        total_bytes: What comes in all, for progress and errors.

    Attributes:
        changed: Guards the machine, and tells of changes.
    """

    def __init__(
        self,
        sources: Sequence[PeerAddress],
        machine: Machine[_Request],
        settings: FetchSettings,
        *,
        num_workers: int,
        step: int,
        total_bytes: int,
    ) -> None:
        self._sources = sources
        self._machine = machine
        self._settings = settings
        self._num_workers = num_workers
        self._step = step
        self._total_bytes = total_bytes
        self.changed = SafeCondition()
        self._connections: list[Connection] = []
        self._interruption: BaseException | None = None
        self._ended: set[WorkerIndex] = set()
        self._ends: SimpleQueue[WorkerIndex] = SimpleQueue()
        self._started_s = time.monotonic()
        self._done_bytes = 0

    @abstractmethod
    def perform(self, worker: WorkerIndex, connection: Connection, request: _Request) -> None:
        """Sends one request and takes its answer, reporting each part that landed to the machine."""

    def run(self) -> None:
        """Runs one thread per further connection, and the first one on this thread.

        Returns or raises only when no thread writes to the destination any more, whatever signals come meanwhile.
        """
        threads = [
            threading.Thread(
                target=self._work_on_thread, args=(WorkerIndex(index),), name=f"ft-transport-fetch-{index}", daemon=True
            )
            for index in range(1, self._num_workers)
        ]
        num_started = 0
        try:
            for thread in threads:
                self._start(thread)
                num_started += 1
            self._work(WorkerIndex(0))
        except BaseException as error:
            self._interrupt(error)
        # Not Thread.join: interrupted by a signal handler that raises, it takes a running thread for an ended one.
        while len(self._ended) < num_started:
            try:
                self._ends.get()
            except BaseException as error:
                self._interrupt(error)
        for thread in threads[:num_started]:
            thread.join()
        if self._interruption is not None:
            raise self._interruption
        stopped = self._machine.stopped
        assert stopped is not None, "the workers end only when the machine stops"
        if stopped.error is not None:
            raise stopped.error

    @staticmethod
    def _start(thread: threading.Thread) -> None:
        try:
            thread.start()
        except RuntimeError as error:
            raise TransportError(f"expected a thread for each connection: {error}") from error

    def _work_on_thread(self, worker: WorkerIndex) -> None:
        try:
            self._work(worker)
        except BaseException as error:
            self._interrupt(error)
        finally:
            self._ended.add(worker)
            self._ends.put(worker)

    def _interrupt(self, error: BaseException) -> None:
        """Ends the fetch because ``error`` was raised where none is expected; ``run`` raises it again."""
        if self._interruption is None:
            self._interruption = error
        self._abort(TransportError(f"the fetch was interrupted: {type(error).__name__}"))

    def _work(self, worker: WorkerIndex) -> None:
        connections: dict[int, Connection] = {}
        try:
            while True:
                with self.changed:
                    instruction = self._machine.next(worker)
                    while isinstance(instruction, Wait):
                        self.changed.wait(timeout=self._settings.timeouts.stall_timeout_s)
                        instruction = self._machine.next(worker)
                match instruction:
                    case Stop():
                        return
                    case _:
                        self._perform(worker, instruction, connections)
        finally:
            for connection in connections.values():
                connection.close()

    def _perform(self, worker: WorkerIndex, instruction: _Request, connections: dict[int, Connection]) -> None:
        settings = self._settings
        source = self._sources[instruction.source]
        connection = connections.get(instruction.source)
        if connection is None:
            # One at a time: a source has to serve many receivers.
            for other in connections.values():
                other.close()
                with self.changed:
                    self._connections.remove(other)
            connections.clear()
            connection = Connection(source, token=settings.token, timeouts=settings.timeouts)
            connections[instruction.source] = connection
            with self.changed:
                self._connections.append(connection)
        try:
            if instruction.delay_s:
                left_s = settings.timeouts.remaining_s("waiting to try again", source)
                with self.changed:
                    if self.changed.wait_for(
                        lambda: self._machine.stopped is not None, timeout=min(instruction.delay_s, left_s)
                    ):
                        return
            self.perform(worker, connection, instruction)
        except TransportError as error:
            connection.close()
            error.step = self._step
            if settings.timeouts.is_over():
                self._abort(self._out_of_time(error))
                return
            with self.changed:
                self._machine.receive(RequestFailed(worker, error))
                self.changed.notify_all()
                stopped = self._machine.stopped
            if stopped is not None:
                self._interrupt_connections()
        except Exception as error:
            cause = error.__cause__ if isinstance(error, _ProgressError) else error
            failure = TransportError(f"the receiver failed: {type(cause).__name__}: {cause}", step=self._step)
            failure.__cause__ = cause
            self._abort(failure)

    def _out_of_time(self, error: TransportError) -> DeadlineExceededError:
        out_of_time = DeadlineExceededError(
            f"timed out with {self._done_bytes} of {self._total_bytes} bytes received: "
            f"{self._settings.timeouts.reason()}; last: {error.message}",
            peer=error.peer,
            step=self._step,
        )
        out_of_time.__cause__ = error
        return out_of_time

    def _abort(self, error: TransportError) -> None:
        """Stops the machine and wakes every worker, also those that are reading."""
        with self.changed:
            self._machine.receive(Aborted(error))
            self.changed.notify_all()
        self._interrupt_connections()

    def _interrupt_connections(self) -> None:
        with self.changed:
            connections = list(self._connections)
        for connection in connections:
            connection.interrupt()

    def report_progress(self, num_bytes: int) -> None:
        """So many more bytes have landed. Called under ``changed``."""
        self._done_bytes += num_bytes
        if self._settings.on_progress is not None:
            progress = FetchProgress(
                done_bytes=self._done_bytes,
                total_bytes=self._total_bytes,
                elapsed_s=time.monotonic() - self._started_s,
            )
            try:
                self._settings.on_progress(progress)
            except Exception as error:
                raise _ProgressError from error
