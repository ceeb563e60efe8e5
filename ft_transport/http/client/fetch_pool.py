"""The threads of a fetch and their connections: each thread performs the requests that a state machine assigns to it.

``wire.fetch`` has the state machine, which makes all decisions. Reads block and release the GIL, so the threads receive
bytes as fast as the kernel delivers them. The threads share their connections: a new connection costs more time than a
chunk, and a receiver in a large fleet sends requests to more peers than it has threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol

from ft_transport.errors import DeadlineExceededError, TransportError
from ft_transport.http.bind_address import interface_of, interfaces
from ft_transport.http.client.connection import Connection
from ft_transport.http.client.fetch_settings import FetchSettings
from ft_transport.http.peer_address import PeerAddress
from ft_transport.runtime.signal_safe import SafeCondition
from ft_transport.runtime.threads import run_on_threads
from ft_transport.telemetry.record import Transfer
from ft_transport.telemetry.recorder import current
from ft_transport.wire.fetch import FetchMachine, Interrupt, Request, Stop, Unit, WorkerIndex

_MAX_IDLE: Final = 128
"""Maximum number of idle connections of a fetch."""
_LOCK_S: Final = 0.1
"""Longest wait of a status request for the pool's lock, under which the caller's ``on_progress`` runs."""
_RELAY_STALL_S: Final = 5.0
_TICK_S: Final = 0.25
"""Interval at which one waiting worker checks whether relays have become too slow."""


class _ProgressError(Exception):
    """The caller's ``on_progress`` raised an error, which must not count as a failure of a source."""


@dataclass(slots=True)
class _Flow:
    began_s: float
    ended_s: float
    num_bytes: int = 0
    num_connections: int = 0
    local_address: str = ""
    peer_address: str = ""


class ConnectionPool:
    """The connections of one fetch, grouped by peer, and their traffic. Not thread-safe: the caller's lock protects it.

    Args:
        peers: All peers. The methods take the index of a peer in this sequence.
        connect: Takes the index of a peer and returns a new connection, which opens at its first request.
        num_sources: Number of sources, which come first in ``peers``; the other peers are relays.
    """

    def __init__(self, peers: Sequence[PeerAddress], connect: Callable[[int], Connection], *, num_sources: int) -> None:
        self._peers = peers
        self._connect = connect
        self._num_sources = num_sources
        self._used: dict[Connection, int] = {}
        """Connections in use, with the number of times that each was opened before its current request."""
        self._idle: list[tuple[int, Connection]] = []
        """Idle connections with the index of their peer, least recently used first."""
        self._flows: dict[int, _Flow] = {}
        self._is_closed = False

    def take(self, peer: int) -> Connection:
        """Return a connection for one request to this peer: the most recently used idle connection, or a new one."""
        found = next((at for at in reversed(range(len(self._idle))) if self._idle[at][0] == peer), None)
        connection = self._connect(peer) if found is None else self._idle.pop(found)[1]
        self._used[connection] = connection.num_opened
        now_s = time.monotonic()
        self._flows.setdefault(peer, _Flow(began_s=now_s, ended_s=now_s))
        return connection

    def received(self, peer: int, num_bytes: int) -> None:
        """Count ``num_bytes`` more verified bytes from a peer."""
        flow = self._flows[peer]
        flow.num_bytes += num_bytes
        flow.ended_s = time.monotonic()

    def give_back(self, peer: int, connection: Connection) -> None:
        """Make a connection idle after its request, or close it if it was interrupted or the pool is closed."""
        flow = self._flows[peer]
        flow.ended_s = time.monotonic()
        flow.num_connections += connection.num_opened - self._used.pop(connection)
        flow.local_address = connection.local_address or flow.local_address
        flow.peer_address = connection.reached or flow.peer_address
        if self._is_closed or connection.is_interrupted:
            connection.close()
            return
        self._idle.append((peer, connection))
        if len(self._idle) > _MAX_IDLE:
            _, oldest = self._idle.pop(0)
            oldest.close()

    def transfers(self) -> list[Transfer]:
        """Return the transfer from each peer to which a request was sent."""
        by_address = interfaces()
        return [
            Transfer(
                peer=str(self._peers[peer]),
                role="source" if peer < self._num_sources else "relay",
                num_bytes=flow.num_bytes,
                length_s=flow.ended_s - flow.began_s,
                local_address=flow.local_address,
                peer_address=flow.peer_address,
                interface=interface_of(flow.local_address, by_address),
                num_connections=flow.num_connections,
            )
            for peer, flow in sorted(self._flows.items())
        ]

    def interrupt(self) -> None:
        """Interrupt the connections in use, and close the idle connections."""
        for connection in self._used:
            connection.interrupt()
        self.close_idle()

    def close_idle(self) -> None:
        """Close the idle connections now, and each connection in use after its request."""
        self._is_closed = True
        while self._idle:
            self._idle.pop()[1].close()

    def close(self) -> None:
        """Close all connections, even those in use: an interrupted worker may not have given its connection back."""
        self.close_idle()
        while self._used:
            self._used.popitem()[0].close()


