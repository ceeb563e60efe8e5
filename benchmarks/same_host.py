"""Same host: a state moves between two processes of one host, out of the source's memory, beside a copy of memory.

The ceiling is ``memmove`` of the same bytes by as many threads as the receiver has, from memory of its own. Receivers
have their tensors prefaulted, or take fresh memory. The same over the loopback stands beside it.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

import torch

from benchmarks.fetch import COLD, WARM, FetchVariant, measure
from benchmarks.options import Benchmark, Options, Size
from benchmarks.report import Group, Verdict
from benchmarks.states import COUNTED_STATES, State, StateSpec, build_destination, tensors_of
from benchmarks.transports import Address, Fetch, Receiver, prepare_ours, serve_ours
from ft_transport.cli.bench import NUM_CONNECTIONS, MemoryCopy


def serve_nothing(_state: State, _num_bytes: int, _stack: contextlib.ExitStack) -> Address:
    """A copy of memory has no sender."""
    return lambda _num_fetches: ""


def prepare_copy(receiver: Receiver) -> Fetch:
    copy = MemoryCopy(list(tensors_of(build_destination(receiver.spec))))
    return copy.memmove


def prepare_fresh_copy(receiver: Receiver) -> Fetch:
    sources = list(tensors_of(build_destination(receiver.spec)))

    def fetch() -> None:
        memory = mmap.mmap(-1, receiver.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # As ours does: fewer and larger page faults.
        memory.madvise(mmap.MADV_HUGEPAGE)
        copy = MemoryCopy(sources, torch.frombuffer(memory, dtype=torch.uint8))
        copy.memmove()
        copy.close()

    return fetch


_SERVE: Final = partial(serve_ours, same_host=True)
VERIFIED: Final = FetchVariant("same host, in place, verified", "ours", _SERVE, partial(prepare_ours, same_host=True))
UNVERIFIED: Final = replace(
    VERIFIED,
    name="same host, in place, unverified",
    prepare=partial(prepare_ours, same_host=True, verify=False),
)
FRESH: Final = replace(
    VERIFIED,
    name="same host, fresh memory, verified",
    prepare=partial(prepare_ours, same_host=True, in_place=False),
    fresh_times=1.25,
)
FRESH_UNVERIFIED: Final = replace(
    FRESH,
    name="same host, fresh memory, unverified",
    prepare=partial(prepare_ours, same_host=True, in_place=False, verify=False),
)
LOOPBACK: Final = replace(
    VERIFIED,
    name=f"loopback, in place, {NUM_CONNECTIONS} connections, verified",
    role="other",
    prepare=partial(prepare_ours, same_host=False),
)
LOOPBACK_FRESH: Final = replace(
    FRESH,
    name=f"loopback, fresh memory, {NUM_CONNECTIONS} connections, verified",
    role="other",
    prepare=partial(prepare_ours, same_host=False, in_place=False),
)
COPY: Final = FetchVariant("memmove, prefaulted", "ceiling", serve_nothing, prepare_copy)
FRESH_COPY: Final = FetchVariant("memmove, fresh memory", "ceiling", serve_nothing, prepare_fresh_copy, fresh_times=1.0)
VARIANTS: Final = (VERIFIED, UNVERIFIED, FRESH, FRESH_UNVERIFIED, LOOPBACK, LOOPBACK_FRESH, COPY, FRESH_COPY)


def run(options: Options) -> Iterator[Group]:
    """Measures one number of tensors after the other."""
    for name in options.states:
        group = measure("same-host", StateSpec(name, options.scale), VARIANTS, options)
        group.title = f"{group.title.partition(' over')[0]} between two processes, fresh receivers"
        group.verdicts = [
            Verdict.at_least("in place, unverified / memmove", group.ratio(UNVERIFIED, COPY, COLD), 0.8),
            Verdict.at_least("in place, verified / memmove", group.ratio(VERIFIED, COPY, COLD), 0.6),
            Verdict.at_least(
                "fresh memory, unverified / memmove", group.ratio(FRESH_UNVERIFIED, FRESH_COPY, COLD), 0.8
            ),
            Verdict.at_least("fresh memory, verified / memmove", group.ratio(FRESH, FRESH_COPY, COLD), 0.6),
            Verdict("in place, same host / loopback", group.ratio(VERIFIED, LOOPBACK, COLD), None, "at least"),
        ]
        if options.is_full:
            group.verdicts += [
                Verdict.at_least("later fetches, unverified / memmove", group.ratio(UNVERIFIED, COPY, WARM), 0.8),
                Verdict.at_least("later fetches, verified / memmove", group.ratio(VERIFIED, COPY, WARM), 0.6),
            ]
        yield group


BENCHMARK: Final = Benchmark(
    name="same-host",
    question="How fast is a fetch on the same host?",
    run=run,
    states=(*COUNTED_STATES, "adamw"),
    default=Size(scale=0.25, num_samples=3),
    misses={
        "in place": "Manifest, matching and building the state take 8 to 13 µs for each tensor, in Python.",
    },
)
