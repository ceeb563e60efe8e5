"""The ways to move a state that are compared: ours, torchft's as torchft's own manager uses them, and a bare loop.

A ``serve_*`` function serves a state; a ``prepare_*`` function does in a receiver's process all that comes before a
fetch. Both are functions of a module, so that they travel to other processes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import mmap
import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

import torch

from benchmarks.states import State, StateSpec, build_destination
from ft_transport import HTTPTransport, TransportSettings
from ft_transport.cli.bench import bare_receiver, bare_sender
from ft_transport.state.snapshot import Taking
from ft_transport.transfer.server import SnapshotInProgress

TIMEOUT: Final = timedelta(seconds=60)
STEP: Final = 1
NO_TORCHFT: Final = "torchft is not installed, so its rows are missing"

# gloo would otherwise look for an interface by the host's name.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

Fetch = Callable[[], object]
"""Fetches once and returns the state, or ``None`` where there is none to check."""
Address = Callable[[int], str]
"""Makes a sender ready for one more receiver that fetches so often, and returns where that finds it."""
Serve = Callable[[State, int, contextlib.ExitStack], Address]
"""Serves a state of so many bytes until the stack is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    """What a receiver is told: which state comes, its size, and where from."""

    spec: StateSpec
    num_bytes: int
    address: str


def torchft_is_installed() -> bool:
    return importlib.util.find_spec("torchft") is not None


# -------------------------------------------------------------------------------------------------------------- ours


def our_transport(
    state_dict: Callable[[], Any] | None = None, *, same_host: bool = False, **settings: Any
) -> HTTPTransport[Any]:
    """One whose fetches go over the loopback, which stands for a network, unless ``same_host`` says otherwise."""
    return HTTPTransport(
        TIMEOUT,
        state_dict=state_dict,
        settings=TransportSettings(host="127.0.0.1", advertise="127.0.0.1", same_host=same_host, **settings),
    )


def clone(transport: HTTPTransport[Any], state: State) -> SnapshotInProgress:
    """What ``HTTPTransport.send_checkpoint`` does under the read lock."""
    snapshot = transport.server.take(Taking(step=STEP, state=state))
    snapshot.copy_deferred()
    return snapshot


def serve_ours(state: State, _num_bytes: int, stack: contextlib.ExitStack, **settings: Any) -> Address:
    transport = our_transport(**settings)
    stack.callback(transport.shutdown)
    transport.send_checkpoint([1], STEP, state, TIMEOUT)
    return lambda _num_fetches: transport.metadata()


def prepare_ours(receiver: Receiver, *, in_place: bool = True, **settings: Any) -> Fetch:
    own_state = build_destination(receiver.spec) if in_place else None
    transport = our_transport((lambda: own_state) if in_place else None, **settings)
    return lambda: transport.recv_checkpoint(0, receiver.address, STEP, TIMEOUT)


# ----------------------------------------------------------------------------------------------------- torchft, HTTP


def torchft_http_transport(num_chunks: int) -> Any:
    from torchft.checkpointing.http_transport import HTTPTransport as TorchftHTTPTransport

    transport = TorchftHTTPTransport(timeout=TIMEOUT, num_chunks=num_chunks)
    # It prints a line for each request, which would cost it time and hide our own output.
    transport._server.RequestHandlerClass.log_message = lambda *_: None
    return transport


def on_loopback(metadata: str) -> str:
    """torchft advertises the host's name; every peer is measured over the same address."""
    parts = urlsplit(metadata)
    return parts._replace(netloc=f"127.0.0.1:{parts.port}").geturl()


def serve_torchft_http(state: State, _num_bytes: int, stack: contextlib.ExitStack, num_chunks: int = 0) -> Address:
    transport = torchft_http_transport(num_chunks)
    stack.callback(transport.shutdown)
    transport.send_checkpoint(dst_ranks=[1], step=STEP, state_dict=state, timeout=TIMEOUT)
    address = on_loopback(transport.metadata())
    return lambda _num_fetches: address


def prepare_torchft_http(receiver: Receiver, num_chunks: int = 0) -> Fetch:
    transport = torchft_http_transport(num_chunks)
    return lambda: transport.recv_checkpoint(0, receiver.address, STEP, TIMEOUT)


# ---------------------------------------------------------------------------------------------------- torchft, gloo


def serve_torchft_gloo(state: State, _num_bytes: int, _stack: contextlib.ExitStack) -> Address:
    """Takes part in every fetch as rank 0 of a process group of two: a thread for each receiver process."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
    numbers = itertools.count(1)

    def start(num_fetches: int) -> str:
        address = f"127.0.0.1:{store.port}/receiver/{next(numbers)}"

        def send() -> None:
            transport = torchft_gloo_transport(address, 0, None)
            for _ in range(num_fetches):
                transport.send_checkpoint(dst_ranks=[1], step=STEP, state_dict=state, timeout=TIMEOUT)

        threading.Thread(target=send, name="torchft-gloo-sender", daemon=True).start()
        return address

    return start


def prepare_torchft_gloo(receiver: Receiver) -> Fetch:
    own_state = build_destination(receiver.spec)
    transport = torchft_gloo_transport(receiver.address, 1, lambda: own_state)
    return lambda: transport.recv_checkpoint(0, transport.metadata(), STEP, TIMEOUT)


def torchft_gloo_transport(store_address: str, rank: int, state_dict: Callable[[], object] | None) -> Any:
    """A PGTransport over gloo. Returns when both ranks have connected."""
    from torchft.checkpointing.pg_transport import PGTransport
    from torchft.process_group import ProcessGroupGloo

    # It reads a storage as a tensor, which torch 2.13 finds worth a warning for each tensor.
    warnings.filterwarnings("ignore", category=UserWarning)
    group = ProcessGroupGloo(timeout=TIMEOUT)
    group.configure(store_addr=store_address, replica_id="0", rank=rank, world_size=2)
    return PGTransport(group, timeout=TIMEOUT, device=torch.device("cpu"), state_dict=state_dict)


# ----------------------------------------------------------------------------------------------------- the bare loop


def serve_bare(_state: State, num_bytes: int, stack: contextlib.ExitStack) -> Address:
    port = stack.enter_context(bare_sender(num_bytes))
    return lambda _num_fetches: str(port)


def prepare_bare(receiver: Receiver) -> Fetch:
    destination = torch.full((receiver.num_bytes,), 1, dtype=torch.uint8)
    return bare_receiver(int(receiver.address), memoryview(destination.numpy()))


def prepare_bare_fresh(receiver: Receiver) -> Fetch:
    def fetch() -> None:
        memory = mmap.mmap(-1, receiver.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # As ours does: fewer and larger page faults.
        memory.madvise(mmap.MADV_HUGEPAGE)
        bare_receiver(int(receiver.address), memoryview(memory))()

    return fetch
