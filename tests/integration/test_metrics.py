"""What ``/metrics`` tells of real managers, stores and publishers: the numbers are those of what happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_servers import VLLMStandIn, serving
from quorum_threads import TIMEOUT, Trainer, beside, loopback_transport
from scrapes import scraped
from served_memory import until

from ft_transport import CheckpointStore, LoRAAdapter, Publisher, VLLMEngine
from ft_transport.telemetry.record import Record
from manager import StateManager

pytestmark = pytest.mark.timeout(120)


class Replica(Trainer):
    """One layer, trained alone or with others."""

    def __init__(self, address: str, name: str) -> None:
        # Without memory in common: what is received comes over the network, and both sides count it.
        self.transport = loopback_transport(same_host=False)
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        super().__init__(address, name, model, optimizer, checkpoint_transport=self.transport)
        self.error: Exception | None = None

    def backward(self) -> None:
        self.model(torch.ones(64)).sum().backward()
        if self.error is not None:
            self.manager.report_error(self.error)


def test_steps_quorums_and_refusals_are_those_that_were(address: str) -> None:
    replica, outcomes = Replica(address, "alone"), []
    try:
        for number in range(8):
            replica.error = ValueError("no") if number in (2, 5) else None
            outcomes.append(replica.step())
        replica.manager.start_quorum()
        outcomes.append(replica.step())  # and the one before was abandoned
        shown = scraped(replica.transport)
        replica_id = replica.manager.replica_id()
    finally:
        replica.manager.shutdown()
    assert outcomes.count(False) == 2
    assert shown["steps_committed_total",] == 7
    assert shown["step",] == shown["batches_committed",] == 7
    assert shown["steps_refused_total", "ValueError"] == 2
    assert shown["steps_refused_total", "Abandoned"] == 1
    assert shown["steps_refused_total", "TooFewReplicas"] == 0
    assert shown["quorum_seconds_count",] == 10
    assert shown["step_until_commit_seconds_count",] == 9
    assert shown["step_seconds_count",] == 8  # the last one has no next boundary yet, the abandoned one no end
    assert shown["participants",] == 1
    assert shown["member_info", "0", replica_id] == 1
    assert shown["missed_heartbeats_total",] == 0
    assert shown["lock_hold_seconds_count", "write"] >= 7
    assert shown["unreadable_sources",] == 0


def test_a_heal_is_counted_by_who_healed_and_its_bytes_by_both(address: str) -> None:
    trains = Replica(address, "trains")
    committed: list[bool] = []

    def newcomer() -> tuple[Record, dict[tuple[str, ...], float]]:
        joins = Replica(address, "joins")
        try:
            before = joins.manager.current_step()
            while joins.manager.current_step() < before + 3:
                joins.step()
            (heal,) = (each for each in joins.transport.recorder.recent() if each.kind == "heal")
            return heal, scraped(joins.transport)
        finally:
            joins.manager.shutdown()

    try:
        heal, healed = beside(lambda: committed.append(trains.step()), newcomer, num_steps=1)
        source = scraped(trains.transport)
    finally:
        trains.manager.shutdown()
    received = sum(transfer.num_bytes for transfer in heal.transfers)
    assert received > 64 * 64 * 4
    assert healed["recoveries_total",] == 1
    assert healed["operation_seconds_count", "heal", "ok"] == 1
    assert healed["operation_seconds_sum", "heal", "ok"] == pytest.approx(heal.length_s)
    assert healed["transfer_bytes_total", "heal", "source"] == received
    phases = {key[2]: value for key, value in healed.items() if key[:2] == ("operation_phase_seconds_total", "heal")}
    assert phases.keys() == {phase.name for phase in heal.phases}
    assert sum(phases.values()) == pytest.approx(heal.length_s, rel=0.02)
    assert healed["operation_last_step", "heal"] == heal.step
    sent = [value for key, value in source.items() if key[0] == "sent_bytes_total" and key[1] != "metadata"]
    assert sum(sent) >= received
    assert source["recoveries_total",] == 0
    assert source["steps_committed_total",] == sum(committed)


def test_saves_and_their_age_are_told_by_the_managers_transport(tmp_path: Path) -> None:
    transport = loopback_transport()
    manager = StateManager(checkpoint_transport=transport, checkpoint_store=CheckpointStore(tmp_path))
    try:
        manager.register_state_dict_fn("part", lambda _: None, lambda: {"w": torch.arange(1000)})
        for step in (3, 7):
            manager.start_step(step)
            manager.save(wait=True)
        assert manager.resume() is not None
        shown = scraped(transport)
        last = [each for each in manager._replica.checkpoints.store.recorder.recent() if each.kind == "save"][-1]  # type: ignore[union-attr]
    finally:
        manager.shutdown()
    assert shown["operation_seconds_count", "save", "ok"] == 2
    assert shown["operation_last_step", "save"] == 7
    assert shown["operation_last_success_timestamp_seconds", "save"] == pytest.approx(last.begun_unix_s + last.length_s)
    assert shown["resumes_total",] == 1
    assert shown["snapshot_copy_bytes_total", "clone"] >= 2 * 8000
    assert shown["snapshots_published_total",] == 2


def test_an_engine_that_refuses_a_version_lags_behind(tmp_path: Path) -> None:
    transport, server = loopback_transport(), VLLMStandIn()
    try:
        with serving(server), Publisher([VLLMEngine(server.url)], tmp_path, transport=transport) as publisher:
            for version in (1, 2, 3):
                server.refusal = (400, "application/json", "{}") if version > 1 else None
                name = "base_model.model.layers.0.q.lora_{}.weight"
                tensors = {name.format("A"): torch.ones(4, 8), name.format("B"): torch.ones(8, 4)}
                config = {"r": 4, "lora_alpha": 8, "target_modules": {"q"}}
                publisher.publish(version, LoRAAdapter(tensors, config)).report(TIMEOUT)
            until(lambda: len(publisher.recorder.recent()) == 3)
            shown = scraped(transport)
        assert ("engines",) not in scraped(transport)
    finally:
        transport.shutdown()
    assert shown["published_version",] == 3
    assert shown["engine_version", server.url] == 1
    assert shown["engine_lag_versions", server.url] == 2
    assert shown["engine_lag_seconds", server.url] > 0
    assert shown["operation_seconds_count", "publish", "failed"] == 2
    assert shown["retries_total", "refused", "publish"] == 2


def test_two_managers_of_a_process_count_each_for_itself() -> None:
    managers = [StateManager(checkpoint_transport=loopback_transport()) for _ in range(2)]
    transports = [manager._replica.transport for manager in managers]
    try:
        for number, manager in enumerate(managers, 1):
            manager.start_step(number)
            for _ in range(number):
                with manager.writing():
                    pass
        for number, transport in enumerate(transports, 1):
            assert transport is not None
            shown = scraped(transport)
            assert (shown["step",], shown["lock_hold_seconds_count", "write"]) == (number, number)
    finally:
        for manager in managers:
            manager.shutdown()
