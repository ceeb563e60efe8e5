"""Engines that are added, removed, restarted and out of reach while a publisher is open."""

from __future__ import annotations

import asyncio
import gc
import socketserver
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from aiohttp import web
from engine_servers import BASE_MODEL, SGLangStandIn, SkyRLStandIn, StandIn, VLLMStandIn, serving
from programs import run
from publishers import adapter, engine_of
from publishers import publishing as publishing_to
from ranks_on_threads import groups_of, run_ranks
from served_memory import until

from ft_transport import (
    ConfigurationError,
    Delivery,
    EngineConnection,
    EngineRefusedError,
    EngineState,
    HTTPTransport,
    Publisher,
    PublishError,
    PullingEngine,
    SGLangEngine,
    TransportSettings,
    VLLMEngine,
    WeightReceiver,
)
from ft_transport.coordination.ranks import RankGroup

SOON = timedelta(seconds=10)
OFTEN = timedelta(seconds=0.1)
NUM_POLLS = 5
publishing = partial(publishing_to, poll_interval=OFTEN)


def state_of(publisher: Publisher, url: str) -> EngineState:
    return next(each for each in publisher.engines() if each.url == url)


def num_loads(stand_in: StandIn) -> int:
    return sum(route.startswith("POST") and "load_lora" in route and "unload" not in route for route in stand_in.routes)


def was_polled(stand_in: StandIn, num_times: int = NUM_POLLS) -> None:
    """Returns when it was asked so many times more."""
    before = stand_in.routes.count("GET /v1/models")
    until(lambda: stand_in.routes.count("GET /v1/models") >= before + num_times)


