"""A death, the standstill after it and the heal that ends it are lines of the log, of /state and of /metrics."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from quorum_threads import LONG_S, Gate, lighthouse, make_manager, run_replicas

from manager import Manager

pytestmark = [pytest.mark.usefixtures("quorum_ready")]

_HEARTBEAT_S = 30.0
"""Nobody waits for it: the keeper asks in the place of the replica that has left."""


@dataclass
class _Drill:
    """Three replicas: ``c`` dies at step 3, is started again, heals, and all make three more steps."""

    address: str
    dies_in_step: bool
    gate: Gate = field(default_factory=Gate)
    ready: threading.Barrier = field(default_factory=lambda: threading.Barrier(3))
    last_step: int = 10**6
    seen: dict[str, dict[str, Any]] = field(default_factory=dict)
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)

    def survivor(self, name: str) -> None:
        manager, train = _replica(self.address, name)
        try:
            # The first quorum has all whose heartbeats the Lighthouse hears.
            self.ready.wait(LONG_S)
            while manager.current_step() < self.last_step:
                train()
                if manager.num_participants() == 2 and manager.current_step() > 4:
                    self.gate.open("alone")
            self._look(name, manager)
        finally:
            manager.shutdown()

    def victim(self) -> None:
        manager, train = _replica(self.address, "c")
        try:
            self.ready.wait(LONG_S)
            while manager.current_step() < 3:
                train()
            if self.dies_in_step:
                manager.start_quorum()
                manager.wait_quorum()
        finally:
            manager.shutdown()
        self.gate.wait("alone")
        manager, train = _replica(self.address, "c", lr=0.05)
        try:
            train()
            self.last_step = manager.current_step() + 3
            while manager.current_step() < self.last_step:
                train()
            self._look("c", manager)
        finally:
            manager.shutdown()

    def _look(self, name: str, manager: Manager) -> None:
        address = manager.metadata().removesuffix("checkpoint/")
        with urlopen(address + "state", timeout=LONG_S) as answer:
            self.seen[name] = json.load(answer)
        with urlopen(address + "metrics", timeout=LONG_S) as answer:
            found = re.findall(r"^ft_transport_(\w+) ([0-9.e+-]+)$", answer.read().decode(), re.MULTILINE)
        self.metrics[name] = {metric: float(value) for metric, value in found}


def _replica(address: str, name: str, *, lr: float = 0.1) -> tuple[Manager, Callable[[], None]]:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    manager = make_manager(address, name)
    manager.register("model", model)
    manager.register("optimizer", optimizer)
    manager.attach(optimizer)

    def train() -> None:
        manager.start_quorum()
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        manager.average_gradients(model)
        if manager.should_commit():
            optimizer.step()

    return manager, train


@pytest.mark.parametrize("dies_in_step", [False, True])
def test_each_survivor_says_once_who_left_and_for_how_long_all_stood_still(
    dies_in_step: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with lighthouse(min_replicas=2, heartbeat_timeout_ms=round(1e3 * _HEARTBEAT_S)) as address:
        drill = _Drill(address, dies_in_step)
        run_replicas(lambda: drill.survivor("a"), lambda: drill.survivor("b"), drill.victim)

    lines = [
        record.getMessage()
        for record in caplog.records
        if record.name == "manager.quorum.telemetry" and record.levelno == logging.WARNING
    ]
    for name in ("a", "b"):
        own = [line for line in lines if line.startswith(f"replica {name}:")]
        left, joined = own
        assert re.search(r"step 3: replica c:\S+ left: all stood still for \d\.\d s.*; last in a quorum \d", left)
        assert left.endswith("; 2 replicas train now")
        assert ("1 attempted step lost" in left) == dies_in_step
        assert re.search(r": replica c:\S+ joined: heals to step \d+; 3 replicas train$", joined)
        death, return_ = drill.seen[name]["changes"]
        assert (death["kind"], death["step"]) == ("left", 3)
        assert 0.0 < death["length_s"] < 10.0
        assert return_["kind"] == "joined"
        assert drill.metrics[name]["departures_total"] == 1
        assert drill.metrics[name]["standstill_seconds_total"] == pytest.approx(death["length_s"])
        assert drill.metrics[name]["recovery_seconds_total"] == 0
    (healed,) = [line for line in lines if line.startswith("replica c:")]
    assert re.search(r"^replica c:\S+ step \d+: healed to step \d+ in \d+\.\d s, from [ab]:", healed)
    (changed,) = [record.getMessage() for record in caplog.records if record.name == "manager.state.compatibility"]
    assert (
        "replaces hyperparameters that this process was started with: optimizer.param_groups.0.lr 0.05 by 0.1;"
        in changed
    )
    (change,) = drill.seen["c"]["changes"]
    assert change["kind"] == "healed"
    assert drill.metrics["c"]["recovery_seconds_total"] == pytest.approx(change["length_s"])
    assert drill.metrics["c"]["departures_total"] == 0
