"""What a replica records of its recovery. Real Lighthouse, gloo and HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quorum_threads import TIMEOUT, Trainer, beside, loopback_transport

from ft_transport import HTTPTransport
from ft_transport.telemetry.record import Record, decode_record
from ft_transport.telemetry.recorder import current

pytestmark = [pytest.mark.usefixtures("quorum_ready"), pytest.mark.timeout(120)]

WIDTH = 1500
STATE_BYTES = WIDTH * WIDTH * 4


class Replica(Trainer):
    def __init__(self, address: str, name: str, *, seed: int, **settings: Any) -> None:
        model = torch.nn.ParameterList([torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed))])
        self.transport: HTTPTransport[Any] = loopback_transport(**settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        super().__init__(address, name, model, optimizer, checkpoint_transport=self.transport)

    def backward(self) -> None:
        self.model[0].grad = torch.full_like(self.model[0], 0.1)


def healed(address: str, **settings: Any) -> tuple[Replica, Replica]:
    """One that trained, and a newcomer, after two steps that the newcomer has made with it."""
    trains = Replica(address, "trains", seed=1)

    def newcomer() -> Replica:
        joins = Replica(address, "joins", seed=2, **settings)
        try:
            before = joins.manager.current_step()
            while joins.manager.current_step() < before + 2:
                joins.step()
            assert current() is None
            return joins
        finally:
            joins.manager.shutdown(wait=False)

    try:
        return trains, beside(trains.step, newcomer)
    finally:
        trains.manager.shutdown(wait=False)


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
    source, receiver = loopback_transport(), loopback_transport(same_host=same_host)
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
