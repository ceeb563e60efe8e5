"""``ft-transport bench``: how fast are a clone and a fetch on this machine, beside what it allows?"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from ft_transport.cli.output import escape, megabytes
from ft_transport.errors import TransportError

if TYPE_CHECKING:
    from ft_transport import HTTPTransport

_TENSOR_BYTES: Final = 4 << 20
_STATE_BYTES: Final = 512 << 20
_QUICK_BYTES: Final = 64 << 20
_NUM_ROUNDS: Final = 7
_NUM_QUICK_ROUNDS: Final = 3
_CLONE_S: Final = 8.0
_FETCH_S: Final = 20.0
"""After so long no further round is begun."""
_RECEIVER_S: Final = 45.0
_COPY: Final = "memory copy"
_CLONE: Final = "clone"
_MAX_ERROR: Final = 2000

_seconds_decoder: Final = msgspec.json.Decoder(dict[str, list[float]])


class BenchFailedError(TransportError):
    """Something could not be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The measurements of one thing, in bytes per second.

    Attributes:
        name: Name of the measurement.
        ceiling: Name of the machine's limit for this rate; empty if this is a limit itself.
        median: Median rate of all rounds.
        low: Rate of the slowest round.
        high: Rate of the fastest round.
        num_rounds: Number of rounds; fewer than requested if they take long.
    """

    name: str
    ceiling: str
    median: float
    low: float
    high: float
    num_rounds: int


def bench_command(
    quick: Annotated[
        bool, typer.Option("--quick", help="An eighth of the size and fewer rounds: a few seconds.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One object of JSON.")] = False,
) -> None:
    """Measure a clone beside a memory copy, and a fetch over the loopback beside a bare sendfile → recv_into loop.

    Each is measured several times in turn, with memory that was used before. The fetch is received in place by a
    process of its own, over 4 connections. Takes less than a minute. Exits with 1 if something could not be measured.
    """
    from ft_transport.cli.ceilings import NUM_CONNECTIONS

    num_bytes, num_rounds = (_QUICK_BYTES, _NUM_QUICK_ROUNDS) if quick else (_STATE_BYTES, _NUM_ROUNDS)
    rates = measure(num_bytes, num_rounds)
    if as_json:
        told = {"num_bytes": num_bytes, "num_connections": NUM_CONNECTIONS, "rates": rates}
        typer.echo(msgspec.json.encode(told))
        return
    by_name = {rate.name: rate for rate in rates}
    typer.echo(
        f"{megabytes(num_bytes)} in tensors of {megabytes(_TENSOR_BYTES)}, median of {rates[-1].num_rounds} (min–max)"
    )
    for rate in rates:
        spread = f"{rate.low / 1e9:.2f}–{rate.high / 1e9:.2f}"
        ceiling = by_name.get(rate.ceiling)
        share = f"{rate.median / ceiling.median:.2f} of the {ceiling.name}" if ceiling is not None else "the ceiling"
        typer.echo(f"  {rate.name:<20} {rate.median / 1e9:6.2f} GB/s ({spread})  {share}")


def measure(num_bytes: int, num_rounds: int) -> list[Rate]:
    """All rates, clones first.

    Raises:
        BenchFailedError: The receiver's process failed, or took too long.
    """
    from datetime import timedelta

    from ft_transport import HTTPTransport, TransportSettings
    from ft_transport.cli.bench_receiver import STEP, state_of

    settings = TransportSettings(
        host="127.0.0.1", advertise="127.0.0.1", same_host=False, max_snapshots=1, tls=None, token=None
    )
    transport: HTTPTransport[Any] = HTTPTransport(timedelta(seconds=_RECEIVER_S), settings=settings)
    try:
        state = state_of(num_bytes, _TENSOR_BYTES)
        rates = _clone_rates(transport, state, num_bytes, num_rounds)
        transport.send_checkpoint([], STEP, state, timedelta(seconds=_RECEIVER_S))
        return [*rates, *_fetch_rates(transport.metadata(), num_bytes, num_rounds)]
    finally:
        transport.shutdown()


def _clone_rates(transport: HTTPTransport[Any], state: dict[str, Any], num_bytes: int, num_rounds: int) -> list[Rate]:
    import statistics

    from ft_transport.cli.ceilings import MemoryCopy
    from ft_transport.state.snapshot import Taking

    samples: dict[str, list[float]] = {"copy_": [], "memmove": [], _CLONE: []}
    until_s = time.monotonic() + _CLONE_S
    plain = MemoryCopy(list(state.values()))
    try:
        # The first round makes the arena, and everything warm.
        for number in range(num_rounds + 1):
            if number > 1 and time.monotonic() > until_s:
                break
            seconds = {"copy_": _seconds(plain.torch_copy), "memmove": _seconds(plain.memmove)}
            began_s = time.perf_counter()
            snapshot = transport.server.take(Taking(step=0, state=state))
            snapshot.copy_deferred()
            seconds[_CLONE] = time.perf_counter() - began_s
            snapshot.abandon()
            for name, each in seconds.items():
                samples[name] += [num_bytes / each] if number else []
    finally:
        plain.close()
    best = max(samples["copy_"], samples["memmove"], key=statistics.median)
    return [_rate(_COPY, "", best), _rate(_CLONE, _COPY, samples[_CLONE])]


def _fetch_rates(url: str, num_bytes: int, num_rounds: int) -> list[Rate]:
    """Measure in a separate process, so that the two sides share no interpreter."""
    from ft_transport.cli.bench_receiver import BARE, UNVERIFIED, VERIFIED, Task
    from ft_transport.cli.ceilings import bare_sender

    with bare_sender(num_bytes) as port:
        task = Task(
            url=url,
            port=port,
            num_bytes=num_bytes,
            tensor_bytes=_TENSOR_BYTES,
            num_rounds=num_rounds,
            within_s=_FETCH_S,
        )
        try:
            done = subprocess.run(
                [sys.executable, "-m", "ft_transport.cli.bench_receiver"],
                input=msgspec.json.encode(task),
                capture_output=True,
                timeout=_RECEIVER_S,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise BenchFailedError(f"expected a process that receives: {error}; try --quick") from error
    if done.returncode:
        told = escape(done.stderr.decode("utf-8", "replace")[-_MAX_ERROR:], _MAX_ERROR)
        raise BenchFailedError(f"expected a process that receives, it ended with {done.returncode}: {told}")
    seconds = _seconds_decoder.decode(done.stdout)
    samples = {name: [num_bytes / each for each in values] for name, values in seconds.items()}
    return [
        _rate(BARE, "", samples[BARE]),
        _rate(UNVERIFIED, BARE, samples[UNVERIFIED]),
        _rate(VERIFIED, BARE, samples[VERIFIED]),
    ]


def _seconds(action: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s


def _rate(name: str, ceiling: str, samples: list[float]) -> Rate:
    import statistics

    return Rate(
        name=name,
        ceiling=ceiling,
        median=statistics.median(samples),
        low=min(samples),
        high=max(samples),
        num_rounds=len(samples),
    )
