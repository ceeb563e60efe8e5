"""One process publishes to stand-ins for engines (``engine_servers``, which cites the contracts)."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from engine_servers import BASE_MODEL, SGLangStandIn, SkyRLStandIn, StandIn, VLLMStandIn, serving
from programs import run
from publishers import CONFIG, adapter, engine_of, publishing, pulling
from safetensors.torch import load_file
from served_memory import until
from torch import nn
from transport_settings import settings_of

from ft_transport import (
    CheckpointInUseError,
    ConfigurationError,
    Delivery,
    EngineConnection,
    HTTPTransport,
    LoRAAdapter,
    Publisher,
    PublishError,
    PullingEngine,
    SGLangEngine,
    StaleVersionError,
    TransportSettings,
    VLLMEngine,
    WeightReceiver,
)
from ft_transport.publish import publisher as publisher_module

SOON = timedelta(seconds=10)


def value_of(stand_in: StandIn) -> float:
    """Of the adapter that it serves."""
    (tensors,) = [stand_in.tensors[name] for name in stand_in.adapters]
    return float(tensors["base_model.model.layers.0.q.lora_A.weight"][0, 0])


class TestAdapters:
    @pytest.mark.parametrize("kind", [VLLMStandIn, SGLangStandIn, SkyRLStandIn])
    def test_each_version_replaces_the_one_before(self, tmp_path: Path, kind: type[StandIn]) -> None:
        server = kind()
        with publishing(tmp_path, server) as publisher:
            for version in (1, 2, 5):
                report = publisher.publish(version, adapter(version)).report(SOON)
                assert [each.outcome for each in report.engines] == ["confirmed"]
                assert [each.version for each in report.engines] == [version]
                if kind is not SGLangStandIn:
                    assert value_of(server) == version
        left = {path.name for path in tmp_path.glob("version-*")}
        # SGLang unloads those before later, when their requests are done.
        assert left <= {"version-5", "version-2", *(["version-1"] if kind is SGLangStandIn else [])}
        assert "version-5" in left

    def test_the_files_are_those_of_peft(self, tmp_path: Path) -> None:
        with publishing(tmp_path) as publisher:
            directory = publisher.publish(1, adapter(1)).directory
            assert sorted(path.name for path in directory.iterdir()) == [
                "adapter_config.json",
                "adapter_model.safetensors",
            ]
            config = json.loads((directory / "adapter_config.json").read_text())
            assert config == {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q", "v"]}
            tensors = load_file(directory / "adapter_model.safetensors")
            assert tensors.keys() == adapter(1).tensors.keys()
            assert all(torch.equal(tensors[name], value) for name, value in adapter(1).tensors.items())

    def test_versions_with_names_of_their_own(self, tmp_path: Path) -> None:
        server = VLLMStandIn()
        with serving(server), Publisher([VLLMEngine(server.url, lora_name="policy-{version}")], tmp_path) as publisher:
            for version in (1, 2):
                publisher.publish(version, adapter(version)).result(SOON)
            until(lambda: list(server.adapters) == ["policy-2"])


class TestWeights:
    @pytest.mark.parametrize("kind", [VLLMStandIn, SGLangStandIn])
    def test_all_weights_between_pause_and_resume(self, tmp_path: Path, kind: type[StandIn]) -> None:
        server = kind()
        with publishing(tmp_path, server) as publisher:
            weights = {"layer.weight": torch.randn(3, 4), "layer.bias": torch.randn(3, dtype=torch.bfloat16)}
            publisher.publish(1, weights).result(SOON)
            assert all(torch.equal(server.tensors[BASE_MODEL][name], value) for name, value in weights.items())
            assert not server.is_paused
            paused, *_, resumed = [route for route in server.routes if "GET" not in route]
            assert (paused, resumed) in [
                ("POST /pause", "POST /resume"),
                ("POST /pause_generation", "POST /continue_generation"),
            ]

    @pytest.mark.parametrize("kind", [VLLMStandIn, SGLangStandIn])
    @pytest.mark.parametrize("is_hanging", [False, True])
    def test_an_engine_whose_load_fails_is_resumed_with_whole_weights_alone(
        self, tmp_path: Path, kind: type[StandIn], is_hanging: bool
    ) -> None:
        server = kind(is_hanging=is_hanging, refusal=(500, "text/plain", "out of memory"))
        expected = "within 0.5 s" if is_hanging else "out of memory"
        is_vllm = kind is VLLMStandIn
        with serving(server):
            for attempt in (1, 2):
                timeout = timedelta(seconds=0.5 if is_hanging else 10)
                with (
                    Publisher([engine_of(server)], tmp_path, engine_timeout=timeout) as publisher,
                    pytest.raises(PublishError, match=f"{expected}.*stays paused" if is_vllm else expected),
                ):
                    publisher.publish(attempt, {"weight": torch.ones(3)}).result(SOON)
                # Also where the first trainer is gone.
                assert server.is_paused == is_vllm
            server.is_hanging, server.refusal = False, None
            with Publisher([engine_of(server)], tmp_path) as publisher:
                publisher.publish(3, {"weight": torch.ones(3)}).result(SOON)
            assert not server.is_paused
            assert not server.is_dead
            assert not server.is_mixed

    @pytest.mark.parametrize("is_open", [False, True], ids=["closed", "left open"])
    def test_a_backend_of_the_users_own_gets_the_directory(self, tmp_path: Path, is_open: bool) -> None:
        server = VLLMStandIn(update=["started"] if is_open else [], is_half_replaced=is_open, is_paused=is_open)
        with serving(server):
            engine = VLLMEngine(server.url, update_info=lambda delivery: {"path": str(delivery.directory)})
            with Publisher([engine], tmp_path) as publisher:
                publisher.publish(7, {"weight": torch.full((3,), 7.0)}).result(SOON)
        assert server.tensors[BASE_MODEL]["weight"].tolist() == [7.0] * 3
        assert (server.weight_version, server.is_dead, server.is_paused) == ("7", False, False)

    def test_a_backend_of_the_users_own_that_failed_is_given_a_session_without_what_it_kept(
        self, tmp_path: Path
    ) -> None:
        server = VLLMStandIn(refusal=(500, "text/plain", "disk"))
        with serving(server):
            engine = VLLMEngine(server.url, update_info=lambda delivery: {"path": str(delivery.directory)})
            with Publisher([engine], tmp_path) as publisher:
                with pytest.raises(PublishError, match=r"status 500.*disk; the engine stays paused"):
                    publisher.publish(1, {"weight": torch.ones(3)}).result(SOON)
                with pytest.raises(PublishError, match="restart this engine"):
                    publisher.publish(2, {"weight": torch.ones(3)}).result(SOON)
                server.refusal = None
                publisher.publish(3, {"weight": torch.full((3,), 3.0)}).result(SOON)
        assert server.tensors[BASE_MODEL]["weight"].tolist() == [3.0] * 3
        assert (server.weight_version, server.is_dead, server.is_paused) == ("3", False, False)
        # The end of the session tells it.
        assert "POST /update_weight_version" not in server.routes

    def test_an_engine_whose_pause_and_resume_break_is_resumed_before_the_next_attempt(self, tmp_path: Path) -> None:
        server = FlakyPause(num_broken=1)
        with serving(server), Publisher([VLLMEngine(server.url)], tmp_path) as publisher:
            report = publisher.publish(1, {"weight": torch.ones(3)}).result(SOON)
            assert [(each.outcome, each.num_attempts) for each in report.engines] == [("confirmed", 2)]
            assert not server.is_paused
            changes = [route.split()[1] for route in server.routes if route in ("POST /pause", "POST /resume")]
            assert changes == ["/pause", "/resume", "/resume", "/pause", "/resume"]

    def test_something_else_than_a_tensor_is_refused_by_name(self, tmp_path: Path) -> None:
        with publishing(tmp_path) as publisher:
            with pytest.raises(PublishError, match=r"expected only tensors.*layer.scale"):
                publisher.publish(1, {"layer.weight": torch.ones(3), "layer.scale": 3.0})  # type: ignore[dict-item]
            assert publisher.latest() is None


class TestPulling:
    """Engines that share no disk; the receiver is the real one."""

    @pytest.fixture
    def transport(self) -> Iterator[HTTPTransport[Any]]:
        transport: HTTPTransport[Any] = HTTPTransport(settings=settings_of(host="127.0.0.1", chunk_bytes=1 << 18))
        yield transport
        transport.shutdown()

    def weights(self, value: float) -> dict[str, torch.Tensor]:
        return {"embedding": torch.full((1 << 20,), 3.0), "layer": torch.full((1 << 18,), float(value))}

    def test_only_what_has_changed_crosses_the_network(self, tmp_path: Path, transport: HTTPTransport[Any]) -> None:
        def weights(version: int) -> dict[str, torch.Tensor]:
            every_bit = torch.Generator().manual_seed(version)
            layer = torch.randint(-(1 << 31), 1 << 31, (1 << 18,), generator=every_bit, dtype=torch.int32)
            return {"embedding": torch.full((1 << 20,), 3.0), "layer": layer}

        own = {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}
        entered: list[int] = []

        @contextmanager
        def paused() -> Iterator[None]:
            entered.append(1)
            yield

        with pulling(tmp_path, transport, own, paused=paused) as (publisher, receiver):
            report = publisher.publish(1, weights(1)).result(SOON)
            assert [(each.outcome, each.version) for each in report.engines] == [("confirmed", 1)]
            assert receiver.num_bytes_fetched == 5 << 20
            publisher.publish(2, weights(2)).result(SOON)
            assert receiver.version == 2
            assert receiver.num_bytes_fetched == 1 << 20
            assert all(torch.equal(own[name], tensor) for name, tensor in weights(2).items())
            assert len(entered) == 2

    @pytest.mark.parametrize("kind", ["parameter", "tied", "strided"])
    def test_tensors_as_engines_have_them_are_received_in_place(
        self, tmp_path: Path, transport: HTTPTransport[Any], kind: str
    ) -> None:
        class EngineParameter(nn.Parameter):
            """As vLLM's."""

        published = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(6.0).view(2, 3)}
        memory = torch.zeros(2, 3)
        own: dict[str, torch.Tensor] = {
            "parameter": {"a": EngineParameter(memory), "b": torch.zeros(2, 3)},
            "tied": {"a": memory, "b": memory},
            "strided": {"a": memory, "b": torch.zeros(3, 2).t()},
        }[kind]
        if kind == "tied":
            published["b"] = published["a"]
        with pulling(tmp_path, transport, own) as (publisher, _receiver):
            publisher.publish(1, published).result(SOON)
            assert torch.equal(memory, published["a"])
            assert all(torch.equal(own[name].detach(), published[name]) for name in own)

    @pytest.mark.parametrize("kind", ["meta", "expanded", "overlapping", "no tensor", "tied here alone"])
    def test_what_cannot_be_received_into_is_refused_and_never_confirmed(
        self, tmp_path: Path, transport: HTTPTransport[Any], kind: str
    ) -> None:
        memory = torch.zeros(8)
        own: dict[str, Any] = {
            "meta": {"a": torch.empty(4, device="meta"), "b": torch.zeros(4)},
            "expanded": {"a": torch.zeros(1).expand(4), "b": torch.zeros(4)},
            "overlapping": {"a": memory[:4], "b": memory[2:6]},
            "no tensor": {"a": 5, "b": torch.zeros(4)},
            "tied here alone": {"a": memory[:4], "b": memory[:4]},
        }[kind]
        with pulling(tmp_path, transport, own) as (publisher, receiver):
            handle = publisher.publish(1, {"a": torch.ones(4), "b": torch.full((4,), 2.0)})
            reason = "weights_differ" if kind == "tied here alone" else "weights_unusable"
            with pytest.raises(PublishError, match=rf"status 500.*{reason}"):
                handle.result(SOON)
            assert receiver.version is None

    def test_a_receiver_asks_for_the_token(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        own = {name: torch.zeros_like(tensor) for name, tensor in self.weights(0).items()}
        monkeypatch.setenv("FT_TRANSPORT_TOKEN", "secret")
        transport: HTTPTransport[Any] = HTTPTransport(settings=TransportSettings(host="127.0.0.1"))
        with WeightReceiver(own, host="127.0.0.1") as receiver:
            engines = [PullingEngine(receiver.url, headers={"Authorization": "Bearer secret"}, token="wrong")]
            with Publisher(engines, tmp_path / "a", transport=transport) as publisher:
                handle = publisher.publish(1, self.weights(1))
                with pytest.raises(PublishError, match=r"status 401.*expected a proof of the job token"):
                    handle.result(SOON)
            with Publisher([PullingEngine(receiver.url)], tmp_path / "b", transport=transport) as publisher:
                publisher.publish(1, self.weights(1)).result(SOON)
        transport.shutdown()

    def test_a_transport_that_is_gone_leaves_the_weights_as_they_are(
        self, tmp_path: Path, transport: HTTPTransport[Any]
    ) -> None:
        own = self.weights(5)
        with WeightReceiver(own, host="127.0.0.1", timeout=timedelta(seconds=1)) as receiver:
            engines = [PullingEngine(receiver.url)]
            with Publisher(engines, tmp_path / "a") as publisher:
                handle = publisher.publish(1, self.weights(1))
                with pytest.raises(PublishError, match="expected a publisher that serves versions"):
                    handle.result(SOON)
            transport.shutdown()
            with Publisher(engines, tmp_path / "b", transport=transport) as publisher:
                handle = publisher.publish(1, self.weights(1))
                with pytest.raises(PublishError):
                    handle.result(SOON)
            assert all(torch.equal(own[name], tensor) for name, tensor in self.weights(5).items())


class TestFailures:
    def test_a_refusal_names_url_status_and_body(self, tmp_path: Path) -> None:
        good, bad = VLLMStandIn(load_s=1.0), VLLMStandIn(refusal=(500, "text/plain", "CUDA error: out of memory"))
        with publishing(tmp_path, good, bad) as publisher:
            handle = publisher.publish(1, adapter(1))
            with pytest.raises(PublishError) as caught:
                handle.result(SOON)
            text = str(caught.value)
            for part in (f"POST {bad.url}/v1/load_lora_adapter", "status 500", "CUDA error: out of memory"):
                assert part in text
            # It does not wait for the slow one.
            assert [each.outcome for each in caught.value.report.engines] == ["pending", "refused"]
            assert [each.outcome for each in handle.report(SOON).engines] == ["confirmed", "refused"]

    def test_what_an_engine_answers_moves_and_hides_no_other_text(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        hostile = "no\x1b[2J\x1b]0;owned\x07\r\nERROR forged line \u202e \x9b31m"
        with publishing(tmp_path, VLLMStandIn(refusal=(500, "text/plain", hostile))) as publisher:
            handle = publisher.publish(1, adapter(1))
            with pytest.raises(PublishError) as caught:
                handle.result(SOON)
            (engine,) = handle.report(SOON).engines
            state = publisher.engines()[0]
        logged = [record.getMessage() for record in caplog.records]
        for text in [str(caught.value), engine.body, str(engine), str(state), *logged]:
            assert text.replace("\n  ", "").isprintable(), text
        assert r"no\x1b[2J\x1b]0;owned\x07\r\nERROR forged line \u202e \x9b31m" in engine.body

    def test_one_that_failed_is_left_out_until_it_is_caught_up(self, tmp_path: Path) -> None:
        good, bad = VLLMStandIn(), VLLMStandIn(refusal=(503, "text/plain", "loading"))
        with publishing(tmp_path, good, bad) as publisher:
            with pytest.raises(PublishError):
                publisher.publish(1, adapter(1)).result(SOON)
            second = publisher.publish(2, adapter(2))
            assert second.result(SOON).verdict == "good"
            assert [(each.outcome, each.is_counted) for each in second.report(SOON).engines] == [
                ("confirmed", True),
                ("refused", False),
            ]
            bad.refusal = None
            third = publisher.publish(3, adapter(3)).report(SOON)
            assert [(each.outcome, each.version) for each in third.engines] == [("confirmed", 3), ("confirmed", 3)]
            assert all(each.is_counted for each in publisher.publish(4, adapter(4)).report(SOON).engines)

    def test_connections_that_break_are_tried_again_and_refusals_are_not(self, tmp_path: Path) -> None:
        broken, bad = VLLMStandIn(num_broken=2), VLLMStandIn(refusal=(500, "text/plain", "no"))
        with publishing(tmp_path, broken, bad, policy="best_effort") as publisher:
            report = publisher.publish(1, adapter(1)).report(SOON)
            assert [(each.outcome, each.num_attempts) for each in report.engines] == [("confirmed", 3), ("refused", 1)]

    def test_an_engine_that_says_yes_and_does_not_is_not_updated(self, tmp_path: Path) -> None:
        server = VLLMStandIn(refusal=(200, "text/plain", "Success: LoRA adapter 'policy' added successfully."))
        with publishing(tmp_path, server) as publisher:
            handle = publisher.publish(1, adapter(1))
            with pytest.raises(PublishError, match=r"to serve the adapter 'policy'.*it serves no adapters"):
                handle.result(SOON)


class FlakyPause(VLLMStandIn):
    """Its pause takes effect, but what it answers does not arrive; and resuming it fails at first."""

    num_refused_resumes = 1

    async def _pause(self, request: web.Request) -> web.Response:
        await super()._pause(request)
        assert request.transport is not None
        if self.num_broken:
            self.num_broken -= 1
            request.transport.close()
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        if self.num_refused_resumes:
            self.num_refused_resumes -= 1
            return web.json_response({"error": "busy"}, status=503)
        return await super()._resume(request)


class TestOthersCode:
    """An engine's deliver may be anybody's."""

    class Own:
        """An engine that does something else each time."""

        url = "http://own"
        headers: Mapping[str, str] = {}  # a protocol's attribute

        def __init__(self, deliver: Callable[[], Any]) -> None:
            self._deliver = deliver

        async def deliver(self, _connection: EngineConnection, delivery: Delivery) -> int:
            await self._deliver()
            return delivery.version

    @pytest.mark.parametrize("error", [ValueError("own"), asyncio.CancelledError(), SystemExit(3)])
    def test_what_it_raises_is_its_own_failure(self, tmp_path: Path, error: BaseException) -> None:
        async def fail() -> None:
            raise error

        with (
            serving(good := VLLMStandIn(load_s=0.2)),
            Publisher([self.Own(fail), VLLMEngine(good.url)], tmp_path) as publisher,
        ):
            for version in (1, 2):
                report = publisher.publish(version, adapter(version)).report(SOON)
                assert [each.outcome for each in report.engines] == ["failed", "confirmed"]

    def test_one_that_does_not_give_way_is_late(self, tmp_path: Path) -> None:
        may_end = threading.Event()

        async def persist() -> None:
            while not may_end.is_set():
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.05)

        timeout = timedelta(seconds=1)
        with Publisher([self.Own(persist)], tmp_path, engine_timeout=timeout) as publisher:
            report = publisher.publish(1, adapter(1)).report(SOON)
            assert [each.outcome for each in report.engines] == ["late"]
            may_end.set()
            report = publisher.publish(2, adapter(2)).report(SOON)
            assert [each.outcome for each in report.engines] == ["confirmed"]


class TestVersions:
    def test_of_several_that_wait_the_newest_is_told(self, tmp_path: Path) -> None:
        server = VLLMStandIn(load_s=1.0)
        with publishing(tmp_path, server) as publisher:
            handles = [publisher.publish(1, adapter(1))]
            until(lambda: "POST /v1/load_lora_adapter" in server.routes)
            handles += [publisher.publish(version, adapter(version)) for version in range(2, 6)]
            server.load_s = 0.0
            outcomes = [handle.report(SOON).engines[0].outcome for handle in handles]
            assert outcomes == ["confirmed", *["superseded"] * 3, "confirmed"]
            assert value_of(server) == 5

    def test_who_waits_hears_that_a_closed_publisher_has_given_up(self, tmp_path: Path) -> None:
        server = VLLMStandIn(is_hanging=True)
        with publishing(tmp_path, server) as publisher:
            handle = publisher.publish(1, {"weight": torch.ones(3)})
            publisher.close(timedelta(seconds=0.5))
            with pytest.raises(PublishError, match="cancelled: the publisher was closed"):
                handle.result(SOON)
            assert "POST /pause" in server.routes
        # With weights that may be half replaced it would end at the next request.
        assert server.is_paused

    def test_they_only_go_up_also_after_a_restart(self, tmp_path: Path) -> None:
        server = VLLMStandIn()
        with publishing(tmp_path, server) as publisher:
            publisher.publish(7, adapter(7)).result(SOON)
            with pytest.raises(StaleVersionError, match=r"expected a version after 7.*got 7"):
                publisher.publish(7, adapter(7))
        with publishing(tmp_path, VLLMStandIn()) as publisher:
            assert publisher.latest() == 7
            with pytest.raises(StaleVersionError, match=r"expected a version after 7.*got 6"):
                publisher.publish(6, adapter(6))
            publisher.publish(8, adapter(8)).result(SOON)

    def test_what_was_interrupted_is_cleared_and_what_was_published_is_not_writable(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "version-3.incomplete").mkdir()
        (tmp_path / "version-notes").mkdir()
        with publishing(tmp_path) as publisher:
            directory = publisher.publish(1, adapter(1)).directory
            assert all(not path.stat().st_mode & 0o222 for path in directory.iterdir())
            monkeypatch.setattr(publisher_module, "_MARGIN_S", 0.1)
            with pytest.raises(CheckpointInUseError):
                Publisher([], tmp_path)
        assert sorted(path.name for path in tmp_path.glob("version-*")) == ["version-1", "version-notes"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "missing: r, lora_alpha, target_modules"),
        ({"r": 4, "lora_alpha": 8, "target_modules": None}, "missing: target_modules"),
        (None, r"peft_config\.to_dict\(\), got NoneType"),
    ],
)
def test_an_adapter_without_what_engines_need_is_refused(config: Any, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        LoRAAdapter(adapter(1).tensors, config)
    with pytest.raises(ConfigurationError, match="names to an adapter's tensors, got an empty one"):
        LoRAAdapter({}, CONFIG)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (dict(adapter(1).tensors), r"got only LoRA's matrices.*LoRAAdapter\(tensors, config\).*q\.lora_A\.weight"),
        (nn.Linear(2, 2), r"got a module, Linear; pass its state_dict\(\)"),
        ({}, "got no weights"),
    ],
)
def test_what_no_engine_can_use_is_refused_in_the_call(tmp_path: Path, weights: Any, expected: str) -> None:
    with Publisher([], tmp_path) as publisher:
        for given in (weights, lambda: weights):
            with pytest.raises(PublishError, match=expected):
                publisher.publish(1, given)
        assert publisher.latest() is None


