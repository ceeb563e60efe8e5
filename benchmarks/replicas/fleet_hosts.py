"""What runs on a host of the fleet benchmark: a source that serves a state, or a receiver that fetches and keeps it.

Each is a process of its own in its own network namespace, and says and is told what `Channel` carries.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal
from urllib.parse import urlsplit

import torch

from benchmarks.network_namespaces import Host, enter
from benchmarks.processes import Channel
from benchmarks.states import State, digest_of
from benchmarks.transports import STEP, torchft_http_transport
from ft_transport import HTTPTransport, TransportSettings
from ft_transport.cli.bench import RANGE, bare_receiver, bare_sender
from ft_transport.credentials import Keys
from ft_transport.wire.chunks import Digester

TIMEOUT: Final = timedelta(seconds=180)
NUM_TENSORS: Final = 64
_PORT: Final = 4700
_TOKEN: Final = "only-for-a-benchmark"
"""Without one, servers would listen on the loopback alone."""
_CHAIN_BYTES: Final = 256 << 10
"""As much is received before it is passed on."""
_CHANGED_TENSORS: Final = 3
"""Of 64: what is left unchanged is 95% of the bytes."""
_ADAPTER_SHARE: Final = 0.01

Kind = Literal["whole", "mostly the same", "adapter"]


@dataclass(frozen=True, slots=True)
class FleetState:
    """Which state is moved.

    Attributes:
        kind: ``whole``: the receiver has nothing of it; ``mostly the same``: all but 5%; ``adapter``: a small adapter
            and its Adam on frozen weights, which the receiver has.
        num_bytes: In all.
    """

    kind: Kind
    num_bytes: int

    @property
    def new_bytes(self) -> int:
        """What a receiver lacks."""
        return sum(tensor.nbytes for name, tensor in _build(self, 0).items() if _is_new(self, name))

    def of_source(self) -> State:
        """Random bytes, the same in each process."""
        return dict(_build(self, 1))

    def of_receiver(self) -> State:
        """The receiver's own: every page touched, and every bit wrong of what it lacks."""
        return {
            name: torch.full_like(tensor, -1.0) if _is_new(self, name) else tensor
            for name, tensor in _build(self, 0 if self.kind == "whole" else 1).items()
        }


def _build(state: FleetState, seed: int) -> dict[str, torch.Tensor]:
    """Seed 0 leaves the bytes as they are."""
    sizes = {f"layers.{at}.weight": state.num_bytes // NUM_TENSORS // 4 for at in range(NUM_TENSORS)}
    if state.kind == "adapter":
        num_items = int(state.num_bytes * _ADAPTER_SHARE) // NUM_TENSORS // 4
        for part in ("adapter", "adam.exp_avg", "adam.exp_avg_sq"):
            sizes |= {f"{part}.{at}": num_items for at in range(NUM_TENSORS)}
    if seed == 0:
        return {name: torch.empty(num_items) for name, num_items in sizes.items()}
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(num_items, generator=generator) for name, num_items in sizes.items()}


