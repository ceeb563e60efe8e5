"""Publishing to SkyRL's own server, on a real vLLM that is busy."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_server import MARKS, Load, TinyLlama, VLLMServer, vllm_server

from ft_transport import HTTPTransport, Publisher, SkyRLEngine, TransportSettings

_NUM_VERSIONS = 20
# Not imported: it would import vLLM's server here.
_PROGRAM = importlib.util.find_spec("skyrl_server")

pytestmark = MARKS


@pytest.fixture(scope="module")
def server(model: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    assert _PROGRAM is not None
    assert _PROGRAM.origin is not None
    log = tmp_path_factory.mktemp("skyrl") / "log"
    # SkyRL chooses vLLM's worker for GPUs.
    options = ("--enable-lora", "--max-lora-rank", "8", "--worker-cls", "vllm.v1.worker.cpu_worker.CPUWorker")
    backend = ("--weight-transfer-config", '{"backend": "ft_transport"}')
    with vllm_server(model, log, *options, *backend, program=[_PROGRAM.origin]) as server:
        yield server


def test_adapters_under_load(model: TinyLlama, server: VLLMServer, tmp_path: Path) -> None:
    with Load(server, "base") as load, Publisher([SkyRLEngine(server.url)], tmp_path) as publisher:
        for version in range(1, _NUM_VERSIONS + 1):
            publisher.publish(version, model.adapter(version)).result()
            load.ask_for("skyrl-lora")
            assert server.answers("skyrl-lora") == model.expected(is_adapted=True), version
    assert not load.failures
    assert load.num_done
    assert server.is_alive()


def test_weights_under_load(model: TinyLlama, server: VLLMServer, tmp_path: Path) -> None:
    with Load(server, "base") as load, Publisher([SkyRLEngine(server.url)], tmp_path) as publisher:
        for version in range(1, _NUM_VERSIONS + 1):
            publisher.publish(version, model.weights(version)).result()
            assert server.answers("base") == model.expected(is_adapted=False), version
    assert not load.failures
    assert load.num_done
    assert server.is_alive()


def test_pulled_weights_under_load(model: TinyLlama, server: VLLMServer, tmp_path: Path) -> None:
    """Whole versions and deltas in turn."""
    transport: HTTPTransport[Any] = HTTPTransport(settings=TransportSettings(host="127.0.0.1", advertise="127.0.0.1"))
    engine = SkyRLEngine(server.url, pulls=True)
    try:
        with Load(server, "base") as load, Publisher([engine], tmp_path, transport=transport) as publisher:
            for version in range(1, _NUM_VERSIONS + 1):
                weights = model.step(version) if version % 2 == 0 else model.weights(version)
                publisher.publish(version, weights).result()
                assert server.ask("/weight_info") == {"weight_version": str(version)}
                assert server.answers("base") == model.expected(is_adapted=False), version
    finally:
        transport.shutdown()
    assert not load.failures
    assert load.num_done
    assert server.is_alive()
