"""A fresh rank of ``reshard`` that receives its part of a sharded state once, checks it, and says what it measured."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks import peers
from benchmarks.layouts import ShardedSpec, build, ensure_process_group, is_right
from benchmarks.machine import Watch, back_free_memory
from benchmarks.replicas.processes import Channel
from ft_transport import HTTPTransport, TransportSettings

_SETTLE_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What came, and how long it took."""

    seconds: float
    num_bytes: int
    moved_bytes: int
    others_share: float | None
    is_right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What a receiver is told.

    Attributes:
        layout: How the ranks divide the state.
        rank: Which of them it is.
        scale: Of the state.
        addresses: Of the sources.
        is_same: Whether the one source has the same part; else all of them are asked for what they have of it.
        sender_id: The process that serves.
    """

    layout: ShardedSpec
    rank: int
    scale: float
    addresses: tuple[str, ...]
    is_same: bool
    sender_id: int


def receive(channel: Channel, told: Rank) -> None:
    """Says what it has `Received`."""
    ensure_process_group()
    state = build(told.layout, told.rank, told.scale, is_source=False)
    num_bytes = sum(tensor.to_local().nbytes for tensor in state.values())  # type: ignore[attr-defined]
    transport: HTTPTransport[object] = HTTPTransport(
        peers.TIMEOUT, settings=TransportSettings(host="127.0.0.1", advertise="127.0.0.1")
    )
    back_free_memory(num_bytes)
    time.sleep(_SETTLE_S)
    watch = Watch([os.getpid(), told.sender_id])
    watch.start()
    before_bytes = _loopback_bytes()
    started_s = time.perf_counter()
    if told.is_same:
        transport.fetch(told.addresses[0], peers.STEP, into=state)
    else:
        transport.fetch_sharded(list(told.addresses), peers.STEP, into=state, group_rank=told.rank)
    seconds = time.perf_counter() - started_s
    moved_bytes = _loopback_bytes() - before_bytes
    channel.say(
        Received(
            seconds=seconds,
            num_bytes=num_bytes,
            moved_bytes=moved_bytes,
            others_share=watch.stop(),
            is_right=is_right(state, told.scale),
        )
    )
    channel.wait_for_end()


def _loopback_bytes() -> int:
    """What has come over loopback so far: requests, answers, headers and acknowledgements of all connections."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise RuntimeError("no loopback interface")
