"""What a replica records of its recovery. Real Lighthouse, gloo and HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quorum_threads import LONG_S, TIMEOUT, Gate, lighthouse, make_manager

from ft_transport import HTTPTransport, TransportSettings
from ft_transport.telemetry.record import Record, decode_record
from ft_transport.telemetry.recorder import current

pytest.importorskip("torchft")

pytestmark = [pytest.mark.usefixtures("quorum_ready"), pytest.mark.timeout(120)]

WIDTH = 1500
STATE_BYTES = WIDTH * WIDTH * 4


def transport(**settings: Any) -> HTTPTransport[Any]:
    return HTTPTransport(TIMEOUT, settings=TransportSettings(host="127.0.0.1", advertise="127.0.0.1", **settings))


class Replica:
    def __init__(self, address: str, name: str, *, seed: int, **settings: Any) -> None:
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)))
        self.optimizer = torch.optim.SGD([self.weight], lr=1e-3)
        self.transport: HTTPTransport[Any] = transport(**settings)
        self.manager = make_manager(address, name, checkpoint_transport=self.transport)
        self.manager.register("model", torch.nn.ParameterList([self.weight]))
        self.manager.register("optimizer", self.optimizer)
        self.manager.attach(self.optimizer)

    def step(self) -> None:
        self.manager.start_quorum()
        self.weight.grad = torch.full_like(self.weight, 0.1)
        self.manager.allreduce(self.weight.grad)
        if self.manager.should_commit():
            self.optimizer.step()


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse() as at:
        yield at


def healed(address: str, **settings: Any) -> tuple[Replica, Replica]:
    """One that trained, and a newcomer, after two steps that the newcomer has made with it."""
    gate = Gate()
    trains = Replica(address, "trains", seed=1)
    is_over = threading.Event()

    def train() -> None:
        while not is_over.is_set():
            trains.step()
            gate.open("trains")

    thread = threading.Thread(target=train)
    thread.start()
    newcomers: list[Replica] = []
    try:
        gate.wait("trains")
        joins = Replica(address, "joins", seed=2, **settings)
        newcomers.append(joins)
        before = joins.manager.current_step()
        while joins.manager.current_step() < before + 2:
            joins.step()
        assert current() is None
    finally:
        is_over.set()
        for newcomer in newcomers:
            newcomer.manager.shutdown(wait=False)
        thread.join(LONG_S)
        trains.manager.shutdown(wait=False)
    return trains, joins


def the_heal(records: tuple[Record, ...]) -> Record:
    (heal,) = (record for record in records if record.kind == "heal")
    return heal


def test_the_record_of_a_heal_says_where_its_time_went_and_whom_its_bytes_came_from(
    address: str, tmp_path: Path
) -> None:
    trains, joins = healed(address, same_host=False, records=tmp_path / "records")
    record = the_heal(joins.transport.recorder.recent())
    assert record.outcome == "ok"
    assert record.replica.partition(":")[0] == "joins"
    assert record.step is not None
    names = [phase.name for phase in record.phases]
    assert names[0] == "quorum"
    assert {"manifest", "plan", "transfer", "load", "compare", "rendezvous", "first_step"} <= set(names)
    assert names[-1] == "first_step"
    assert "heal" not in names
    assert sum(phase.length_s for phase in record.phases) >= 0.98 * record.length_s
    (transfer,) = record.transfers
    assert transfer.peer == trains.transport.metadata().removeprefix("http://").removesuffix("/checkpoint/")
    assert STATE_BYTES <= transfer.num_bytes <= 1.01 * STATE_BYTES
    assert record.num_bytes >= STATE_BYTES
    assert (transfer.role, transfer.interface, transfer.local_address) == ("source", "lo", "127.0.0.1")
    assert transfer.peer_address.startswith("127.0.0.1:")
    assert transfer.num_connections >= 1
    assert [decode_record(line) for line in (tmp_path / "records").read_bytes().splitlines()] == [record]
    assert not [each for each in trains.transport.recorder.recent() if each.kind == "heal"]


@pytest.mark.parametrize(("same_host", "role"), [(False, "source"), (True, "same_host")])
def test_a_fetch_without_a_manager_is_recorded_too(same_host: bool, role: str) -> None:
    source, receiver = transport(), transport(same_host=same_host)
    try:
        source.send_checkpoint([], 3, {"w": torch.ones(1 << 20)}, TIMEOUT)
        receiver.fetch(source.metadata(), 3)
        (record,) = receiver.recorder.recent()
        assert (record.kind, record.outcome, record.step) == ("fetch", "ok", 3)
        assert [phase.name for phase in record.phases] == ["manifest", "plan", "transfer", "verify", "load"]
        (transfer,) = record.transfers
        assert (transfer.num_bytes, transfer.role) == (4 << 20, role)
    finally:
        source.shutdown()
        receiver.shutdown()
