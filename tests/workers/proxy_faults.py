"""Fetches through proxies that hurt connections by a seed; by hand with many (`make proxy-faults`), in CI with few.

Each fetch has 1 to 3 sources, each behind a proxy of its own (`faulty_network`), and about every second connection is
hurt, in one of both directions. What must hold of each fetch: the state arrives exactly, or the error has a type; it
ends within its deadline. What must hold at the end: no thread or descriptor is left, and no source is being read.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import random
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from faulty_network import Fault, draw, faulty_network
from machine_pauses import MachinePauses, watching_for_pauses
from sharded_tools import mesh_of, part_of
from state_equality import exact
from torch.distributed.tensor import Replicate, Shard
from transport_settings import settings_of

from ft_transport import FetchFailedError, HTTPTransport, TransportError
from ft_transport.http.peer_address import PeerAddress

STALL_S: Final = 0.1
TIMEOUT_S: Final = 3.0
GRACE_S: Final = 3.0
"""A busy machine may be so late; what hangs is later by far."""
SHARE_HURT: Final = 0.5
MAX_HURT_PER_FETCH: Final = 3
_LONG: Final = timedelta(seconds=30)


def whole_state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    return {
        "w": torch.randn(48, 100, generator=generator),
        "h": torch.randn(30, 7, generator=generator).to(torch.bfloat16),
        "b": torch.arange(6000, dtype=torch.int64),
        "step": 1,
        "name": "state",
    }


def parts_of(state: dict[str, Any], rank: int, num_ranks: int) -> dict[str, Any]:
    """What a rank holds: all of it if there are two, a third of each matrix if there are three."""
    mesh, at = mesh_of((num_ranks,), rank), [Replicate() if num_ranks == 2 else Shard(0)]
    return {
        key: part_of(value, mesh, at) if isinstance(value, torch.Tensor) and value.dim() == 2 else value
        for key, value in state.items()
    }


@dataclass
class Tally:
    """What came of all fetches."""

    num_fetches: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    alone: Counter[tuple[str, str, bool]] = field(default_factory=Counter)
    hurt: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    late: list[tuple[float, float, str]] = field(default_factory=list)
    longest_s: float = 0.0
    mutex: threading.Lock = field(default_factory=threading.Lock)

    @property
    def num_hurt(self) -> int:
        return sum(self.hurt.values())


@contextmanager
def _serving() -> Iterator[dict[int, list[HTTPTransport[Any]]]]:
    """Sources for fetches from one, two and three of them."""
    with ExitStack() as stack:

        def transport(state: Any) -> HTTPTransport[Any]:
            settings = settings_of(
                host="127.0.0.1", chunk_bytes=8 << 10, lease=timedelta(0), stall_timeout=timedelta(seconds=5 * STALL_S)
            )
            made: HTTPTransport[Any] = HTTPTransport(_LONG, settings=settings)
            stack.callback(made.shutdown)
            made.send_checkpoint([], 1, state, _LONG)
            return made

        state = whole_state()
        yield {
            1: [transport(state)],
            2: [transport(parts_of(state, rank, 2)) for rank in range(2)],
            3: [transport(parts_of(state, rank, 3)) for rank in range(3)],
        }


class _Fetcher:
    """One thread's fetches, one after the other, each from its own seed."""

    def __init__(self, servers: dict[int, list[HTTPTransport[Any]]], tally: Tally, expected: object) -> None:
        self._servers = servers
        self._tally = tally
        self._expected = expected
        self._drawn: list[Fault] = []
        self._random = random.Random(0)
        self._num_left = 0

    def run(self, seeds: Iterator[int], num_faults: int) -> None:
        settings = settings_of(
            host="127.0.0.1",
            stall_timeout=timedelta(seconds=STALL_S),
            min_bytes_per_s=1,
            max_failures=6,
        )
        with ExitStack() as stack:
            receiver: HTTPTransport[Any] = HTTPTransport(_LONG, 2, settings=settings)
            stack.callback(receiver.shutdown)
            proxies = {
                count: [
                    stack.enter_context(faulty_network(PeerAddress.from_url(each.metadata()).port, self._next_fault))
                    for each in servers
                ]
                for count, servers in self._servers.items()
            }
            for seed in seeds:
                if self._tally.num_hurt >= num_faults:
                    break
                self._fetch(receiver, proxies, seed)

    def _next_fault(self) -> Fault | None:
        if self._num_left <= 0 or self._random.random() >= SHARE_HURT:
            return None
        self._num_left -= 1
        fault = draw(self._random, STALL_S)
        self._drawn.append(fault)
        return fault

    def _fetch(self, receiver: HTTPTransport[Any], proxies: dict[int, list[Any]], seed: int) -> None:
        self._random = random.Random(seed)
        num_sources = self._random.choice((1, 1, 2, 3))
        self._drawn, self._num_left = [], self._random.randint(1, MAX_HURT_PER_FETCH)
        used = proxies[num_sources]
        before = sum((proxy.hurt for proxy in used), Counter())
        urls = [f"http://127.0.0.1:{proxy.port}/checkpoint/" for proxy in used]
        started_s = time.monotonic()
        violation = None
        timeout = timedelta(seconds=TIMEOUT_S)
        try:
            if num_sources == 1:
                state = receiver.fetch(urls[0], 1, timeout=timeout).state
            else:
                state = receiver.fetch_sharded(urls, 1, timeout=timeout).state
            outcome = "exact"
            if exact(state) != self._expected:
                violation = "another state came"
        except TransportError as error:
            last = error.failures[-1] if isinstance(error, FetchFailedError) and error.failures else error
            outcome = type(last).__name__
        except BaseException as error:
            outcome = type(error).__name__
            violation = f"an error without a type: {error!r}"
        took_s = time.monotonic() - started_s
        hurt = sum((proxy.hurt for proxy in used), Counter()) - before
        tally = self._tally
        fetch = f"seed {seed}, {num_sources} sources, {self._drawn}"
        with tally.mutex:
            tally.num_fetches += 1
            tally.outcomes[outcome] += 1
            tally.hurt += hurt
            tally.longest_s = max(tally.longest_s, took_s)
            if len(self._drawn) == 1 and hurt.total() == 1:
                fault = self._drawn[0]
                where = "request" if fault.to_server else "answer"
                tally.alone[where, fault.kind, outcome == "exact"] += 1
            if took_s > TIMEOUT_S + GRACE_S:
                tally.late.append((started_s, started_s + took_s, fetch))
            if violation is not None:
                tally.violations.append(f"{fetch}: {violation}")


