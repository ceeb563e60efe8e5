"""What several integration tests need: a Lighthouse, transports, and a trainer that is fetched from while it loops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import xxhash
from quorum_threads import lighthouse, make_manager
from state_equality import exact
from transport_settings import settings_of

from ft_transport import HTTPTransport
from manager import Manager

_TIMEOUT = timedelta(seconds=30)
_HOLD_BACK_S = 0.05
NUM_FETCHED = 6


def _fingerprints(parts: Mapping[str, object]) -> dict[str, int]:
    """Small stand-ins for the parts of a state, which are equal only if every type, order and bit is."""
    return {key: hash(_frozen(exact(part))) for key, part in parts.items()}


def _frozen(value: object) -> object:
    if isinstance(value, bytes):
        return xxhash.xxh3_64_intdigest(value)
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


@pytest.fixture
def address(request: pytest.FixtureRequest, quorum_ready: None) -> Iterator[str]:
    """The address of a Lighthouse that waits for `MIN_REPLICAS` of the test's module, or for one replica."""
    with lighthouse(getattr(request.module, "MIN_REPLICAS", 1)) as at:
        yield at


@pytest.fixture
def new_manager(address: str) -> Iterator[Callable[..., Manager]]:
    """Makes managers, and shuts all down at the end, because one that shuts down breaks the collectives of others."""
    with ExitStack() as stack:

        def make(name: str, **keywords: Any) -> Manager:
            manager = make_manager(address, name, **keywords)
            stack.callback(manager.shutdown)
            return manager

        yield make


@pytest.fixture
def new_transport() -> Iterator[Callable[..., HTTPTransport[Any]]]:
    """Makes transports on the loopback, with the settings that it is given, and shuts them down in the end."""
    with ExitStack() as stack:

        def make(**given: Any) -> HTTPTransport[Any]:
            settings = settings_of(host="127.0.0.1", advertise="127.0.0.1", **given)
            transport: HTTPTransport[Any] = HTTPTransport(_TIMEOUT, num_chunks=2, settings=settings)
            stack.callback(transport.shutdown)
            return transport

        yield make


class Fetcher:
    """Fetches ``latest`` over and over on a thread of its own, until it has seen enough different steps."""

    def __init__(self, receiver: HTTPTransport[Any], address: str, num_steps: int) -> None:
        self.states: dict[int, list[dict[str, int]]] = {}
        self.is_done = threading.Event()
        self._receiver = receiver
        self._address = address
        self._num_steps = num_steps
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fetcher", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while len(self.states) < self._num_steps:
                received = self._receiver.fetch(self._address, timeout=_TIMEOUT)
                self.states.setdefault(received.step, []).append(_fingerprints(received.state["user"]))
        except BaseException as error:
            self._error = error
        finally:
            self.is_done.set()

    def finish(self) -> None:
        self._thread.join(_TIMEOUT.total_seconds())
        if self._error is not None:
            raise self._error


class _HeldBack:
    """A snapshot whose background copy comes late: when the step after it is over, were it not for the lock."""

    def __init__(self, snapshot: Any, step_is_over: threading.Event) -> None:
        self._snapshot = snapshot
        self._step_is_over = step_is_over
        self.publish = snapshot.publish
        self.abandon = snapshot.abandon

    def copy_deferred(self) -> Any:
        self._step_is_over.wait(_HOLD_BACK_S)
        return self._snapshot.copy_deferred()


@pytest.fixture
def fetched_while_looping(
    new_transport: Callable[[], HTTPTransport[Any]], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Any, HTTPTransport[Any], Callable[[], None]], int]:
    """Runs training steps on this thread until ``latest`` was fetched at `NUM_FETCHED` different steps.

    Each state that was fetched is compared with what the manager held at that step's boundary. Returns the number of
    steps that were compared.
    """

    def run(manager: Any, transport: HTTPTransport[Any], train_step: Callable[[], None]) -> int:
        step_is_over = threading.Event()
        take = transport.server.take
        monkeypatch.setattr(
            transport.server, "take", lambda *args, **options: _HeldBack(take(*args, **options), step_is_over)
        )
        at_boundary: dict[int, dict[str, int]] = {}
        fetcher = Fetcher(new_transport(), transport.metadata(), num_steps=NUM_FETCHED)
        try:
            step = 0
            while not fetcher.is_done.is_set():
                step_is_over.clear()
                manager.start_step(step)
                at_boundary[step] = _fingerprints(manager.replica_state()["user"])
                train_step()
                step_is_over.set()
                step += 1
        finally:
            step_is_over.set()
            fetcher.is_done.wait(_TIMEOUT.total_seconds())
        fetcher.finish()
        for fetched_step, states in fetcher.states.items():
            for state in states:
                assert state == at_boundary[fetched_step], f"step {fetched_step}"
        # Otherwise a state that stands still would pass as well.
        assert all(at_boundary[step] != at_boundary[step + 1] for step in range(len(at_boundary) - 1))
        return len(fetcher.states)

    return run
