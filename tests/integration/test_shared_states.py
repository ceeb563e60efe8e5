"""A state is served from where it lies, and copied only if it is about to change while somebody reads it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from state_equality import exact

from ft_transport import FetchProgress, HTTPTransport, Received, SnapshotError, TransportError
from ft_transport.http.server import server
from ft_transport.state.snapshot import Taking
from manager import StateManager
from manager.recovery.replica import Replica

LONG_S = 20.0
LONG = timedelta(seconds=LONG_S)
LARGE = 20_000_000
"""More bytes than the sockets between two processes hold."""


class Fetch:
    """A fetch that stops after its first chunk until it is told to go on."""

    def __init__(self, new_transport: Callable[..., HTTPTransport[Any]], address: str) -> None:
        self.has_begun = threading.Event()
        self.may_go_on = threading.Event()
        self._receiver = new_transport(on_progress=self._wait)
        self._address = address
        self._received: list[Received[Any]] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def result(self) -> Received[Any]:
        self.may_go_on.set()
        self._thread.join(LONG_S)
        return self._received[0]

    def _run(self) -> None:
        self._received.append(self._receiver.fetch(self._address, 1, timeout=LONG))

    def _wait(self, _progress: FetchProgress) -> None:
        self.has_begun.set()
        assert self.may_go_on.wait(LONG_S)


class Training:
    """A frozen part, which is stable, and a small one that is trained."""

    def __init__(self, transport: HTTPTransport[Any]) -> None:
        self.transport = transport
        self.frozen = torch.randn(LARGE // 4)
        self.model = torch.nn.Linear(4, LARGE // 16, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.replica = Replica(LONG, transport)
        self.state = self.replica.state
        self.state.registry.register("frozen", lambda state: None, lambda: {"w": self.frozen}, is_stable=True)
        self.state.registry.register_object("model", self.model)
        self.attach(self.optimizer)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        self.state.attach((optimizer,), every_commit=True)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(2, 4)).square().mean().backward()
        self.optimizer.step()

    def num_arenas(self) -> int:
        """How many of them hold a copy."""
        return self.transport.server._stager._pool.num_taken()

    def lend_boundary(self, step: int) -> dict[str, Any]:
        """What a quorum does that has a newcomer in it."""
        assert self.replica.snapshots is not None
        assert self.replica.begin_step(step, hold=True)
        state = exact(self.state.content())
        self.replica.snapshots.request(share=True)
        assert self.replica.snapshots.settle()
        assert not self.state.lock.holders(), "nobody waits for the lock"
        return state


@pytest.fixture
def training(new_transport: Callable[..., HTTPTransport[Any]]) -> Iterator[Training]:
    made = Training(new_transport())
    yield made
    made.replica.close(wait=True)


@pytest.fixture
def fetch(training: Training, new_transport: Callable[..., HTTPTransport[Any]]) -> Callable[[], Fetch]:
    return lambda: Fetch(new_transport, training.transport.metadata())


def test_a_state_that_is_read_before_it_changes_is_never_copied(training: Training, fetch: Callable[[], Fetch]) -> None:
    expected = training.lend_boundary(1)
    assert exact(fetch().result().state) == expected
    assert training.num_arenas() == 0
    training.step()
    assert training.num_arenas() == 0


def test_a_step_while_it_is_being_read_does_not_show(training: Training, fetch: Callable[[], Fetch]) -> None:
    expected = training.lend_boundary(1)
    reading = fetch()
    assert reading.has_begun.wait(LONG_S)
    training.step()
    training.frozen.neg_()
    assert training.num_arenas() == 1
    assert exact(reading.result().state) == expected


def test_a_snapshot_that_nobody_has_read_yet_outlives_the_step(training: Training, fetch: Callable[[], Fetch]) -> None:
    expected = training.lend_boundary(1)
    training.step()
    assert exact(fetch().result().state) == expected


def test_steps_do_not_touch_what_is_stable_and_writing_sections_copy_it(
    training: Training, fetch: Callable[[], Fetch]
) -> None:
    training.replica.snapshots.take(1).result(LONG_S)
    expected = exact(training.state.content())
    reading = fetch()
    assert reading.has_begun.wait(LONG_S)
    for _ in range(3):
        training.step()
    memory = training.transport.server._shared[0]
    assert memory.is_shared, "no optimizer's step changes it"
    with training.state.lock.write("an outer step"):
        training.frozen.neg_()
    assert not memory.is_shared
    assert exact(reading.result().state) == expected


def test_a_step_copies_what_is_stable_if_it_is_the_optimizers_in_truth(
    training: Training, fetch: Callable[[], Fetch]
) -> None:
    # A part of it is unfrozen after it was shared.
    training.replica.snapshots.take(1).result(LONG_S)
    expected = exact(training.state.content())
    reading = fetch()
    assert reading.has_begun.wait(LONG_S)
    unfrozen = torch.nn.Parameter(training.frozen[10:1000])
    unfrozen.grad = torch.ones_like(unfrozen)
    training.optimizer.add_param_group({"params": [unfrozen]})
    before = training.frozen[10].item()
    training.optimizer.step()
    assert training.frozen[10].item() != before
    assert exact(reading.result().state) == expected
    # And what is unfrozen when it would be shared, is not.
    training.replica.snapshots.take(2).result(LONG_S)
    assert not training.transport.server.is_sharing()


def test_a_receiver_that_takes_longer_than_an_idle_connection_may(
    training: Training, new_transport: Callable[..., HTTPTransport[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_KEEP_ALIVE_S", 0.2)
    sender = new_transport()
    manager = StateManager(checkpoint_transport=sender, prefault=False)
    manager.register_state_dict_fn("w", lambda state: None, lambda: {"w": training.frozen}, is_stable=True)
    manager.snapshot(1).result(LONG_S)
    assert sender.server.is_sharing(), "its digests come later"
    # The pace of a slow receiver: five chunks take longer than the connection may be idle.
    receiver = new_transport(on_progress=lambda progress: time.sleep(0.1))
    received = receiver.fetch(sender.metadata(), 1, timeout=LONG)
    assert exact(received.state) == exact(manager.replica_state())
    manager.shutdown()


def test_a_snapshot_that_is_lost_before_anybody_knows_it_is_not_served(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = training.transport
    held = transport.server.hold(Taking(step=1, state={"w": training.frozen}, deferrable=lambda tensor: True))
    assert held is not None
    in_progress = transport.server.take(held, share=True)

    def refuse(_num_bytes: int) -> Any:
        raise SnapshotError("no memory")

    monkeypatch.setattr(transport.server._shared[0]._resources.pool, "take", refuse)
    transport.server.materialize()
    with pytest.raises(SnapshotError, match="the snapshot is lost"):
        in_progress.publish()
    assert transport.server.newest_step() is None


def test_attaching_an_optimizer_materializes_what_it_will_change(
    training: Training, fetch: Callable[[], Fetch]
) -> None:
    expected = training.lend_boundary(1)
    reading = fetch()
    assert reading.has_begun.wait(LONG_S)
    parameter = torch.nn.Parameter(training.frozen)
    training.attach(torch.optim.SGD([parameter], lr=1.0))
    assert not training.transport.server.is_sharing()
    assert exact(reading.result().state) == expected


def test_a_state_without_a_byte_can_be_shared(new_transport: Callable[..., HTTPTransport[Any]]) -> None:
    transport, receiver = new_transport(), new_transport()
    replica = Replica(LONG, transport)
    replica.state.registry.register("numbers", lambda state: None, lambda: {"a": 1})
    assert replica.snapshots is not None
    try:
        assert replica.begin_step(1, hold=True)
        replica.snapshots.request(share=True)
        assert replica.snapshots.settle()
        assert receiver.fetch(transport.metadata(), 1, timeout=LONG).state["user"] == {"numbers": {"a": 1}}
    finally:
        replica.close(wait=True)


def test_bytes_that_were_damaged_before_their_digests_came_are_fetched_again(
    training: Training, new_transport: Callable[..., HTTPTransport[Any]]
) -> None:
    expected = training.lend_boundary(1)
    into = {
        "user": {"frozen": {"w": torch.zeros(LARGE // 4)}, "model": {"weight": torch.zeros(LARGE // 16, 4)}},
    }
    damaged = into["user"]["frozen"]["w"]

    def damage(progress: FetchProgress) -> None:
        if progress.done_bytes == progress.total_bytes:
            damaged[:: LARGE // 40] = 7.0

    receiver = new_transport(on_progress=damage)
    received = receiver.fetch(training.transport.metadata(), 1, timeout=LONG, into=into)
    assert received.state["user"]["frozen"]["w"].data_ptr() == damaged.data_ptr()
    assert exact(received.state) == expected
    assert received.differences(training.state.content()) == ()


def test_a_parameter_group_that_was_switched_to_other_tensors_is_copied_before_its_step(
    training: Training, fetch: Callable[[], Fetch]
) -> None:
    # As BAdam and LISA do: the same number of parameters, and others.
    other = torch.nn.Parameter(training.frozen[: training.model.weight.numel()].view_as(training.model.weight))
    training.replica.snapshots.take(1).result(LONG_S)
    expected = exact(training.state.content())
    reading = fetch()
    assert reading.has_begun.wait(LONG_S)
    training.step()
    training.optimizer.param_groups[0]["params"] = [other]
    other.grad = torch.ones_like(other)
    before = training.frozen[0].item()
    training.optimizer.step()
    assert training.frozen[0].item() != before
    assert exact(reading.result().state) == expected


def test_stable_tensors_that_forward_changes_in_place_are_not_served(
    training: Training, new_transport: Callable[..., HTTPTransport[Any]]
) -> None:
    training.replica.snapshots.take(1).result(LONG_S)
    training.frozen.mul_(1.5)  # no write section: a hook that nobody knows of
    with pytest.raises(TransportError):
        new_transport().fetch(training.transport.metadata(), 1, timeout=timedelta(seconds=2))
    training.replica.snapshots.take(2).result(LONG_S)
    training.frozen.mul_(1.5)
    expected = training.frozen / 1.5
    received = new_transport().fetch(training.transport.metadata(), 2, timeout=LONG)
    assert torch.allclose(received.state["user"]["frozen"]["w"], expected), "it is copied at the boundary now"
