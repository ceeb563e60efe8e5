"""Cached connections to ``TCPStore``s, one to each, made when first needed; a `StoreChannel` calls each.

A client of a ``TCPStore`` looks up its host's name in its constructor, which takes seconds where the resolver is slow;
so process groups reuse these connections. Calls of the client have no deadline: a call to a stopped process returns
when that process goes on. So a thread of the connection makes the calls, and the caller waits for the thread no longer
than its timeout.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeAlias, TypeVar

from torch.distributed import (  # type: ignore[attr-defined] # exported, undeclared
    DistError,
    DistNetworkError,
    TCPStore,
)

from ft_transport.coordination.rendezvous import nobody_listens
from ft_transport.coordination.store_channel import StoreChannel
from ft_transport.errors import DeadlineExceededError, RankGoneError
from ft_transport.runtime.handler_safety import SafeFuture, SafeThread

T = TypeVar("T")
_Job: TypeAlias = tuple["Future[Any]", Callable[[Any], Any]]

_MAX_OTHERS: Final = 2
"""For stores outside the own group. A group meets in the store of one member; a second store is read where states
differ."""
_GRACE_S: Final = 0.25
"""Time for the answer to come back, since the store counts the timeout itself."""
_PROBE_S: Final = 1.0
_SHORTEST_CONNECT_S: Final = 1.0
"""A resolver may take longer than one caller's timeout; the next caller then finds the connection made."""


