"""The receiving side of ``ft-transport bench``: a process that fetches in each way in turn, and times it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import msgspec

STEP: Final = 1
BARE: Final = "bare socket loop"
UNVERIFIED: Final = "fetch, not verified"
VERIFIED: Final = "fetch, verified"

_TIMEOUT: Final = timedelta(seconds=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The two fetches to time: a state from a URL, and as many bytes from a bare sender's port.

    So many times, but no further time after ``within_s`` seconds.
    """

    url: str
    port: int
    num_bytes: int
    tensor_bytes: int
    num_rounds: int
    within_s: float


_task_decoder: Final = msgspec.json.Decoder(Task)


def state_of(num_bytes: int, tensor_bytes: int) -> dict[str, Any]:
    """A state of equal tensors whose memory was used before."""
    import torch

    return {
        f"layer.{number}": torch.full((tensor_bytes // 4,), float(number))
        for number in range(num_bytes // tensor_bytes)
    }


def fetch_in_turn(task: Task) -> dict[str, list[float]]:
    """The seconds that each way took, round by round; the round that makes everything warm is left out."""
    from ft_transport import HTTPTransport, TransportSettings
    from ft_transport.cli.ceilings import bare_receiver

    own = state_of(task.num_bytes, task.tensor_bytes)
    transports = []
    ways: dict[str, Callable[[], object]] = {
        BARE: bare_receiver(task.port, memoryview(bytearray(b"\x01" * task.num_bytes)))
    }
    try:
        for name, is_verified in ((UNVERIFIED, False), (VERIFIED, True)):
            settings = TransportSettings(host="127.0.0.1", same_host=False, verify=is_verified)
            transport: HTTPTransport[Any] = HTTPTransport(_TIMEOUT, settings=settings)
            transports.append(transport)
            ways[name] = _fetching(transport, task.url, own)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        until_s = time.monotonic() + task.within_s
        for number in range(task.num_rounds + 1):
            if number > 1 and time.monotonic() > until_s:
                break
            for name in [*ways][number % len(ways) :] + [*ways][: number % len(ways)]:
                began_s = time.perf_counter()
                ways[name]()
                if number:
                    seconds[name].append(time.perf_counter() - began_s)
        return seconds
    finally:
        for transport in transports:
            transport.shutdown()


def _fetching(transport: Any, url: str, own: dict[str, Any]) -> Callable[[], object]:
    return lambda: transport.fetch(url, STEP, into=own)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(fetch_in_turn(_task_decoder.decode(sys.stdin.buffer.read()))))
