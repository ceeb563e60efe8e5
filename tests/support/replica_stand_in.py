"""A replica whose transport is a stand-in that records, and does on the way what a test asks for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from ft_transport.state.snapshot import Taking
from manager.snapshots.scheduler import SnapshotScheduler
from manager.state.lock import StateLock
from manager.state.optimizer_guard import OptimizerAttachment
from manager.state.optimizer_states import MIN_DEFERRED_BYTES
from manager.state.replica_state import ReplicaState

LONG_S = 20.0
LONG = timedelta(seconds=LONG_S)
LARGE = MIN_DEFERRED_BYTES // 4
"""Floats in the smallest tensor that may be deferred."""


def flat(state: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return {path: state.detach()}
    if isinstance(state, dict):
        return {key: leaf for name, item in state.items() for key, leaf in flat(item, f"{path}/{name}").items()}
    return {}


class _StandInSnapshot:
    """What the stand-in transport began: it copies as the real one does, and writes down when and where."""

    def __init__(self, transport: StandInTransport, step: int, deferred: dict[str, torch.Tensor]) -> None:
        self._transport = transport
        self.step = step
        self._deferred = deferred
        self.at_boundary: dict[str, torch.Tensor] = {}
        self.later: dict[str, torch.Tensor] = {}
        self.boundary_thread = threading.get_ident()
        self.holders_at_boundary = transport.lock.holders()
        self.is_abandoned = False

    def copy_deferred(self) -> None:
        self._transport.during_copy()
        self.later = {path: tensor.clone() for path, tensor in self._deferred.items()}

    def publish(self) -> None:
        self._transport.during_publish()
        self._transport.published.append(self)
        self._transport.after_publish()

    def abandon(self) -> None:
        self.is_abandoned = True


class StandInTransport:
    """Stands in for ``HTTPTransport``: takes snapshots into dicts, and does on the way what a test asks for."""

    def __init__(self, lock: StateLock) -> None:
        self.lock = lock
        self.server = self
        self.begun: list[_StandInSnapshot] = []
        self.published: list[_StandInSnapshot] = []
        self.failures: list[tuple[int, BaseException]] = []
        self.before_begin: Callable[[], object] = lambda: None
        self.during_copy: Callable[[], object] = lambda: None
        self.during_publish: Callable[[], object] = lambda: None
        self.after_publish: Callable[[], object] = lambda: None
        self.on_prepare: Callable[[object], object] = lambda _state: None

    def prefault(self, state: object) -> None:
        self.on_prepare(state)

    def serve_fresh(self, request: object) -> None: ...

    def is_sharing(self) -> bool:
        return False

    def materialize(self, changing: object = None) -> None: ...

    def take(self, taking: Taking) -> _StandInSnapshot:
        self.before_begin()
        tensors, deferrable = flat(taking.state), taking.deferrable
        deferred = {path: tensor for path, tensor in tensors.items() if deferrable is not None and deferrable(tensor)}
        snapshot = _StandInSnapshot(self, taking.step, deferred)
        snapshot.at_boundary = {path: tensor.clone() for path, tensor in tensors.items() if path not in deferred}
        self.begun.append(snapshot)
        return snapshot

    def is_full(self) -> bool:
        return False

    def newest_sequence(self) -> int:
        return len(self.published)

    def snapshot_failed(self, step: int, error: BaseException, *, is_final: bool = False) -> None:
        self.failures.append((step, error))

    def newest_step(self) -> int | None:
        return self.published[-1].step if self.published else None


class _GivenState(ReplicaState):
    """A replica's state whose content a test gives."""

    def __init__(self, timeout: timedelta, content: Callable[[], object]) -> None:
        super().__init__(timeout)
        self._given = content

    def content(self) -> Any:
        return self._given()


class Replica:
    """A model with a large weight, a large buffer and small parts, an attached optimizer and a snapshot_scheduler."""

    def __init__(self, timeout: timedelta = LONG) -> None:
        self.replica_state = _GivenState(timeout, self._call_state)
        self.lock = self.replica_state.lock
        self.transport: Any = StandInTransport(self.lock)
        self.model = torch.nn.Sequential(torch.nn.Linear(1, LARGE), torch.nn.BatchNorm1d(LARGE, affine=False))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.attachment: OptimizerAttachment = self.attach(self.optimizer)
        self.state: Callable[[], object] = lambda: {"model": self.model.state_dict(), "more": self.more}
        self.more: dict[str, torch.Tensor] = {}
        self.snapshot_scheduler = SnapshotScheduler(self.replica_state, self.transport, prefault=True)

    def attach(self, optimizer: torch.optim.Optimizer) -> OptimizerAttachment:
        return self.replica_state.attach((optimizer,), every_commit=True)

    def _call_state(self) -> object:
        return self.state()

    def forward_backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.rand(4, 1)).square().mean().backward()

    def boundary(self, step: int) -> None:
        self.replica_state.step = step
        self.snapshot_scheduler.boundary()

    def take(self, step: int, timeout: timedelta = LONG) -> Future[None]:
        self.replica_state.timeout = timeout
        return self.snapshot_scheduler.take(step)

    def finish(self) -> None:
        """Wait until nothing is under way: the next one would have to wait as well."""
        self.snapshot_scheduler._pool.submit(lambda: None).result(LONG_S)

    def is_free(self) -> bool:
        return not self.lock.holders()


@contextmanager
def open_replica() -> Iterator[Replica]:
    replica = Replica()
    yield replica
    replica.snapshot_scheduler.close()
    assert replica.is_free()


def elsewhere(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread
