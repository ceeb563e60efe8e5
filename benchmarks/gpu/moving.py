"""Moving: how fast a state moves from the memory of the device into that of another process, which has an older one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Final

import torch

from benchmarks.gpu.model import device, device_name, has_gpu, synchronize
from benchmarks.machine import Watch
from benchmarks.options import Options
from benchmarks.processes import Channel, Child
from benchmarks.report import Group, Named, Quantity, Sample, Verdict, ratio
from benchmarks.states import State, num_bytes_of, tensors_of
from benchmarks.transports import (
    NO_TORCHFT,
    STEP,
    TIMEOUT,
    Address,
    on_loopback,
    our_transport,
    serve_bare,
    serve_torchft_gloo,
    torchft_gloo_transport,
    torchft_http_transport,
    torchft_is_installed,
)
from ft_transport import Limits
from ft_transport.cli.bench import MemoryCopy, bare_receiver
from ft_transport.settings import default_num_threads
from ft_transport.state.host_copying import HostCopier
from ft_transport.wire.chunks import CHUNK_BYTES, ChunkTable

_MOVED_BYTES: Final = {True: 2 << 30, False: 64 << 20}
"""By whether there is a GPU."""
_NUM_TENSORS: Final = 300
_CHANGED_SHARE: Final = 100
_CHILD_S: Final = 120.0

RATE: Final = Quantity("first fetch", "GB/s")
SEND: Final = Quantity("send_checkpoint", "ms")
LINK: Final = Named("copy from the device into page-locked memory", "ceiling")
MEMORY: Final = Named("copy in the host's memory", "ceiling")
DIGESTS: Final = Named("xxh3 of 4 MiB chunks in the host's memory, all threads", "ceiling")
SOCKETS: Final = Named("bare sendfile → recv_into", "ceiling")
LOOPBACK: Final = Named("ft_transport over the loopback", "ours")
UNVERIFIED: Final = Named("ft_transport over the loopback, unverified", "ours")
SAME_HOST: Final = Named("ft_transport, same host", "ours")
CHANGED: Final = Named("ft_transport over the loopback, 1 % of each tensor differs", "ours")
CHANGED_TENSORS: Final = Named("ft_transport over the loopback, 1 % of the tensors differ", "ours")
SENDER: Final = Named("ft_transport", "ours")
HTTP: Final = Named("torchft HTTPTransport", "peer")
GLOO: Final = Named("torchft PGTransport, gloo", "peer")
_CEILINGS: Final = (LINK, MEMORY, DIGESTS, SOCKETS)
_OURS: Final = (LOOPBACK, UNVERIFIED, SAME_HOST, CHANGED, CHANGED_TENSORS)
_PEERS: Final = (HTTP, GLOO)


def _state(seed: int) -> State:
    generator = torch.Generator(device=device()).manual_seed(seed)
    num_items = _MOVED_BYTES[has_gpu()] // 4 // _NUM_TENSORS
    return {f"{index}": torch.rand(num_items, generator=generator, device=device()) for index in range(_NUM_TENSORS)}


def _change(state: State, variant: Named) -> None:
    """Changes as much of the sender's state as the variant says; the receiver has what it received last."""
    tensors = list(tensors_of(state))
    if variant is CHANGED_TENSORS:
        tensors = tensors[: len(tensors) // _CHANGED_SHARE]
    with torch.no_grad():
        for tensor in tensors:
            part = tensor[: len(tensor) // _CHANGED_SHARE] if variant is CHANGED else tensor
            part.add_(1.0)


# ---------------------------------------------------------------------------------------------------------- receiver


def _receive(channel: Channel) -> None:
    """In the receiver's process: makes each fetch that the sender requests, and reports its seconds and sums."""
    into = _state(2)
    synchronize()
    host = torch.ones(num_bytes_of(into), dtype=torch.uint8)
    copy = MemoryCopy([host])
    copier = HostCopier(default_num_threads())
    channel.say("ready")
    while True:
        name, address = channel.wait()
        with ExitStack() as stack:
            if name == MEMORY.name:
                fetch: Callable[[], object] = copy.memmove
            elif name == DIGESTS.name:
                fetch = partial(
                    copier.digests,
                    memoryview(host.numpy()),
                    ChunkTable(data_bytes=host.nbytes, chunk_bytes=CHUNK_BYTES),
                )
            elif name == SOCKETS.name:
                fetch = bare_receiver(int(address), memoryview(host.numpy()))
            elif name in (HTTP.name, GLOO.name):
                fetch = _torchft_fetch(name, address, into, stack)
            else:
                fetch = _our_fetch(name, address, into, stack)
            began_s = time.monotonic()
            fetch()
            synchronize()
            seconds = time.monotonic() - began_s
        channel.say((seconds, [float(tensor.double().sum()) for tensor in tensors_of(into)]))


def _our_fetch(name: str, address: str, into: State, stack: ExitStack) -> Callable[[], object]:
    transport = our_transport(same_host=name == SAME_HOST.name, verify=name != UNVERIFIED.name)
    stack.callback(transport.shutdown)
    known = "into" if name in (CHANGED.name, CHANGED_TENSORS.name) else None
    return lambda: transport.fetch(address, STEP, into=into, timeout=TIMEOUT, known=known)


def _torchft_fetch(name: str, address: str, into: State, stack: ExitStack) -> Callable[[], object]:
    if name == HTTP.name:
        transport = torchft_http_transport(0)
        stack.callback(transport.shutdown)
    else:
        transport = torchft_gloo_transport(address, 1, lambda: into)

    def fetch() -> None:
        received = transport.recv_checkpoint(0, address, STEP, TIMEOUT)
        with torch.no_grad():
            for own, tensor in zip(tensors_of(into), tensors_of(received), strict=True):
                own.copy_(tensor)

    return fetch


# ------------------------------------------------------------------------------------------------------------ sender


def measure_moving(group: Group, options: Options) -> None:
    """Moves a state of the device to another process, which has its own tensors there."""
    state = _state(1)
    num_bytes = num_bytes_of(state)
    group.title = f"{_NUM_TENSORS} tensors, {num_bytes / 1e9:.2f} GB, between two processes on {device_name()}"
    variants = (*_CEILINGS, *_OURS, *(_PEERS if torchft_is_installed() else ()))
    # A copy into memory that has not been touched would take longer.
    pinned = [torch.zeros(tensor.shape, pin_memory=has_gpu()) for tensor in tensors_of(state)]
    receiver = Child(_receive)
    try:
        receiver.receive(_CHILD_S)
        for round_number, variant in options.rounds("gpu moving", variants):
            if variant is LINK:
                synchronize()
                with Watch([os.getpid()]) as watch:
                    for source, target in zip(tensors_of(state), pinned, strict=True):
                        target.copy_(source, non_blocking=True)
                    synchronize()
                group.add(LINK, RATE, watch.sample(round_number, num_bytes / watch.seconds / 1e9))
                continue
            if variant not in _CEILINGS:
                _change(state, variant)
            with ExitStack() as stack:
                serve, sent_s = _serve(variant, state, stack)
                if sent_s is not None:
                    sender = variant if variant is HTTP else SENDER
                    group.add(sender, SEND, Sample(round_number, sent_s * 1e3))
                receiver.say((variant.name, serve(1)))
                seconds, sums = receiver.receive(_CHILD_S)
            if variant not in _CEILINGS and sums != [float(tensor.double().sum()) for tensor in tensors_of(state)]:
                raise RuntimeError(f"{variant.name}: expected the sender's state, got another one")
            group.add(variant, RATE, Sample(round_number, num_bytes / seconds / 1e9))
    finally:
        receiver.close()
    group.sort((*_CEILINGS, *_OURS, SENDER, *_PEERS))
    if not torchft_is_installed():
        group.notes.append(NO_TORCHFT)
    group.verdicts = [
        Verdict.at_least(f"{variant.name} / torchft HTTPTransport", group.ratio(variant, HTTP, RATE), 1.0)
        for variant in _OURS
    ]
    group.verdicts.append(
        Verdict.at_least(f"{LOOPBACK.name} / torchft PGTransport", group.ratio(LOOPBACK, GLOO, RATE), 1.0)
    )
    sent = ratio(group.find(SENDER, SEND), group.find(HTTP, SEND))
    group.verdicts.append(Verdict.at_most("send_checkpoint, warm arena / torchft HTTPTransport", sent, 1.0))


def _serve(variant: Named, state: State, stack: ExitStack) -> tuple[Address, float | None]:
    """Serves the state as the variant does, until the stack is closed. Returns also the seconds of the snapshot."""
    if variant in (MEMORY, DIGESTS):
        return lambda _num_fetches: "", None
    if variant in (SOCKETS, GLOO):
        return (serve_bare if variant is SOCKETS else serve_torchft_gloo)(state, num_bytes_of(state), stack), None
    is_ours = variant is not HTTP
    transport = (
        our_transport(same_host=variant is SAME_HOST, limits=Limits(max_snapshots=1))
        if is_ours
        else torchft_http_transport(0)
    )
    stack.callback(transport.shutdown)
    for _is_warm in (False, True) if is_ours else (True,):
        synchronize()
        began_s = time.monotonic()
        transport.send_checkpoint([1], STEP, state, TIMEOUT)
        sent_s = time.monotonic() - began_s
    metadata: str = transport.metadata()
    return lambda _num_fetches: metadata if is_ours else on_loopback(metadata), sent_s
