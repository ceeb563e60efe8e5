"""Access to a key-value store of ``torch.distributed``. Every call has a timeout, and every wait polls.

A wait within torch's store can be neither interrupted nor abandoned, and blocks the connection for other threads. So a
`StoreChannel` waits by polling. It reaches the store in one of two ways:

- `DirectStore` calls the store to which ``torch.distributed`` has connected, on the caller's thread.
- `StoreConnection` connects to any ``TCPStore``, and calls it on a thread of its own. A call of torch's client has no
  deadline: a call to a stopped process returns only after that process continues. So the caller waits for the thread,
  at most until its timeout. Process groups reuse connections, because torch's client resolves the host's name when it
  connects, which may take seconds.
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
from typing import Any, Final, TypeVar

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
"""Timeout of a wait that polls only once."""


class DirectStore:
    """Calls the store that ``torch.distributed`` has connected to, on the caller's thread.

    Timeouts are ignored: if that store does not answer, the trainer's own collectives hang as well.
    """

    def __init__(self, store: Any) -> None:
        self._open: Callable[[], Any] = lambda: store

    @classmethod
    def opened_by(cls, open_store: Callable[[], Any]) -> DirectStore:
        """Return an object that gets its store from a function, at each call."""
        direct = cls(None)
        direct._open = open_store
        return direct

    def call(self, function: Callable[[Any], T], timeout: timedelta, *, may_repeat: bool = True) -> T:
        """Call a function with the store; see `StoreChannel.call`."""
        del timeout, may_repeat
        try:
            return function(self._open())
        except RuntimeError as error:  # the base class of torch's DistError
            raise RankGoneError(f"expected the key-value store of torch.distributed to answer: {error}") from error


class StoreChannel:
    """Reads and writes the keys of one store. Several threads may use it, one at a time.

    All methods raise the errors of `call`.
    """

    def __init__(self, caller: DirectStore | StoreConnection) -> None:
        self._caller = caller

    def call(self, function: Callable[[Any], T], timeout: timedelta, *, may_repeat: bool = True) -> T:
        """Call a function with the store, and return its result.

        Args:
            function: The function; its argument is the store.
            timeout: Limit of the call.
            may_repeat: Whether the function may run twice, which happens if the connection turns out to be broken.

        Raises:
            DeadlineExceededError: The store did not answer in time.
            RankGoneError: The connection to the store is broken or cannot be made.
            Exception: Any error of the function.
        """
        return self._caller.call(function, timeout, may_repeat=may_repeat)

    def set(self, key: str, value: str | bytes, timeout: timedelta) -> None:
        """Set a key, and wait until the store has confirmed it."""

        def set_and_see(store: Any) -> None:
            store.set(key, value)
            # torch's store does not answer a `set`; this call shows that the store still runs.
            store.check([key])

        self.call(set_and_see, timeout)

    def post(self, key: str, value: str | bytes, timeout: timedelta) -> None:
        """Set a key without waiting for the store. If the store has died, only the next call raises an error."""
        self.call(lambda store: store.set(key, value), timeout)

    def set_once(self, key: str, value: str, timeout: timedelta, *, remove: Sequence[str] = ()) -> bytes:
        """Set a key, unless it is set already, and delete the keys ``remove``. Return the value of the key."""

        def set_and_remove(store: Any) -> bytes:
            stored = bytes(store.compare_set(key, "", value))
            for each in remove:
                store.delete_key(each)
            return stored

        return self.call(set_and_remove, timeout)

    def replace(self, key: str, old: str, new: str, timeout: timedelta) -> None:
        """Set a key to ``new``, if its value is ``old``."""
        self.call(lambda store: store.compare_set(key, old, new), timeout)

    def add(self, key: str, number: int, timeout: timedelta) -> int:
        """Add a number to the counter under a key, and return its new value."""
        return int(self.call(lambda store: store.add(key, number), timeout, may_repeat=False))

    def remove(self, key: str, timeout: timedelta) -> None:
        """Delete a key."""
        self.call(lambda store: store.delete_key(key), timeout)

    def missing(self, keys: Sequence[str], timeout: timedelta) -> list[str]:
        """Return those of the keys that are not set."""
        return self.call(lambda store: [key for key in keys if not store.check([key])], timeout)

    def get(
        self,
        keys: Sequence[str],
        timeout: timedelta,
        *,
        unless: Sequence[str] = (),
        answer_timeout: timedelta = timedelta(0),
    ) -> list[bytes] | None:
        """Wait until all keys are set, and return their values; ``None`` if the wait ends earlier.

        Args:
            keys: The keys to wait for; at least one.
            timeout: Limit of the wait; `AT_ONCE` to poll once.
            unless: Keys that end the wait if one of them is set. If all ``keys`` were set before that key, the values
                are still returned.
            answer_timeout: Limit of each call of the store, if it is longer than ``timeout``. A busy machine may not
                answer within a short timeout.
        """
        deadline = Deadline.after(timeout)
        backoff = Backoff()

        def values(store: Any) -> list[bytes] | None:
            return [bytes(store.get(key)) for key in keys] if store.check(list(keys)) else None

        def look(store: Any) -> list[bytes] | None:
            found = values(store)
            if found is None and any(store.check([key]) for key in unless):
                # Poll again: after the first poll, the keys may have been set, and then the key that ends the wait.
                found = values(store) or []
            return found

        while True:
            found = self.call(look, max(answer_timeout, deadline.cap(timeout)))
            if found is not None or deadline.is_over():
                return found or None
            backoff.pause(deadline.cap(timeout).total_seconds())


_MAX_OTHERS: Final = 2
"""Number of cached connections to stores of other replicas. A process group is set up through one of them, and a second
one is read if the replicas' states differ."""
_GRACE_S: Final = 0.25
"""Additional time for an answer that the store sends right at the timeout."""
_PROBE_S: Final = 1.0
_SHORTEST_CONNECT_S: Final = 1.0
"""Shortest timeout of an attempt to connect. The attempt continues after its caller has timed out, so that a later call
succeeds even if resolving the name takes longer than one caller's timeout."""


