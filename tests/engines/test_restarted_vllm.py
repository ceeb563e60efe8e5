"""A real vLLM that is killed and started again at its address: it gets what was published, without another publish."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from served_memory import until
from vllm_server import MARKS, TinyLlama, vllm_server

from ft_transport import EngineState, Publisher, VLLMEngine

_LORA = ("--enable-lora", "--max-loras", "1", "--max-cpu-loras", "1", "--max-lora-rank", "8")

pytestmark = MARKS


@pytest.mark.parametrize("is_adapted", [True, False], ids=["adapter", "weights"])
def test_it_gets_the_present_version(model: TinyLlama, tmp_path: Path, is_adapted: bool) -> None:
    options = _LORA if is_adapted else ()
    name = "policy" if is_adapted else "base"
    with vllm_server(model, tmp_path / "first", *options) as server:
        engine = VLLMEngine(server.url, name)
        with Publisher([engine], tmp_path / "versions", poll_interval=timedelta(seconds=1)) as publisher:
            for version in (1, 2):
                publisher.publish(version, model.adapter(version) if is_adapted else model.weights(version)).result()
            expected = model.expected(is_adapted=is_adapted)
            assert server.answers(name) == expected
            server.kill()
            until(lambda: publisher.engines()[0].error != "")
            with vllm_server(model, tmp_path / "second", *options, port=server.port) as again:
                confirmed = EngineState(url=server.url, version=2, is_counted=True, outcome="confirmed")
                until(lambda: publisher.engines() == (confirmed,), 60)
                assert again.answers(name) == expected
                assert again.ask("/is_paused") == {"is_paused": False}
