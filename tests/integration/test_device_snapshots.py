"""A trainer whose tensors are on a device goes on while they are copied, and each snapshot shows its step boundary.

There is no device here: see ``stand_in_device``. Its training stream is idle, so that it runs at once what is queued.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from stand_in_device import OnDevice, StandInAccelerator, StandInEvent, StandInStream
from state_equality import exact

from ft_transport import HTTPTransport
from ft_transport.state import stager
from ft_transport.state.blocks import FlatState
from ft_transport.state.copying import CopiesInFlight
from ft_transport.state.flatten import flatten
from ft_transport.state.snapshot import PendingSnapshot
from manager import StateManager
from manager.snapshots import boundary_copy

LONG = timedelta(seconds=20)


class Training:
    """A model and its optimizer on the device, of one thread."""

    def __init__(self, transport: HTTPTransport[Any]) -> None:
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.manager = StateManager(checkpoint_transport=transport)
        self.manager.register("model", self.model)
        self.manager.register("optimizer", self.optimizer)
        self.manager.attach(self.optimizer)
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(3, 8)).square().mean().backward()
        self.optimizer.step()

    def state(self) -> Any:
        return exact({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})


class WaitsOf:
    """The names of the threads that have waited for the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        for name in ("synchronize", "query"):
            monkeypatch.setattr(StandInEvent, name, self._recording(getattr(StandInEvent, name)))

    def _recording(self, method: Callable[[StandInEvent], Any]) -> Callable[[StandInEvent], Any]:
        def wait(event: StandInEvent) -> Any:
            self.names.append(threading.current_thread().name)
            return method(event)

        return wait


@pytest.fixture
def training(
    monkeypatch: pytest.MonkeyPatch, new_transport: Callable[[], HTTPTransport[Any]]
) -> Iterator[tuple[Training, HTTPTransport[Any]]]:
    def on_device(state: object) -> FlatState:
        flat = flatten(state)
        flat.blocks.sources[:] = [source.as_subclass(OnDevice) for source in flat.blocks.sources]
        flat.blocks.addresses[:] = array("q", [0] * len(flat.blocks.sources))
        return flat

    def wait_event(stream: StandInStream, event: StandInEvent, wait: Any = StandInStream.wait_event) -> None:
        wait(stream, event)
        if stream.name.startswith("training"):
            while stream.queue:
                stream.queue.pop(0)()

    monkeypatch.setattr(stager, "flatten", on_device)
    # The optimizer's own tensors say that they are on the host.
    monkeypatch.setattr(boundary_copy, "belongs_to", lambda _guarded: lambda _tensor: True)
    monkeypatch.setattr(OnDevice, "stream", None)
    monkeypatch.setattr(StandInStream, "wait_event", wait_event)
    OnDevice.accelerator = StandInAccelerator()
    sender = new_transport()
    sender.server._stager._resources.device_copier._accelerator = OnDevice.accelerator  # type: ignore[assignment]
    made = Training(sender)
    yield made, sender
    made.manager.shutdown()


def test_optimizer_steps_do_not_wait_on_the_host(
    training: tuple[Training, HTTPTransport[Any]],
    new_transport: Callable[[], HTTPTransport[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer, sender = training
    receiver = new_transport()
    waits, may_complete = WaitsOf(monkeypatch), hold_completion(monkeypatch)
    for step in range(1, 8):
        trainer.manager.start_step(step)
        expected = trainer.state()
        may_complete.clear()
        taken = trainer.manager.snapshot()
        trainer.step()
        assert not taken.done()
        may_complete.set()
        taken.result(LONG.total_seconds())
        received = receiver.fetch(sender.metadata(), step, timeout=LONG).state["user"]
        assert exact(received) == expected
    assert OnDevice.accelerator.log.count("training cuda:0 waits") == 7
    assert "MainThread" not in waits.names


def test_a_disallow_inside_of_a_step_waits_on_the_host(
    training: tuple[Training, HTTPTransport[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The section of ``disallow`` may outlast the step."""
    trainer, _ = training
    trainer.optimizer.register_step_pre_hook(lambda *_: trainer.manager.disallow_state_dict_read())
    waits, may_complete = WaitsOf(monkeypatch), hold_completion(monkeypatch)
    trainer.manager.start_step(1)
    taken = trainer.manager.snapshot()
    trainer.optimizer.step()
    assert "MainThread" in waits.names
    trainer.manager.allow_state_dict_read()
    may_complete.set()
    taken.result(LONG.total_seconds())


def test_an_interrupted_beginning_frees_no_memory_under_running_copies(
    training: tuple[Training, HTTPTransport[Any]],
    new_transport: Callable[[], HTTPTransport[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A handler raises on the training thread when the other thread already has the snapshot."""
    trainer, sender = training
    scheduler = trainer.manager._replica.snapshots
    assert scheduler is not None
    has_begun, may_copy = threading.Event(), threading.Event()
    submit, copy_deferred = scheduler._pool.submit, PendingSnapshot.copy_deferred

    def late(pending: PendingSnapshot) -> CopiesInFlight | None:
        has_begun.set()
        assert may_copy.wait(LONG.total_seconds())
        return copy_deferred(pending)

    def interrupted(*arguments: Any) -> None:
        submit(*arguments)
        assert has_begun.wait(LONG.total_seconds())
        raise KeyboardInterrupt

    trainer.manager.start_step(1)
    expected = trainer.state()
    with monkeypatch.context() as patched:
        patched.setattr(PendingSnapshot, "copy_deferred", late)
        patched.setattr(scheduler._pool, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.manager.snapshot()
        assert trainer.manager._state.lock.holders(), "the state may change before it is copied"
        may_copy.set()
    submit(lambda: None).result(LONG.total_seconds())
    assert not trainer.manager._state.lock.holders()
    trainer.step()
    assert exact(new_transport().fetch(sender.metadata(), 1, timeout=LONG).state["user"]) == expected


def test_other_writers_wait_on_the_host(
    training: tuple[Training, HTTPTransport[Any]],
    new_transport: Callable[[], HTTPTransport[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer, sender = training
    receiver = new_transport()
    waits, may_complete = WaitsOf(monkeypatch), hold_completion(monkeypatch)
    trainer.manager.start_step(1)
    expected = trainer.state()
    taken = trainer.manager.snapshot()
    trainer.manager.disallow_state_dict_read()
    assert "MainThread" in waits.names
    with torch.no_grad():
        trainer.model.weight.zero_()
    trainer.manager.allow_state_dict_read()
    may_complete.set()
    taken.result(LONG.total_seconds())
    assert exact(receiver.fetch(sender.metadata(), 1, timeout=LONG).state["user"]) == expected


def hold_completion(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no snapshot wait for its copies before the event is set."""
    may_complete = threading.Event()
    complete = CopiesInFlight.complete

    def late(copies: CopiesInFlight) -> None:
        assert may_complete.wait(LONG.total_seconds())
        complete(copies)

    monkeypatch.setattr(CopiesInFlight, "complete", late)
    return may_complete
