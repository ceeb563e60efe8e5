"""Publishing to a real SGLang that is busy, over a stand-in for its scheduler (``sglang_scheduler.py``)."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import dying_publisher
import pytest
import torch
from programs import run
from safetensors.torch import save_file
from served_memory import until
from sglang_server import SGLangServer, sglang_server

from ft_transport import LoRAAdapter, Publisher, PublishError, SGLangEngine
from ft_transport.publish.report import EngineReport

_NUM_VERSIONS = 25
_PROGRAM_S = 60.0
_SOON = timedelta(seconds=30)
_AT_ONCE = timedelta(0)

pytestmark = pytest.mark.timeout(300)

Pause = Literal["abort", "retract", "in_place"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    with sglang_server(tmp_path_factory.mktemp("sglang")) as server:
        yield server


@pytest.fixture
def server(shared: SGLangServer) -> SGLangServer:
    shared.order()
    return shared


def adapter(version: int) -> LoRAAdapter:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = {name.format("A"): torch.full((4, 64), float(version)), name.format("B"): torch.ones(64, 4)}
    return LoRAAdapter(tensors, {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]})


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"model.norm.weight": torch.full((64,), float(version))}


def publish(publisher: Publisher, version: int, what: Any) -> EngineReport:
    (report,) = publisher.publish(version, what).report(_SOON).engines
    return report


def is_confirmed(report: EngineReport, version: int) -> bool:
    return (report.outcome, report.version) == ("confirmed", version)


class TestAdapters:
    def test_each_is_confirmed_at_once_beside_a_request_that_holds_the_first(
        self, server: SGLangServer, tmp_path: Path
    ) -> None:
        engine = SGLangEngine(server.url, "held-{version}")
        with Publisher([engine], tmp_path) as publisher:
            assert is_confirmed(publish(publisher, 1, adapter(1)), 1)
            stream = server.streaming("held-1")
            for version in range(2, _NUM_VERSIONS + 1):
                assert is_confirmed(publish(publisher, version, adapter(version)), version)
                assert set(server.streaming(f"held-{version}", num_tokens=2).ended().tokens) == {version}
            assert server.adapters(tmp_path) == [f"held-{version}" for version in range(1, _NUM_VERSIONS + 1)]
            server.order(finish=True)
            assert (stream.ended().finish, stream.failure, set(stream.tokens)) == ("length", "", {1})
        last = _NUM_VERSIONS + 1
        with Publisher([SGLangEngine(server.url, "held-{version}", unload_after=_AT_ONCE)], tmp_path) as publisher:
            assert is_confirmed(publish(publisher, last, adapter(last)), last)
            until(lambda: server.adapters(tmp_path) == [f"held-{last}"])

    def test_where_one_is_unloaded_too_early_the_next_waits_for_its_requests(
        self, server: SGLangServer, tmp_path: Path
    ) -> None:
        """The reason for ``unload_after``: SGLang's lock is held while an unload waits."""
        engine = SGLangEngine(server.url, "early-{version}", unload_after=_AT_ONCE)
        with Publisher([engine], tmp_path, engine_timeout=timedelta(seconds=3)) as publisher:
            assert is_confirmed(publish(publisher, 1, adapter(1)), 1)
            stream = server.streaming("early-1")
            assert is_confirmed(publish(publisher, 2, adapter(2)), 2)
            until(lambda: "early-1" not in server.adapters(tmp_path))
            late = publish(publisher, 3, adapter(3))
            assert (late.outcome, late.version) == ("late", 2)
            assert (stream.finish, stream.failure) == (None, "")
            server.order(finish=True)
            assert (stream.ended().finish, set(stream.tokens)) == ("length", {1})
            assert is_confirmed(publish(publisher, 4, adapter(4)), 4)
            until(lambda: server.adapters(tmp_path) == ["early-4"])

    def test_a_name_that_is_loaded_is_replaced_by_unloading_it_first(
        self, server: SGLangServer, tmp_path: Path
    ) -> None:
        with Publisher([SGLangEngine(server.url, "one")], tmp_path) as publisher:
            for version in (1, 2, 3):
                assert is_confirmed(publish(publisher, version, adapter(version)), version)
                assert server.streaming("one", num_tokens=2).ended().tokens == [version, version]
        assert server.adapters(tmp_path) == ["one"]

    def test_a_refused_one_leaves_the_one_before_in_use(self, server: SGLangServer, tmp_path: Path) -> None:
        class Unchecked(SGLangEngine):
            adapter_features = None

        bad = LoRAAdapter(adapter(2).tensors, {**adapter(2).config, "use_dora": True})
        engine = Unchecked(server.url, "refused-{version}", unload_after=_AT_ONCE)
        with Publisher([engine], tmp_path) as publisher:
            publish(publisher, 1, adapter(1))
            refused = publish(publisher, 2, bad)
            assert (refused.outcome, refused.status, refused.version) == ("refused", 400, 1)
            assert is_confirmed(publish(publisher, 3, adapter(3)), 3)
            until(lambda: server.adapters(tmp_path) == ["refused-3"])


