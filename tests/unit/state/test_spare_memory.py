"""Memory that is made resident before a state is received into it."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from state_equality import exact

from ft_transport import HTTPTransport, TransportSettings
from ft_transport.state import spare_memory
from ft_transport.state.spare_memory import SpareMemory

MIB = 1 << 20
LONG = timedelta(seconds=20)


def test_what_was_made_ready_is_taken_once_and_cut_to_size() -> None:
    spare = SpareMemory()
    spare.prepare(2 * MIB)
    block = spare.take(MIB)
    assert block is not None
    assert len(block) == MIB
    assert spare.take(1) is None


@pytest.mark.parametrize("available", [3 * MIB, 0])
def test_memory_that_the_machine_needs_is_left_alone(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    monkeypatch.setattr(spare_memory, "available_bytes", lambda: available)
    spare = SpareMemory()
    spare.prepare(2 * MIB)
    assert spare.take(1) is None


def test_too_little_of_it_is_better_than_none() -> None:
    spare = SpareMemory()
    before = _resident_bytes()
    spare.prepare(64 * MIB)
    block = spare.take(66 * MIB)
    assert block is not None
    assert len(block) == 66 * MIB
    assert _resident_bytes() - before > 48 * MIB
    assert spare.take(1) is None


def test_where_a_mapping_cannot_grow_too_little_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rigid(mmap.mmap):
        def resize(self, newsize: int) -> None:
            raise SystemError("mmap: resizing not available--no mremap()")

    monkeypatch.setattr(spare_memory, "new_block", lambda num_bytes: Rigid(-1, num_bytes))
    spare = SpareMemory()
    spare.prepare(MIB)
    assert spare.take(2 * MIB) is None
    assert spare.take(1) is None


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


@pytest.fixture
def transports() -> Iterator[list[HTTPTransport[Any]]]:
    settings = TransportSettings(host="127.0.0.1", advertise="127.0.0.1")
    made: list[HTTPTransport[Any]] = [HTTPTransport(LONG, settings=settings) for _ in range(2)]
    yield made
    for transport in made:
        transport.shutdown()


def test_it_is_resident_and_a_state_is_received_into_it(transports: list[HTTPTransport[Any]]) -> None:
    sender, receiver = transports
    state = {"w": torch.randn(16 * MIB // 4)}
    sender.send_checkpoint([1], 1, state, LONG)
    before = _resident_bytes()
    receiver.prefault_receive(64 * MIB)
    assert _resident_bytes() - before > 48 * MIB
    received = receiver.fetch(sender.metadata(), 1, timeout=LONG)
    assert exact(received.state) == exact(state)
    assert receiver._client.spare.take(1) is None