class StoreConnections:
    """One connection to each store. Any thread may call it.

    Every replica that restarts brings another store, so the connections that were used least recently are closed.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._own: dict[tuple[str, int], StoreConnection] = {}
        self._others: dict[tuple[str, int], StoreConnection] = {}
        self._is_closed = False

    def at(self, host: str, port: int) -> StoreChannel:
        """Return the channel to this store, which connects with the first call of one of its methods.

        Raises:
            RankGoneError: The connections have been closed.
        """
        place, oldest = (host, port), None
        with self._mutex:
            if self._is_closed:
                raise RankGoneError(f"expected no more need of the store at {host}:{port}: has been shut down")
            if place in self._own:
                return StoreChannel(self._own[place])
            connection = self._others.pop(place, None) or StoreConnection(host, port, is_patient=False)
            self._others[place] = connection
            if len(self._others) > _MAX_OTHERS:
                oldest = self._others.pop(next(iter(self._others)))
        if oldest is not None:
            oldest.close()
        return StoreChannel(connection)

    def own(self, host: str, port: int, store: TCPStore | None = None) -> StoreChannel:
        """Return the channel to a store of this process's own group, whose connection is never evicted; raises as `at`.

        Args:
            host: The store's host.
            port: The store's port.
            store: The store, if this process hosts it: a second connection to it may take seconds, too.
        """
        with self._mutex:
            connection = self._own[host, port] = StoreConnection(host, port, store)
            return StoreChannel(connection)

    def at_address(self, address: str) -> StoreChannel:
        """Return the channel to the store at ``host:port``; see `at`."""
        host, _, port = address.rpartition(":")
        return self.at(host.strip("[]"), int(port))

    def close(self) -> None:
        """Close every connection."""
        with self._mutex:
            self._is_closed = True
            connections = [*self._own.values(), *self._others.values()]
            self._own, self._others = {}, {}
        for connection in connections:
            connection.close()


class StoreConnection:
    """A connection to one store; each call reconnects a broken one once. Any thread may call it, one after the other.

    Args:
        host: The store's host.
        port: The store's port.
        store: A connected store to start with; ``None`` to connect with the first call.
        is_patient: Whether to wait for a store whose port refuses connections. Another replica's store listens for as
            long as that replica lives.
    """

    def __init__(self, host: str, port: int, store: TCPStore | None = None, *, is_patient: bool = True) -> None:
        self._host = host
        self._port = port
        self._first: TCPStore | None = store
        self._is_patient = is_patient
        self._mutex = threading.Lock()
        self._worker: _Worker | None = None
        self._is_closed = False

    def call(self, function: Callable[[Any], T], timeout: timedelta, *, may_repeat: bool = True) -> T:
        """Call ``function`` on the thread of the connection; see `StoreCaller.call`."""
        deadline_s = time.monotonic() + timeout.total_seconds() + _GRACE_S
        while True:
            worker = self._running_worker(timeout)
            was_connected = worker.is_connected
            future = worker.submit(function)
            try:
                return future.result(max(0.0, deadline_s - time.monotonic()))
            except CancelledError:
                # The connection was closed before this call could begin: for good, or because another call broke it.
                continue
            except TimeoutError as error:
                # If the call only waits for its turn, or for the connection, the thread goes on.
                if not future.cancel() and worker.is_connected:
                    self._drop(worker)
                raise DeadlineExceededError(self._unanswered(f"no answer in {timeout.total_seconds():g} s")) from error
            except DistNetworkError as error:
                self._drop(worker)
                if not (was_connected and may_repeat):
                    raise RankGoneError(self._unanswered(str(error))) from error
            except DistError as error:
                raise RankGoneError(self._unanswered(str(error))) from error
            finally:
                # The future refers to the error, and the error to this frame.
                del future

    def close(self) -> None:
        """Close the connection; calls that wait for it raise."""
        with self._mutex:
            self._is_closed = True
            worker, self._worker, self._first = self._worker, None, None
        if worker is not None:
            worker.end()
            worker.join(_GRACE_S)

    def _unanswered(self, reason: str) -> str:
        return f"expected the store at {self._host}:{self._port} to answer: {reason}"

    def _running_worker(self, timeout: timedelta) -> _Worker:
        with self._mutex:
            if self._is_closed:
                raise RankGoneError(self._unanswered("has been shut down"))
            if self._worker is None:
                first, self._first = self._first, None
                connect_s = max(timeout.total_seconds(), _SHORTEST_CONNECT_S)
                connect = partial(_connect, self._host, self._port, connect_s, is_patient=self._is_patient)
                self._worker = _Worker(connect, first)
            return self._worker

    def _drop(self, worker: _Worker) -> None:
        with self._mutex:
            if self._worker is worker:
                self._worker = None
        worker.end()


class _Worker:
    """The thread of one connection: it connects, and then runs one job after the other."""

    def __init__(self, connect: Callable[[], TCPStore], store: TCPStore | None) -> None:
        self.is_connected = store is not None
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._current: Future[Any] | None = None
        # A daemon, because a call to a store whose process is stopped does not return.
        self._thread = SafeThread(target=self._run, args=(connect, [store]), name="ft-transport-store", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[Any], T]) -> Future[T]:
        future: Future[T] = SafeFuture()
        self._jobs.put((future, function))
        return future

    def end(self) -> None:
        """End all waits; the thread ends when its current call does."""
        self._jobs.put(None)
        current = self._current
        if current is not None and not current.cancel():
            with contextlib.suppress(InvalidStateError):
                current.set_exception(DistNetworkError("the connection was closed"))

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self, connect: Callable[[], TCPStore], first: list[TCPStore | None]) -> None:
        # Taken out of the list, which the thread object keeps: nothing else refers to the store when this ends.
        store: Any = first.pop()
        while (job := self._jobs.get()) is not None:
            self._current, function = job
            try:
                if store is None and not self._current.cancelled():
                    store = connect()
                    self.is_connected = True
                if self._current.set_running_or_notify_cancel():
                    _finish(self._current, function(store))
            except BaseException as error:
                current = self._current
                if current.running() or (not current.done() and current.set_running_or_notify_cancel()):
                    _finish(current, error)
                del current
            # While the thread waits for the next job, it refers to nothing of the last one.
            self._current = None
            del job, function
        while not self._jobs.empty():
            if (job := self._jobs.get()) is not None and job[0].set_running_or_notify_cancel():
                _finish(job[0], DistNetworkError("the connection was closed"))


def _connect(host: str, port: int, timeout_s: float, *, is_patient: bool) -> TCPStore:
    # A client of the store retries a refused port until its timeout is over.
    named = f"[{host}]" if ":" in host else host
    if not is_patient and nobody_listens(f"http://{named}:{port}", _PROBE_S):
        raise DistNetworkError("nobody listens there: the replica that had it is dead")
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def _finish(future: Future[Any], outcome: Any) -> None:
    # A thread that closed the connection may have set the outcome first.
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
