"""TRL's asynchronous GRPO trainer publishes to a real vLLM server, which generates its rollouts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import peft
import pytest
from transformers import LlamaForCausalLM
from vllm_server import MARKS, TinyLlama, VLLMServer, greedy_tokens, vllm_server

_WORKER = Path(__file__).parents[1] / "workers" / "trl_run.py"
_BACKEND = ("--weight-transfer-config", '{"backend": "ft_transport"}')
_TIMEOUT_S = 120.0

pytestmark = MARKS


def options(model: TinyLlama) -> list[str]:
    # TRL requests the model by its directory.
    return ["--served-model-name", "base", str(model.directory)]


@pytest.fixture(scope="module")
def server(model: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    with vllm_server(model, tmp_path_factory.mktemp("vllm") / "log", *options(model), *_BACKEND) as server:
        yield server


class Trainer:
    """A running trainer, which waits whenever it has synchronized the weights."""

    def __init__(self, ranks: list[subprocess.Popen[str]], log: Path) -> None:
        self._ranks = ranks
        self._log = log

    def next_step(self) -> dict[str, int]:
        """Wait for the next synchronization."""
        assert self._ranks[0].stdout is not None
        for line in self._ranks[0].stdout:
            if line.startswith('{"step"'):
                step: dict[str, int] = json.loads(line)
                return step
        raise AssertionError(f"the trainer has ended:\n{self.log()}")

    def go_on(self) -> None:
        assert self._ranks[0].stdin is not None
        self._ranks[0].stdin.write("\n")
        self._ranks[0].stdin.flush()

    def end(self) -> list[int]:
        """Wait for the end of all ranks, and return their exit codes."""
        self._ranks[0].communicate(timeout=_TIMEOUT_S)
        return [rank.wait(_TIMEOUT_S) for rank in self._ranks]

    def log(self) -> str:
        return self._log.read_text()[-8000:]


@dataclass(frozen=True)
class Job:
    """Trainers that continue each other, with all that they share."""

    model: TinyLlama
    server: VLLMServer
    directory: Path
    way: str = "disk"
    num_ranks: int = 1
    engine_timeout_s: float = 60.0

    @contextmanager
    def trainer(self, num_steps: int) -> Iterator[Trainer]:
        """Start a trainer, and kill what is left of it in the end, with TRL's process that asks for the rollouts."""
        output, root, log = (self.directory / name for name in ("output", "versions", "log"))
        output.mkdir(exist_ok=True)
        given = (self.model.directory, output, root, self.server.url, self.way, num_steps, self.engine_timeout_s)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if self.num_ranks > 1:
            environment["WORLD_SIZE"] = str(self.num_ranks)
        ranks: list[subprocess.Popen[str]] = []
        try:
            for number in map(str, range(self.num_ranks)):
                numbers = {"RANK": number, "LOCAL_RANK": number}
                ranks += [_start({**environment, **numbers}, log, given)]
            yield Trainer(ranks, log)
        finally:
            for process in ranks:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()

    def tokens(self, step: int) -> list[list[int]]:
        """The tokens of transformers, with the weights that the trainer has saved after a step."""
        saved = self.directory / "output" / f"checkpoint-{step}" if step else self.model.directory
        if "lora" in self.way and step:
            base = LlamaForCausalLM.from_pretrained(self.model.directory)
            return greedy_tokens(peft.PeftModel.from_pretrained(base, saved))
        return greedy_tokens(LlamaForCausalLM.from_pretrained(saved))


def _start(environment: dict[str, str], log: Path, given: tuple[object, ...]) -> subprocess.Popen[str]:
    with log.open("a") as file:
        return subprocess.Popen(
            [sys.executable, str(_WORKER), *map(str, given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if environment["RANK"] == "0" else file,
            stderr=file,
            text=True,
            env=environment,
            start_new_session=True,
        )


@pytest.mark.parametrize(
    ("way", "num_ranks"),
    [
        pytest.param("disk", 1, id="from a disk"),
        pytest.param("lora", 1, id="with an adapter merged"),
        pytest.param("pull", 2, id="fetched, from two ranks"),
    ],
)
def test_the_server_generates_with_the_weights_of_every_step_before_and_after_a_kill(
    model: TinyLlama, server: VLLMServer, tmp_path: Path, way: str, num_ranks: int
) -> None:
    job = Job(model, server, tmp_path, way, num_ranks)
    versions: list[int] = []
    fetched: list[int] = []
    seen: list[tuple[int, list[list[int]]]] = []

    def check(step: dict[str, int], expected_step: int) -> None:
        assert step["step"] == expected_step
        assert server.ask("/weight_info") == {"weight_version": str(step["version"])}
        versions.append(step["version"])
        fetched.append(step["fetched"])
        seen.append((expected_step, server.answers("base")))

    with job.trainer(num_steps=9) as trainer:
        for number in range(3):
            check(trainer.next_step(), number)
            if number < 2:
                trainer.go_on()
        # Killed before it saves the second step.
    assert not (tmp_path / "output" / "checkpoint-2").exists()
    assert seen.pop()[0] == 2
    with job.trainer(num_steps=4) as trainer:
        for number in range(1, 5):
            check(trainer.next_step(), number)
            trainer.go_on()
        assert trainer.end() == [0] * num_ranks
    assert versions == list(range(1, 8))
    for number, tokens in seen:
        assert tokens == job.tokens(number), number
    assert len({str(tokens) for _, tokens in seen}) == 5
    if way == "pull":
        num_bytes = sum(each.nbytes for each in model.weights(0).values())
        assert fetched[0] >= num_bytes
        assert max(fetched[1:]) < 0.1 * num_bytes


def test_training_goes_on_when_the_server_is_restarted(model: TinyLlama, tmp_path: Path) -> None:
    with vllm_server(model, tmp_path / "first", *options(model)) as first:
        job = Job(model, first, tmp_path, engine_timeout_s=300)
        with job.trainer(num_steps=2) as trainer:
            trainer.next_step()
            first.kill()
            trainer.go_on()
            with vllm_server(model, tmp_path / "second", *options(model), port=first.port) as second:
                for number in (1, 2):
                    step = trainer.next_step()
                    assert step["step"] == number
                    assert second.ask("/weight_info") == {"weight_version": str(step["version"])}
                    tokens = second.answers("base")
                    trainer.go_on()
                assert trainer.end() == [0]
                assert tokens == job.tokens(2)


def test_training_fails_when_the_server_does_not_get_the_weights(model: TinyLlama, tmp_path: Path) -> None:
    with vllm_server(model, tmp_path / "server", *options(model)) as server:
        job = Job(model, server, tmp_path, engine_timeout_s=5)
        with job.trainer(num_steps=2) as trainer:
            trainer.next_step()
            server.kill()
            trainer.go_on()
            assert trainer.end() == [1]
            assert "PublishError: " in trainer.log()
            assert not (tmp_path / "output" / "checkpoint-1").exists()