class StoreConnections:
    """Caches one connection to each store. Any thread may call it.

    Of the connections to other replicas' stores, only the most recently used ones stay open, since every restarted
    replica has a new store.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._own: dict[tuple[str, int], StoreConnection] = {}
        self._others: dict[tuple[str, int], StoreConnection] = {}
        self._is_closed = False

    def at(self, address: str) -> StoreChannel:
        """Return a channel to the store at ``host:port``. The channel connects in its first call.

        Raises:
            RankGoneError: The connections have been closed.
        """
        host, _, number = address.rpartition(":")
        key, oldest = (host.strip("[]"), int(number)), None
        with self._mutex:
            if self._is_closed:
                raise RankGoneError(f"expected an open connection to the store at {address}, but it has been closed")
            if key in self._own:
                return StoreChannel(self._own[key])
            connection = self._others.pop(key, None) or StoreConnection(*key, is_patient=False)
            self._others[key] = connection
            if len(self._others) > _MAX_OTHERS:
                oldest = self._others.pop(next(iter(self._others)))
        if oldest is not None:
            oldest.close()
        return StoreChannel(connection)

    def own(self, host: str, port: int, store: TCPStore | None = None) -> StoreChannel:
        """Return a channel to the store of this process's own replica. Its connection stays open until `close`.

        Args:
            host: The store's host.
            port: The store's port.
            store: The store, if this process hosts it; another connection to it might take seconds.
        """
        with self._mutex:
            connection = self._own[host, port] = StoreConnection(host, port, store)
            return StoreChannel(connection)

    def close(self) -> None:
        """Close every connection."""
        with self._mutex:
            self._is_closed = True
            connections = [*self._own.values(), *self._others.values()]
            self._own, self._others = {}, {}
        for connection in connections:
            connection.close()


class StoreConnection:
    """A connection to one store. If it is broken, a call reconnects once. Several threads may use it, one at a time.

    Args:
        host: The store's host.
        port: The store's port.
        store: A store that is connected already; ``None`` to connect in the first call.
        is_patient: Whether to wait if the port refuses connections. If not, the replica that hosted the store is
            assumed to be dead.
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
        """Call a function with the store on the thread of the connection; see `StoreChannel.call`."""
        deadline_s = time.monotonic() + timeout.total_seconds() + _GRACE_S
        while True:
            worker = self._running_worker(timeout)
            was_connected = worker.is_connected
            future = worker.submit(function)
            try:
                return future.result(max(0.0, deadline_s - time.monotonic()))
            except CancelledError:
                # The connection was closed before this call began, by `close` or after another call failed.
                continue
            except TimeoutError as error:
                # A call that was still waiting, for its turn or for the connection, does not mean that the store hangs.
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
                # The future refers to the error, and the error to this frame: break the cycle.
                del future

    def close(self) -> None:
        """Close the connection. Calls that wait for an answer raise `RankGoneError`."""
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
    """The thread of one connection. It connects, unless ``store`` is connected already, and then runs jobs in turn."""

    def __init__(self, connect: Callable[[], TCPStore], store: TCPStore | None) -> None:
        self.is_connected = store is not None
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[Any], Any]] | None] = SimpleQueue()
        self._current: Future[Any] | None = None
        # A daemon thread, because a call does not return while the process of the store is stopped.
        self._thread = SafeThread(target=self._run, args=(connect, [store]), name="ft-transport-store", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[Any], T]) -> Future[T]:
        future: Future[T] = SafeFuture()
        self._jobs.put((future, function))
        return future

    def end(self) -> None:
        """End the waits for all jobs. The thread ends after its current job."""
        self._jobs.put(None)
        current = self._current
        if current is not None and not current.cancel():
            with contextlib.suppress(InvalidStateError):
                current.set_exception(DistNetworkError("the connection was closed"))

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self, connect: Callable[[], TCPStore], first: list[TCPStore | None]) -> None:
        # Take the store out of the list, which the thread object keeps, so that nothing refers to the store at the end.
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
            # While the thread waits for the next job, it must not refer to the last one.
            self._current = None
            del job, function
        while not self._jobs.empty():
            if (job := self._jobs.get()) is not None and job[0].set_running_or_notify_cancel():
                _finish(job[0], DistNetworkError("the connection was closed"))