class Wire(Protocol[Unit]):
    """Requests and receives units (chunks or frames). Any thread may call it, with a connection of its own."""

    def receive(self, connection: Connection, request: Request[Unit]) -> Iterator[tuple[Unit, int]]:
        """Sends one request; yields each received and verified unit, with its number of bytes.

        Yields fewer units than requested if the peer does not have the rest yet. A caller that does not need the rest
        stops iterating and closes the connection.
        """


class FetchPool(Generic[Unit]):
    """The threads of one fetch, which perform the requests of its state machine.

    Args:
        sources: The peers that serve the data. The machine refers to a peer by its index in this sequence.
        machine: State machine that decides which requests to send; called only under the pool's lock.
        wire: Performs the requests.
        settings: Settings of the fetch.
        num_workers: Number of threads.
        num_sources: Number of peers that have all of the data, which come first in ``sources``. The other peers are
            relays, whose stall timeout is short because other peers can replace them.
        step: Step of the state, for errors.
        total_bytes: Size of all data to fetch, for progress reports and errors.
    """

    def __init__(
        self,
        sources: Sequence[PeerAddress],
        machine: FetchMachine[Unit],
        wire: Wire[Unit],
        settings: FetchSettings,
        *,
        num_workers: int,
        num_sources: int,
        step: int,
        total_bytes: int,
    ) -> None:
        self._sources = sources
        self._machine = machine
        self._wire = wire
        self._settings = settings
        self._num_workers = num_workers
        self._num_sources = num_sources
        self._step = step
        self._total_bytes = total_bytes
        # Guards the machine and the connections. Workers without a request wait for a notification.
        self._changed = SafeCondition()
        # Workers that pause before a request wait for a notification that the fetch has ended.
        self._pausing = SafeCondition(self._changed)
        self._connections = ConnectionPool(sources, self._connect, num_sources=self._num_sources)
        self._used_by: dict[WorkerIndex, Connection] = {}
        self._recording = current()
        self._interruption: BaseException | None = None
        self._started_s = time.monotonic()
        self._has_watcher = False
        self._done_bytes = 0
        self._reached: dict[str, None] = {}

    def summary(self) -> str:
        """Return the size, throughput and peers of the fetch as text for the log; call after `run`."""
        took_s = time.monotonic() - self._started_s
        rate = self._done_bytes / max(took_s, 1e-6) / 1e6
        return f"{self._done_bytes} bytes in {took_s:.2f} s, {rate:.1f} MB/s, from {', '.join(self._reached)}"

    def run(self) -> None:
        """Run the workers, the first of them on this thread, until the machine stops.

        Returns or raises only when no thread writes to the destination any more, even if signal handlers raise
        meanwhile.
        """
        try:
            if self._recording is not None:
                self._recording.follow(self._transfers)
            name = "ft-transport-fetch"
            run_on_threads(self._work, self._num_workers, name=name, failed=self._interrupt, needs_all=True)
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
        """Return the transfers from each peer so far, or none if the lock is busy. Thread-safe."""
        if not self._changed.acquire(timeout=_LOCK_S):
            return []
        try:
            return self._connections.transfers()
        finally:
            self._changed.release()

    def _interrupt(self, error: BaseException) -> None:
        """End the fetch because of an unexpected ``error``, which ``run`` raises."""
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
                    # Wakes one other worker, which looks for a further request and watches the relays. Waking all
                    # workers, most of which have nothing to do, would cost more than their work.
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
            # A worker ends only when the fetch has ended.
            with self._changed:
                self._connections.close_idle()

    def _next(self, worker: WorkerIndex) -> Request[Unit] | Stop:
        """Wait for the worker's next request, or for the end of the fetch. Called under the lock."""
        instruction = self._machine.next(worker)
        while not isinstance(instruction, Request | Stop):
            if isinstance(instruction, Interrupt) and instruction.worker in self._used_by:
                self._used_by[instruction.worker].interrupt()
                self._wake_all()
            self._wait()
            instruction = self._machine.next(worker)
        return instruction

    def _wait(self) -> None:
        """Wait for a notification; end the fetch if its time is over. Called under the lock."""
        timeouts = self._settings.timeouts
        longest_s = min(timeouts.stall_timeout_s, timeouts.end_s() - time.monotonic())
        # If relays become too slow, the machine has new requests for waiting workers. One worker checks for all.
        is_watcher = self._has_relays and not self._has_watcher
        if is_watcher:
            self._has_watcher = True
            longest_s = min(longest_s, _TICK_S)
        try:
            self._changed.wait(timeout=max(0.0, longest_s))
        finally:
            if is_watcher:
                self._has_watcher = False
        if is_watcher and self._report_time():
            self._wake_all()
        if timeouts.is_over():
            self._abort(self._out_of_time(self._machine.last_failure))

    @property
    def _has_relays(self) -> bool:
        return self._num_sources < len(self._sources)

    def _report_time(self) -> bool:
        """Report the elapsed time to the machine; return whether it has new requests. Called under the lock."""
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
                left_s = settings.timeouts.remaining_s("waiting for the next attempt", source)
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
                if self._machine.stopped is not None:
                    self._connections.interrupt()
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
                # Comes first, because an error of ``on_progress`` must end the fetch even at the last unit.
                self._report_progress(num_bytes)
                self._connections.received(request.source, num_bytes)
                if self._machine.unit_landed(worker, unit):
                    self._wake_all()
                is_cut_short = num_left > 0 and not self._machine.has_request(worker)
            if is_cut_short:
                # Other workers fetch the rest. HTTP has no way to cancel a response but to close the connection.
                connection.close()
                return
        with self._changed:
            self._machine.request_cut(worker)
            # Otherwise this worker asks the machine for its next request first, and then wakes another worker.
            if self._machine.stopped is not None or (self._has_relays and self._report_time()):
                self._wake_all()

    def _out_of_time(self, last: TransportError | None) -> DeadlineExceededError:
        reason = self._settings.timeouts.reason() + (f"; last error: {last.message}" if last is not None else "")
        what = f"timed out with {self._done_bytes} of {self._total_bytes} bytes received: {reason}"
        out_of_time = DeadlineExceededError(what, peer=last.peer if last is not None else None, step=self._step)
        out_of_time.__cause__ = last
        return out_of_time

    def _abort(self, error: TransportError) -> None:
        """Stop the machine, wake every waiting worker, and interrupt every reading worker."""
        with self._changed:
            self._machine.abort(error)
            self._wake_all()
            self._connections.interrupt()

    def _wake_all(self) -> None:
        """Make every waiting worker ask the machine for a request. Called under the lock."""
        self._changed.notify_all()
        self._pausing.notify_all()

    def _report_progress(self, num_bytes: int) -> None:
        """Count ``num_bytes`` more received bytes, and call the caller's ``on_progress``. Called under the lock."""
        self._done_bytes += num_bytes
        elapsed_s = time.monotonic() - self._started_s
        try:
            self._settings.report_progress(self._done_bytes, self._total_bytes, elapsed_s=elapsed_s)
        except Exception as error:
            raise _ProgressError from error
