"""A real vLLM with a weight-transfer backend of a user's own, ``directory_backend.py``, and requests in flight."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import dying_publisher
import pytest
from programs import run
from safetensors.torch import save_file
from vllm_server import MARKS, Load, TinyLlama, VLLMServer, plugin, vllm_server

from ft_transport import Delivery, Publisher, PublishError, VLLMEngine

_NUM_VERSIONS = 20
_PROGRAM_S = 60.0

pytestmark = MARKS


@pytest.fixture(scope="module")
def server(model: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    directory = tmp_path_factory.mktemp("vllm")
    backend = ("--weight-transfer-config", '{"backend": "directory"}')
    with vllm_server(model, directory / "log", *backend, path=plugin(directory, "directory_backend")) as server:
        yield server


def in_directory(delivery: Delivery) -> Mapping[str, object]:
    return {"directory": str(delivery.directory)}


def test_weights_under_load(model: TinyLlama, server: VLLMServer, tmp_path: Path) -> None:
    engine = VLLMEngine(server.url, update_info=in_directory)
    with Load(server, "base") as load, Publisher([engine], tmp_path) as publisher:
        for version in range(1, _NUM_VERSIONS + 1):
            publisher.publish(version, model.weights(version)).result()
            assert server.ask("/weight_info") == {"weight_version": str(version)}
            assert server.answers("base") == model.expected(is_adapted=False), version
    assert not load.failures
    assert load.num_done
    assert server.is_alive()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_new_trainer_takes_over_wherever_the_one_before_was_killed(
    model: TinyLlama, server: VLLMServer, tmp_path: Path, moment: str
) -> None:
    """With 9 at every request of a session, which stays open then; a whole version comes from the next trainer."""
    routes: list[str] = []
    version = 0
    while True:
        version += 1
        weights = tmp_path / "weights.safetensors"
        save_file(model.weights(version), weights)
        arguments = [str(tmp_path / "versions"), server.url, str(version), moment, str(len(routes) + 1), str(weights)]
        killed = run([sys.executable, dying_publisher.__file__, *arguments, "transfer"], timeout=_PROGRAM_S)
        routes = killed.stdout.split()
        if killed.returncode == 0:
            break
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        version += 1
        with Publisher([VLLMEngine(server.url, update_info=in_directory)], tmp_path / "versions") as publisher:
            publisher.publish(version, model.weights(version)).result()
        assert server.answers("base") == model.expected(is_adapted=False), routes
    assert {"/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"} <= set(routes)


def test_an_update_that_failed_half_way_leaves_it_paused_and_the_next_is_whole(
    model: TinyLlama, server: VLLMServer, tmp_path: Path
) -> None:
    num_tensors = len(model.weights(1))
    num_readable: list[int] = []

    def failing(delivery: Delivery) -> Mapping[str, object]:
        return {**in_directory(delivery), "num_read": num_readable.pop() if num_readable else None}

    version = 0
    with Publisher([VLLMEngine(server.url, update_info=failing)], tmp_path) as publisher:
        for num_read in range(num_tensors):
            version += 1
            num_readable.append(num_read)
            handle = publisher.publish(version, model.weights(version))
            with pytest.raises(PublishError, match=r"refused.*stays paused"):
                handle.result()
            assert server.ask("/is_paused") == {"is_paused": True}
            version += 1
            publisher.publish(version, model.weights(version)).result()
            assert server.ask("/is_paused") == {"is_paused": False}
            assert server.answers("base") == model.expected(is_adapted=False), version
    assert server.is_alive()
