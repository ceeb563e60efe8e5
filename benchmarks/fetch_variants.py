"""The ways to move a state that ``fetch`` compares: what sends, and how a receiver of it prepares."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from benchmarks import peers
from benchmarks.ceilings import NUM_CONNECTIONS, bare_receiver, bare_sender
from benchmarks.report import Role
from benchmarks.states import State, StateSpec, build_destination
from ft_transport import HTTPTransport, TransportSettings

Fetch = Callable[[], object]
"""Fetches once and returns the state, or ``None`` where there is none to check."""
Address = Callable[[int], str]
"""Makes a sender ready for one more receiver that fetches so often, and says where that finds it."""
Sender = Callable[[State, int, contextlib.ExitStack], Address]
"""Serves a state of so many bytes until the stack is closed."""


@dataclass(frozen=True, kw_only=True)
class Receiver:
    """What a receiver is told.

    Attributes:
        spec: Which state comes.
        num_bytes: Its size.
        address: Where from.
    """

    spec: StateSpec
    num_bytes: int
    address: str


@dataclass(frozen=True, kw_only=True)
class FetchVariant:
    """One way to move the state.

    Attributes:
        key: Names it, also for the receiver's process.
        label: Names it for people.
        role: Whose it is.
        sender: Serves the state; variants with the same one share it.
        prepare: In the receiver: all that comes before a fetch.
        fresh_times: How much memory a receiver touches for the first time while it fetches, in sizes of the state.
        is_sender_busy: Whether another thread of the sender's process keeps Python busy, as a training loop may.
        is_judged: Whether a verdict needs it.
    """

    key: str
    label: str
    role: Role
    sender: Sender
    prepare: Callable[[Receiver], Fetch]
    fresh_times: float = 0.0
    is_sender_busy: bool = False
    is_judged: bool = True


# ------------------------------------------------------------------------------------------------------------ senders


def _serve_ours(state: State, _num_bytes: int, stack: contextlib.ExitStack) -> Address:
    transport: HTTPTransport[State] = HTTPTransport(
        peers.TIMEOUT, settings=TransportSettings(host="127.0.0.1", advertise="127.0.0.1")
    )
    stack.callback(transport.shutdown)
    transport.send_checkpoint([1], peers.STEP, state, peers.TIMEOUT)
    return lambda _num_fetches: transport.metadata()


def _serve_http_0(state: State, _num_bytes: int, stack: contextlib.ExitStack) -> Address:
    address = stack.enter_context(peers.torchft_http_sender(state, 0))
    return lambda _num_fetches: address


def _serve_http_8(state: State, _num_bytes: int, stack: contextlib.ExitStack) -> Address:
    address = stack.enter_context(peers.torchft_http_sender(state, peers.CHUNKED))
    return lambda _num_fetches: address


def _serve_process_group(state: State, _num_bytes: int, _stack: contextlib.ExitStack) -> Address:
    return peers.TorchftPGSender(state).start


def _serve_bare(_state: State, num_bytes: int, stack: contextlib.ExitStack) -> Address:
    port = stack.enter_context(bare_sender(num_bytes))
    return lambda _num_fetches: str(port)


# ---------------------------------------------------------------------------------------------------------- receivers


def _ours(receiver: Receiver, *, in_place: bool = True, verify: bool = True) -> Fetch:
    own_state = build_destination(receiver.spec) if in_place else None
    transport: HTTPTransport[object] = HTTPTransport(
        peers.TIMEOUT,
        state_dict=(lambda: own_state) if in_place else None,
        settings=TransportSettings(host="127.0.0.1", advertise="127.0.0.1", verify=verify),
    )
    return lambda: transport.recv_checkpoint(0, receiver.address, peers.STEP, peers.TIMEOUT)


def _torchft_http(receiver: Receiver, num_chunks: int = 0) -> Fetch:
    transport = peers.torchft_http_transport(num_chunks)
    return lambda: transport.recv_checkpoint(0, receiver.address, peers.STEP, peers.TIMEOUT)


def _torchft_process_group(receiver: Receiver) -> Fetch:
    own_state = build_destination(receiver.spec)
    transport = peers.torchft_pg_transport(receiver.address, 1, lambda: own_state)
    return lambda: transport.recv_checkpoint(0, transport.metadata(), peers.STEP, peers.TIMEOUT)


def _bare(receiver: Receiver) -> Fetch:
    destination = torch.full((receiver.num_bytes,), 1, dtype=torch.uint8)
    return bare_receiver(int(receiver.address), memoryview(destination.numpy()))


def _bare_fresh(receiver: Receiver) -> Fetch:
    def fetch() -> None:
        memory = mmap.mmap(-1, receiver.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # As ours does: fewer and larger page faults.
        memory.madvise(mmap.MADV_HUGEPAGE)
        bare_receiver(int(receiver.address), memoryview(memory))()

    return fetch


_CONNECTIONS: Final = f"{NUM_CONNECTIONS} connections"
_BUSY: Final = "sender's Python busy"
_OURS: Final = "ft_transport"
_HTTP: Final = "torchft HTTPTransport, fresh memory, num_chunks"
_BARE: Final = f"bare sendfile → recv_into, {_CONNECTIONS}"

VERIFIED: Final = FetchVariant(
    key="ours_verify",
    label=f"{_OURS}, in place, {_CONNECTIONS}, verified",
    role="ours",
    sender=_serve_ours,
    prepare=_ours,
)
UNVERIFIED: Final = FetchVariant(
    key="ours_no_verify",
    label=f"{_OURS}, in place, {_CONNECTIONS}, unverified",
    role="ours",
    sender=_serve_ours,
    prepare=lambda receiver: _ours(receiver, verify=False),
)
FRESH: Final = FetchVariant(
    key="ours_fresh",
    label=f"{_OURS}, fresh memory, {_CONNECTIONS}, verified",
    role="ours",
    sender=_serve_ours,
    prepare=lambda receiver: _ours(receiver, in_place=False),
    fresh_times=1.25,
)
BUSY: Final = FetchVariant(
    key="ours_busy",
    label=f"{_OURS}, in place, {_CONNECTIONS}, verified, {_BUSY}",
    role="ours",
    sender=_serve_ours,
    prepare=_ours,
    is_sender_busy=True,
)
HTTP_0: Final = FetchVariant(
    key="torchft_http_0",
    label=f"{_HTTP}=0",
    role="peer",
    sender=_serve_http_0,
    prepare=_torchft_http,
    fresh_times=2.0,
)
HTTP_8: Final = FetchVariant(
    key="torchft_http_8",
    label=f"{_HTTP}={peers.CHUNKED}",
    role="peer",
    sender=_serve_http_8,
    prepare=lambda receiver: _torchft_http(receiver, peers.CHUNKED),
    fresh_times=2.0,
)
HTTP_BUSY: Final = FetchVariant(
    key="torchft_http_0_busy",
    label=f"{_HTTP}=0, {_BUSY}",
    role="peer",
    sender=_serve_http_0,
    prepare=_torchft_http,
    fresh_times=2.0,
    is_sender_busy=True,
)
PROCESS_GROUP: Final = FetchVariant(
    key="torchft_pg",
    label="torchft PGTransport, in place, gloo",
    role="peer",
    sender=_serve_process_group,
    prepare=_torchft_process_group,
)
BARE: Final = FetchVariant(key="bare", label=_BARE, role="ceiling", sender=_serve_bare, prepare=_bare)
BARE_FRESH: Final = FetchVariant(
    key="bare_fresh",
    label=f"{_BARE}, fresh memory",
    role="ceiling",
    sender=_serve_bare,
    prepare=_bare_fresh,
    fresh_times=1.0,
    is_judged=False,
)
VARIANTS: Final = (
    VERIFIED,
    UNVERIFIED,
    FRESH,
    BUSY,
    HTTP_0,
    HTTP_8,
    HTTP_BUSY,
    PROCESS_GROUP,
    BARE,
    BARE_FRESH,
)
