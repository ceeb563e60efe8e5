"""The threads of a fetch: each asks the fetch's state machine for its next request, and performs it.

``wire.fetch`` makes the decisions. Reads block and release the GIL, so a receiver's threads move bytes as fast as the
kernel hands them out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Final, Generic, Protocol

from ft_transport.errors import DeadlineExceededError, TransportError
from ft_transport.http.client.connection import Connection
from ft_transport.http.client.connection_pool import ConnectionPool
from ft_transport.http.client.fetch_settings import FetchSettings
from ft_transport.http.peer_address import PeerAddress
from ft_transport.runtime.signal_safe import SafeCondition
from ft_transport.runtime.threads import run_on_threads
from ft_transport.settings import FetchProgress
from ft_transport.telemetry.record import Transfer
from ft_transport.telemetry.recorder import current
from ft_transport.wire.fetch import (
    FetchMachine,
    Interrupt,
    Request,
    Stop,
    Unit,
    WorkerIndex,
)

_LOOK_S: Final = 0.1
"""How long a request for the transfers waits for the pool's lock, under which ``on_progress`` runs."""
_RELAY_STALL_S: Final = 5.0
_TICK_S: Final = 0.25
"""Interval at which a waiting worker checks whether relays have become too slow."""


class _ProgressError(Exception):
    """The caller's ``on_progress`` raised; never taken for a failure of a source."""


class Wire(Protocol[Unit]):
    """Requests and receives units. Called by any thread, each with its own connection."""

    def receive(self, connection: Connection, request: Request[Unit]) -> Iterator[tuple[Unit, int]]:
        """Sends one request; yields each unit and its number of bytes when it has landed and is verified.

        Yields fewer units than requested if the source has no more of them yet. The caller stops iterating when the
        rest is no longer wanted, and closes the connection.
        """


