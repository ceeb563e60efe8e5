"""A real SGLang server over a stand-in for its scheduler, and requests that it streams; see ``sglang_on_cpu.py``."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import sglang_on_cpu
from served_memory import until
from transformers import LlamaConfig

_START_S = 120.0
_ANSWER_S = 60.0
_POLL_S = 0.1


class SGLangServer:
    """A running server.

    Attributes:
        url: Its base URL.
        log: What it has printed.
    """

    def __init__(self, process: subprocess.Popen[Any], port: int, log: Path, orders: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._port = port
        self._process = process
        self._orders = orders

    def order(self, **orders: object) -> None:
        """Gives the scheduler orders, in place of those before; see ``sglang_scheduler.Orders``."""
        new = self._orders.with_suffix(".new")
        new.write_text(json.dumps(orders))
        new.replace(self._orders)

    def is_alive(self) -> bool:
        """Whether its process runs and it answers."""
        if self._process.poll() is not None:
            return False
        try:
            self.ask("/model_info")
        except OSError:
            return False
        return True

    def ask(self, path: str, body: object = None) -> Any:
        """Asks with JSON; the answer's, or its text."""
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            text = answer.read().decode()
        try:
            return json.loads(text)
        except ValueError:
            return text

    def adapters(self, root: Path) -> list[str]:
        """The names of the adapters that it lists, of those that were published to this root."""
        cards = self.ask("/v1/models")["data"]
        return [card["id"] for card in cards if card["parent"] is not None and Path(card["root"]).parent == root]

    def streaming(self, adapter: str | None = None, num_tokens: int | None = None) -> Stream:
        """Begins a request, of so many tokens or without end, and waits for its first token."""
        return Stream(self._port, adapter, num_tokens)


class Stream:
    """A request that is streamed.

    Attributes:
        tokens: Its tokens so far; each is the version that it was computed with.
        finish: Why it ended, as SGLang says.
        failure: What went wrong.
    """

    def __init__(self, port: int, adapter: str | None, num_tokens: int | None) -> None:
        self.tokens: list[int] = []
        self.finish: str | None = None
        self.failure = ""
        self._num_tokens = num_tokens
        self._adapter = adapter
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_S)
        self._thread = threading.Thread(target=self._run, name="stream")
        self._thread.start()
        until(lambda: bool(self.tokens or self.failure or self.finish))

    def ended(self) -> Stream:
        """Waits for its end."""
        self._thread.join(_ANSWER_S)
        assert not self._thread.is_alive()
        return self

    def until_token(self, token: int) -> None:
        """Waits for a token that was computed with this version."""
        until(lambda: token in self.tokens or bool(self.failure or self.finish))

    def _run(self) -> None:
        body = {
            "input_ids": [3, 14, 15],
            "stream": True,
            "sampling_params": {"max_new_tokens": self._num_tokens or 1 << 20},
            "lora_path": self._adapter,
        }
        try:
            self._connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
            answer = self._connection.getresponse()
            if answer.status != 200:
                self.failure = f"status {answer.status}: {answer.read().decode()}"
            while line := answer.readline():
                text = line.decode().strip().removeprefix("data: ")
                if not text or text == "[DONE]":
                    continue
                part = json.loads(text)
                if "error" in part:
                    self.failure = f"{part['error']}"
                    return
                self.tokens = part["output_ids"]
                if (reason := part["meta_info"]["finish_reason"]) is not None:
                    self.finish = reason["type"]
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            self._connection.close()


@contextmanager
def sglang_server(directory: Path) -> Iterator[SGLangServer]:
    """Starts a server, and ends it with all of its processes.

    Args:
        directory: For its model, its log and its orders.
    """
    model, log, orders = directory / "model", directory / "log", directory / "orders"
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1 << 30,
    ).save_pretrained(model)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, sglang_on_cpu.__file__, str(model), str(port), str(orders)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    server = SGLangServer(process, port, log, orders)
    server.order()
    try:
        deadline_s = time.monotonic() + _START_S
        while not server.is_alive():
            assert process.poll() is None, f"SGLang has ended:\n{log.read_text()[-6000:]}"
            assert time.monotonic() < deadline_s, f"SGLang has not started:\n{log.read_text()[-6000:]}"
            time.sleep(_POLL_S)
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
