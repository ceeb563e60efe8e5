"""Tensors that are not received in place, as those on a device, are copied while other tensors still arrive."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from faulty_transports import CHUNK_BYTES as FETCHED_BYTES
from faulty_transports import STATE_BYTES, TIMEOUT, blank, holds, is_state, spread_out, state_of, transport
from interruptions import HandlerError, at_every_place
from state_tools import CHUNK_BYTES, deliver, file_of_state, manifest_of

from ft_transport import FetchProgress
from ft_transport.state import bounce_buffers as module
from ft_transport.state.restore import Restore

LONG_S = 20.0
NUM_ITEMS = 3 * CHUNK_BYTES // 4


def spaced(value: float) -> torch.Tensor:
    """A tensor that no bytes can be received into in place."""
    return torch.full((NUM_ITEMS, 2), value)[:, 0]


class Trip:
    """A state of two tensors of three chunks each, on its way to a receiver."""

    def __init__(self) -> None:
        self.state = [torch.full((NUM_ITEMS,), 1.0), torch.full((NUM_ITEMS,), 2.0)]
        self.file = file_of_state(self.state)
        self.manifest = manifest_of(self.file)
        self.own = [spaced(0.0), spaced(0.0)]
        self.restore = Restore(self.manifest, into=self.own)

    def arrive(self, *chunks: int, data: bytes | None = None) -> None:
        for chunk in chunks:
            deliver(self.restore, data or self.file, self.manifest, *self.manifest.chunks.range_of(chunk, chunk + 1))
            self.restore.landed(chunk)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The targets that were copied to, in order."""
    found: list[torch.Tensor] = []
    copy_one = module._copy_one

    def noted(target: torch.Tensor, source: torch.Tensor) -> None:
        copy_one(target, source)
        found.append(target)

    monkeypatch.setattr(module, "_copy_one", noted)
    return found


def test_a_tensor_is_copied_once_when_all_of_it_has_arrived(copied: list[torch.Tensor]) -> None:
    trip = Trip()
    trip.arrive(0, 2, 3)
    trip.restore._copier.wait()
    assert not copied
    assert not trip.restore.destination_touched
    trip.arrive(1)
    trip.restore._copier.wait()
    assert [target is trip.own[0] for target in copied] == [True]
    assert trip.restore.destination_touched
    trip.arrive(4, 5)
    state: Any = trip.restore.finish()
    assert [target is own for target, own in zip(copied, trip.own, strict=True)] == [True, True]
    assert all(torch.equal(own, sent) for own, sent in zip(trip.own, trip.state, strict=True))
    assert state[0] is trip.own[0]


def test_a_chunk_that_arrives_again_is_copied_again() -> None:
    trip = Trip()
    trip.arrive(0, 1, 2, 3, 4, 5, data=trip.file[:-100] + bytes(100))
    trip.restore._copier.wait()
    assert not torch.equal(trip.own[1], trip.state[1])
    trip.arrive(5)
    trip.restore.finish()
    assert all(torch.equal(own, sent) for own, sent in zip(trip.own, trip.state, strict=True))


def test_after_a_failure_no_tensor_has_a_part_of_the_state() -> None:
    trip = Trip()
    trip.arrive(0, 1, 2, 3)
    trip.restore.poison()
    assert trip.own[0].isnan().all()
    assert not trip.own[1].any(), "nothing was copied to it"


def test_wherever_a_signal_handler_raises_no_part_of_the_state_is_left() -> None:
    trip = Trip()

    def receive() -> None:
        try:
            for chunk in range(6):
                trip.restore.landed(chunk)
            trip.restore.finish()
        except HandlerError:
            trip.restore.poison()
            raise

    def check() -> None:
        nonlocal trip
        are_received = [torch.equal(own, sent) for own, sent in zip(trip.own, trip.state, strict=True)]
        assert all(are_received) or not any(are_received)
        assert all(are_received) or all(own.isnan().all() or not own.any() for own in trip.own)
        trip = Trip()
        deliver(trip.restore, trip.file, trip.manifest)

    deliver(trip.restore, trip.file, trip.manifest)
    modules = ("ft_transport.state.restore", "ft_transport.state.bounce_buffers", "ft_transport.runtime.threads")
    at_every_place(receive, check, at_least=50, modules=modules)


@pytest.mark.parametrize("same_host", [False, True])
def test_a_fetch_copies_while_it_receives(same_host: bool) -> None:
    into = spread_out(blank())
    was_early: list[bool] = []

    def on_progress(progress: FetchProgress) -> None:
        """When only one chunk is missing, one of the tensors is complete."""
        if progress.done_bytes == STATE_BYTES - FETCHED_BYTES:
            waiting, deadline = threading.Event(), LONG_S
            while deadline > 0 and not any(holds({**into, other: state_of(1)[other]}, 1) for other in "ab"):
                waiting.wait(0.01)
                deadline -= 0.01
            was_early.append(deadline > 0)

    with transport(same_host=same_host) as source, transport(same_host=same_host, on_progress=on_progress) as receiver:
        source.send_checkpoint([], 1, state_of(1), TIMEOUT)
        received = receiver.fetch(source.metadata(), 1, into=into)
    assert was_early == [True]
    assert is_state(received.state, 1)
    assert received.state["a"] is into["a"]
