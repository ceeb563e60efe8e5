"""One process publishes to stand-ins for engines: what SGLang's real server does, and which versions are in doubt."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from engine_servers import SGLangStandIn, StandIn, VLLMStandIn, serving
from served_memory import until

from ft_transport import ConfigurationError, LoRAAdapter, Publisher, SGLangEngine, VLLMEngine
from ft_transport.publish.report import EngineReport

SOON = timedelta(seconds=20)
AT_ONCE = timedelta(0)


def adapter() -> LoRAAdapter:
    tensors = {"model.layers.0.q.lora_A.weight": torch.ones(4, 8)}
    return LoRAAdapter(tensors, {"r": 4, "lora_alpha": 8, "target_modules": ["q"]})


def publish(publisher: Publisher, version: int, what: Any = None) -> EngineReport:
    """Publishes an adapter, or what is given."""
    (report,) = publisher.publish(version, adapter() if what is None else what).report(SOON).engines
    return report


def outcome(report: EngineReport) -> tuple[str, int | None]:
    return report.outcome, report.version


WEIGHTS = {"weight": torch.ones(3)}


def test_an_adapter_is_confirmed_beside_a_request_that_holds_an_old_one(tmp_path: Path) -> None:
    server = SGLangStandIn(in_use={"policy-1"})
    with serving(server), Publisher([SGLangEngine(server.url)], tmp_path) as publisher:
        for version in range(1, 6):
            assert outcome(publish(publisher, version)) == ("confirmed", version)
        assert list(server.adapters) == [f"policy-{version}" for version in range(1, 6)]


def test_an_adapter_is_unloaded_some_time_after_the_next_one_was_written(tmp_path: Path) -> None:
    server = SGLangStandIn()
    engine_of: Any = lambda after: SGLangEngine(server.url, unload_after=after)  # noqa: E731
    with serving(server):
        with Publisher([engine_of(timedelta(hours=1))], tmp_path) as publisher:
            for version in (1, 2, 3):
                publish(publisher, version)
        # The clock is that of the files, so that a new trainer knows, too.
        with Publisher([engine_of(AT_ONCE)], tmp_path) as publisher:
            publish(publisher, 4)
            until(lambda: list(server.adapters) == ["policy-4"])
    with pytest.raises(ConfigurationError, match="unload_after"):
        SGLangEngine(server.url, unload_after=timedelta(seconds=-1))


def test_one_that_was_loaded_late_is_unloaded_with_the_others(tmp_path: Path) -> None:
    options: Any = {"engine_timeout": timedelta(seconds=1)}
    with (
        serving(server := SGLangStandIn(in_use={"policy-1"})),
        Publisher([SGLangEngine(server.url, unload_after=AT_ONCE)], tmp_path, **options) as publisher,
    ):
        assert outcome(publish(publisher, 1)) == ("confirmed", 1)
        assert outcome(publish(publisher, 2)) == ("confirmed", 2)
        # SGLang holds its lock while an unload waits.
        assert outcome(publish(publisher, 3)) == ("late", 2)
        fourth = publisher.publish(4, adapter())
        until(lambda: server.routes.count("POST /load_lora_adapter") == 4)
        server.in_use.clear()
        assert outcome(fourth.report(SOON).engines[0]) == ("confirmed", 4)
        until(lambda: list(server.adapters) == ["policy-4"])


@pytest.mark.parametrize("is_same_trainer", [True, False])
def test_two_updates_are_never_under_way_at_once(tmp_path: Path, is_same_trainer: bool) -> None:
    server = SGLangStandIn(is_hanging=True)
    options: Any = {"engine_timeout": timedelta(seconds=0.5)}
    with serving(server):
        with Publisher([SGLangEngine(server.url)], tmp_path, **options) as publisher:
            assert publish(publisher, 1, WEIGHTS).outcome == "late"
            if is_same_trainer:
                assert publish(publisher, 2, WEIGHTS).outcome == "late"
        with Publisher([SGLangEngine(server.url)], tmp_path, **options) as publisher:
            assert publish(publisher, 3, WEIGHTS).outcome == "late"
            server.is_hanging = False
            assert outcome(publish(publisher, 4, WEIGHTS)) == ("confirmed", 4)
    assert not server.is_dead
    assert not server.is_paused


def test_a_refusal_may_come_with_status_200(tmp_path: Path) -> None:
    server = SGLangStandIn()
    with serving(server), Publisher([SGLangEngine(server.url)], tmp_path) as publisher:
        assert outcome(publish(publisher, 1, WEIGHTS)) == ("confirmed", 1)
        server.refusal = (200, "application/json", '{"success": false, "message": "out of memory"}')
        refused = publish(publisher, 2, WEIGHTS)
        assert (refused.outcome, refused.status, refused.version) == ("refused", 200, None)
        assert "out of memory" in refused.body


def test_older_ones_call_two_routes_otherwise(tmp_path: Path) -> None:
    class Older(SGLangStandIn):
        def own_routes(self) -> list[web.RouteDef]:
            names = {"/model_info": "/get_model_info", "/server_info": "/get_server_info"}
            return [
                web.RouteDef(each.method, names.get(each.path, each.path), each.handler, each.kwargs)
                for each in super().own_routes()
            ]

    server = Older()
    with serving(server), Publisher([SGLangEngine(server.url)], tmp_path) as publisher:
        assert outcome(publish(publisher, 1, WEIGHTS)) == ("confirmed", 1)
    assert {"GET /get_model_info", "GET /get_server_info"} <= set(server.routes)


def test_one_that_was_left_paused_in_place_is_resumed_before_its_requests_are_aborted(tmp_path: Path) -> None:
    server = SGLangStandIn(is_paused=True)
    with serving(server), Publisher([SGLangEngine(server.url, pause="abort")], tmp_path) as publisher:
        assert outcome(publish(publisher, 1, WEIGHTS)) == ("confirmed", 1)
    changes = [route for route in server.routes if route.endswith("_generation")]
    assert changes == ["POST /continue_generation", "POST /pause_generation", "POST /continue_generation"]


@pytest.mark.parametrize("kind", [VLLMStandIn, SGLangStandIn])
@pytest.mark.parametrize("is_hanging", [False, True], ids=["refused", "late"])
def test_which_version_is_used_is_unknown_from_when_an_update_began(
    tmp_path: Path, kind: type[StandIn], is_hanging: bool
) -> None:
    server = kind()
    timeout = timedelta(seconds=0.5 if is_hanging else 10)
    with serving(server):
        engine = (VLLMEngine if kind is VLLMStandIn else SGLangEngine)(server.url)
        options: Any = {"keep_for": timedelta(0), "engine_timeout": timeout}
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
        assert sorted(path.name for path in tmp_path.glob("version-*")) == ["version-3", "version-4"]


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
