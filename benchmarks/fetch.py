"""Fetch: a state moves to a fresh process over loopback, by us, by torchft, and by a bare loop.

All senders live in this process, which sleeps while a receiver runs. A verdict needs a receiver's first fetch only, as
a recovering replica makes it; a full run repeats it, which shows it with everything warm.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from benchmarks import transports
from benchmarks.machine import PeakMemory, Watch, back_free_memory, busy_interpreter
from benchmarks.options import Benchmark, Options, Size
from benchmarks.processes import in_fresh_process
from benchmarks.report import Group, Quantity, Role, Sample, Verdict, ratio
from benchmarks.states import STATE_NAMES, StateSpec, build_source, digest_of, num_bytes_of
from benchmarks.transports import Address, Fetch, Receiver, Serve, prepare_ours, serve_ours
from ft_transport.cli.bench import NUM_CONNECTIONS

_NUM_FULL_FETCHES: Final = 3
_SETTLE_S: Final = 0.2
"""A sender that takes part in the fetch is given this long to be ready."""
COLD: Final = Quantity("first fetch", "GB/s")
WARM: Final = Quantity("later fetches", "GB/s")
MEMORY: Final = Quantity("peak memory", "MB")


@dataclass(frozen=True, slots=True)
class FetchVariant:
    """One way to move the state.

    Attributes:
        serve: Serves the state; variants with the same one share a sender.
        prepare: In the receiver: all that comes before a fetch.
        fresh_times: How much memory a receiver touches for the first time while it fetches, in sizes of the state.
        is_sender_busy: Whether another thread of the sender's process keeps Python busy, as a training loop may.
        is_judged: Whether a verdict needs it.
    """

    name: str
    role: Role
    serve: Serve
    prepare: Callable[[Receiver], Fetch]
    fresh_times: float = 0.0
    is_sender_busy: bool = False
    is_judged: bool = True


_CONNECTIONS: Final = f"{NUM_CONNECTIONS} connections"
_HTTP: Final = "torchft HTTPTransport, fresh memory, num_chunks"
_BUSY: Final = ", sender's Python busy"

VERIFIED: Final = FetchVariant(f"ft_transport, in place, {_CONNECTIONS}, verified", "ours", serve_ours, prepare_ours)
UNVERIFIED: Final = replace(
    VERIFIED, name=f"ft_transport, in place, {_CONNECTIONS}, unverified", prepare=partial(prepare_ours, verify=False)
)
FRESH: Final = replace(
    VERIFIED,
    name=f"ft_transport, fresh memory, {_CONNECTIONS}, verified",
    prepare=partial(prepare_ours, in_place=False),
    fresh_times=1.25,
)
BUSY: Final = replace(VERIFIED, name=VERIFIED.name + _BUSY, is_sender_busy=True)
HTTP_0: Final = FetchVariant(
    f"{_HTTP}=0", "peer", transports.serve_torchft_http, transports.prepare_torchft_http, fresh_times=2.0
)
HTTP_8: Final = replace(
    HTTP_0,
    name=f"{_HTTP}=8",
    serve=partial(transports.serve_torchft_http, num_chunks=8),
    prepare=partial(transports.prepare_torchft_http, num_chunks=8),
)
HTTP_BUSY: Final = replace(HTTP_0, name=HTTP_0.name + _BUSY, is_sender_busy=True)
GLOO: Final = FetchVariant(
    "torchft PGTransport, in place, gloo", "peer", transports.serve_torchft_gloo, transports.prepare_torchft_gloo
)
BARE: Final = FetchVariant(
    f"bare sendfile → recv_into, {_CONNECTIONS}", "ceiling", transports.serve_bare, transports.prepare_bare
)
BARE_FRESH: Final = replace(
    BARE,
    name=f"{BARE.name}, fresh memory",
    prepare=transports.prepare_bare_fresh,
    fresh_times=1.0,
    is_judged=False,
)
VARIANTS: Final = (VERIFIED, UNVERIFIED, FRESH, BUSY, HTTP_0, HTTP_8, HTTP_BUSY, GLOO, BARE, BARE_FRESH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What one fetch was."""

    seconds: float
    others_share: float | None
    peak_bytes: int | None
    digest: str | None


def run(options: Options) -> Iterator[Group]:
    """Measures one state after the other."""
    for name in options.states:
        yield _run_state(StateSpec(name, options.scale), options)


def _run_state(spec: StateSpec, options: Options) -> Group:
    group = measure("fetch", spec, measured_variants(spec.name, is_full=options.is_full), options)
    if not transports.torchft_is_installed():
        group.notes.append(transports.NO_TORCHFT)
    group.verdicts = judge(group)
    return group