def run(num_faults: int, seed: int, *, num_threads: int = 4) -> Tally:
    """Fetches until so many faults have hurt a connection."""
    expected = exact(whole_state())
    tally = Tally()
    numbers = iter(range(seed * 10_000_000, (seed + 1) * 10_000_000))
    mutex = threading.Lock()

    def seeds() -> Iterator[int]:
        while True:
            with mutex:
                number = next(numbers)
            yield number

    with watching_for_pauses() as pauses, _serving() as servers:
        threads = [
            threading.Thread(target=_Fetcher(servers, tally, expected).run, args=(seeds(), num_faults))
            for _ in range(num_threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        tally.violations += _still_read(servers)
    tally.violations += _too_late(tally, pauses)
    return tally


def _too_late(tally: Tally, pauses: MachinePauses) -> Iterator[str]:
    """Fetches that were late while the machine was running."""
    for start_s, end_s, fetch in tally.late:
        paused_s = pauses.overlap_s(start_s, end_s)
        if end_s - start_s - paused_s > TIMEOUT_S + GRACE_S:
            yield f"{fetch}: it took {end_s - start_s:.1f} s, {paused_s:.1f} s of them a pause of the machine"


def _still_read(servers: dict[int, list[HTTPTransport[Any]]]) -> list[str]:
    """Sources that are still being read some time after the last fetch."""
    until_s = time.monotonic() + 10
    while True:
        busy = []
        for server in (each for group in servers.values() for each in group):
            address = server.metadata().removesuffix("/").removesuffix("/checkpoint")
            with urllib.request.urlopen(f"{address}/status", timeout=10) as answer:
                told = json.loads(answer.read())
            if told["clients"]:
                busy.append(f"{told['clients']} readers are left at {address}")
        if not busy or time.monotonic() > until_s:
            return busy
        time.sleep(0.05)


def left_behind(before: Counter[str]) -> Counter[str]:
    """Threads and descriptors that were not there before, some time after the end."""
    until_s = time.monotonic() + 10
    while (left := alive() - before) and time.monotonic() < until_s:
        gc.collect()
        time.sleep(0.05)
    return left


def alive() -> Counter[str]:
    descriptors: list[str] = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            descriptors.append(os.readlink(entry).partition("[")[0])
        except OSError:
            continue
    return Counter([*descriptors, *(f"thread {thread.name.rpartition('-')[0]}" for thread in threading.enumerate())])


def _print(tally: Tally, took_s: float, num_faults: int, seed: int) -> None:
    print(
        f"seed {seed}: {tally.num_hurt} faults (asked for {num_faults}) in {tally.num_fetches} fetches, {took_s:.0f} s"
    )
    print(
        f"longest fetch {tally.longest_s:.2f} s of {TIMEOUT_S:g} s; {len(tally.late)} late with pauses of the machine"
    )
    for outcome, count in tally.outcomes.most_common():
        print(f"  {outcome:28} {count:7} {100 * count / tally.num_fetches:6.2f} %")
    print("fetches with one fault, that arrived:")
    for where in ("request", "answer"):
        kinds = sorted({kind for at, kind, _ in tally.alone if at == where})
        numbers = {kind: (tally.alone[where, kind, True], tally.alone[where, kind, False]) for kind in kinds}
        all_good, all_bad = (sum(each[at] for each in numbers.values()) for at in (0, 1))
        print(f"  {where}: {all_good} of {all_good + all_bad}", end="; ")
        print(", ".join(f"{kind} {good}/{good + bad}" for kind, (good, bad) in numbers.items()))
    for violation in tally.violations[:20]:
        print(f"VIOLATION: {violation}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num", type=int, default=1000, help="how many faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=4)
    options = parser.parse_args()
    logging.disable()  # servers speak of each damaged request
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run(1, 0)  # what is opened once and kept
    before = alive()
    started_s = time.monotonic()
    tally = run(options.num, options.seed, num_threads=options.threads)
    took_s = time.monotonic() - started_s
    left = left_behind(before)
    tally.violations += [f"left behind: {count} × {what}" for what, count in left.items()]
    _print(tally, took_s, options.num, options.seed)
    dist.destroy_process_group()
    sys.exit(bool(tally.violations))


if __name__ == "__main__":
    main()
