"""torchft's transports, used as torchft's own tests and manager use them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

from benchmarks.states import State

TIMEOUT: Final = timedelta(seconds=60)
STEP: Final = 1
CHUNKED: Final = 8

# gloo would otherwise look for an interface by the host's name.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def torchft_is_installed() -> bool:
    return importlib.util.find_spec("torchft") is not None


def torchft_http_transport(num_chunks: int) -> Any:
    from torchft.checkpointing.http_transport import HTTPTransport

    transport = HTTPTransport(timeout=TIMEOUT, num_chunks=num_chunks)
    # It prints a line for each request, which would cost it time and hide our own output.
    transport._server.RequestHandlerClass.log_message = lambda *_: None
    return transport


def on_loopback(metadata: str) -> str:
    """torchft advertises the host's name; every peer is measured over the same address."""
    parts = urlsplit(metadata)
    return parts._replace(netloc=f"127.0.0.1:{parts.port}").geturl()


@contextlib.contextmanager
def torchft_http_sender(state: State, num_chunks: int) -> Iterator[str]:
    """Serves ``state``; yields the metadata."""
    transport = torchft_http_transport(num_chunks)
    try:
        transport.send_checkpoint(dst_ranks=[1], step=STEP, state_dict=state, timeout=TIMEOUT)
        yield on_loopback(transport.metadata())
    finally:
        transport.shutdown()


def torchft_pg_transport(store_address: str, rank: int, state_dict: Callable[[], object] | None) -> Any:
    """A PGTransport over gloo. Returns when both ranks have connected."""
    import torch
    from torchft.checkpointing.pg_transport import PGTransport
    from torchft.process_group import ProcessGroupGloo

    # It reads a storage as a tensor, which torch 2.13 finds worth a warning for each tensor.
    warnings.filterwarnings("ignore", category=UserWarning)
    group = ProcessGroupGloo(timeout=TIMEOUT)
    group.configure(store_addr=store_address, replica_id="0", rank=rank, world_size=2)
    return PGTransport(group, timeout=TIMEOUT, device=torch.device("cpu"), state_dict=state_dict)


class TorchftPGSender:
    """Rank 0 of a process group of two, which takes part in every fetch: one thread for each receiver process.

    Args:
        state: What it sends.
    """

    def __init__(self, state: State) -> None:
        import torch.distributed as dist

        self._state = state
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
        self._num_receivers = 0

    def start(self, num_fetches: int) -> str:
        """Sends ``num_fetches`` times to a new receiver; returns the address of the store where it finds us."""
        self._num_receivers += 1
        address = f"127.0.0.1:{self._store.port}/receiver/{self._num_receivers}"

        def send() -> None:
            transport = torchft_pg_transport(address, 0, None)
            for _ in range(num_fetches):
                transport.send_checkpoint(dst_ranks=[1], step=STEP, state_dict=self._state, timeout=TIMEOUT)

        threading.Thread(target=send, name="torchft-pg-sender", daemon=True).start()
        return address