class NotingStandIn(VLLMStandIn):
    """It notes which adapters it could load."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []

    def read_adapter(self, name: str, path: str) -> str | None:
        wrong = super().read_adapter(name, path)
        if wrong is None:
            self.loaded.append(Path(path).name)
        return wrong


class TestRestarted:
    @pytest.mark.parametrize("kind", [VLLMStandIn, SGLangStandIn, SkyRLStandIn])
    def test_one_gets_the_present_adapter_without_a_publish(self, tmp_path: Path, kind: type[StandIn]) -> None:
        server, other = kind(), kind()
        with publishing(tmp_path, server, other) as publisher:
            for version in (1, 2):
                publisher.publish(version, adapter(version)).result(SOON)
            was_polled(other)
            loads = num_loads(other)
            server.restart()
            until(lambda: list(server.adapters.values()) == [str(tmp_path / "version-2")])
            until(lambda: state_of(publisher, server.url).outcome == "confirmed")
            assert num_loads(other) == loads

    @pytest.mark.parametrize("kind", [VLLMStandIn, SGLangStandIn])
    def test_one_gets_the_present_weights_without_a_publish(self, tmp_path: Path, kind: type[StandIn]) -> None:
        server = kind()
        with publishing(tmp_path, server) as publisher:
            publisher.publish(4, {"weight": torch.full((3,), 4.0)}).result(SOON)
            server.restart()
            until(lambda: server.weight_version == "4" and not server.is_paused)
            assert server.tensors[BASE_MODEL]["weight"].tolist() == [4.0] * 3
            until(lambda: state_of(publisher, server.url).outcome == "confirmed")

    def test_one_that_pulls_gets_them_too_also_where_the_transport_serves_something_else(self, tmp_path: Path) -> None:
        transport: HTTPTransport[Any] = HTTPTransport(settings=TransportSettings(host="127.0.0.1"))
        first = WeightReceiver({"weight": torch.zeros(3)}, host="127.0.0.1")
        with Publisher([PullingEngine(first.url)], tmp_path, transport=transport, poll_interval=OFTEN) as publisher:
            publisher.publish(4, {"weight": torch.full((3,), 4.0)}).result(SOON)
            first.close()
            for step in (100, 101, 102):
                transport.send_checkpoint([], step, {"weights": {}}, SOON)
            own = {"weight": torch.zeros(3)}
            with WeightReceiver(own, host="127.0.0.1", port=urlsplit(first.url).port or 0) as second:
                until(lambda: second.version == 4)
                assert own["weight"].tolist() == [4.0] * 3
                until(lambda: state_of(publisher, first.url).outcome == "confirmed")
        transport.shutdown()

    def test_the_version_that_it_loads_is_kept_for_it(self, tmp_path: Path) -> None:
        server, other = NotingStandIn(), VLLMStandIn()
        with publishing(tmp_path, server, other) as publisher:
            publisher.publish(1, adapter(1)).report(SOON)
            server.load_s = 1.0
            server.restart()
            until(lambda: num_loads(server) == 2)
            publisher.publish(2, adapter(2))
            handle = publisher.publish(3, adapter(3))
            publisher.remove_engine(other.url)
            assert handle.report(SOON).engines[0].outcome == "confirmed"
            assert server.loaded == ["version-1", "version-1", "version-3"]
            until(lambda: not (tmp_path / "version-1").exists())

    def test_none_is_asked_where_that_is_off(self, tmp_path: Path) -> None:
        with serving(server := VLLMStandIn()), Publisher([VLLMEngine(server.url)], tmp_path, poll_interval=None) as off:
            off.publish(1, adapter(1)).result(SOON)
            asked = server.routes.count("GET /v1/models")
            with publishing(tmp_path / "on", other := VLLMStandIn()) as publisher:
                publisher.publish(1, adapter(1)).result(SOON)
                was_polled(other)
            assert server.routes.count("GET /v1/models") == asked
        with pytest.raises(ConfigurationError, match="poll_interval that is positive"):
            Publisher([], tmp_path, poll_interval=timedelta(0))


class TestOutOfReach:
    def test_one_that_was_down_gets_the_present_version_when_it_comes_up(self, tmp_path: Path) -> None:
        with serving(server := VLLMStandIn()):
            pass
        timeout = timedelta(seconds=0.5)
        with Publisher([VLLMEngine(server.url)], tmp_path, engine_timeout=timeout, poll_interval=OFTEN) as publisher:
            report = publisher.publish(1, adapter(1)).report(SOON)
            assert [each.outcome for each in report.engines] == ["unreachable"]
            state = state_of(publisher, server.url)
            assert (state.version, state.is_counted, state.outcome) == (None, False, "unreachable")
            assert "Connect" in state.error
            until(lambda: "poll for its version failed" in state_of(publisher, server.url).error)
            with serving(server):
                until(lambda: list(server.adapters.values()) == [str(tmp_path / "version-1")])
                expected = EngineState(url=server.url, version=1, is_counted=True, outcome="confirmed")
                until(lambda: state_of(publisher, server.url) == expected)

    def test_one_that_was_late_with_weights_half_replaced_is_told_again_and_resumed(self, tmp_path: Path) -> None:
        server = VLLMStandIn(is_hanging=True)
        with publishing(tmp_path, server, engine_timeout=timedelta(seconds=0.5)) as publisher:
            report = publisher.publish(1, {"weight": torch.ones(3)}).report(SOON)
            assert [each.outcome for each in report.engines] == ["late"]
            assert server.is_paused
            server.is_hanging = False
            until(lambda: server.weight_version == "1" and not server.is_paused)
            assert not server.is_dead

    def test_one_that_refused_is_not_told_again_until_it_was_restarted(self, tmp_path: Path) -> None:
        server = VLLMStandIn()
        with publishing(tmp_path, server) as publisher:
            publisher.publish(1, adapter(1)).report(SOON)
            server.refusal = (500, "text/plain", "no")
            assert [each.outcome for each in publisher.publish(2, adapter(2)).report(SOON).engines] == ["refused"]
            server.refusal = None
            was_polled(server)
            assert list(server.adapters.values()) == [str(tmp_path / "version-1")]
            state = state_of(publisher, server.url)
            assert (state.version, state.is_counted, state.outcome) == (1, False, "refused")
            assert "status 500" in state.error
            server.restart()
            until(lambda: list(server.adapters.values()) == [str(tmp_path / "version-2")])

    def test_one_that_is_down_is_asked_less_and_less_often(self, tmp_path: Path) -> None:
        class Down(VLLMStandIn):
            asked_s: list[float] = []  # noqa: RUF012 - of the one instance

            async def _models(self, request: web.Request) -> web.Response:
                if self.is_hanging:
                    self.asked_s.append(time.monotonic())
                    return web.json_response({"error": "loading"}, status=503)
                return await super()._models(request)

        server = Down()
        with serving(server), Publisher([VLLMEngine(server.url)], tmp_path, poll_interval=OFTEN) as publisher:
            publisher.publish(1, adapter(1)).report(SOON)
            server.is_hanging = True
            until(lambda: len(server.asked_s) >= 6)
            pauses = [after - before for before, after in zip(server.asked_s, server.asked_s[1:], strict=False)]
            # The fifth is six intervals, less a fifth at most.
            assert pauses[4] > 3 * OFTEN.total_seconds()
            assert "503" in state_of(publisher, server.url).error
            server.is_hanging = False
            until(lambda: state_of(publisher, server.url).error == "")
            assert num_loads(server) == 1


class Own:
    """An engine of a user's, which says what it is asked, and by how many at a time."""

    headers: Mapping[str, str] = {}  # a protocol's attribute

    def __init__(self, url: str = "http://own") -> None:
        self.url = url
        self.version: int | None = None
        self.delivered: list[int] = []
        self.num_inside = 0
        self.most_inside = 0
        self.is_hanging = False

    @contextmanager
    def inside(self) -> Iterator[None]:
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        try:
            yield
        finally:
            self.num_inside -= 1

    async def deliver(self, _connection: EngineConnection, delivery: Delivery) -> int:
        with self.inside():
            await asyncio.sleep(0.01)
            self.version = delivery.version
            self.delivered.append(delivery.version)
            return delivery.version


