"""Servers whose workers fetch what is published, with stand-ins for vLLM; ``tests/engines`` has the real one."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_workers
from engine_servers import serving
from vllm_workers import MODULE, PullingStandIn, Workers, backend_module

from ft_transport import HTTPTransport, Publisher, PublishError, TransportSettings, VLLMEngine
from ft_transport.credentials import Keys
from ft_transport.errors import PeerUnreachableError
from ft_transport.publish import shared_weights
from ft_transport.publish.engines.pulling import Order

SOON = timedelta(seconds=60)
Weights = dict[str, torch.Tensor]


def weights_of(version: int) -> Weights:
    chance = torch.Generator().manual_seed(version)
    names = ["embed.weight", *(f"layers.{at}.{part}.weight" for at in range(3) for part in "qkv"), "head.weight"]
    return {name: torch.randn(100, 100, generator=chance) for name in names}


def fetched_by(backend: Any) -> Any:
    """Return the weights that a worker itself fetches, as the first one on a host does."""
    return backend._fetched._received


def same(model: Mapping[str, torch.Tensor] | None, weights: Weights) -> bool:
    assert model is not None
    return model.keys() == weights.keys() and all(torch.equal(model[name], weights[name]) for name in weights)


@contextmanager
def serving_workers(root: Path, num_workers: int = 2) -> Iterator[tuple[Publisher, PullingStandIn, Workers]]:
    """A publisher and the server that it updates."""
    with ExitStack() as stack:
        module = stack.enter_context(backend_module(num_workers))
        workers = Workers(module, weights_of(0), num_workers)
        stack.callback(workers.shutdown)
        server = PullingStandIn(workers=workers)
        stack.enter_context(serving(server))
        transport: HTTPTransport[Any] = HTTPTransport(
            settings=TransportSettings(host="127.0.0.1", advertise="127.0.0.1")
        )
        stack.callback(transport.shutdown)
        engine = VLLMEngine(server.url, pulls=True)
        publisher = stack.enter_context(Publisher([engine], root, transport=transport, poll_interval=None))
        yield publisher, server, workers


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_each_version_is_in_all_workers_when_it_is_confirmed(tmp_path: Path, num_workers: int) -> None:
    with serving_workers(tmp_path, num_workers) as (publisher, server, workers):
        for version in (1, 2, 5):
            publisher.publish(version, weights_of(version)).result(SOON)
            assert server.weight_version == str(version)
            assert all(same(model.weights, weights_of(version)) for model in workers.models)
            assert not server.is_paused
    routes = [route for route in server.routes if "GET" not in route]
    update = ["/init_weight_transfer_engine", "/pause", "/start_weight_update", "/update_weights"]
    update += ["/finish_weight_update", "/init_weight_transfer_engine", "/reset_prefix_cache"]
    update += ["/update_weight_version", "/resume"]
    assert routes == [f"POST {route}" for route in update] * 3


@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 1, 2)])
def test_one_worker_on_each_host_fetches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: tuple[int, ...]
) -> None:
    """A worker cannot open what belongs to another host."""
    host_of: dict[str, int] = {}
    path_of, contains = shared_weights._path_of, shared_weights._contains

    def own_path(descriptor: int) -> str:
        path = path_of(descriptor)
        host_of[path] = hosts[vllm_workers._here.rank]
        return path

    def can_open(path: str, token: str) -> bool:
        return host_of[path] == hosts[vllm_workers._here.rank] and contains(path, token)

    monkeypatch.setattr(shared_weights, "_path_of", own_path)
    monkeypatch.setattr(shared_weights, "_contains", can_open)
    weights = {name: tensor.bfloat16() for name, tensor in weights_of(1).items()}
    weights |= {"norm.weight": torch.ones(7), "bias": torch.zeros(0, 3), "steps": torch.tensor(5)}
    with serving_workers(tmp_path, len(hosts)) as (publisher, _server, workers):
        for model in workers.models:
            model._stored = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
        for version in (1, 2, 3):
            weights["norm.weight"][2] += 1
            weights["head.weight"][5] += 1
            publisher.publish(version, weights).result(SOON)
            assert all(same(model.weights, weights) for model in workers.models)
        versions = [fetched_by(backend).version for backend in workers.backends]
        assert versions == [3 if host not in hosts[:rank] else None for rank, host in enumerate(hosts)]


def test_a_loader_that_changes_its_tensors_changes_those_of_no_other_worker(tmp_path: Path) -> None:
    """As that of vLLM's plamo2 does."""
    weights = {"norm.weight": torch.zeros(8192), "small.norm.weight": torch.zeros(64)}
    with serving_workers(tmp_path, 3) as (publisher, _server, workers):
        for model in workers.models:
            model._stored = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
            model.increment = 1.0
        for version in (1, 2, 3):
            publisher.publish(version, weights).result(SOON)
            expected = {name: tensor + 1 for name, tensor in weights.items()}
            assert all(same(model.weights, expected) for model in workers.models)
            weights["norm.weight"][version] += 1
        assert fetched_by(workers.backends[0]).num_bytes_fetched < 2000


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_without_descriptors_reads_anothers_memory_and_one_that_fails_leaves_no_other_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    memfd_create = os.memfd_create

    def refusing(name: str, *flags: int) -> int:
        if name == shared_weights._NAME and vllm_workers._here.rank == rank:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return memfd_create(name, *flags)

    with serving_workers(tmp_path) as (publisher, _server, workers):
        monkeypatch.setattr(os, "memfd_create", refusing)
        publisher.publish(1, weights_of(1)).result(SOON)
        assert fetched_by(workers.backends[rank]).version is None
        monkeypatch.setattr(os, "memfd_create", memfd_create)
        new_weights = workers.backends[rank]._new_weights
        workers.backends[rank]._fetched = None
        workers.backends[rank]._new_weights = None
        with pytest.raises(PublishError, match="engine_failed"):
            publisher.publish(2, weights_of(2)).result(SOON)
        workers.backends[rank]._new_weights = new_weights
        for backend in workers.backends:
            backend.shutdown()
        publisher.publish(3, weights_of(3)).result(SOON)
        assert all(same(model.weights, weights_of(3)) for model in workers.models)


