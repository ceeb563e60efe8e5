"""A job token: a state moves to a fresh process from a source that proves itself, and from one without a token."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from benchmarks.fetch import COLD, VERIFIED, FetchVariant, measure
from benchmarks.options import Benchmark, Options, Size
from benchmarks.report import Group, Verdict
from benchmarks.states import StateSpec
from benchmarks.transports import prepare_ours, serve_ours
from ft_transport.cli.bench import NUM_CONNECTIONS

_TOKEN: Final = "only-for-a-benchmark"


WITH_TOKEN: Final = FetchVariant(
    f"ft_transport, token, in place, {NUM_CONNECTIONS} connections, verified",
    "ours",
    partial(serve_ours, token=_TOKEN),
    partial(prepare_ours, token=_TOKEN),
)


def run(options: Options) -> Iterator[Group]:
    """Measures one state after the other."""
    for name in options.states:
        group = measure("token", StateSpec(name, options.scale), (WITH_TOKEN, VERIFIED), options)
        ratio = group.ratio(WITH_TOKEN, VERIFIED, COLD)
        group.verdicts = [Verdict("cryptographic digests / no token", ratio, None, "at least")]
        yield group


BENCHMARK: Final = Benchmark(
    name="token",
    question="What does a job token cost a fetch?",
    run=run,
    states=("big",),
    default=Size(scale=0.4, num_samples=7),
)
