"""Keys of a store of ``torch.distributed``: set, set once, wait; every wait polls until a deadline.

A wait in the store itself can be neither interrupted nor abandoned, and blocks its connection for other threads. A
`StoreChannel` calls a store that ``torch.distributed`` has connected to directly (`DirectStore`), and any other on the
thread of a cached connection (`StoreConnection`).

A client of a ``TCPStore`` looks up its host's name in its constructor, which takes seconds where the resolver is slow;
so process groups reuse connections. Calls of the client have no deadline: a call to a stopped process returns when that
process goes on. So a thread of the connection makes the calls, and the caller waits for the thread no longer than its
timeout.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
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

from ft_transport.errors import DeadlineExceededError, RankGoneError, TransportError
from ft_transport.http.peer_address import AddressInfo, PeerAddress, look_up
from ft_transport.runtime.deadline import Backoff, Deadline
from ft_transport.runtime.signal_safe import SafeFuture, SafeThread

T = TypeVar("T")

AT_ONCE: Final = timedelta(0)
"""The timeout of a wait that polls once."""


class DirectStore:
    """Calls the store of ``torch.distributed`` on the caller's own thread, which saves a switch between threads.

    Timeouts do not apply: the trainer's own collectives need the store's process too.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def call(self, function: Callable[[Any], T], timeout: timedelta, *, may_repeat: bool = True) -> T:
        """Call ``function``; see `StoreChannel.call`."""
        del timeout, may_repeat
        try:
            return function(self._store)
        except RuntimeError as error:  # DistError and its like
            raise RankGoneError(f"expected the key-value store of torch.distributed to answer: {error}") from error


class StoreChannel:
    """The keys of one store. Any thread may call it, one after the other. All methods raise as `call`."""

    def __init__(self, caller: DirectStore | StoreConnection) -> None:
        self._caller = caller

    def call(self, function: Callable[[Any], T], timeout: timedelta, *, may_repeat: bool = True) -> T:
        """Call ``function`` with the store.

        Args:
            function: Receives the store.
            timeout: For the store to answer.
            may_repeat: Whether ``function`` may run a second time if the connection turns out to be broken.

        Raises:
            DeadlineExceededError: The store did not answer in time.
            RankGoneError: The store does not answer.
            Exception: Any error of ``function``.
        """
        return self._caller.call(function, timeout, may_repeat=may_repeat)

    def set(self, key: str, value: str | bytes, timeout: timedelta) -> None:
        """Set a key, and make sure that the store still answers."""

        def set_and_see(store: Any) -> None:
            store.set(key, value)
            # A store does not answer to `set`; only this call shows that it is still there.
            store.check([key])

        self.call(set_and_see, timeout)

    def post(self, key: str, value: str | bytes, timeout: timedelta) -> None:
        """Set a key without waiting; if the store died, only the next call notices."""
        self.call(lambda store: store.set(key, value), timeout)

    def set_once(self, key: str, value: str, timeout: timedelta, *, remove: Sequence[str] = ()) -> bytes:
        """Set a key unless it is set already, and remove others. Return the value of the key."""

        def set_and_remove(store: Any) -> bytes:
            stored = bytes(store.compare_set(key, "", value))
            for each in remove:
                store.delete_key(each)
            return stored

        return self.call(set_and_remove, timeout)

    def replace(self, key: str, old: str, new: str, timeout: timedelta) -> None:
        """Set a key if it has the old value."""
        self.call(lambda store: store.compare_set(key, old, new), timeout)

    def add(self, key: str, number: int, timeout: timedelta) -> int:
        """Add to a counter, and return its new value."""
        return int(self.call(lambda store: store.add(key, number), timeout, may_repeat=False))

    def remove(self, key: str, timeout: timedelta) -> None:
        """Delete a key."""
        self.call(lambda store: store.delete_key(key), timeout)

    def missing(self, keys: Sequence[str], timeout: timedelta) -> list[str]:
        """Return the keys that are not set."""
        return self.call(lambda store: [key for key in keys if not store.check([key])], timeout)

    def get(
        self,
        keys: Sequence[str],
        timeout: timedelta,
        *,
        unless: Sequence[str] = (),
        answer_timeout: timedelta = timedelta(0),
    ) -> list[bytes] | None:
        """Wait until all keys are set. Return their values, or ``None`` if they are not.

        Args:
            keys: The keys to wait for; at least one.
            timeout: For the keys to be set; `AT_ONCE` to poll once.
            unless: If one of these is set, the wait ends. Keys that were set before it are still found.
            answer_timeout: For the store to answer, if that is longer: a busy machine may need more than a short
                timeout.
        """
        deadline = Deadline.after(timeout)
        backoff = Backoff()

        def values(store: Any) -> list[bytes] | None:
            return [bytes(store.get(key)) for key in keys] if store.check(list(keys)) else None

        def look(store: Any) -> list[bytes] | None:
            found = values(store)
            if found is None and any(store.check([key]) for key in unless):
                # Since the first poll, the keys may have been set, and then one that ends the wait.
                found = values(store) or []
            return found

        while True:
            found = self.call(look, max(answer_timeout, deadline.cap(timeout)))
            if found is not None or deadline.is_over():
                return found or None
            backoff.pause(deadline.cap(timeout).total_seconds())


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
    """One connection to each store; closes those used least recently, because restarted replicas bring new stores.

    Any thread may call it.
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
        """Call ``function`` on the thread of the connection; see `StoreChannel.call`."""
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


def nobody_listens(address: str, timeout_s: float) -> bool:
    """Return whether a host refuses connections at an address; not if it is invalid, or does not answer in time."""
    give_up_s = time.monotonic() + timeout_s
    try:
        found = look_up(PeerAddress.from_url(address), timeout_s=timeout_s, is_given_up=lambda: False)
    except (TransportError, OSError):
        return False
    return bool(found) and all(_is_refused(each, give_up_s) for each in found)


def _is_refused(found: AddressInfo, give_up_s: float) -> bool:
    family, kind, protocol, _, address = found
    remaining_s = give_up_s - time.monotonic()
    if remaining_s <= 0:
        return False
    try:
        with socket.socket(family, kind, protocol) as connection:
            connection.settimeout(remaining_s)
            connection.connect(address)
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
