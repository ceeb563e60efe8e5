"""Replicas of a job with certificates: they find each other, heal over TLS, and take no state without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from certificates import Issued, issue
from quorum_threads import beside, loopback_transport, make_manager

from manager import Manager, QuorumError

pytestmark = [pytest.mark.usefixtures("quorum_ready")]


def replica(address: str, name: str, issued: Issued | None, part: dict[str, Any], **keywords: Any) -> Manager:
    transport = loopback_transport(tls=issued.files if issued is not None else None)
    manager = make_manager(address, name, checkpoint_transport=transport, **keywords)
    manager.register_state_dict_fn("part", part.update, lambda: dict(part))
    return manager


def joined(address: str, tmp_path: Path, issued: Issued | None, part: dict[str, Any]) -> tuple[int, float] | str:
    """The step and the weight with which a newcomer begins, or why it does not."""
    own = {"weights": torch.zeros_like(part["weights"])}
    healthy = replica(address, "a", issue(tmp_path / "a"), own)

    def step() -> None:
        healthy.start_quorum()
        if healthy.should_commit():
            own["weights"] = own["weights"] + 1.0

    def newcomer() -> tuple[int, float] | str:
        manager = None
        try:
            manager = replica(address, "b", issued, part)
            manager.start_quorum()
            manager.wait_quorum()
            assert manager.metadata().startswith("https://")
            return manager.current_step(), float(part["weights"][0])
        except QuorumError as error:
            return str(error)
        finally:
            if manager is not None:
                manager.shutdown()

    try:
        return beside(step, newcomer)
    finally:
        healthy.shutdown()


def test_a_newcomer_heals_over_tls(address: str, tmp_path: Path) -> None:
    outcome = joined(address, tmp_path, issue(tmp_path / "b"), {"weights": torch.zeros(1 << 18)})
    assert not isinstance(outcome, str), outcome
    step, weight = outcome
    assert step == weight > 0


@pytest.mark.parametrize("kind", ["foreign", "none"])
def test_a_newcomer_without_the_jobs_certificate_gets_no_state_and_says_why(
    address: str, tmp_path: Path, kind: str
) -> None:
    part = {"weights": torch.zeros(16)}
    issued = issue(tmp_path / "b", signed_by="another job", trusts="another job") if kind == "foreign" else None
    outcome = joined(address, tmp_path, issued, part)
    assert isinstance(outcome, str), outcome
    assert "certificate" in outcome
    assert part["weights"].tolist() == [0.0] * 16
