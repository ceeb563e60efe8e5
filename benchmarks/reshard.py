"""Reshard: a rank receives its part of a state that others divide in another way, beside one that needs no other.

All senders live in this process, which sleeps while a receiver runs; each receiver is a fresh process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from benchmarks import peers, planning
from benchmarks.layouts import ShardedSpec, build, ensure_process_group
from benchmarks.machine import is_busy
from benchmarks.options import Benchmark, Options, Size, turns
from benchmarks.replicas.processes import Child
from benchmarks.report import Group, Sample, Verdict
from benchmarks.reshard_receiver import Rank, Received, receive
from ft_transport import HTTPTransport, TransportSettings

_RANK: Final = 1
_RATE: Final = "GB/s"
_MOVED: Final = "× of its part"
_SECONDS: Final = "s"


@dataclass(frozen=True)
class _Variant:
    key: str
    label: str
    source: ShardedSpec
    receiver: ShardedSpec
    is_same: bool = False


_VARIANTS: Final = (
    _Variant("same", "4 ranks, the same layout", ShardedSpec((4,), 0), ShardedSpec((4,), 0), True),
    _Variant("from_all", "4 ranks, the same layout, as if another", ShardedSpec((4,), 0), ShardedSpec((4,), 0)),
    _Variant("dim_0_fewer", "dimension 0: 8 ranks to 4", ShardedSpec((8,), 0), ShardedSpec((4,), 0)),
    _Variant("dim_0_more", "dimension 0: 2 ranks to 4", ShardedSpec((2,), 0), ShardedSpec((4,), 0)),
    _Variant("dim_0_uneven", "dimension 0: 3 ranks to 4", ShardedSpec((3,), 0), ShardedSpec((4,), 0)),
    _Variant("dim_0_to_1", "dimension 0 to 1, 4 ranks", ShardedSpec((4,), 0), ShardedSpec((4,), 1)),
    _Variant("dim_1_to_0", "dimension 1 to 0, 4 ranks", ShardedSpec((4,), 1), ShardedSpec((4,), 0)),
    _Variant("dim_1_fewer", "dimension 1: 8 ranks to 4", ShardedSpec((8,), 1), ShardedSpec((4,), 1)),
    _Variant("hsdp", "HSDP 2 x 4 to 4 ranks", ShardedSpec((2, 4), 0), ShardedSpec((4,), 0)),
)
_OF_DIM_0: Final = ("dim_0_fewer", "dim_0_more", "dim_0_uneven")
_OF_OTHERS: Final = ("dim_0_to_1", "dim_1_to_0", "dim_1_fewer")


def run(options: Options) -> Iterator[Group]:
    """Measures all variants by turns."""
    ensure_process_group()
    group = Group("reshard", "sharded", "a rank's part of a transformer, fresh receivers, 4 connections, verified")
    with contextlib.ExitStack() as stack:
        addresses: dict[ShardedSpec, list[str]] = {}
        for source in dict.fromkeys(variant.source for variant in _VARIANTS):
            addresses[source] = [_serve(source, rank, options.scale, stack) for rank in range(source.num_ranks)]
        num_bytes = 0
        for round_number, variant in turns(_VARIANTS, options.num_samples):
            options.settle()
            outcome = _receive(variant, addresses[variant.source], options.scale)
            num_bytes = outcome.num_bytes
            _take_note(group, variant, round_number, outcome)
            rate = num_bytes / outcome.seconds / 1e9
            options.say(f"reshard {round_number + 1}/{options.num_samples} {variant.label}: {rate:.2f} GB/s")
        group.title = f"{num_bytes / 1e6:.0f} MB, {group.title}"
    for change, round_number in itertools.product(planning.CHANGES, range(options.num_samples)):
        options.settle()
        seconds = planning.seconds_of(change)
        label = f"plan {planning.NUM_TENSORS} tensors: {change.label}"
        group.add(change.key, Sample(round_number, seconds), label=label, role="ours", phase="cold", unit=_SECONDS)
        options.say(f"reshard {label}: {seconds:.2f} s")
    order = [*(variant.key for variant in _VARIANTS), *(change.key for change in planning.CHANGES)]
    group.series.sort(key=lambda series: order.index(series.key))
    group.verdicts = _judge(group)
    yield group


def _serve(source: ShardedSpec, rank: int, scale: float, stack: contextlib.ExitStack) -> str:
    """Serves what one rank has; returns the address."""
    transport: HTTPTransport[Any] = HTTPTransport(
        peers.TIMEOUT, settings=TransportSettings(host="127.0.0.1", advertise="127.0.0.1", max_snapshots=1)
    )
    stack.callback(transport.shutdown)
    transport.send_checkpoint([], peers.STEP, build(source, rank, scale, is_source=True), peers.TIMEOUT)
    return transport.metadata()


def _receive(variant: _Variant, addresses: list[str], scale: float) -> Received:
    """Runs one fresh receiver and returns what it measured."""
    told = Rank(
        layout=variant.receiver,
        rank=_RANK,
        scale=scale,
        addresses=(addresses[_RANK],) if variant.is_same else tuple(addresses),
        is_same=variant.is_same,
        sender_id=os.getpid(),
    )
    child = Child(receive, told)
    try:
        outcome: Received = child.receive()
    finally:
        child.close()
    if not outcome.is_right:
        raise RuntimeError(f"{variant.label!r} delivered another state than was sent")
    return outcome


def _take_note(group: Group, variant: _Variant, round_number: int, outcome: Received) -> None:
    share = outcome.others_share
    for unit, value in (
        (_RATE, outcome.num_bytes / outcome.seconds / 1e9),
        (_MOVED, outcome.moved_bytes / outcome.num_bytes),
    ):
        sample = Sample(round_number, value, is_busy(share), share)
        group.add(variant.key, sample, label=variant.label, role="ours", phase="cold", unit=unit)


def _judge(group: Group) -> list[Verdict]:
    same = group.find("same", "cold", _RATE)
    verdicts = [
        Verdict.at_least(f"{_label(key)} / the same layout", group.ratio(group.find(key, "cold", _RATE), same), limit)
        for keys, limit in ((("hsdp", *_OF_DIM_0), 0.6), (_OF_OTHERS, 0.35))
        for key in keys
    ]
    moved = [series for series in group.series if series.unit == _MOVED]
    largest = max((series.summary.high for series in moved), default=None)
    slowest = [series.summary.median for series in group.series if series.unit == _SECONDS]
    verdicts.append(
        Verdict(
            f"planning {planning.NUM_TENSORS} tensors over {planning.NUM_RANKS} ranks, the slowest median",
            max(slowest, default=None),
            1.0,
            "at most",
            _SECONDS,
        )
    )
    verdicts.append(Verdict("bytes on the wire, all told, at most", largest, 1.02, "at most", _MOVED))
    return verdicts


def _label(key: str) -> str:
    return next(variant.label for variant in _VARIANTS if variant.key == key)


BENCHMARK: Final = Benchmark(name="reshard", run=run, default=Size(scale=0.5, num_samples=3))