class OwnPolled(Own):
    """It can be asked as well, and may take for ever to answer."""

    num_asked = 0

    async def served_version(self, _connection: EngineConnection, _newest: Delivery) -> Any:
        with self.inside():
            self.num_asked += 1
            if self.is_hanging:
                await asyncio.Event().wait()
            return self.version


class TestOwnEngines:
    def test_a_poll_never_overlaps_a_delivery_nor_holds_it_up(self, tmp_path: Path) -> None:
        engine = OwnPolled()
        with Publisher([engine], tmp_path, poll_interval=timedelta(milliseconds=1)) as publisher:
            for version in range(1, 51):
                publisher.publish(version, adapter(version)).result(SOON)
            engine.is_hanging, asked = True, engine.num_asked
            until(lambda: engine.num_asked > asked and engine.num_inside == 1)
            report = publisher.publish(51, adapter(51)).result(SOON)
            assert engine.num_asked > 1
            assert engine.most_inside == 1
            assert report.engines[0].seconds < 1

    @pytest.mark.parametrize("error", [ValueError("own"), SystemExit(3)])
    def test_what_it_raises_when_it_is_asked_is_shown_and_harms_nobody(
        self, tmp_path: Path, error: BaseException
    ) -> None:
        class Failing(OwnPolled):
            async def served_version(self, _connection: EngineConnection, _newest: Delivery) -> Any:
                raise error

        failing, good = Failing("http://failing"), OwnPolled("http://good")
        with Publisher([failing, good], tmp_path, poll_interval=OFTEN) as publisher:
            publisher.publish(1, adapter(1)).result(SOON)
            until(lambda: type(error).__name__ in state_of(publisher, failing.url).error)
            good.version = None
            until(lambda: good.version == 1)
            assert publisher.publish(2, adapter(2)).result(SOON).verdict == "good"

    def test_an_answer_that_is_no_version_is_shown(self, tmp_path: Path) -> None:
        with Publisher([engine := OwnPolled()], tmp_path, poll_interval=OFTEN) as publisher:
            publisher.publish(1, adapter(1)).result(SOON)
            engine.version = "1"  # type: ignore[assignment]
            until(lambda: "or None from served_version, got str" in state_of(publisher, engine.url).error)
            assert engine.delivered == [1]

    def test_one_that_has_a_newer_version_from_elsewhere_keeps_it(self, tmp_path: Path) -> None:
        with Publisher([engine := OwnPolled()], tmp_path, poll_interval=OFTEN) as publisher:
            publisher.publish(1, adapter(1)).result(SOON)
            engine.version, asked = 9, engine.num_asked
            until(lambda: engine.num_asked >= asked + NUM_POLLS)
            assert engine.delivered == [1]

    def test_a_publisher_that_was_dropped_asks_no_more(self, tmp_path: Path) -> None:
        engine = OwnPolled()
        publisher = Publisher([engine], tmp_path, poll_interval=OFTEN)
        publisher.publish(1, adapter(1)).result(SOON)
        notifier, exporter, claim = publisher._notifier, publisher._resources, publisher._claim
        assert notifier is not None
        assert exporter is not None
        del publisher
        gc.collect()
        with Publisher([other := OwnPolled()], tmp_path / "other", poll_interval=OFTEN) as second:
            second.publish(1, adapter(1)).result(SOON)
            # One that had been asked when the publisher was dropped has answered by then.
            for version in (engine.version, None):
                engine.version, asked = version, other.num_asked
                until(lambda asked=asked: other.num_asked >= asked + NUM_POLLS)  # type: ignore[misc]
        assert engine.delivered == [1]
        notifier.close()
        exporter.stager.close()
        claim.release()


