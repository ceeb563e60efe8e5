"""Reshard: a rank receives its part of a state that others divide in another way, beside one that needs no other.

All senders live in this process, which sleeps while a receiver runs; each receiver is a fresh process. A second group
plans 10,000 tensors.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks import planning
from benchmarks.layouts import ShardedSpec, build, ensure_process_group, is_right
from benchmarks.machine import Watch, back_free_memory
from benchmarks.options import Benchmark, Options, Size
from benchmarks.processes import in_fresh_process
from benchmarks.report import Figure, Group, Quantity, Role, Sample, Verdict
from benchmarks.transports import STEP, TIMEOUT, our_transport
from ft_transport import Limits

_RANK: Final = 1
_SETTLE_S: Final = 0.2
_RATE: Final = Quantity("received", "GB/s")
_MOVED: Final = Quantity("over the wire", "× of its part")


@dataclass(frozen=True, slots=True)
class ReshardVariant:
    """A layout of the sources and one of the receiver.

    Attributes:
        limit: The target, as a part of the rate of ``SAME``.
        is_same: Whether one source is asked, which has just that part; else all are, for what they have of it.
    """

    name: str
    source: ShardedSpec
    receiver: ShardedSpec
    limit: float | None = None
    is_same: bool = False
    role: Role = "ours"


_BY_0: Final = ShardedSpec((4,), 0)
_BY_1: Final = ShardedSpec((4,), 1)
SAME: Final = ReshardVariant("4 ranks, the same layout", _BY_0, _BY_0, is_same=True)
VARIANTS: Final = (
    SAME,
    ReshardVariant("4 ranks, the same layout, as if another", _BY_0, _BY_0),
    ReshardVariant("dimension 0: 8 ranks to 4", ShardedSpec((8,), 0), _BY_0, 0.6),
    ReshardVariant("dimension 0: 2 ranks to 4", ShardedSpec((2,), 0), _BY_0, 0.6),
    ReshardVariant("dimension 0: 3 ranks to 4", ShardedSpec((3,), 0), _BY_0, 0.6),
    ReshardVariant("HSDP 2 x 4 to 4 ranks", ShardedSpec((2, 4), 0), _BY_0, 0.6),
    ReshardVariant("dimension 0 to 1, 4 ranks", _BY_0, _BY_1, 0.35),
    ReshardVariant("dimension 1 to 0, 4 ranks", _BY_1, _BY_0, 0.35),
    ReshardVariant("dimension 1: 8 ranks to 4", ShardedSpec((8,), 1), _BY_1, 0.35),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What came, and how long it took."""

    seconds: float
    num_bytes: int
    moved_bytes: int
    others_share: float | None
    is_right: bool


def run(options: Options) -> Iterator[Group]:
    """Measures all variants by turns, then planning."""
    ensure_process_group()
    group = Group("reshard", "sharded", "a rank's part of a transformer, fresh receivers, 4 connections, verified")
    with contextlib.ExitStack() as stack:
        addresses: dict[ShardedSpec, list[str]] = {}
        for source in dict.fromkeys(variant.source for variant in VARIANTS):
            addresses[source] = [_serve(source, rank, options.scale, stack) for rank in range(source.num_ranks)]
        for round_number, variant in options.rounds("reshard", VARIANTS):
            received = in_fresh_process(_receive, variant, addresses[variant.source], options.scale, os.getpid())
            if not received.is_right:
                raise RuntimeError(f"{variant.name!r} delivered another state than was sent")
            for quantity, value in (
                (_RATE, received.num_bytes / received.seconds / 1e9),
                (_MOVED, received.moved_bytes / received.num_bytes),
            ):
                group.add(variant, quantity, Sample(round_number, value, received.others_share))
            part = f"{received.num_bytes / 1e6:.0f} MB"
    group.title = f"{part}, {group.title}"
    group.sort(VARIANTS)
    group.verdicts = _judge(group)
    yield group
    yield planning.measure(options)


def _serve(source: ShardedSpec, rank: int, scale: float, stack: contextlib.ExitStack) -> str:
    """Serves what one rank has; returns the address."""
    transport = our_transport(limits=Limits(max_snapshots=1))
    stack.callback(transport.shutdown)
    transport.send_checkpoint([], STEP, build(source, rank, scale, is_source=True), TIMEOUT)
    return transport.metadata()


def _receive(variant: ReshardVariant, addresses: list[str], scale: float, sender_id: int) -> Received:
    """In the receiver's process."""
    ensure_process_group()
    state = build(variant.receiver, _RANK, scale, is_source=False)
    num_bytes = sum(tensor.to_local().nbytes for tensor in state.values())  # type: ignore[attr-defined]
    transport = our_transport()
    back_free_memory(num_bytes)
    time.sleep(_SETTLE_S)
    with Watch([os.getpid(), sender_id]) as watch:
        before_bytes = _loopback_bytes()
        started_s = time.perf_counter()
        if variant.is_same:
            transport.fetch(addresses[_RANK], STEP, into=state)
        else:
            transport.fetch_sharded(addresses, STEP, into=state, group_rank=_RANK)
        seconds = time.perf_counter() - started_s
        moved_bytes = _loopback_bytes() - before_bytes
    return Received(
        seconds=seconds,
        num_bytes=num_bytes,
        moved_bytes=moved_bytes,
        others_share=watch.others_share,
        is_right=is_right(state, scale),
    )


def _loopback_bytes() -> int:
    """What has come over loopback so far: requests, answers, headers and acknowledgements of all connections."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise RuntimeError("no loopback interface")


def _judge(group: Group) -> list[Verdict]:
    verdicts = [
        Verdict.at_least(f"{variant.name} / the same layout", group.ratio(variant, SAME, _RATE), variant.limit)
        for variant in VARIANTS
        if variant.limit is not None
    ]
    moved = [sample.value for series in group.series if series.quantity == _MOVED for sample in series.samples]
    most = Figure(max(moved), min(moved), max(moved), _MOVED.unit)
    return [*verdicts, Verdict.at_most("bytes on the wire, all told, at most", most, 1.02)]


BENCHMARK: Final = Benchmark(
    name="reshard", question="How fast is a fetch into another layout?", run=run, default=Size(scale=0.5, num_samples=3)
)
