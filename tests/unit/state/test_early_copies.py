"""Tensors on a device are copied while other tensors still arrive.

There is no device here: strided tensors, which are not received in place either, stand in for those on a device.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from faulty_transports import CHUNK_BYTES as FETCHED_BYTES
from faulty_transports import STATE_BYTES, TIMEOUT, blank, holds, is_state, spread_out, state_of, transport
from interruptions import HandlerError, at_every_place
from state_tools import CHUNK_BYTES, deliver, file_of_state, manifest_of

from ft_transport import FetchProgress, PartialState, RestoreError, TransportError
from ft_transport.errors import ManifestError
from ft_transport.state import bounce_buffers as module
from ft_transport.state import restore as restore_module
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


@pytest.fixture(autouse=True)
def _strided_tensors_are_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore_module, "_is_on_device", lambda _tensor: True)


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
    trip.restore._early.copier.wait()
    assert not copied
    assert not trip.restore.destination_touched
    trip.arrive(1)
    trip.restore._early.copier.wait()
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
    trip.restore._early.copier.wait()
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


def test_a_tensor_that_cannot_be_overwritten_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    trip = Trip()
    trip.arrive(0, 1, 2)
    trip.restore._early.copier.wait()

    def refuse(_target: torch.Tensor, _source: torch.Tensor) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(module, "_copy_one", refuse)
    with pytest.raises(RuntimeError, match="the device is gone"):
        trip.restore.poison()


def test_a_tensor_that_was_freed_is_skipped() -> None:
    trip = Trip()
    trip.arrive(0, 1, 2)
    trip.restore._early.copier.wait()
    trip.own[0].untyped_storage().resize_(0)
    trip.arrive(3, 4, 5)
    trip.restore.poison()
    assert trip.own[1].isnan().all()


def test_a_tensor_that_was_freed_before_its_copy_is_an_error() -> None:
    trip = Trip()
    trip.own[1].untyped_storage().resize_(0)
    trip.arrive(0, 1, 2, 3, 4, 5)
    with pytest.raises(RestoreError, match="the memory was freed"):
        trip.restore.finish()
    trip.restore.poison()
    assert trip.own[0].isnan().all()


def test_tensors_that_the_next_attempt_does_not_receive_into_are_overwritten() -> None:
    first, second = Trip(), Trip()
    first.arrive(0, 1, 2, 3)
    second.own[1] = first.own[1]
    second.restore = Restore(second.manifest, into=second.own)
    assert second.restore.adopt(first.restore, is_landed=True)
    assert first.own[0].isnan().all()
    second.arrive(4, 5)
    second.restore.finish()
    assert all(torch.equal(own, sent) for own, sent in zip(second.own, second.state, strict=True))


def test_what_cannot_be_copied_is_the_callers_error_and_not_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    trip = Trip()

    def refuse(_index: int) -> Any:
        raise ManifestError("expected another shape")

    monkeypatch.setattr(trip.restore, "_copies_of", refuse)
    trip.arrive(0, 1, 2, 3, 4, 5)
    assert not trip.restore.destination_touched
    trip.restore.finish()
    assert all(torch.equal(own, sent) for own, sent in zip(trip.own, trip.state, strict=True))


@pytest.mark.parametrize("is_kept", [True, False])
def test_after_a_failure_no_thread_writes(monkeypatch: pytest.MonkeyPatch, is_kept: bool) -> None:
    into, copy_one = spread_out(blank()), module._copy_one
    fails, ended = threading.Event(), threading.Event()

    def slow(target: torch.Tensor, source: torch.Tensor) -> None:
        # Only when the fetch fails, the copy goes on, a little later.
        assert fails.wait(LONG_S)
        ended.wait(0.2)
        copy_one(target, source)
        ended.set()

    def on_progress(progress: FetchProgress) -> None:
        if progress.done_bytes == STATE_BYTES:
            fails.set()
            raise RuntimeError("fails at the end")

    monkeypatch.setattr(module, "_copy_one", slow)
    with transport() as source, transport(on_progress=on_progress) as receiver:
        source.send_checkpoint([], 1, state_of(1), TIMEOUT)
        part = PartialState() if is_kept else None
        with pytest.raises(TransportError, match="fails at the end"):
            receiver.fetch(source.metadata(), 1, into=into, known=part)
        assert ended.is_set()
        if part is not None:
            part.discard()
    assert all(into[name].isnan().all() for name in "ab")


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
    modules = (
        "ft_transport.state.restore",
        "ft_transport.state.early_copies",
        "ft_transport.state.bounce_buffers",
        "ft_transport.runtime.threads",
    )
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