class TestAdded:
    def test_one_gets_the_newest_version_at_once_and_counts_from_the_next(self, tmp_path: Path) -> None:
        first, second = VLLMStandIn(load_s=1.0), VLLMStandIn()
        with serving(first, second), Publisher([VLLMEngine(first.url)], tmp_path) as publisher:
            handle = publisher.publish(1, adapter(1))
            publisher.add_engine(VLLMEngine(second.url))
            until(lambda: list(second.adapters.values()) == [str(tmp_path / "version-1")])
            assert [each.url for each in handle.report(SOON).engines] == [first.url]
            first.load_s, second.refusal = 0.0, (500, "text/plain", "no")
            with pytest.raises(PublishError, match=f"{second.url}: refused"):
                publisher.publish(2, adapter(2)).result(SOON)

    def test_one_gets_what_an_earlier_run_published_before_the_first_publish(self, tmp_path: Path) -> None:
        with Publisher([], tmp_path) as publisher:
            publisher.publish(7, adapter(7)).result(SOON)
        with serving(server := VLLMStandIn()), Publisher([], tmp_path) as publisher:
            publisher.add_engine(VLLMEngine(server.url))
            until(lambda: list(server.adapters.values()) == [str(tmp_path / "version-7")])

    def test_what_is_no_new_engine_or_no_engine_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="engines with different URLs, got two with http://host"):
            Publisher([VLLMEngine("http://host"), VLLMEngine("http://host")], tmp_path)
        publisher = Publisher([VLLMEngine("http://host")], tmp_path)
        with pytest.raises(ConfigurationError, match="engines with different URLs, got two with http://host"):
            publisher.add_engine(VLLMEngine("http://host/"))
        with pytest.raises(ConfigurationError, match="expected engines with url, headers and deliver, got 5"):
            publisher.add_engine(5)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=r"one of \['http://host'\], got 'http://other'"):
            publisher.remove_engine("http://other")
        publisher.close()
        with pytest.raises(PublishError, match="this one is closed"):
            publisher.add_engine(VLLMEngine("http://other"))
        with pytest.raises(PublishError, match="this one is closed"):
            publisher.remove_engine("http://host")
        assert [each.url for each in publisher.engines()] == ["http://host"]

    def test_closing_waits_for_it(self, tmp_path: Path) -> None:
        with serving(server := VLLMStandIn(load_s=0.5)):
            with Publisher([], tmp_path) as publisher:
                publisher.publish(1, adapter(1)).result(SOON)
                publisher.add_engine(VLLMEngine(server.url))
            assert list(server.adapters.values()) == [str(tmp_path / "version-1")]