def test_a_version_of_a_plain_transport_may_have_any_layout(tmp_path: Path) -> None:
    weights = {"transposed": torch.randn(200, 300).t(), "plain": torch.randn(100, 100), "small": torch.randn(3, 4).t()}
    with serving_workers(tmp_path) as (_publisher, _server, workers):
        for model in workers.models:
            model._stored = {name: torch.empty(tensor.shape) for name, tensor in weights.items()}
        settings = TransportSettings(host="127.0.0.1", advertise="127.0.0.1")
        transport: HTTPTransport[Any] = HTTPTransport(settings=settings)
        try:
            transport.send_checkpoint([], 1, {"weights": weights}, SOON)
            workers.call("init", {"version": 1, **Order(version=1, address=transport.metadata()).body(None)})
            workers.call("start")
            workers.call("update", {"version": 1})
            workers.call("finish")
            workers.call("init", {"version": 1})
        finally:
            transport.shutdown()
        assert all(same(model.weights, weights) for model in workers.models)


def test_a_small_change_costs_a_small_fetch(tmp_path: Path) -> None:
    weights = weights_of(1)
    with serving_workers(tmp_path) as (publisher, _server, workers):
        publisher.publish(1, weights).result(SOON)
        weights["layers.1.k.weight"][5, 5] += 1
        publisher.publish(2, weights).result(SOON)
        publisher.publish(3, weights).result(SOON)
        for model, backend in zip(workers.models, workers.backends, strict=True):
            assert same(model.weights, weights)
            assert model.loads == [list(weights)] * 3
            assert fetched_by(backend).num_bytes_fetched < 2000
            # Another process, or vLLM's sleep, replaces weights without a call of the backend.
            model.weights["layers.0.q.weight"].zero_()
        del weights["embed.weight"]
        weights["head.weight"][0] += 1
        publisher.publish(4, weights, missing_ok=True).result(SOON)
        for model in workers.models:
            assert model.weights is not None
            assert same({name: model.weights[name] for name in weights}, weights)


