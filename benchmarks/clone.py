"""Clone: a state becomes a snapshot in a warm arena, beside plain copies of the same tensors into warm memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import torch

from benchmarks import peers
from benchmarks.ceilings import MemoryCopy
from benchmarks.machine import Watch, is_busy, return_free_memory
from benchmarks.options import Benchmark, Options, Size, turns
from benchmarks.report import Group, Phase, Role, Sample, Verdict
from benchmarks.states import STATE_NAMES, State, StateSpec, build_source, num_bytes_of, tensors_of
from ft_transport import HTTPTransport, SnapshotInProgress, TransportSettings

_WARM_PER_ROUND: Final = 2

RATE: Final = "GB/s"

T = TypeVar("T")


@dataclass(frozen=True)
class _Clock:
    """Times one action and puts it in the group."""

    group: Group
    num_bytes: int
    round_number: int

    def measure(self, action: Callable[[], T], key: str, label: str, role: Role, phase: Phase = "warm") -> T:
        watch = Watch([os.getpid()])
        watch.start()
        started_s = time.perf_counter()
        outcome = action()
        seconds = time.perf_counter() - started_s
        share = watch.stop()
        rate = Sample(self.round_number, self.num_bytes / seconds / 1e9, is_busy(share), share)
        self.group.add(key, rate, label=label, role=role, phase=phase, unit=RATE)
        return outcome


def run(options: Options) -> Iterator[Group]:
    """Measures one state after the other."""
    for name in options.states:
        yield _run_state(StateSpec(name, options.scale), options)


def _run_state(spec: StateSpec, options: Options) -> Group:
    state = build_source(spec)
    tensors = list(tensors_of(state))
    num_bytes = num_bytes_of(state)
    group = Group("clone", spec.name, f"{spec.title}, {num_bytes / 1e9:.2f} GB, {len(tensors)} tensors")
    plain = MemoryCopy(tensors)
    try:
        measured: tuple[Callable[[_Clock], None], ...] = (
            lambda clock: _measure_ours(clock, state, is_full=options.is_full),
            lambda clock: _measure_plain(clock, plain),
        )
        if options.is_full:
            measured += (
                lambda clock: _measure_fresh(clock, tensors),
                lambda clock: _measure_torchft(clock, state),
            )
        for round_number, measure in turns(measured, options.num_samples):
            options.settle()
            measure(_Clock(group, num_bytes, round_number))
            options.say(f"clone {spec.name} {round_number + 1}/{options.num_samples}")
    finally:
        plain.close()
    torchft = group.find("torchft", "warm", "ms")
    if torchft is not None:
        group.notes.append(
            f"torchft's HTTPTransport.send_checkpoint takes {torchft.summary.median:.2f} ms, because it copies no CPU "
            "tensor: it serves the live ones, and so states torn between steps"
        )
    elif options.is_full:
        group.notes.append("torchft is not installed, so its row is missing")
    group.notes.append("under the lock: flatten and copy; digests and header follow without it")
    group.verdicts = judge(group)
    return group


def _measure_ours(clock: _Clock, state: State, *, is_full: bool) -> None:
    """One snapshot into an arena that has to be made, and some into the same arena."""
    transport: HTTPTransport[State] = HTTPTransport(
        settings=TransportSettings(host="127.0.0.1", advertise="127.0.0.1", max_snapshots=1)
    )
    try:
        for index in range(1 + _WARM_PER_ROUND):
            phase: Phase = "warm" if index else "cold"
            began_s = time.perf_counter()
            snapshot = clock.measure(
                lambda: _clone(transport, state), "ours_lock", "ft_transport, under the lock", "ours", phase
            )
            if not is_full:
                snapshot.abandon()
                continue
            clock.measure(snapshot.publish, "ours_publish", "ft_transport, digests and header", "other", phase)
            seconds = time.perf_counter() - began_s
            whole = Sample(clock.round_number, clock.num_bytes / seconds / 1e9)
            label = "ft_transport, the whole snapshot"
            clock.group.add("ours_whole", whole, label=label, role="other", phase=phase, unit=RATE)
    finally:
        transport.shutdown()


def _clone(transport: HTTPTransport[State], state: State) -> SnapshotInProgress:
    """What ``HTTPTransport.send_checkpoint`` does under the read lock."""
    snapshot = transport.begin_snapshot(peers.STEP, state)
    snapshot.copy_deferred()
    return snapshot


def _measure_plain(clock: _Clock, plain: MemoryCopy) -> None:
    num_threads = torch.get_num_threads()
    for _ in range(_WARM_PER_ROUND):
        clock.measure(plain.torch_copy, "copy", f"Tensor.copy_ into warm memory, {num_threads} threads", "ceiling")
        clock.measure(plain.memmove, "memmove", f"memmove into warm memory, {num_threads} threads", "ceiling")


def _measure_fresh(clock: _Clock, tensors: Sequence[torch.Tensor]) -> None:
    def clone_all() -> list[torch.Tensor]:
        return [tensor.clone() for tensor in tensors]

    # Memory that the allocator kept from the last time would be warm.
    return_free_memory()
    clock.measure(clone_all, "torch_clone", "Tensor.clone() into fresh memory", "other", "cold")


def _measure_torchft(clock: _Clock, state: State) -> None:
    if not peers.torchft_is_installed():
        return
    transport = peers.torchft_http_transport(0)
    try:
        started_s = time.perf_counter()
        transport.send_checkpoint([1], peers.STEP, state, peers.TIMEOUT)
        milliseconds = (time.perf_counter() - started_s) * 1e3
    finally:
        transport.shutdown()
    label = "torchft HTTPTransport.send_checkpoint"
    sample = Sample(clock.round_number, milliseconds)
    clock.group.add("torchft", sample, label=label, role="other", phase="warm", unit="ms")


def judge(group: Group) -> list[Verdict]:
    """The target of a clone."""
    ours = group.find("ours_lock", "warm", RATE)
    ceiling = group.best("ceiling", "warm", RATE)
    return [Verdict.at_least("warm clone under the lock / memory copy", group.ratio(ours, ceiling), 0.8)]


BENCHMARK: Final = Benchmark(name="clone", run=run, states=STATE_NAMES, default=Size(scale=1.0, num_samples=5))
