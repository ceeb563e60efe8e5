"""Publishing to a real vLLM that is busy: nothing fails that would not have, and each version is what it should be."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dying_publisher
import pytest
import torch
from programs import run
from safetensors.torch import save_file
from vllm_server import MARKS, Load, TinyLlama, VLLMServer, vllm_server

from ft_transport import LoRAAdapter, Publisher, PublishError, VLLMEngine

_NUM_VERSIONS = 50
_PROGRAM_S = 60.0

pytestmark = MARKS


@pytest.fixture(scope="module")
def server(model: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    lora = ("--enable-lora", "--max-loras", "1", "--max-cpu-loras", "1", "--max-lora-rank", "8")
    with vllm_server(model, tmp_path_factory.mktemp("vllm") / "log", *lora) as server:
        yield server


@pytest.mark.parametrize("lora_name", ["policy", "policy-{version}"])
def test_adapters_under_load(model: TinyLlama, server: VLLMServer, tmp_path: Path, lora_name: str) -> None:
    with Load(server, "base") as load, Publisher([VLLMEngine(server.url, lora_name)], tmp_path) as publisher:
        for version in range(1, _NUM_VERSIONS + 1):
            publisher.publish(version, model.adapter(version)).result()
            name = lora_name.replace("{version}", str(version))
            load.ask_for(name)
            assert server.answers(name) == model.expected(is_adapted=True), version
    assert not load.failures
    assert load.num_done
    assert server.is_alive()


def test_weights_under_load(model: TinyLlama, server: VLLMServer, tmp_path: Path) -> None:
    with Load(server, "base") as load, Publisher([VLLMEngine(server.url)], tmp_path) as publisher:
        for version in range(1, _NUM_VERSIONS + 1):
            publisher.publish(version, model.weights(version)).result()
            assert server.answers("base") == model.expected(is_adapted=False), version
    assert not load.failures
    assert load.num_done
    assert server.is_alive()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_new_trainer_publishes_wherever_the_one_before_was_killed(
    model: TinyLlama, server: VLLMServer, tmp_path: Path, moment: str
) -> None:
    """With 9 at every request of an update, the engine paused, half updated or not; then a whole version comes."""
    routes: list[str] = []
    version = 0
    while True:
        version += 1
        weights = tmp_path / "weights.safetensors"
        save_file(model.weights(version), weights)
        arguments = [str(tmp_path / "versions"), server.url, str(version), moment, str(len(routes) + 1), str(weights)]
        arguments.append("reload")
        killed = run([sys.executable, dying_publisher.__file__, *arguments], timeout=_PROGRAM_S)
        routes = killed.stdout.split()
        if killed.returncode == 0:
            break
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        version += 1
        with Publisher([VLLMEngine(server.url)], tmp_path / "versions") as publisher:
            publisher.publish(version, model.weights(version)).result()
        assert server.answers("base") == model.expected(is_adapted=False), routes
    assert {"/pause", "/collective_rpc", "/resume", "/weight_info"} <= set(routes)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param("model.layers.0.mlp.down_proj.weight", (3, 5), id="of another shape"),
        # In the midst of a layer, of which vLLM has read a part then.
        pytest.param("model.layers.0.self_attn.l_proj.weight", (3, 5), id="unknown"),
    ],
)
def test_an_engine_that_cannot_be_mended_stays_paused_and_the_report_says_to_restart_it(
    tmp_path: Path, name: str, shape: tuple[int, int]
) -> None:
    """vLLM 0.32 keeps of a refused update what it has read, and refuses those after it; it must answer nobody."""
    model = TinyLlama(tmp_path / "llama")
    with (
        vllm_server(model, tmp_path / "log") as server,
        Publisher([VLLMEngine(server.url)], tmp_path / "versions") as publisher,
    ):
        with pytest.raises(PublishError, match="stays paused"):
            publisher.publish(1, {**model.weights(1), name: torch.zeros(shape)}).result()
        with pytest.raises(PublishError, match="restart this engine"):
            publisher.publish(2, model.weights(2), missing_ok=True).result()
        assert server.ask("/is_paused") == {"is_paused": True}
        assert server.ask("/weight_info")["weight_version"] not in ("1", "2")
        assert server.is_alive()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_compiled_model_is_served_as_peft_has_it(model: TinyLlama, server: VLLMServer, tmp_path: Path) -> None:
    model.adapter(1)
    compiled: Any = torch.compile(model.adapted)
    with Publisher([VLLMEngine(server.url, "compiled")], tmp_path) as publisher:
        publisher.publish(1, LoRAAdapter.of(compiled, model.adapted.peft_config["default"])).result()
    assert server.answers("compiled") == model.expected(is_adapted=True)
    assert server.answers("compiled") != server.answers("base")