def test_a_source_that_is_gone_leaves_the_version_before_and_the_server_is_never_paused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving_workers(tmp_path) as (publisher, server, workers):
        publisher.publish(1, weights_of(1)).result(SOON)
        received = fetched_by(workers.backends[0])
        fetch = received.fetch

        def failing(*_: object) -> None:
            raise PeerUnreachableError("expected\nan answer", peer="http://127.0.0.1:9")

        received.fetch = failing
        server.routes.clear()
        with pytest.raises(PublishError, match=r"cannot reach the publisher's transport \(source_unreachable\)"):
            publisher.publish(2, weights_of(2)).result(SOON)
        assert "POST /pause" not in server.routes
        assert server.weight_version == "1"
        assert all(same(model.weights, weights_of(1)) for model in workers.models)
        assert r"version 2 could not be received: PeerUnreachableError: expected\nan answer" in caplog.text
        received.fetch = fetch
        publisher.publish(3, weights_of(3)).result(SOON)
        assert all(same(model.weights, weights_of(3)) for model in workers.models)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_in_one_worker_leaves_it_paused_and_the_next_is_whole(
    tmp_path: Path, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    with serving_workers(tmp_path) as (publisher, server, workers):
        publisher.publish(1, weights_of(1)).result(SOON)
        workers.models[rank].failure = KeyError("of\na \x1b[31mtensor")
        with pytest.raises(PublishError, match=r"\(not_loaded\).*stays paused"):
            publisher.publish(2, weights_of(2)).result(SOON)
        assert server.is_paused
        assert server.weight_version == "1"
        assert all(model.weights is not None for model in workers.models), "parameters have no memory"
        assert re.search(r"version 2 could not be loaded: KeyError: .*of\\+na", caplog.text)
        assert "\x1b" not in caplog.text
        publisher.publish(3, weights_of(2)).result(SOON)
        assert all(same(model.weights, weights_of(2)) for model in workers.models)
        assert not server.is_paused


def test_an_update_that_another_trainer_has_begun_is_ended_first(tmp_path: Path) -> None:
    with serving_workers(tmp_path) as (publisher, server, workers):
        publisher.publish(1, weights_of(1)).result(SOON)
        server.is_paused = True
        workers.call("start")
        publisher.publish(2, weights_of(2)).result(SOON)
        assert all(same(model.weights, weights_of(2)) for model in workers.models)
        assert not server.is_paused


def test_a_version_that_cannot_be_fetched_leaves_a_paused_server_paused_and_the_report_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving_workers(tmp_path) as (publisher, server, _workers):
        server.is_paused = True
        monkeypatch.setattr(sys.modules[MODULE], "_TIMEOUT", timedelta(0))
        with pytest.raises(PublishError, match=r"\(too_slow\).*stays paused"):
            publisher.publish(1, weights_of(1)).result(SOON)
        assert server.is_paused


def test_with_a_token_only_its_publishers_are_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_TRANSPORT_TOKEN", "secret-of-the-job")
    with serving_workers(tmp_path) as (publisher, _server, workers):
        publisher.publish(1, weights_of(1)).result(SOON)
        assert all(same(model.weights, weights_of(1)) for model in workers.models)
        order = Order(version=1, address="http://127.0.0.1:9/checkpoint/")
        for keys in (None, Keys.of("another-secret-of-a-job")):
            with pytest.raises(RuntimeError, match="unproved"):
                workers.call("init", {"version": 1, **order.body(keys)})
        with pytest.raises(RuntimeError, match="engine_failed"):
            workers.call("init", {"version": 1, "address": "http://\ud800", "signature": "0:0"})
        publisher.publish(2, weights_of(2)).result(SOON)


def test_a_version_is_fetched_again_after_a_shutdown_of_the_backend(tmp_path: Path) -> None:
    with serving_workers(tmp_path) as (publisher, _server, workers):
        publisher.publish(1, weights_of(1)).result(SOON)
        for backend in workers.backends:
            backend.shutdown()
            assert backend._fetched is None
        publisher.publish(2, weights_of(1)).result(SOON)
        assert [len(model.loads) for model in workers.models] == [2, 2]
        assert all(same(model.weights, weights_of(1)) for model in workers.models)


def test_a_publisher_without_a_transport_is_refused(tmp_path: Path) -> None:
    with backend_module(1) as module:
        server = PullingStandIn(workers=Workers(module, weights_of(0)))
        with (
            serving(server),
            Publisher([VLLMEngine(server.url, pulls=True)], tmp_path) as publisher,
            pytest.raises(PublishError, match="pass a transport to Publisher"),
        ):
            publisher.publish(1, weights_of(1)).result(SOON)
        assert not server.is_paused