class TestRemoved:
    def test_a_publish_under_way_does_not_wait_for_it(self, tmp_path: Path) -> None:
        good, hanging = VLLMStandIn(), VLLMStandIn(is_hanging=True)
        with publishing(tmp_path, good, hanging) as publisher:
            handle = publisher.publish(1, adapter(1))
            until(lambda: num_loads(hanging) == 1)
            publisher.remove_engine(f"{hanging.url}/")
            report = handle.result(SOON)
            assert [(each.outcome, each.is_counted) for each in report.engines] == [
                ("confirmed", True),
                ("removed", False),
            ]
            assert (report.verdict, report.failed()) == ("good", ())
            assert [each.url for each in publisher.engines()] == [good.url]
            assert [each.url for each in publisher.publish(2, adapter(2)).report(SOON).engines] == [good.url]

    def test_no_version_is_kept_for_it(self, tmp_path: Path) -> None:
        good, stuck = VLLMStandIn(), VLLMStandIn()
        with publishing(tmp_path, good, stuck, policy="best_effort") as publisher:
            publisher.publish(1, adapter(1)).report(SOON)
            stuck.refusal = (500, "text/plain", "no")
            for version in (2, 3, 4):
                publisher.publish(version, adapter(version)).report(SOON)
            assert len(list(tmp_path.glob("version-*"))) == 4
            publisher.remove_engine(stuck.url)
            until(lambda: {path.name for path in tmp_path.glob("version-*")} == {"version-3", "version-4"})

    def test_one_that_is_paused_is_resumed_where_that_is_safe(self, tmp_path: Path) -> None:
        safe, half = SGLangStandIn(is_hanging=True), VLLMStandIn(is_hanging=True)
        with publishing(tmp_path, safe, half) as publisher:
            handle = publisher.publish(1, {"weight": torch.ones(3)})
            until(lambda: safe.is_paused and half.is_half_replaced)
            for each in (safe, half):
                publisher.remove_engine(each.url)
            assert [each.outcome for each in handle.result(SOON).engines] == ["removed", "removed"]
            until(lambda: not safe.is_paused)
            assert (half.is_paused, half.is_dead) == (True, False)
            # Added again, it is mended by what arrives whole.
            half.is_hanging = False
            publisher.add_engine(VLLMEngine(half.url))
            until(lambda: half.weight_version == "1" and not half.is_paused)
            assert (half.is_mixed, half.is_dead) == (False, False)

    def test_one_that_is_added_again_is_not_resumed_in_the_middle_of_an_update(self, tmp_path: Path) -> None:
        class Busy(SGLangStandIn):
            """It cannot be resumed for a while."""

            is_resumable = False

            async def _continue(self, request: web.Request) -> web.Response:
                if not self.is_resumable:
                    return web.json_response({"error": "busy"}, status=503)
                return await super()._continue(request)

        server = Busy(is_hanging=True)
        with publishing(tmp_path, server) as publisher:
            publisher.publish(1, {"weight": torch.ones(3)})
            until(lambda: "POST /update_weights_from_disk" in server.routes)
            publisher.remove_engine(server.url)
            publisher.add_engine(SGLangEngine(server.url))
            until(lambda: "POST /continue_generation" in server.routes)
            server.is_hanging, server.is_resumable = False, True
            until(lambda: server.routes.count("POST /pause_generation") == 2)
            until(lambda: server.weight_version == "1" and not server.is_paused)
            _, begun = (place for place, route in enumerate(server.routes) if route == "POST /pause_generation")
            assert "POST /continue_generation" in server.routes[:begun]
            assert server.routes[begun + 1 :][:2] == ["GET /server_info", "POST /update_weights_from_disk"]

    def test_any_thread_may_add_and_remove_while_versions_are_published(self, tmp_path: Path) -> None:
        steady, *others = (VLLMStandIn() for _ in range(5))
        with publishing(tmp_path, steady) as publisher, serving(*others):
            is_done = threading.Event()

            def come_and_go(stand_in: StandIn) -> int:
                times = 0
                # At another moment of a publish each time.
                while not is_done.wait(times % 10 / 500):
                    publisher.add_engine(engine_of(stand_in))
                    publisher.remove_engine(stand_in.url)
                    times += 1
                publisher.add_engine(engine_of(stand_in))
                return times

            def publish() -> int:
                try:
                    for version in range(1, 31):
                        report = publisher.publish(version, adapter(version)).result(SOON)
                        assert report.engines[0].outcome == "confirmed"
                finally:
                    is_done.set()
                return 1

            assert all(run_ranks(publish, *(lambda each=each: come_and_go(each) for each in others)))
            newest = [str(tmp_path / "version-30")]
            until(lambda: all(list(each.adapters.values()) == newest for each in (steady, *others)))
            until(lambda: all(each.outcome == "confirmed" for each in publisher.engines()))
            assert len(publisher.engines()) == 5