def _is_new(state: FleetState, name: str) -> bool:
    if state.kind == "whole":
        return True
    if state.kind == "adapter":
        return not name.startswith("layers.")
    return name in {f"layers.{at}.weight" for at in range(_CHANGED_TENSORS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a receiver is told to fetch.

    Attributes:
        sources: Addresses of those that have the state.
        relays: Addresses of those that fetch it now.
    """

    sources: Sequence[str]
    relays: Sequence[str] = ()
    only_changed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a receiver says when it has the state.

    Attributes:
        ended_s: When the last byte was there and verified, of the machine's monotonic clock.
        num_bytes_fetched: How much data it took, where that is counted.
        file: Where what has come lies, of a program that keeps it in a file.
    """

    ended_s: float
    num_bytes_fetched: int | None = None
    file: str | None = None


# -------------------------------------------------------------------------------------------------------------- ours


def serve_ours(channel: Channel, host: Host, state: FleetState) -> None:
    """Says its address, and serves until it is ended."""
    enter(host.namespace)
    transport = _our_transport(host)
    transport.send_checkpoint([], STEP, state.of_source(), TIMEOUT)
    channel.say(transport.metadata())
    channel.wait_for_end()


def receive_ours(channel: Channel, host: Host, state: FleetState) -> None:
    """Says its address, fetches once when it is told to, and serves what it has until it is ended."""
    enter(host.namespace)
    own_state = state.of_receiver()
    transport = _our_transport(host)
    channel.say(transport.metadata())
    order: Order = channel.wait()
    known: Literal["into"] | None = "into" if order.only_changed else None
    received = transport.fetch(order.sources, STEP, relays=order.relays, into=own_state, known=known, timeout=TIMEOUT)
    ended_s = time.monotonic()
    channel.say(Done(ended_s=ended_s, num_bytes_fetched=received.num_bytes_fetched))
    _say_digest(channel, received.state)


def _say_digest(channel: Channel, state: State) -> None:
    """When it is asked for, because others may still be receiving, on the same cores."""
    channel.wait()
    channel.say(digest_of(state))
    channel.wait_for_end()


def _our_transport(host: Host) -> HTTPTransport[State]:
    # All else as it is by default; the port is known beforehand, as each host has one receiver.
    return HTTPTransport(TIMEOUT, settings=TransportSettings(port=_PORT, advertise=host.address, token=_TOKEN))


# ----------------------------------------------------------------------------------------------------- torchft, HTTP


def serve_torchft(channel: Channel, host: Host, state: FleetState) -> None:
    enter(host.namespace)
    transport = torchft_http_transport(0)
    transport.send_checkpoint(dst_ranks=[], step=STEP, state_dict=state.of_source(), timeout=TIMEOUT)
    parts = urlsplit(transport.metadata())
    channel.say(parts._replace(netloc=f"{host.address}:{parts.port}").geturl())
    channel.wait_for_end()


def receive_torchft(channel: Channel, host: Host, _state: FleetState) -> None:
    enter(host.namespace)
    transport = torchft_http_transport(0)
    channel.say(None)
    order: Order = channel.wait()
    received = transport.recv_checkpoint(0, order.sources[0], STEP, TIMEOUT)
    channel.say(Done(ended_s=time.monotonic()))
    _say_digest(channel, received)


# ----------------------------------------------------------------------------------------------------- the bare loop


def serve_bare(channel: Channel, host: Host, state: FleetState) -> None:
    enter(host.namespace)
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(bare_sender(state.num_bytes, host=host.address))
        channel.say(f"{host.address}:{port}")
        channel.wait_for_end()


def receive_bare(channel: Channel, host: Host, state: FleetState) -> None:
    """An equal part from each source."""
    enter(host.namespace)
    destination = torch.full((state.num_bytes,), 1, dtype=torch.uint8)
    channel.say(None)
    order: Order = channel.wait()
    parts = torch.tensor_split(destination, len(order.sources))
    loops: list[Callable[[], None]] = []
    for source, part in zip(order.sources, parts, strict=True):
        address, _, port = source.rpartition(":")
        loops.append(bare_receiver(int(port), memoryview(part.numpy()), host=address))
    threads = [threading.Thread(target=loop) for loop in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    channel.say(Done(ended_s=time.monotonic()))
    channel.wait_for_end()


def receive_bare_chain(channel: Channel, host: Host, state: FleetState) -> None:
    """The first one takes all from the source, each other from the one before it, which passes on what has come.

    Nothing is planned, verified or repeated: what the wires and the cores of this machine allow.
    """
    _receive_chain(channel, host, state, lambda _piece: None)


def receive_digested_chain(channel: Channel, host: Host, state: FleetState) -> None:
    """As `receive_bare_chain`, but each piece is digested with a key before it is passed on, as ours does it."""
    digester = Digester.of(Keys.of(_TOKEN).current()[0])
    _receive_chain(channel, host, state, digester.digest)


def _receive_chain(channel: Channel, host: Host, state: FleetState, look_at: Callable[[memoryview], object]) -> None:
    enter(host.namespace)
    destination = memoryview(torch.full((state.num_bytes,), 1, dtype=torch.uint8).numpy())
    with socket.create_server((host.address, _PORT)) as listener:
        own = f"{host.address}:{_PORT}"
        channel.say(own)
        order: Order = channel.wait()
        at = order.relays.index(own) if order.relays else 0
        landed = _Landed()
        passing_on = threading.Thread(target=_pass_on, args=(listener, destination, landed))
        is_last = at + 1 >= len(order.relays)
        if not is_last:
            passing_on.start()
        address, _, port = (order.relays[at - 1] if at else order.sources[0]).rpartition(":")
        with socket.create_connection((address, int(port))) as connected:
            connected.sendall(RANGE.pack(0, len(destination)))
            for start in range(0, len(destination), _CHAIN_BYTES):
                piece = destination[start : start + _CHAIN_BYTES]
                if connected.recv_into(piece, 0, socket.MSG_WAITALL) != len(piece):
                    raise ConnectionError("the one before closed the connection")
                look_at(piece)
                landed.add(len(piece))
        ended_s = time.monotonic()
        if not is_last:
            passing_on.join()
        channel.say(Done(ended_s=ended_s))
        channel.wait_for_end()


class _Landed:
    """How many bytes have come, to wait for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        with self._changed:
            self._num_bytes += num_bytes
            self._changed.notify()

    def wait_beyond(self, num_bytes: int) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._num_bytes > num_bytes, TIMEOUT.total_seconds())
            return self._num_bytes


def _pass_on(listener: socket.socket, destination: memoryview, landed: _Landed) -> None:
    connected, _ = listener.accept()
    with connected:
        connected.recv(RANGE.size, socket.MSG_WAITALL)
        num_sent = 0
        while num_sent < len(destination):
            num_landed = landed.wait_beyond(num_sent)
            connected.sendall(destination[num_sent:num_landed])
            num_sent = num_landed
