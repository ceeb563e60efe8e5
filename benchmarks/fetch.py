"""Fetch: a state moves to a fresh process over loopback, by us, by torchft, and by a bare loop.

All senders live in this process, which sleeps while a receiver runs. Rounds go through all variants, beginning with
another one each time, so that what the machine does meanwhile befalls all of them alike. A verdict needs a receiver's
first fetch only; a full run repeats it, which shows it with everything warm.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Final

from benchmarks import fetch_variants as variants
from benchmarks import peers
from benchmarks.fetch_variants import Address, FetchVariant, Receiver, Sender
from benchmarks.machine import is_busy
from benchmarks.options import Benchmark, Options, Size, turns
from benchmarks.receiver import Fetched, receive
from benchmarks.replicas.processes import Child
from benchmarks.report import Group, Phase, Sample, Series, Verdict
from benchmarks.states import STATE_NAMES, State, StateSpec, build_source, digest_of, num_bytes_of

_NUM_FULL_FETCHES: Final = 3

RATE: Final = "GB/s"
MEMORY: Final = "MB"


def run(options: Options) -> Iterator[Group]:
    """Measures one state after the other."""
    for name in options.states:
        yield _run_state(StateSpec(name, options.scale), options)


def _run_state(spec: StateSpec, options: Options) -> Group:
    state = build_source(spec)
    num_bytes = num_bytes_of(state)
    digest = digest_of(state)
    group = Group("fetch", spec.name, f"{spec.title}, {num_bytes / 1e9:.2f} GB over loopback, fresh receivers")
    measured = measured_variants(spec.name, is_full=options.is_full)
    if not peers.torchft_is_installed():
        group.notes.append("torchft is not installed, so its rows are missing")
    with contextlib.ExitStack() as stack:
        addresses = _Addresses(state, num_bytes, stack)
        for round_number, variant in turns(measured, options.num_samples):
            options.settle()
            num_fetches = _NUM_FULL_FETCHES if options.is_full and not variant.is_sender_busy else 1
            address = addresses.of(variant.sender)(num_fetches)
            receiver = Receiver(spec=spec, num_bytes=num_bytes, address=address)
            with _busy_interpreter() if variant.is_sender_busy else contextlib.nullcontext():
                fetched = _receive(variant, receiver, num_fetches)
            _check(variant, fetched, digest)
            _take_note(group, variant, round_number, num_bytes, fetched)
            rate = num_bytes / fetched[0].seconds / 1e9
            options.say(f"fetch {spec.name} {round_number + 1}/{options.num_samples} {variant.label}: {rate:.2f} GB/s")
    order = [variant.key for variant in measured]
    group.series.sort(key=lambda series: order.index(series.key))
    group.verdicts = judge(group)
    return group


def measured_variants(state: str, *, is_full: bool) -> tuple[FetchVariant, ...]:
    """What is measured of all variants."""
    return tuple(
        variant
        for variant in variants.VARIANTS
        if (is_full or variant.is_judged) and (variant.role != "peer" or peers.torchft_is_installed())
        # torchft sends so many tensors from a busy interpreter for minutes.
        if state != "small" or not variant.is_sender_busy
    )


class _Addresses:
    """Starts each sender when it is first needed; ``stack`` ends them."""

    def __init__(self, state: State, num_bytes: int, stack: contextlib.ExitStack) -> None:
        self._state = state
        self._num_bytes = num_bytes
        self._stack = stack
        self._started: dict[Sender, Address] = {}

    def of(self, sender: Sender) -> Address:
        if sender not in self._started:
            self._started[sender] = sender(self._state, self._num_bytes, self._stack)
        return self._started[sender]


@contextlib.contextmanager
def _busy_interpreter() -> Iterator[None]:
    """A thread that computes in Python and never waits."""
    stopping = threading.Event()

    def compute() -> None:
        number = 0
        while not stopping.is_set():
            for _ in range(1000):
                number = (number * 5 + 1) % 1009

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def _receive(variant: FetchVariant, receiver: Receiver, num_fetches: int) -> list[Fetched]:
    """Runs one fresh receiver and returns what it measured."""
    child = Child(receive, variant.key, receiver, num_fetches, os.getpid())
    try:
        return child.receive()  # type: ignore[no-any-return]
    finally:
        child.close()


def _check(variant: FetchVariant, fetched: list[Fetched], digest: str) -> None:
    """A transfer that loses bytes is no faster one."""
    for fetch in fetched:
        if fetch.digest not in (None, digest):
            raise RuntimeError(f"{variant.label!r} delivered another state than was sent")


def _take_note(group: Group, variant: FetchVariant, round_number: int, num_bytes: int, fetched: list[Fetched]) -> None:
    for index, fetch in enumerate(fetched):
        busy, share = is_busy(fetch.others_share), fetch.others_share
        rate = Sample(round_number, num_bytes / fetch.seconds / 1e9, busy, share)
        phase: Phase = "warm" if index else "cold"
        group.add(variant.key, rate, label=variant.label, role=variant.role, phase=phase, unit=RATE)
        if not index and fetch.peak_bytes is not None:
            memory = Sample(round_number, fetch.peak_bytes / 1e6, busy, share)
            group.add(variant.key, memory, label=variant.label, role=variant.role, phase=phase, unit=MEMORY)


def judge(group: Group) -> list[Verdict]:
    """The targets of a cold fetch. With many small tensors, all that is asked towards peers is to be no slower."""
    is_small = group.state == "small"

    def cold(variant: FetchVariant) -> Series | None:
        return group.find(variant.key, "cold", RATE)

    verified, unverified, fresh = cold(variants.VERIFIED), cold(variants.UNVERIFIED), cold(variants.FRESH)
    bare, process_group = cold(variants.BARE), cold(variants.PROCESS_GROUP)
    http = group.best("peer", "cold", RATE, [variants.HTTP_0.key, variants.HTTP_8.key])
    memory = group.find(variants.VERIFIED.key, "cold", MEMORY)
    to_process_group, to_http, fresh_to_http = (1.0, 1.0, 1.0) if is_small else (1.25, 2.0, 1.5)
    verdicts = [
        Verdict.at_least("in place, verified / socket ceiling", group.ratio(verified, bare), 0.75),
        Verdict.at_least("in place, unverified / socket ceiling", group.ratio(unverified, bare), 0.9),
        Verdict.at_least(
            "in place, verified / torchft PGTransport in place", group.ratio(verified, process_group), to_process_group
        ),
        Verdict.at_least(
            "in place, verified / torchft HTTPTransport at its best", group.ratio(verified, http), to_http
        ),
        Verdict.at_least("fresh memory / torchft HTTPTransport at its best", group.ratio(fresh, http), fresh_to_http),
        Verdict(
            "peak memory above the receiver's own tensors, in place",
            memory.summary.high if memory is not None else None,
            64.0,
            "at most",
            MEMORY,
        ),
    ]
    if not is_small:
        busy = group.ratio(cold(variants.BUSY), cold(variants.HTTP_BUSY))
        verdicts.append(Verdict.at_least("sender's Python busy: ours / torchft HTTPTransport", busy, 1.0))
    return verdicts


BENCHMARK: Final = Benchmark(name="fetch", run=run, states=STATE_NAMES, default=Size(scale=0.5, num_samples=3))