@pytest.mark.parametrize("kind", [VLLMStandIn, SGLangStandIn])
def test_an_engine_without_routes_for_weights_is_told_of_once_and_holds_nobody_up(
    tmp_path: Path, kind: type[StandIn]
) -> None:
    class WithoutWeights(kind):  # type: ignore[misc, valid-type]
        def own_routes(self) -> list[web.RouteDef]:
            return [route for route in super().own_routes() if "lora" in route.path]

    server = WithoutWeights()
    engine = {VLLMStandIn: VLLMEngine, SGLangStandIn: SGLangEngine}[kind]
    with serving(server):
        publisher = Publisher([engine(server.url)], tmp_path)
        for version in (1, 2):
            handle = publisher.publish(version, {"weight": torch.ones(3)})
            with pytest.raises(PublishError, match=r"status 404.*publish a LoRA adapter as a LoRAAdapter"):
                handle.result(SOON)
        started_s = time.monotonic()
        publisher.close()
        assert time.monotonic() - started_s < 5
    changes = [route for route in server.routes if "GET" not in route]
    assert changes == [f"POST {'/pause' if kind is VLLMStandIn else '/pause_generation'}"] * 2


def test_urls_that_are_none_are_refused() -> None:
    for url in ("localhost:8000", "ftp://host", "http://", "http://host/?a=b"):
        with pytest.raises(ConfigurationError, match="expected the base URL of an engine"):
            VLLMEngine(url)


def test_a_process_that_ends_still_tells_the_engines(tmp_path: Path) -> None:
    script = (
        "import sys, torch; from ft_transport import LoRAAdapter, Publisher, VLLMEngine\n"
        "publisher = Publisher([VLLMEngine(sys.argv[1])], sys.argv[2])\n"
        "config = {'r': 1, 'lora_alpha': 1, 'target_modules': ['a']}\n"
        "publisher.publish(1, LoRAAdapter({'a.lora_A.weight': torch.ones(1, 3)}, config))\n"
        "raise RuntimeError('of the user')"
    )
    with serving(server := VLLMStandIn(load_s=0.5)):
        # A name has to be looked up, which asyncio does on a thread of a pool.
        command = [sys.executable, "-c", script, server.url.replace("127.0.0.1", "localhost"), str(tmp_path)]
        ended = run(command, ends_as_interpreter=True, timeout=100)
        assert (ended.returncode, "of the user" in ended.stderr) == (1, True), ended.stderr
        assert list(server.adapters.values()) == [str(tmp_path / "version-1")]
