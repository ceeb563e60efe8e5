"""A sender, a receiver and a hostile network between them, in one process."""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from proxy import Proxy, proxied
from transport_settings import settings_of

from ft_transport import FetchProgress, HTTPTransport, SnapshotLimitError
from ft_transport.http.peer_address import PeerAddress

TIMEOUT = timedelta(seconds=30)
CHUNK_BYTES = 64 << 10
NUM_ITEMS = 1 << 19  # 2 MiB a tensor


@functools.cache
def _drawn(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(NUM_ITEMS, generator=generator) for name in "ab"}


def state_of(seed: int) -> dict[str, Any]:
    return {**{name: tensor.clone() for name, tensor in _drawn(seed).items()}, "seed": seed}


STATE_BYTES = 2 * 4 * NUM_ITEMS


def blank() -> dict[str, Any]:
    return {"a": torch.zeros(NUM_ITEMS), "b": torch.zeros(NUM_ITEMS), "seed": -1}


def spread_out(state: dict[str, Any]) -> dict[str, Any]:
    """The same values in tensors that nothing is received into in place: like those on a device, they are copied to."""

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        spaced: torch.Tensor = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)[..., 0]
        return spaced.copy_(tensor)

    return {key: spread(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def holds(tensors: dict[str, Any], seed: int) -> bool:
    """Whether the tensors of a receiver are those of the state."""
    return all(torch.equal(tensors[key], expected) for key, expected in _drawn(seed).items())


def is_state(state: dict[str, Any], seed: int) -> bool:
    return state["seed"] == seed and holds(state, seed)


def is_poisoned(state: dict[str, Any]) -> bool:
    return bool(state["a"].isnan().all() and state["b"].isnan().all())


def port_of(transport: HTTPTransport[Any]) -> int:
    return PeerAddress.from_url(transport.metadata()).port


def fetching_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ft-transport-fetch")]


@contextmanager
def transport(num_chunks: int = 1, **settings: Any) -> Iterator[HTTPTransport[Any]]:
    """On the loopback address, with small chunks and no lease; all that is fetched goes through the network."""
    chosen: dict[str, Any] = {
        "host": "127.0.0.1",
        "chunk_bytes": CHUNK_BYTES,
        "lease": timedelta(0),
        "same_host": False,
        **settings,
    }
    made: HTTPTransport[Any] = HTTPTransport(TIMEOUT, num_chunks, settings=settings_of(**chosen))
    try:
        yield made
    finally:
        made.shutdown()


def send_when_free(sender: HTTPTransport[Any], step: int, state: Any) -> None:
    """Takes the one place of a sender, as soon as the snapshot in it is not being fetched any more."""
    deadline_s = time.monotonic() + TIMEOUT.total_seconds()
    while True:
        try:
            return sender.send_checkpoint([], step, state, TIMEOUT)
        except SnapshotLimitError:
            assert time.monotonic() < deadline_s, "the place did not become free"
            time.sleep(0.01)


@dataclass
class Net:
    sender: HTTPTransport[Any]
    receiver: HTTPTransport[Any]
    proxy: Proxy

    def fetch(self, step: Any = 1, *, into: Any = None, timeout_s: float = 30) -> Any:
        return self.receiver.fetch(self.proxy.url, step, into=into, timeout=timedelta(seconds=timeout_s)).state


@contextmanager
def network(
    num_chunks: int = 1,
    *,
    on_progress: Callable[[FetchProgress], None] | None = None,
    sender: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Net]:
    """Serves ``state_of(1)`` as step 1 through a proxy; ``num_chunks`` and ``settings`` are the receiver's."""
    with (
        transport(**(sender or {})) as sending,
        transport(num_chunks, on_progress=on_progress, **settings) as receiving,
        proxied(port_of(sending)) as proxy,
    ):
        sending.send_checkpoint([], 1, state_of(1), TIMEOUT)
        yield Net(sending, receiving, proxy)


def closed_port() -> int:
    """A port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
