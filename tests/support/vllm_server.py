"""A real vLLM server with a tiny random Llama, requests that keep it busy, and what Hugging Face's code answers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import engine_load
import peft
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ft_transport import LoRAAdapter

_VOCABULARY = 128
_START_S = 240.0
_STOP_S = 30.0
_ANSWER_S = 120.0
_POLL_S = 0.2
_NUM_TOKENS = 12
_VLLM = ("-m", "vllm.entrypoints.openai.api_server")

MARKS = [
    pytest.mark.timeout(900),
    # peft and transformers warn of each other's newest names.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

PROMPTS: Sequence[list[int]] = ([3, 14, 15, 92], [65, 35], [89, 79, 3, 23, 8, 46], [26, 4])


class TinyLlama:
    """A model that answers each prompt with other tokens for each version of its weights or of its adapter.

    Args:
        directory: Where vLLM loads it from.
        tie: Whether the output matrix is the embedding.
    """

    def __init__(self, directory: Path, *, tie: bool = False) -> None:
        self.directory = directory
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,  # of 32 each, the least that vLLM's attention on CPUs has
            num_key_value_heads=2,
            max_position_embeddings=2048,
            initializer_range=0.3,  # far apart logits: the greedy choice does not depend on rounding
            tie_word_embeddings=tie,
            eos_token_id=0,
        )
        self._model = LlamaForCausalLM(config)
        self._model.save_pretrained(directory)
        words = Tokenizer(WordLevel({f"t{number}": number for number in range(_VOCABULARY)}, unk_token="t0"))
        words.pre_tokenizer = Whitespace()  # type: ignore[assignment]
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", eos_token="t0").save_pretrained(directory)
        lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj"])
        self.adapted: Any = peft.get_peft_model(LlamaForCausalLM(config), lora)
        self.adapted.base_model.model.load_state_dict(self._model.state_dict(), strict=False)
        self._bases = {
            name.replace("base_layer.", "").removeprefix("base_model.model."): parameter
            for name, parameter in self.adapted.named_parameters()
            if "lora_" not in name
        }
        self._set_bases()

    def _set_bases(self) -> None:
        with torch.no_grad():
            for name, value in self._model.named_parameters():
                self._bases[name].copy_(value)

    def adapter(self, version: int) -> LoRAAdapter:
        """Sets the adapter to that of a version."""
        generator = torch.Generator().manual_seed(1000 + version)
        with torch.no_grad():
            for name, parameter in self.adapted.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        return LoRAAdapter.of(self.adapted, self.adapted.peft_config["default"])

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        """Sets all weights to those of a version, under the adapter as well."""
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                if "norm" not in name:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        self._set_bases()
        return dict(self._model.state_dict())

    def step(self, version: int) -> dict[str, torch.Tensor]:
        """Changes a few elements of every matrix, by enough to change what it answers."""
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                if "norm" not in name:
                    chosen = torch.randint(parameter.numel(), (parameter.numel() // 200,), generator=generator)
                    parameter.view(-1)[chosen] = 2 * torch.randn(len(chosen), generator=generator)
        self._set_bases()
        return dict(self._model.state_dict())

    def expected(self, *, is_adapted: bool) -> list[list[int]]:
        """The tokens that Hugging Face's code answers to `PROMPTS` with the present adapter, or weights."""
        return greedy_tokens(self.adapted if is_adapted else self._model)


@torch.no_grad()
def greedy_tokens(model: Any) -> list[list[int]]:
    """The tokens that Hugging Face's code answers to `PROMPTS` with a model."""
    answers = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(_NUM_TOKENS):
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    return answers


class VLLMServer:
    """A running server.

    Attributes:
        url: Its base URL.
        port: Of that.
        log: What it has printed.
    """

    def __init__(self, process: subprocess.Popen[Any], port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.log = log
        self._process = process

    def kill(self) -> None:
        """Ends it with all of its processes, at once."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def is_alive(self) -> bool:
        """Whether the process runs and its health route answers 200."""
        if self._process.poll() is not None:
            return False
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=_ANSWER_S) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def ask(self, path: str, body: object = None, *, method: str | None = None) -> Any:
        """Asks with JSON; the answer's, or its text."""
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            text = answer.read().decode()
        try:
            return json.loads(text)
        except ValueError:
            return text

    def answers(self, model: str) -> list[list[int]]:
        """The tokens that it answers to `PROMPTS`."""
        body = {
            "model": model,
            "prompt": list(PROMPTS),
            "max_tokens": _NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        choices = self.ask("/v1/completions", body)["choices"]
        return [choice["token_ids"] for choice in sorted(choices, key=lambda choice: choice["index"])]


def plugin(directory: Path, module: str) -> Path:
    """Makes a directory that has an entry point of vLLM's for ``register`` of a module in ``tests/support``."""
    metadata = directory / "plugin" / "plugin-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{module} = {module}:register\n")
    return metadata.parent


@contextmanager
def vllm_server(
    model: TinyLlama,
    log: Path,
    *options: str,
    port: int | None = None,
    path: Path | None = None,
    program: Sequence[str] = _VLLM,
) -> Iterator[VLLMServer]:
    """Starts a server, and ends it with all of its processes.

    Args:
        model: That it serves.
        log: What it prints.
        *options: Of its command.
        port: Its port; by default any free one.
        path: A directory in which its processes find packages.
        program: What Python runs.
    """
    if port is None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
    command = [sys.executable, *program, "--model", str(model.directory)]
    command += ["--served-model-name", "base", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--dtype", "float32", "--max-model-len", "2048", "--disable-uvicorn-access-log", *options]
    environment = {
        **os.environ,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several workers, whatever the number of cores
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            # A group, to end it as a whole. No session: each has a share of the processor, and the engine never sleeps.
            preexec_fn=os.setpgrp,  # noqa: PLW1509 - nothing of the child's runs before it but this
        )
    server = VLLMServer(process, port, log)
    try:
        deadline_s = time.monotonic() + _START_S
        while not server.is_alive():
            assert process.poll() is None, f"vLLM has ended:\n{log.read_text()[-6000:]}"
            assert time.monotonic() < deadline_s, f"vLLM has not started:\n{log.read_text()[-6000:]}"
            time.sleep(_POLL_S)
        yield server
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        server.kill()


class Load:
    """Requests that are in flight all the time; see ``engine_load.py``.

    Args:
        server: Gets them.
        model: What they ask for.
        num_requests: How many at a time.

    Attributes:
        num_done: Requests that got all of their tokens, once this has been left.
        failures: What the others got instead.
    """

    def __init__(self, server: VLLMServer, model: str, num_requests: int = 3) -> None:
        self.num_done = 0
        self.failures: list[str] = []
        command = [sys.executable, engine_load.__file__, server.url, model, str(num_requests)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Load:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "streaming\n"
        return self

    def ask_for(self, model: str) -> None:
        """Has those that begin from here on ask for another model."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{model}\n")
        self._process.stdin.flush()

    def __exit__(self, *_: object) -> None:
        try:
            output, _errors = self._process.communicate(timeout=_ANSWER_S)
        finally:
            self._process.kill()
            self._process.wait()
        self.num_done, self.failures = json.loads(output)