class FetchPool(Generic[Unit]):
    """The threads of one fetch around its machine.

    Args:
        sources: The serving peers, by the index that the machine uses.
        machine: Makes the decisions; called only under the pool's lock.
        wire: Performs the requests.
        settings: Settings of the fetch.
        num_workers: Number of threads.
        num_sources: The first this many of ``sources`` have all units; the others are relays, which other peers can
            replace, so no worker waits long for a silent one.
        step: The step, for errors.
        total_bytes: Bytes of all units, for progress and errors.
    """

    def __init__(
        self,
        sources: Sequence[PeerAddress],
        machine: FetchMachine[Unit],
        wire: Wire[Unit],
        settings: FetchSettings,
        *,
        num_workers: int,
        num_sources: int | None = None,
        step: int,
        total_bytes: int,
    ) -> None:
        self._sources = sources
        self._machine = machine
        self._wire = wire
        self._settings = settings
        self._num_workers = num_workers
        self._num_sources = num_sources if num_sources is not None else len(sources)
        self._step = step
        self._total_bytes = total_bytes
        # Guards the machine. Workers without work wait for it......
        self._changed = SafeCondition()
        # ...and workers that pause before a request wait for the end.
        self._pausing = SafeCondition(self._changed)
        self._connections = ConnectionPool(sources, self._connect, num_sources=self._num_sources)
        self._used_by: dict[WorkerIndex, Connection] = {}
        self._recording = current()
        self._interruption: BaseException | None = None
        self._started_s = time.monotonic()
        self._is_looked_after = False
        self._done_bytes = 0
        self._reached: dict[str, None] = {}

    def summary(self) -> str:
        """Return how much came from where and how fast, for the log; call after `run`."""
        took_s = time.monotonic() - self._started_s
        rate = self._done_bytes / max(took_s, 1e-6) / 1e6
        return f"{self._done_bytes} bytes in {took_s:.2f} s, {rate:.1f} MB/s, from {', '.join(self._reached)}"

    def run(self) -> None:
        """Run one thread per further connection, and the first worker on this thread.

        Returns or raises only when no thread writes to the destination any more, even if signal handlers raise
        meanwhile.
        """
        try:
            if self._recording is not None:
                self._recording.follow(self._transfers)
            run_on_threads(
                self._work, self._num_workers, name="ft-transport-fetch", failed=self._interrupt, needs_all=True
            )
        except BaseException as error:
            self._interrupt(error)
        with self._changed:
            self._connections.close()
            if self._recording is not None:
                self._recording.follow(None)
                for transfer in self._connections.transfers():
                    self._recording.transfer(transfer)
        if self._interruption is not None:
            raise self._interruption
        stopped = self._machine.stopped
        assert stopped is not None, "the workers end only when the machine stops"
        if stopped.error is not None:
            raise stopped.error

    def _transfers(self) -> list[Transfer]:
        """Return the bytes received from each peer so far, or nothing if the lock is busy. Thread-safe."""
        if not self._changed.acquire(timeout=_LOOK_S):
            return []
        try:
            return self._connections.transfers()
        finally:
            self._changed.release()

    def _interrupt(self, error: BaseException) -> None:
        """End the fetch after an unexpected ``error``; ``run`` raises it again."""
        if self._interruption is None:
            self._interruption = error
        self._abort(TransportError(f"the fetch was interrupted: {type(error).__name__}"))

    def _work(self, number: int) -> None:
        worker = WorkerIndex(number)
        try:
            while True:
                with self._changed:
                    instruction = self._next(worker)
                    if isinstance(instruction, Stop):
                        return
                    # There may be more to do, and another worker watches the relays now. Only one is woken: of many
                    # workers most have nothing to do, and waking them costs more than their work.
                    self._changed.notify()
                    connection = self._connections.take(instruction.source)
                    self._used_by[worker] = connection
                try:
                    self._perform(worker, instruction, connection)
                finally:
                    with self._changed:
                        self._used_by.pop(worker, None)
                        self._connections.give_back(instruction.source, connection)
        finally:
            # A worker ends when the fetch does.
            with self._changed:
                self._connections.close_idle()

    def _next(self, worker: WorkerIndex) -> Request[Unit] | Stop:
        """Wait for the worker's next request, or the end. Called under the lock."""
        instruction = self._machine.next(worker)
        while not isinstance(instruction, Request | Stop):
            if isinstance(instruction, Interrupt) and instruction.worker in self._used_by:
                self._used_by[instruction.worker].interrupt()
                self._wake_all()
            self._wait()
            instruction = self._machine.next(worker)
        return instruction

    def _wait(self) -> None:
        """Wait until something changes, or the time is over. Called under the lock."""
        timeouts = self._settings.timeouts
        longest_s = min(timeouts.stall_timeout_s, timeouts.end_s() - time.monotonic())
        # Only with relays may the passing of time bring work for a waiting worker; one worker checks for all.
        is_looking = self._has_relays and not self._is_looked_after
        if is_looking:
            self._is_looked_after = True
            longest_s = min(longest_s, _TICK_S)
        try:
            self._changed.wait(timeout=max(0.0, longest_s))
        finally:
            if is_looking:
                self._is_looked_after = False
        if is_looking and self._tell_time():
            self._wake_all()
        if timeouts.is_over():
            self._abort(self._out_of_time(self._machine.last_failure))

    @property
    def _has_relays(self) -> bool:
        return self._num_sources < len(self._sources)

    def _tell_time(self) -> bool:
        """Pass the time to the machine; return whether waiting workers have work now. Called under the lock."""
        return self._machine.time_passed(time.monotonic() - self._started_s)

    def _connect(self, source: int) -> Connection:
        settings = self._settings
        if source >= self._num_sources:
            settings = settings.with_stall_timeout(_RELAY_STALL_S)
        return Connection.of(self._sources[source], settings)

    def _perform(self, worker: WorkerIndex, request: Request[Unit], connection: Connection) -> None:
        settings = self._settings
        source = self._sources[request.source]
        try:
            if request.delay_s:
                left_s = settings.timeouts.remaining_s("waiting to try again", source)
                with self._changed:
                    self._pausing.wait_for(
                        lambda: self._machine.stopped is not None or connection.is_interrupted,
                        timeout=min(request.delay_s, left_s),
                    )
                    if self._machine.stopped is not None:
                        return
            self._receive(worker, connection, request)
            self._reached[f"{source} at {connection.reached}"] = None
        except TransportError as error:
            connection.close()
            error.step = self._step
            if settings.timeouts.is_over():
                self._abort(self._out_of_time(error))
                return
            if self._recording is not None:
                self._recording.retry(error, peer=str(source))
            with self._changed:
                self._machine.request_failed(worker, error)
                self._wake_all()
                stopped = self._machine.stopped
            if stopped is not None:
                self._interrupt_connections()
        except Exception as error:
            cause = error.__cause__ if isinstance(error, _ProgressError) else error
            failure = TransportError(f"the receiver failed: {type(cause).__name__}: {cause}", step=self._step)
            failure.__cause__ = cause
            self._abort(failure)

    def _receive(self, worker: WorkerIndex, connection: Connection, request: Request[Unit]) -> None:
        num_left = len(request.units)
        for unit, num_bytes in self._wire.receive(connection, request):
            num_left -= 1
            with self._changed:
                if self._machine.stopped is not None:
                    connection.close()
                    return
                # First, because an error of the caller's callback must end a fetch even at its last unit.
                self._report_progress(num_bytes)
                self._connections.received(request.source, num_bytes)
                if self._machine.unit_landed(worker, unit):
                    self._wake_all()
                is_cut_short = num_left > 0 and not self._machine.has_request(worker)
            if is_cut_short:
                # Other workers fetch the rest; HTTP has no other way to cancel a response.
                connection.close()
                return
        with self._changed:
            self._machine.request_cut(worker)
            # Otherwise this worker first looks for work, and wakes another worker when it has found some.
            if self._machine.stopped is not None or (self._has_relays and self._tell_time()):
                self._wake_all()

    def _out_of_time(self, last: TransportError | None) -> DeadlineExceededError:
        what = (
            f"timed out with {self._done_bytes} of {self._total_bytes} bytes received: "
            f"{self._settings.timeouts.reason()}"
        )
        if last is None:
            return DeadlineExceededError(what, step=self._step)
        out_of_time = DeadlineExceededError(f"{what}; last: {last.message}", peer=last.peer, step=self._step)
        out_of_time.__cause__ = last
        return out_of_time

    def _abort(self, error: TransportError) -> None:
        """Stop the machine and wake every worker, including those that are reading."""
        with self._changed:
            self._machine.abort(error)
            self._wake_all()
        self._interrupt_connections()

    def _wake_all(self) -> None:
        """Make every worker check for work again. Called under the lock."""
        self._changed.notify_all()
        self._pausing.notify_all()

    def _interrupt_connections(self) -> None:
        with self._changed:
            self._connections.interrupt()

    def _report_progress(self, num_bytes: int) -> None:
        """Report ``num_bytes`` more landed bytes. Called under the lock."""
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
