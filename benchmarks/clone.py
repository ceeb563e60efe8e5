"""Clone: a state becomes a snapshot in a warm arena, beside plain copies of the same tensors into warm memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from benchmarks import transports
from benchmarks.machine import Watch, return_free_memory
from benchmarks.options import Benchmark, Options, Size
from benchmarks.report import Group, Named, Quantity, Role, Verdict, ratio
from benchmarks.states import STATE_NAMES, State, StateSpec, build_source, num_bytes_of, tensors_of
from ft_transport import Limits
from ft_transport.cli.bench import MemoryCopy

_WARM_PER_ROUND: Final = 2
_THREADS: Final = torch.get_num_threads()
COLD: Final = Quantity("new arena", "GB/s")
WARM: Final = Quantity("warm", "GB/s")
_SEND: Final = Quantity("send_checkpoint", "ms")
OURS: Final = Named("ft_transport, under the lock", "ours")
_PUBLISH: Final = Named("ft_transport, digests and header", "other")
_WHOLE: Final = Named("ft_transport, the whole snapshot", "other")
_COPIES: Final = (
    Named(f"Tensor.copy_ into warm memory, {_THREADS} threads", "ceiling"),
    Named(f"memmove into warm memory, {_THREADS} threads", "ceiling"),
)
_FRESH: Final = Named("Tensor.clone() into fresh memory", "other")
_TORCHFT: Final = Named("torchft HTTPTransport.send_checkpoint", "other")


@dataclass(slots=True, kw_only=True)
class _Cloning:
    """What is cloned, and where the figures go."""

    group: Group
    state: State
    plain: MemoryCopy
    is_full: bool
    round_number: int = 0

    def add(self, variant: Named, quantity: Quantity, action: Callable[[], object]) -> Watch:
        with Watch([os.getpid()]) as watch:
            action()
        self.add_seconds(variant, quantity, watch, watch.seconds)
        return watch

    def add_seconds(self, variant: Named, quantity: Quantity, watch: Watch, seconds: float) -> None:
        value = num_bytes_of(self.state) / seconds / 1e9 if quantity.is_rate else seconds * 1e3
        self.group.add(variant, quantity, watch.sample(self.round_number, value))


@dataclass(frozen=True, slots=True)
class _Turn:
    """What is measured in one turn of a round."""

    name: str
    role: Role
    measure: Callable[[_Cloning], None]
    is_judged: bool = True


def run(options: Options) -> Iterator[Group]:
    """Measures one state after the other."""
    for name in options.states:
        yield _run_state(StateSpec(name, options.scale), options)


def _run_state(spec: StateSpec, options: Options) -> Group:
    state = build_source(spec)
    tensors = list(tensors_of(state))
    group = Group("clone", spec.name, f"{spec.title}, {num_bytes_of(state) / 1e9:.2f} GB, {len(tensors)} tensors")
    plain = MemoryCopy(tensors)
    cloning = _Cloning(group=group, state=state, plain=plain, is_full=options.is_full)
    try:
        measured = tuple(turn for turn in _TURNS if options.is_full or turn.is_judged)
        for cloning.round_number, turn in options.rounds(f"clone {spec.name}", measured):
            turn.measure(cloning)
    finally:
        plain.close()
    group.notes.append("under the lock: flatten and copy; digests and header follow without it")
    if options.is_full and not transports.torchft_is_installed():
        group.notes.append(transports.NO_TORCHFT)
    elif options.is_full:
        group.notes.append("torchft copies no CPU tensor: it serves the live ones, and so states torn between steps")
    group.sort([OURS, _PUBLISH, _WHOLE, *_COPIES, _FRESH, _TORCHFT])
    group.verdicts = judge(group)
    return group


def _measure_ours(cloning: _Cloning) -> None:
    """One snapshot into an arena that has to be made, and some into the same arena."""
    transport = transports.our_transport(limits=Limits(max_snapshots=1))
    try:
        for quantity in (COLD, *[WARM] * _WARM_PER_ROUND):
            with Watch([os.getpid()]) as watch:
                snapshot = transports.clone(transport, cloning.state)
            cloning.add_seconds(OURS, quantity, watch, watch.seconds)
            if cloning.is_full:
                publishing = cloning.add(_PUBLISH, quantity, snapshot.publish)
                cloning.add_seconds(_WHOLE, quantity, watch, watch.seconds + publishing.seconds)
            else:
                snapshot.abandon()
    finally:
        transport.shutdown()


def _measure_copies(cloning: _Cloning) -> None:
    for _ in range(_WARM_PER_ROUND):
        for variant, action in zip(_COPIES, (cloning.plain.torch_copy, cloning.plain.memmove), strict=True):
            cloning.add(variant, WARM, action)


def _measure_fresh(cloning: _Cloning) -> None:
    tensors = list(tensors_of(cloning.state))
    # Memory that the allocator kept from the last time would be warm.
    return_free_memory()
    with Watch([os.getpid()]) as watch:
        clones = [tensor.clone() for tensor in tensors]
    del clones
    cloning.add_seconds(_FRESH, COLD, watch, watch.seconds)


def _measure_torchft(cloning: _Cloning) -> None:
    if transports.torchft_is_installed():
        transport = transports.torchft_http_transport(0)
        try:
            send = partial(transport.send_checkpoint, [1], transports.STEP, cloning.state, transports.TIMEOUT)
            cloning.add(_TORCHFT, _SEND, send)
        finally:
            transport.shutdown()


_TURNS: Final = (
    _Turn("ft_transport", "ours", _measure_ours),
    _Turn("memory copies", "ceiling", _measure_copies),
    _Turn("fresh memory", "other", _measure_fresh, is_judged=False),
    _Turn("torchft", "other", _measure_torchft, is_judged=False),
)


def judge(group: Group) -> list[Verdict]:
    """The target of a clone."""
    figure = ratio(group.find(OURS, WARM), group.best_of("ceiling", WARM))
    return [Verdict.at_least("warm clone under the lock / memory copy", figure, 0.8)]


BENCHMARK: Final = Benchmark(
    name="clone",
    question="How fast is a snapshot under the lock?",
    run=run,
    states=STATE_NAMES,
    default=Size(scale=1.0, num_samples=5),
    misses={
        "memory copy": "Flattening takes 1.9 µs for each tensor, in Python, before the first byte is copied.",
    },
)
