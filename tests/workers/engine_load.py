"""Keeps an engine busy: long streaming requests without pause, in a process that leaves the test its interpreter.

Usage: ``engine_load.py URL MODEL NUM``: so many at a time. Each line of standard input is the model to ask for from
then on. When all have their first token it prints ``streaming``; when its input ends, how many requests got all of
their tokens, and what the others got instead, as JSON.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
from urllib.parse import urlsplit

_ANSWER_S = 120.0
_PAUSE_S = 0.2
_NUM_TOKENS = 400
_PROMPT = (3, 14, 15, 92)


class Load:
    """The requests.

    Args:
        url: Of the engine.
        model: What they ask for; may be changed meanwhile.
        num_threads: How many at a time.
    """

    def __init__(self, url: str, model: str, num_threads: int) -> None:
        self.model = model
        self.num_done = 0
        self.failures: list[str] = []
        self._url = url
        self._mutex = threading.Lock()
        self._stopping = threading.Event()
        self._streaming = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._run) for _ in range(num_threads)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            self._streaming.acquire(timeout=_ANSWER_S)

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(_ANSWER_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            model = self.model
            try:
                problem = self._stream(model)
            except (OSError, http.client.HTTPException, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
            with self._mutex:
                if problem:
                    self.failures.append(f"{model}: {problem}")
                else:
                    self.num_done += 1
            if problem:
                self._streaming.release()
                self._stopping.wait(_PAUSE_S)

    def _stream(self, model: str) -> str:
        """Asks once; returns what went wrong."""
        parts = urlsplit(self._url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_ANSWER_S)
        try:
            body = {
                "model": model,
                "prompt": _PROMPT,
                "max_tokens": _NUM_TOKENS,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
            }
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                return f"status {answer.status}: {answer.read().decode()[:500]}"
            num_tokens, finish = 0, ""
            while line := answer.readline():
                text = line.decode().strip().removeprefix("data: ")
                if not text or text == "[DONE]":
                    continue
                part = json.loads(text)
                if "error" in part:
                    return f"error after {num_tokens} tokens: {part['error']}"
                if not num_tokens:
                    self._streaming.release()
                num_tokens += len(part["choices"][0].get("token_ids") or ())
                finish = part["choices"][0].get("finish_reason") or finish
                if self._stopping.is_set():
                    return ""
            return "" if num_tokens == _NUM_TOKENS else f"{num_tokens} tokens, {finish or 'no reason'}"
        finally:
            connection.close()


if __name__ == "__main__":
    load = Load(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    load.start()
    print("streaming", flush=True)
    for line in sys.stdin:
        load.model = line.strip()
    load.stop()
    print(json.dumps([load.num_done, load.failures]), flush=True)