def test_ranks_other_than_the_first_may_call_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankGroup, "of", staticmethod(lambda group: group))
    groups: list[Any] = groups_of(2)
    with serving(server := VLLMStandIn()):

        def rank(group: Any) -> tuple[list[str], list[str]]:
            with Publisher([], tmp_path, group) as publisher:
                publisher.add_engine(VLLMEngine(server.url))
                report = publisher.publish(1, adapter(1)).result(SOON)
                shown = [each.url for each in publisher.engines()]
                publisher.remove_engine(server.url)
                return [each.outcome for each in report.engines], shown

        first, second = run_ranks(*(lambda group=group: rank(group) for group in groups))
    assert first == (["confirmed"], [server.url])
    assert second == (["confirmed"], [])


def test_asking_engines_keeps_no_process_from_ending(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys, threading, torch\n"
        "from datetime import timedelta\n"
        "from ft_transport import LoRAAdapter, Publisher\n"
        "asked = threading.Event()\n"
        "class Own:\n"
        "    url, headers = 'http://own', {}\n"
        "    async def deliver(self, connection, delivery):\n"
        "        return delivery.version\n"
        "    async def served_version(self, connection, newest):\n"
        "        asked.set()\n"
        "        await asyncio.sleep(100)\n"
        "        return newest.version\n"
        "publisher = Publisher([Own()], sys.argv[1], poll_interval=timedelta(milliseconds=1))\n"
        "config = {'r': 1, 'lora_alpha': 1, 'target_modules': ['a']}\n"
        "publisher.publish(1, LoRAAdapter({'a.lora_A.weight': torch.ones(1, 3)}, config)).result()\n"
        "assert asked.wait(10)\n"
        "import time; print(time.monotonic(), flush=True)\n"
    )
    ended = run([sys.executable, "-c", script, str(tmp_path)], ends_as_interpreter=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert time.monotonic() - float(ended.stdout) < 5


class _ClosingServer(socketserver.BaseRequestHandler):
    """Answers the first request of a connection, and ends the connection at the second. /init is answered with 500."""

    def handle(self) -> None:
        received = b""
        while not received.endswith(b"\r\n\r\n{}"):
            received += self.request.recv(1 << 16)
        status = b"500 Internal Server Error" if b"/init" in received else b"200 OK"
        self.request.sendall(b"HTTP/1.1 " + status + b"\r\nContent-Length: 2\r\n\r\n{}")
        self.request.recv(1)


@dataclass(frozen=True)
class _AskingTwice:
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)

    async def deliver(self, connection: EngineConnection, delivery: Delivery) -> int:
        with pytest.raises(EngineRefusedError, match="500"):
            await connection.post("/init", {})
        await connection.post("/finish", {})
        return delivery.version


def test_a_request_after_an_error_of_the_engine_has_a_connection_of_its_own(tmp_path: Path) -> None:
    """uvicorn closes a connection after an error of its own, without a header that says so."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _ClosingServer) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        engine = _AskingTwice(f"http://127.0.0.1:{server.server_address[1]}")
        try:
            with Publisher([engine], tmp_path, engine_timeout=timedelta(seconds=1), poll_interval=None) as publisher:
                publisher.publish(1, adapter(1)).result(SOON)
        finally:
            server.shutdown()
            thread.join()
