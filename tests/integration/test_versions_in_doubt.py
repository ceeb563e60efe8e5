"""After an update of weights that began and failed nobody knows which version an engine uses."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_servers import SGLangStandIn, StandIn, VLLMStandIn, serving

from ft_transport import LoRAAdapter, Publisher, SGLangEngine, VLLMEngine
from ft_transport.publish.report import EngineReport

SOON = timedelta(seconds=20)
WEIGHTS = {"weight": torch.ones(3)}


def adapter() -> LoRAAdapter:
    tensors = {"model.layers.0.q.lora_A.weight": torch.ones(4, 8)}
    return LoRAAdapter(tensors, {"r": 4, "lora_alpha": 8, "target_modules": ["q"]})


def publish(publisher: Publisher, version: int, what: Any = None) -> EngineReport:
    """Publishes an adapter, or what is given."""
    (report,) = publisher.publish(version, adapter() if what is None else what).report(SOON).engines
    return report


def outcome(report: EngineReport) -> tuple[str, int | None]:
    return report.outcome, report.version


@pytest.mark.parametrize("kind", [VLLMStandIn, SGLangStandIn])
@pytest.mark.parametrize("is_hanging", [False, True], ids=["refused", "late"])
def test_which_version_is_used_is_unknown_from_when_an_update_began(
    tmp_path: Path, kind: type[StandIn], is_hanging: bool
) -> None:
    server = kind()
    timeout = timedelta(seconds=1 if is_hanging else 10)
    with serving(server):
        engine = (VLLMEngine if kind is VLLMStandIn else SGLangEngine)(server.url)
        options: Any = {"keep": 1, "keep_for": timedelta(0), "engine_timeout": timeout}
        with Publisher([engine], tmp_path, **options) as publisher:
            assert outcome(publish(publisher, 1, WEIGHTS)) == ("confirmed", 1)
            server.is_hanging, server.refusal = is_hanging, None if is_hanging else (500, "text/plain", "no")
            expected = "late" if is_hanging else "refused"
            for version in (2, 3):
                assert outcome(publish(publisher, version, WEIGHTS)) == (expected, None)
            # It may be using any of them.
            assert len(list(tmp_path.glob("version-*"))) == 3
            server.is_hanging, server.refusal = False, None
            assert outcome(publish(publisher, 4, WEIGHTS)) == ("confirmed", 4)
        assert [path.name for path in tmp_path.glob("version-*")] == ["version-4"]


def test_nor_is_it_known_while_the_next_one_is_pending(tmp_path: Path) -> None:
    good, bad = SGLangStandIn(), SGLangStandIn()
    with (
        serving(good, bad),
        Publisher([SGLangEngine(good.url), SGLangEngine(bad.url)], tmp_path) as publisher,
    ):
        publisher.publish(1, WEIGHTS).result(SOON)
        bad.refusal = (500, "text/plain", "no")
        publisher.publish(2, WEIGHTS).report(SOON)
        bad.is_hanging, bad.refusal = True, None
        third = publisher.publish(3, WEIGHTS)
        assert [outcome(each) for each in third.result(SOON).engines] == [("confirmed", 3), ("pending", None)]
        bad.is_hanging = False
        assert [outcome(each) for each in third.report(SOON).engines] == [("confirmed", 3), ("confirmed", 3)]


@pytest.mark.parametrize("kind", [VLLMStandIn, SGLangStandIn])
def test_a_refused_adapter_leaves_the_version_known(tmp_path: Path, kind: type[StandIn]) -> None:
    server = kind()
    with serving(server):
        engine = (VLLMEngine if kind is VLLMStandIn else SGLangEngine)(server.url)
        with Publisher([engine], tmp_path) as publisher:
            assert outcome(publish(publisher, 1)) == ("confirmed", 1)
            server.refusal = (500, "text/plain", "no")
            assert outcome(publish(publisher, 2)) == ("refused", 1)
