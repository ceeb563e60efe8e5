"""A real vLLM whose workers fetch what is published, over HTTP and without a disk in common, and requests in flight."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import dying_publisher
import pytest
import torch
from programs import run
from proxy import Fault, Proxy, corrupt, cut, proxied
from safetensors.torch import save_file
from served_memory import until
from vllm_server import MARKS, Load, TinyLlama, VLLMServer, vllm_server

from ft_transport import (
    Delivery,
    EngineConnection,
    EngineState,
    HTTPTransport,
    Publisher,
    PublishError,
    TransportSettings,
    VLLMEngine,
)

_BACKEND = ("--weight-transfer-config", '{"backend": "ft_transport"}')
_NUM_VERSIONS = 50
_PROGRAM_S = 60.0

pytestmark = MARKS


@dataclass(frozen=True, slots=True)
class Proxied(VLLMEngine):
    """An engine whose workers reach the publisher's transport through a proxy."""

    proxy_url: str = ""
    pulls: bool = True

    async def deliver(self, connection: EngineConnection, delivery: Delivery) -> int:
        async def address() -> str:
            await delivery.source(self.url)
            return self.proxy_url

        return await VLLMEngine.deliver(self, connection, replace(delivery, address=address))


@pytest.fixture(scope="module")
def server(model: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    with vllm_server(model, tmp_path_factory.mktemp("vllm") / "log", *_BACKEND) as server:
        yield server


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    """A model whose output matrix is the embedding."""
    return TinyLlama(tmp_path_factory.mktemp("tied"), tie=True)


@contextmanager
def publishing(root: Path, *urls: str, poll_interval: timedelta | None = None) -> Iterator[tuple[Publisher, Proxy]]:
    """A publisher to engines that fetch through a proxy, which counts the bytes."""
    settings = TransportSettings(host="127.0.0.1", advertise="127.0.0.1", same_host=False)
    transport: HTTPTransport[Any] = HTTPTransport(settings=settings)
    try:
        with (
            proxied(urlsplit(transport.metadata()).port or 0) as proxy,
            Publisher(
                [Proxied(url, proxy_url=proxy.url) for url in urls],
                root,
                transport=transport,
                poll_interval=poll_interval,
            ) as publisher,
        ):
            yield publisher, proxy
    finally:
        transport.shutdown()


def num_bytes(weights: dict[str, torch.Tensor]) -> int:
    return sum(each.nbytes for each in weights.values())


def test_one_that_joins_later_and_one_that_is_started_again_get_the_newest(tied: TinyLlama, tmp_path: Path) -> None:
    with publishing(tmp_path / "versions", poll_interval=timedelta(seconds=1)) as (publisher, proxy):
        for version in (1, 2):
            publisher.publish(version, tied.weights(version)).result()
        with vllm_server(tied, tmp_path / "first", *_BACKEND) as server:
            publisher.add_engine(Proxied(server.url, proxy_url=proxy.url))
            until(lambda: publisher.engines()[0].version == 2, 60)
            assert server.answers("base") == tied.expected(is_adapted=False)
            publisher.publish(3, tied.step(3)).result()
            assert server.answers("base") == tied.expected(is_adapted=False)
            server.kill()
            until(lambda: publisher.engines()[0].error != "")
            with vllm_server(tied, tmp_path / "second", *_BACKEND, port=server.port) as again:
                confirmed = EngineState(url=server.url, version=3, is_counted=True, outcome="confirmed")
                until(lambda: publisher.engines() == (confirmed,), 60)
                assert again.ask("/is_paused") == {"is_paused": False}
                assert again.answers("base") == tied.expected(is_adapted=False)
                publisher.publish(4, tied.step(4)).result()
                assert again.answers("base") == tied.expected(is_adapted=False)


def test_two_workers_have_the_same_version_whatever_fails(model: TinyLlama, tmp_path: Path) -> None:
    """vLLM takes the responses of workers that come after an error for those to its next call."""
    options = (*_BACKEND, "--tensor-parallel-size", "2")
    with (
        vllm_server(model, tmp_path / "log", *options) as server,
        publishing(tmp_path / "versions", server.url) as (publisher, proxy),
    ):
        version = 0
        for fails in ("", "fetch", "load", "session", ""):
            version += 1
            proxy.num_bytes = 0
            weights = model.weights(version)
            publisher.publish(version, weights, missing_ok=True).result()
            assert server.answers("base") == model.expected(is_adapted=False), fails
            assert proxy.num_bytes < 1.5 * num_bytes(weights), "both workers have fetched"
            version += 1
            if fails == "fetch":
                proxy.inject(corrupt(700_000), times=1000)
                with pytest.raises(PublishError, match="source_failed"):
                    publisher.publish(version, model.weights(version)).result()
                proxy._orders.clear()
            elif fails == "load":
                with pytest.raises(PublishError, match="not_loaded"):
                    publisher.publish(version, {**model.weights(version), "unknown": torch.zeros(3)}).result()
            elif fails == "session":
                server.ask("/pause?mode=keep", {})
                server.ask("/start_weight_update", {})
            publisher.publish(version + 1, model.step(version + 1), missing_ok=True).result()
            version += 1
            assert server.answers("base") == model.expected(is_adapted=False), fails
            assert server.ask("/is_paused") == {"is_paused": False}


def test_weights_under_load(model: TinyLlama, server: VLLMServer, tmp_path: Path) -> None:
    """Whole versions and deltas in turn."""
    before: list[list[int]] = []
    with Load(server, "base") as load, publishing(tmp_path, server.url) as (publisher, proxy):
        for version in range(1, _NUM_VERSIONS + 1):
            is_small = version % 2 == 0
            weights = model.step(version) if is_small else model.weights(version)
            proxy.num_bytes = 0
            publisher.publish(version, weights).result()
            assert server.ask("/weight_info") == {"weight_version": str(version)}
            answers = server.answers("base")
            assert answers == model.expected(is_adapted=False), version
            assert answers != before, version
            before = answers
            assert proxy.num_bytes < 0.06 * num_bytes(weights) if is_small else proxy.num_bytes >= num_bytes(weights)
    assert not load.failures
    assert load.num_done
    assert server.is_alive()


def test_a_delta_is_right_after_another_publisher_has_replaced_the_weights(
    model: TinyLlama, server: VLLMServer, tmp_path: Path
) -> None:
    with publishing(tmp_path / "pulled", server.url) as (publisher, proxy):
        publisher.publish(1, model.weights(1)).result()
        with Publisher([VLLMEngine(server.url)], tmp_path / "reloaded") as other:
            other.publish(7, model.weights(7)).result()
        assert server.answers("base") == model.expected(is_adapted=False)
        model.weights(1)
        proxy.num_bytes = 0
        weights = model.step(2)
        publisher.publish(2, weights).result()
        assert proxy.num_bytes < 0.06 * num_bytes(weights)
        assert server.answers("base") == model.expected(is_adapted=False)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_new_trainer_takes_over_wherever_the_one_before_was_killed(
    model: TinyLlama, server: VLLMServer, tmp_path: Path, moment: str
) -> None:
    """With 9 at every request of an update; the server is paused then, in a session or not."""
    routes: list[str] = []
    version = 0
    while True:
        version += 1
        weights = tmp_path / "weights.safetensors"
        save_file(model.weights(version), weights)
        arguments = [str(tmp_path / "versions"), server.url, str(version), moment, str(len(routes) + 1), str(weights)]
        killed = run([sys.executable, dying_publisher.__file__, *arguments, "pull"], timeout=_PROGRAM_S)
        routes = killed.stdout.split()
        if killed.returncode == 0:
            break
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        version += 1
        with publishing(tmp_path / "versions", server.url) as (publisher, _):
            publisher.publish(version, model.step(version)).result()
        assert server.ask("/is_paused") == {"is_paused": False}
        assert server.answers("base") == model.expected(is_adapted=False), routes
    sessions = {"/start_weight_update", "/update_weights", "/finish_weight_update"}
    assert {"/init_weight_transfer_engine", "/pause", *sessions, "/update_weight_version", "/resume"} <= set(routes)


@pytest.mark.parametrize("fault", [corrupt, cut, partial(cut, reset=True)], ids=["lies", "ends", "resets"])
@pytest.mark.parametrize("is_small", [True, False], ids=["delta", "whole"])
def test_a_source_that_lies_or_disappears_leaves_the_version_before_in_service(
    model: TinyLlama, server: VLLMServer, tmp_path: Path, fault: Callable[[int], Fault], is_small: bool
) -> None:
    with Load(server, "base") as load, publishing(tmp_path, server.url) as (publisher, proxy):
        publisher.publish(1, model.weights(1)).result()
        expected = model.expected(is_adapted=False)
        # The delta, and the chunk that is fetched in its place.
        proxy.inject(fault(3000), on="/delta", times=1000)
        proxy.inject(fault(700_000), times=1000)
        handle = publisher.publish(2, model.step(2) if is_small else model.weights(2))
        with pytest.raises(PublishError, match=r"\(source_(failed|unreachable)\)") as caught:
            handle.result()
        assert "paused" not in str(caught.value)
        assert proxy.num_faulty > is_small
        assert server.ask("/weight_info") == {"weight_version": "1"}
        assert server.ask("/is_paused") == {"is_paused": False}
        assert server.answers("base") == expected
        proxy._orders.clear()
        publisher.publish(3, model.step(3)).result()
        assert server.answers("base") == model.expected(is_adapted=False)
    assert not load.failures


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param("model.layers.0.mlp.down_proj.weight", (3, 5), id="of another shape"),
        pytest.param("model.layers.0.self_attn.l_proj.weight", (3, 5), id="unknown"),
    ],
)
def test_a_version_that_vllm_cannot_load_leaves_it_paused_and_the_next_is_whole(
    model: TinyLlama, server: VLLMServer, tmp_path: Path, name: str, shape: tuple[int, int]
) -> None:
    """With vLLM's own reload from disk, it would have to be restarted."""
    with publishing(tmp_path, server.url) as (publisher, _):
        handle = publisher.publish(1, {**model.weights(1), name: torch.zeros(shape)})
        with pytest.raises(PublishError, match=r"\(not_loaded\).*stays paused"):
            handle.result()
        assert server.ask("/is_paused") == {"is_paused": True}
        publisher.publish(2, model.weights(2), missing_ok=True).result()
        assert server.ask("/is_paused") == {"is_paused": False}
        assert server.answers("base") == model.expected(is_adapted=False)