def _connect(host: str, port: int, timeout_s: float, *, is_patient: bool) -> TCPStore:
    # torch's client retries a port that refuses connections until the timeout, so probe the port first.
    named = f"[{host}]" if ":" in host else host
    if not is_patient and nobody_listens(f"http://{named}:{port}", _PROBE_S):
        raise DistNetworkError("no process listens there: the replica that hosted the store is dead")
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def _finish(future: Future[Any], outcome: Any) -> None:
    # A thread that closed the connection may have set the outcome first.
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def nobody_listens(address: str, timeout_s: float) -> bool:
    """Return whether the host and port of the URL ``address`` refuse connections.

    False if the host does not answer within ``timeout_s``.
    """
    give_up_s = time.monotonic() + timeout_s
    try:
        found = look_up(PeerAddress.from_url(address), timeout_s=timeout_s, is_given_up=lambda: False)
    except (TransportError, OSError):
        return False
    return bool(found) and all(_is_refused(each, give_up_s) for each in found)


def _is_refused(found: AddressInfo, give_up_s: float) -> bool:
    family, kind, protocol, _, address = found
    try:
        with socket.socket(family, kind, protocol) as connection:
            connection.settimeout(max(1e-3, give_up_s - time.monotonic()))
            connection.connect(address)
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