def measure(benchmark: str, spec: StateSpec, measured: tuple[FetchVariant, ...], options: Options) -> Group:
    """Fetches a state in each of several ways, round after round; without verdicts."""
    state = build_source(spec)
    num_bytes, digest = num_bytes_of(state), digest_of(state)
    group = Group(benchmark, spec.name, f"{spec.title}, {num_bytes / 1e9:.2f} GB over loopback, fresh receivers")
    with contextlib.ExitStack() as stack:
        addresses: dict[Serve, Address] = {}
        for round_number, variant in options.rounds(f"{benchmark} {spec.name}", measured):
            if variant.serve not in addresses:
                addresses[variant.serve] = variant.serve(state, num_bytes, stack)
            num_fetches = _NUM_FULL_FETCHES if options.is_full and not variant.is_sender_busy else 1
            receiver = Receiver(spec=spec, num_bytes=num_bytes, address=addresses[variant.serve](num_fetches))
            with busy_interpreter() if variant.is_sender_busy else contextlib.nullcontext():
                fetched = in_fresh_process(_receive, variant, receiver, num_fetches, os.getpid())
            for index, fetch in enumerate(fetched):
                if fetch.digest not in (None, digest):  # A transfer that loses bytes is no faster one.
                    raise RuntimeError(f"{variant.name!r} delivered another state than was sent")
                rate = Sample(round_number, num_bytes / fetch.seconds / 1e9, fetch.others_share)
                group.add(variant, WARM if index else COLD, rate)
            if fetched[0].peak_bytes is not None:
                memory = Sample(round_number, fetched[0].peak_bytes / 1e6, fetched[0].others_share)
                group.add(variant, MEMORY, memory)
    group.sort(measured)
    return group


def measured_variants(state: str, *, is_full: bool) -> tuple[FetchVariant, ...]:
    """The variants that are measured with a state."""
    return tuple(
        variant
        for variant in VARIANTS
        if (is_full or variant.is_judged) and (variant.role != "peer" or transports.torchft_is_installed())
        # torchft sends so many tensors from a busy interpreter for minutes.
        if state != "small" or not variant.is_sender_busy
    )


def _receive(variant: FetchVariant, receiver: Receiver, num_fetches: int, sender_id: int) -> list[Fetched]:
    """In the receiver's process. Imports, its own memory and the transport come before anything is measured."""
    fetch = variant.prepare(receiver)
    fetched = []
    for _ in range(num_fetches):
        time.sleep(_SETTLE_S)
        back_free_memory(int(variant.fresh_times * receiver.num_bytes))
        memory = PeakMemory.start()
        with Watch([os.getpid(), sender_id]) as watch:
            state = fetch()
        fetched.append(
            Fetched(
                seconds=watch.seconds,
                others_share=watch.others_share,
                peak_bytes=memory.growth_bytes() if memory is not None else None,
                digest=digest_of(state) if state is not None else None,
            )
        )
        del state
    return fetched


def judge(group: Group) -> list[Verdict]:
    """The targets of a first fetch. With many small tensors, all that is asked towards peers is to be no slower."""
    is_small = group.state == "small"
    to_gloo, to_http, fresh_to_http = (1.0, 1.0, 1.0) if is_small else (1.25, 2.0, 1.5)
    verified, fresh = group.find(VERIFIED, COLD), group.find(FRESH, COLD)
    http = group.best((HTTP_0, HTTP_8), COLD)
    memory = group.figure(VERIFIED, MEMORY)
    highest = replace(memory, value=memory.high) if memory is not None else None
    targets = [
        ("in place, verified / socket ceiling", group.ratio(VERIFIED, BARE, COLD), 0.75),
        ("in place, unverified / socket ceiling", group.ratio(UNVERIFIED, BARE, COLD), 0.9),
        ("in place, verified / torchft PGTransport in place", group.ratio(VERIFIED, GLOO, COLD), to_gloo),
        ("in place, verified / torchft HTTPTransport at its best", ratio(verified, http), to_http),
        ("fresh memory / torchft HTTPTransport at its best", ratio(fresh, http), fresh_to_http),
    ]
    if not is_small:
        targets.append(("sender's Python busy: ours / torchft HTTPTransport", group.ratio(BUSY, HTTP_BUSY, COLD), 1.0))
    return [
        *(Verdict.at_least(*target) for target in targets),
        Verdict.at_most("peak memory above the receiver's own tensors, in place", highest, 64.0),
    ]


BENCHMARK: Final = Benchmark(
    name="fetch",
    question="How fast is the first fetch of a fresh process?",
    run=run,
    states=STATE_NAMES,
    default=Size(scale=0.5, num_samples=3),
    misses={
        "socket ceiling": "Decoding, matching and building 15,259 tensors takes 85 of 350 ms, in Python.",
        "PGTransport": "PGTransport does not verify; the digest reads every byte once more, from memory.",
    },
)
