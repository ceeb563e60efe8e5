"""A job token: a state moves to a fresh process from a source that proves itself, with keyed digests and without."""

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
from ft_transport.wire.chunks import DigestKind

_TOKEN: Final = "only-for-a-benchmark"


def _variant(kind: DigestKind) -> FetchVariant:
    return FetchVariant(
        f"ft_transport, token, {kind}, in place, {NUM_CONNECTIONS} connections, verified",
        "ours",
        partial(serve_ours, token=_TOKEN, keyed_digests=kind),
        partial(prepare_ours, token=_TOKEN, keyed_digests=kind),
    )


KEYED: Final = _variant("keyed-xxh3-64")
CRYPTOGRAPHIC: Final = _variant("blake3-64")


def run(options: Options) -> Iterator[Group]:
    """Measures one state after the other."""
    for name in options.states:
        group = measure("token", StateSpec(name, options.scale), (KEYED, CRYPTOGRAPHIC, VERIFIED), options)
        group.verdicts = [
            Verdict.at_least("keyed digests / no token", group.ratio(KEYED, VERIFIED, COLD), 0.9),
            Verdict("cryptographic digests / no token", group.ratio(CRYPTOGRAPHIC, VERIFIED, COLD), None, "at least"),
        ]
        yield group


BENCHMARK: Final = Benchmark(
    name="token",
    question="What does a job token cost a fetch?",
    run=run,
    states=("big",),
    default=Size(scale=0.4, num_samples=7),
)
