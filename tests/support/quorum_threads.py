"""Replicas as threads of the test: real Lighthouse, real gloo, real HTTP, without the seconds that a process takes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest
import torch
from torch.distributed import TCPStore

from ft_transport import HTTPTransport, TransportSettings
from manager import Manager
from manager.quorum.members import RunningMember
from manager.quorum.membership import Membership

T = TypeVar("T")

TIMEOUT = timedelta(seconds=40)
SHORT = timedelta(seconds=10)
LONG_S = 100.0


@contextmanager
def lighthouse(min_replicas: int = 1, *, port: int = 0, heartbeat_timeout_ms: int = 1000) -> Iterator[str]:
    """A Lighthouse of the test's own; yields its address."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=f"127.0.0.1:{port}",
        min_replicas=min_replicas,
        join_timeout_ms=40_000,
        quorum_tick_ms=10,
        heartbeat_timeout_ms=heartbeat_timeout_ms,
    )
    try:
        yield f"http://127.0.0.1:{urlsplit(server.address()).port}"
    finally:
        server.shutdown()


def loopback_transport(**settings: Any) -> HTTPTransport[Any]:
    given = {"host": "127.0.0.1", "advertise": "127.0.0.1", **settings}
    return HTTPTransport(TIMEOUT, settings=TransportSettings(**given))


def new_store() -> TCPStore:
    """A store for the ranks of one replica. It ends with its last reference."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def make_manager(
    address: str, name: str, *, store: TCPStore | None = None, has_part: bool = False, **keywords: Any
) -> Manager:
    """A manager on the loopback.

    Args:
        address: Address of the Lighthouse.
        name: Name of the replica.
        store: Store of the two ranks of the replica; ``None`` for a replica of one rank.
        has_part: Whether to register an empty state.
        keywords: Further settings.
    """
    chosen: dict[str, Any] = {
        "min_replica_size": 1,
        # gloo misses a closed connection at times, and then waits for as long.
        "timeout": SHORT,
        "quorum_timeout": TIMEOUT,
        "connect_timeout": SHORT,
        **keywords,
    }
    if "checkpoint_transport" not in chosen:
        chosen["checkpoint_transport"] = loopback_transport()
    if store is not None:
        chosen |= {"world_size": 2, "store_addr": "127.0.0.1", "store_port": store.port}
    manager = Manager(lighthouse_addr=address, replica_id=name, **chosen)
    if has_part:
        manager.register_state_dict_fn("part", lambda part: None, dict)
    return manager


class Trainer:
    """A replica that registers a model and its optimizer, and averages each gradient by itself."""

    def __init__(
        self,
        address: str,
        name: str,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        is_stable: bool = False,
        **keywords: Any,
    ) -> None:
        self.model: Any = model
        self.optimizer = optimizer
        self.manager = make_manager(address, name, **keywords)
        self.manager.register("model", model, is_stable=is_stable)
        self.manager.register("optimizer", optimizer)
        self.manager.attach(optimizer)

    def started(self) -> None:
        """Called after `Manager.start_quorum`."""

    def backward(self) -> None:
        """Compute the gradients of the model's parameters."""
        raise NotImplementedError

    def step(self) -> bool:
        """Make one step, and return whether it was committed."""
        self.manager.start_quorum()
        self.started()
        self.optimizer.zero_grad()
        self.backward()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self.manager.allreduce(parameter.grad)
        is_committed = self.manager.should_commit()
        if is_committed:
            self.optimizer.step()
        return is_committed


def let_join_at_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the replica of this name receive a state in the quorum only; the others wait for it from its start."""
    running_members = Membership.running_members

    def members(self: Membership) -> tuple[RunningMember, ...]:
        return () if self._config.replica_id == name else running_members(self)

    monkeypatch.setattr(Membership, "running_members", members)


def run_replicas(*replicas: Callable[[], T]) -> list[T]:
    """Run each on a thread of its own, and return what they return; the first error is raised."""
    with ThreadPoolExecutor(len(replicas), thread_name_prefix="replica") as pool:
        futures = [pool.submit(replica) for replica in replicas]
        return [future.result(LONG_S) for future in futures]


def beside(step: Callable[[], object], newcomer: Callable[[], T], *, num_steps: int = 2) -> T:
    """Call ``step`` of a replica repeatedly, and ``newcomer`` after the first steps; return the newcomer's result."""
    trains, is_over = threading.Event(), threading.Event()

    def train() -> None:
        try:
            for _ in range(num_steps):
                step()
            trains.set()
            while not is_over.is_set():
                step()
        finally:
            trains.set()

    def join() -> T:
        assert trains.wait(LONG_S)
        try:
            return newcomer()
        finally:
            is_over.set()

    outcomes: list[Any] = run_replicas(train, join)
    newcomers: T = outcomes[1]
    return newcomers


class Gate:
    """Lets threads wait for each other by name. Every wait has a deadline."""

    def __init__(self) -> None:
        self._events: dict[str, threading.Event] = {}
        self._mutex = threading.Lock()

    def _event(self, name: str) -> threading.Event:
        with self._mutex:
            return self._events.setdefault(name, threading.Event())

    def open(self, name: str) -> None:
        self._event(name).set()

    def is_open(self, name: str) -> bool:
        return self._event(name).is_set()

    def wait(self, name: str) -> None:
        assert self._event(name).wait(LONG_S), f"{name} did not come"
