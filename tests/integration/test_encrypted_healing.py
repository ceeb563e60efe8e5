"""Replicas of a job with certificates: they find each other, heal over TLS, and take no state without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from certificates import Issued, issue
from quorum_threads import TIMEOUT, Gate, lighthouse, make_manager, run_replicas

from ft_transport import HTTPTransport, TransportSettings
from manager import Manager, QuorumError

pytest.importorskip("torchft")

pytestmark = [pytest.mark.usefixtures("quorum_ready")]


def replica(address: str, name: str, issued: Issued | None, part: dict[str, Any], **keywords: Any) -> Manager:
    files = issued.files if issued is not None else None
    settings = TransportSettings(host="127.0.0.1", advertise="127.0.0.1", tls=files)
    transport: HTTPTransport[Any] = HTTPTransport(TIMEOUT, settings=settings)
    manager = make_manager(address, name, checkpoint_transport=transport, **keywords)
    manager.register_state_dict_fn("part", part.update, lambda: dict(part))
    return manager


def healthy(manager: Manager, part: dict[str, Any], gate: Gate) -> float:
    """Trains until a newcomer is done, of whatever kind."""
    try:
        while not gate.is_open("newcomer is done"):
            manager.start_quorum()
            if manager.should_commit():
                part["weights"] = part["weights"] + 1.0
                gate.open("a step was made")
        return float(part["weights"][0])
    finally:
        gate.open("a step was made")
        manager.shutdown()


def test_a_newcomer_heals_over_tls(tmp_path: Path) -> None:
    gate = Gate()
    parts = {"a": {"weights": torch.zeros(1 << 18)}, "b": {"weights": torch.zeros(1 << 18)}}

    def newcomer() -> tuple[int, float]:
        gate.wait("a step was made")
        try:
            manager = replica(address, "b", issue(tmp_path / "b"), parts["b"])
        except BaseException:
            gate.open("newcomer is done")
            raise
        try:
            assert manager.metadata().startswith("https://")
            manager.start_quorum()
            manager.wait_quorum()
            return manager.current_step(), float(parts["b"]["weights"][0])
        finally:
            gate.open("newcomer is done")
            manager.shutdown()

    with lighthouse() as address:
        first = replica(address, "a", issue(tmp_path / "a"), parts["a"])
        _, (step, weight) = run_replicas(lambda: healthy(first, parts["a"], gate), newcomer)  # type: ignore[list-item]
    assert step == weight > 0


@pytest.mark.parametrize("kind", ["foreign", "none"])
def test_a_newcomer_without_the_jobs_certificate_gets_no_state_and_says_why(tmp_path: Path, kind: str) -> None:
    gate = Gate()
    parts = {"a": {"weights": torch.zeros(16)}, "b": {"weights": torch.zeros(16)}}

    def newcomer() -> str:
        gate.wait("a step was made")
        issued = issue(tmp_path / "b", signed_by="another job", trusts="another job") if kind == "foreign" else None
        try:
            manager = replica(address, "b", issued, parts["b"])
        except BaseException:
            gate.open("newcomer is done")
            raise
        try:
            manager.start_quorum()
            manager.wait_quorum()
        except QuorumError as error:
            return str(error)
        else:
            return "it was healed"
        finally:
            gate.open("newcomer is done")
            manager.shutdown()

    with lighthouse() as address:
        first = replica(address, "a", issue(tmp_path / "a"), parts["a"])
        _, why = run_replicas(lambda: healthy(first, parts["a"], gate), newcomer)  # type: ignore[list-item]
    assert "certificate" in why
    assert parts["b"]["weights"].tolist() == [0.0] * 16