class TestWeights:
    @pytest.mark.parametrize("pause", ["retract", "in_place"])
    def test_a_request_in_flight_goes_on_with_each_version(
        self, server: SGLangServer, tmp_path: Path, pause: Pause
    ) -> None:
        stream = server.streaming()
        versions = range(1, _NUM_VERSIONS + 1)
        with Publisher([SGLangEngine(server.url, pause=pause)], tmp_path) as publisher:
            for version in versions:
                assert is_confirmed(publish(publisher, version, weights(version)), version)
                assert server.ask("/model_info")["weight_version"] == str(version)
                stream.until_token(version)
        assert (stream.finish, stream.failure) == (None, "")
        server.order(finish=True)
        tokens = stream.ended().tokens[1:]
        assert (stream.finish, stream.failure) == ("length", "")
        since = tokens.index(1)
        assert tokens[since:] == sorted(tokens[since:])
        assert set(tokens[since:]) == set(versions)

    def test_a_request_in_flight_is_aborted_and_the_next_one_has_the_version(
        self, server: SGLangServer, tmp_path: Path
    ) -> None:
        with Publisher([SGLangEngine(server.url, pause="abort")], tmp_path) as publisher:
            for version in range(1, _NUM_VERSIONS + 1):
                stream = server.streaming()
                assert is_confirmed(publish(publisher, version, weights(version)), version)
                assert (stream.ended().finish, stream.failure) == ("abort", "")
                assert server.streaming(num_tokens=1).ended().tokens == [version]

    def test_after_a_refusal_nobody_knows_which_version_is_used(self, server: SGLangServer, tmp_path: Path) -> None:
        with Publisher([SGLangEngine(server.url)], tmp_path, keep_for=_AT_ONCE) as publisher:
            assert is_confirmed(publish(publisher, 1, weights(1)), 1)
            stream = server.streaming()
            server.order(refuse="Failed to update weights: out of memory")
            for version in (2, 3):
                refused = publish(publisher, version, weights(version))
                assert (refused.outcome, refused.status, refused.version) == ("refused", 400, None)
                assert "out of memory" in refused.body
            # What SGLang itself says has not changed, and need not be true.
            assert server.ask("/model_info")["weight_version"] == "1"
            assert (stream.finish, stream.failure) == (None, "")
            assert {path.name for path in tmp_path.glob("version-*")} == {"version-1", "version-2", "version-3"}
            server.order()
            assert is_confirmed(publish(publisher, 4, weights(4)), 4)
            stream.until_token(4)
        assert {path.name for path in tmp_path.glob("version-*")} == {"version-3", "version-4"}
        server.order(finish=True)
        assert stream.ended().finish == "length"

    def test_what_was_updated_and_not_flushed_is_not_known(self, server: SGLangServer, tmp_path: Path) -> None:
        """Its scheduler refuses to empty a cache that a request uses; the weights are new all the same."""

        class Unflushed(SGLangEngine):
            async def deliver(self, connection: Any, delivery: Any) -> int:
                pause = connection.pause
                connection.pause = lambda path, _body, **others: pause(path, {"mode": "in_place"}, **others)
                return await super().deliver(connection, delivery)

        with Publisher([SGLangEngine(server.url)], tmp_path / "a") as publisher:
            assert is_confirmed(publish(publisher, 1, weights(1)), 1)
        stream = server.streaming()
        with Publisher([Unflushed(server.url)], tmp_path / "b") as publisher:
            refused = publish(publisher, 2, weights(2))
            assert (refused.outcome, refused.version) == ("refused", None)
            assert "cache was not flushed" in refused.body
            stream.until_token(2)
            assert server.ask("/model_info")["weight_version"] == "1"
        server.order(finish=True)
        stream.ended()

    @pytest.mark.parametrize("is_same_trainer", [True, False])
    def test_an_update_that_is_still_under_way_is_waited_for(
        self, server: SGLangServer, tmp_path: Path, is_same_trainer: bool
    ) -> None:
        """Two at a time end SGLang 0.5.23."""
        stream = server.streaming()
        options: Any = {"engine_timeout": timedelta(seconds=2)}
        publisher = Publisher([SGLangEngine(server.url)], tmp_path, **options)
        try:
            assert is_confirmed(publish(publisher, 1, weights(1)), 1)
            server.order(hold=True)
            for version in (2, 3):
                late = publish(publisher, version, weights(version))
                assert (late.outcome, late.version) == ("late", None)
                if not is_same_trainer:
                    publisher.close()
                    publisher = Publisher([SGLangEngine(server.url)], tmp_path, **options)
            server.order()
            assert is_confirmed(publish(publisher, 4, weights(4)), 4)
            assert server.ask("/model_info")["weight_version"] == "4"
            stream.until_token(4)
            assert (stream.finish, stream.failure) == (None, "")
            server.order(finish=True)
            assert stream.ended().finish == "length"
        finally:
            publisher.close()

    @pytest.mark.parametrize("moment", ["before", "after"])
    def test_a_new_trainer_publishes_wherever_the_one_before_was_killed(
        self, server: SGLangServer, tmp_path: Path, moment: str
    ) -> None:
        stream = server.streaming()
        file = tmp_path / "weights.safetensors"
        save_file(weights(0), file)
        routes: list[str] = []
        version = 0
        while True:
            version += 1
            arguments = [str(tmp_path / "versions"), server.url, str(version), moment, str(len(routes) + 1)]
            arguments += [str(file), "sglang"]
            killed = run([sys.executable, dying_publisher.__file__, *arguments], timeout=_PROGRAM_S)
            routes = killed.stdout.split()
            if killed.returncode == 0:
                break
            assert killed.returncode == -signal.SIGKILL, killed.stderr
            version += 1
            with Publisher([SGLangEngine(server.url)], tmp_path / "versions") as publisher:
                assert is_confirmed(publish(publisher, version, weights(version)), version), routes
            stream.until_token(version)
        assert {"/pause_generation", "/update_weights_from_disk", "/continue_generation", "/model_info"} <= set(routes)
        assert (stream.finish, stream.failure) == (None, "")
        server.order(finish=True)
        assert stream.ended().finish == "length"

    def test_one_that_was_left_paused_in_place_can_be_paused_with_abort(
        self, server: SGLangServer, tmp_path: Path
    ) -> None:
        """Paused so, it makes no step, and a request ends with one."""
        stream = server.streaming()
        server.ask("/pause_generation", {"mode": "in_place"})
        with Publisher([SGLangEngine(server.url, pause="abort")], tmp_path) as publisher:
            assert is_confirmed(publish(publisher, 1, weights(1)), 1)
        assert stream.ended().finish == "abort"
        assert server.streaming(num_tokens=1).ended().tokens == [1]

    def test_adapters_are_found_also_after_the_model_was_renamed(self, server: SGLangServer, tmp_path: Path) -> None:
        """SGLang calls the model by the directory of its weights, once they were replaced."""
        engine = SGLangEngine(server.url, "renamed-{version}", unload_after=_AT_ONCE)
        with Publisher([engine], tmp_path) as publisher:
            assert is_confirmed(publish(publisher, 1, weights(1)), 1)
            assert server.ask("/v1/models")["data"][0]["id"] == str(tmp_path / "version-1")
            assert is_confirmed(publish(publisher, 2, adapter(2)), 2)
            assert server.ask("/get_model_info")["weight_version"] == "1"


def test_an_engine_that_ends_in_the_middle_of_an_update_is_unreachable_and_its_version_unknown(tmp_path: Path) -> None:
    """As SGLang 0.5.23 does with tensors of another shape: its way back reads the same ones once more."""
    with (
        sglang_server(tmp_path) as server,
        Publisher([SGLangEngine(server.url)], tmp_path / "versions", engine_timeout=timedelta(seconds=8)) as publisher,
    ):
        assert is_confirmed(publish(publisher, 1, weights(1)), 1)
        server.order(crash=True)
        with pytest.raises(PublishError, match="unreachable") as caught:
            publisher.publish(2, weights(2)).result(_SOON)
        (report,) = caught.value.report.engines
        assert report.version is None
        until(lambda: not server.is_alive())
