"""Host: eight ranks of one host send, each to a receiver of its own, all at the same moment and over the loopback.

The bytes of the host are divided among the pairs, so that one pair sends as much as eight. Each sample has fresh
processes on both sides. The ceilings are as many pairs of a bare loop, and of iperf3, which sends the same 128 KiB
again and again: its bytes come from the processor's cache and go there. The figures beside the rates show what
limits them: the processor time of a gigabyte, and the share of the cores that was in use.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from benchmarks.fetch import COLD, WARM
from benchmarks.machine import Watch
from benchmarks.options import Benchmark, Options, Size
from benchmarks.processes import Channel, Child, in_fresh_process
from benchmarks.report import Group, Named, Quantity, Role, Sample, Verdict
from benchmarks.states import StateSpec, build_source, digest_of, num_bytes_of
from benchmarks.transports import Fetch, Receiver, Serve, prepare_bare, prepare_ours, serve_bare, serve_ours

_NUM_PAIRS: Final = 8
_STATE: Final = "big"
_HOST_SCALE: Final = 2.0
"""Scales the state to 4 GB per host, half a gigabyte per rank."""
_NUM_FULL_STARTS: Final = 2
_HOST: Final = "127.0.0.1"
_TIMEOUT_S: Final = 60.0
_READY, _FETCH, _SPENT, _DIGEST = "ready", "fetch", "spent", "digest"
_IPERF3: Final = "iperf3"
_IPERF3_S: Final = 2
_MAX_TRIES: Final = 5
IN_USE: Final = Quantity("cores in use", "%")
SPENT: Final = tuple(
    Quantity(f"processor time, {side}, {where}", "s/GB")
    for side in ("senders", "receivers")
    for where in ("user", "system")
)


@dataclass(frozen=True, slots=True)
class Pairs:
    """One way in which the ranks of a host send, each to its receiver."""

    name: str
    role: Role
    serve: Serve
    prepare: Callable[[Receiver], Fetch]
    num_pairs: int = _NUM_PAIRS


VERIFIED: Final = Pairs("ft_transport, 8 pairs, verified", "ours", serve_ours, prepare_ours)
UNVERIFIED: Final = replace(
    VERIFIED, name="ft_transport, 8 pairs, unverified", prepare=partial(prepare_ours, verify=False)
)
ONE: Final = replace(VERIFIED, name="ft_transport, 1 pair, verified", num_pairs=1)
BARE: Final = Pairs("bare sendfile → recv_into, 8 pairs", "ceiling", serve_bare, prepare_bare)
BARE_ONE: Final = replace(BARE, name="bare sendfile → recv_into, 1 pair", num_pairs=1)
IPERF3: Final = Named("iperf3, 8 pairs", "ceiling")
VARIANTS: Final[tuple[Pairs | Named, ...]] = (VERIFIED, UNVERIFIED, ONE, BARE, BARE_ONE, IPERF3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The bytes that all pairs sent together after one start, and the cost.

    Attributes:
        num_bytes: Of all pairs.
        seconds: From the start to the end of the last receiver.
        others_share: See `Watch`.
        spent_s: Processor time, in the order of `SPENT`.
    """

    num_bytes: int
    seconds: float
    others_share: float | None
    spent_s: Sequence[float]

    @property
    def rate(self) -> float:
        """In GB/s."""
        return self.num_bytes / 1e9 / self.seconds

    @property
    def limits(self) -> dict[Quantity, float]:
        """The quantities that explain the rate: processor time of a gigabyte, and the cores in use."""
        return {
            **{quantity: spent_s * 1e9 / self.num_bytes for quantity, spent_s in zip(SPENT, self.spent_s, strict=True)},
            IN_USE: sum(self.spent_s) / self.seconds / (os.cpu_count() or 1) * 100,
        }


def run(options: Options) -> Iterator[Group]:
    """Measures all variants."""
    spec = StateSpec(_STATE, _HOST_SCALE * options.scale)
    has_iperf3 = shutil.which(_IPERF3) is not None
    variants = tuple(each for each in VARIANTS if has_iperf3 or each is not IPERF3)
    group = Group("host", "ranks", "")
    for number, variant in options.rounds("host", variants):
        if isinstance(variant, Named):
            starts = [in_fresh_process(_run_iperf3, _NUM_PAIRS)]
        else:
            starts = _send(variant, spec, num_starts=_NUM_FULL_STARTS if options.is_full else 1)
            group.title = f"{spec.title}, {starts[0].num_bytes / 1e9:.2f} GB over loopback, fresh processes"
        for index, sent in enumerate(starts):
            group.add(variant, WARM if index else COLD, Sample(number, sent.rate, sent.others_share))
        for quantity, value in starts[0].limits.items():
            group.add(variant, quantity, Sample(number, value, starts[0].others_share))
    group.sort(variants)
    group.verdicts = judge(group)
    if not has_iperf3:
        group.notes.append("iperf3 is not installed, so its row is missing")
    yield group


def judge(group: Group) -> list[Verdict]:
    """The targets."""
    return [
        Verdict.at_least("8 pairs, verified / bare loop", group.ratio(VERIFIED, BARE, COLD), 0.75),
        Verdict.at_least("8 pairs, unverified / bare loop", group.ratio(UNVERIFIED, BARE, COLD), 0.9),
        Verdict.at_least("verified, 8 pairs / 1 pair", group.ratio(VERIFIED, ONE, COLD), 0.9),
        Verdict("bare loop, 8 pairs / 1 pair", group.ratio(BARE, BARE_ONE, COLD), None, "at least"),
        Verdict("8 pairs, verified / iperf3", group.ratio(VERIFIED, IPERF3, COLD), None, "at least"),
    ]


def _send(variant: Pairs, spec: StateSpec, *, num_starts: int) -> list[Sent]:
    """Starts fresh pairs, and lets them send several times."""
    with contextlib.ExitStack() as stack:

        def child(target: Callable[..., None], *arguments: object) -> Child:
            started = Child(target, *arguments)
            stack.callback(started.close)
            return started

        share = replace(spec, scale=spec.scale / variant.num_pairs)
        senders = [child(_serve, variant, share) for _ in range(variant.num_pairs)]
        served = [sender.receive(_TIMEOUT_S) for sender in senders]
        receivers = [child(_receive, variant, receiver) for receiver, _ in served]
        _ask(receivers, _READY)
        num_bytes = sum(receiver.num_bytes for receiver, _ in served)
        starts = [_start(senders, receivers, num_bytes) for _ in range(num_starts)]
        for arrived, (_, digest) in zip(_ask(receivers, _DIGEST), served, strict=True):
            if arrived not in (None, digest):  # A transfer that loses bytes is no faster one.
                raise RuntimeError(f"{variant.name!r} delivered another state than was sent")
        return starts


def _start(senders: Sequence[Child], receivers: Sequence[Child], num_bytes: int) -> Sent:
    before = _spent_s(senders) + _spent_s(receivers)
    with Watch([os.getpid(), *(child.process_id for child in (*senders, *receivers))]) as watch:
        _ask(receivers, _FETCH)
    after = _spent_s(senders) + _spent_s(receivers)
    return Sent(
        num_bytes=num_bytes,
        seconds=watch.seconds,
        others_share=watch.others_share,
        spent_s=[end - begun for begun, end in zip(before, after, strict=True)],
    )


def _spent_s(children: Sequence[Child]) -> list[float]:
    """The processor time of all children so far, in user and in system mode."""
    return [sum(spent) for spent in zip(*_ask(children, _SPENT), strict=True)]


def _ask(children: Sequence[Child], task: str) -> list[Any]:
    """Gives all children the task, and returns what they say when it is done."""
    for child in children:
        child.say(task)
    return [child.receive(_TIMEOUT_S) for child in children]


def _serve(channel: Channel, variant: Pairs, spec: StateSpec) -> None:
    """In a sender's process."""
    state = build_source(spec)
    num_bytes = num_bytes_of(state)
    with contextlib.ExitStack() as stack:
        address = variant.serve(state, num_bytes, stack)(_NUM_FULL_STARTS)
        channel.say((Receiver(spec=spec, num_bytes=num_bytes, address=address), digest_of(state)))
        del state  # What is served is a copy.
        _obey(channel, {})


def _receive(channel: Channel, variant: Pairs, receiver: Receiver) -> None:
    """In a receiver's process. Its own memory and the transport come before anything is measured."""
    fetch = variant.prepare(receiver)
    arrived: list[object] = []

    def digest() -> str | None:
        return digest_of(arrived[-1]) if arrived[-1] is not None else None

    _obey(channel, {_FETCH: lambda: arrived.append(fetch()), _DIGEST: digest})


def _obey(channel: Channel, tasks: Mapping[str, Callable[[], object]]) -> None:
    """Does what the parent asks for, until it lets go of this process."""
    tasks = {_READY: lambda: None, _SPENT: _own_spent_s, **tasks}
    while True:
        channel.say(tasks[channel.wait()]())


def _own_spent_s() -> tuple[float, float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime, usage.ru_stime


def _run_iperf3(num_pairs: int) -> Sent:
    """In a process whose end also ends what it has started. iperf3 sends for a time, and reports its processor time."""
    servers = [_iperf3_server() for _ in range(num_pairs)]
    process_ids = [server.pid for _, server in servers]
    with Watch(process_ids) as watch:
        clients = [
            subprocess.Popen(
                [_IPERF3, "-c", _HOST, "-p", str(port), "-t", str(_IPERF3_S), "-J", "--connect-timeout", "5000"],
                stdout=subprocess.PIPE,
            )
            for port, _ in servers
        ]
        # Their processor time began at zero. It stays readable after their end, until somebody waits for them.
        process_ids += [client.pid for client in clients]
        for process_id in process_ids:
            os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOWAIT)
    ended = [json.loads(client.communicate()[0])["end"] for client in clients]
    used = [each["cpu_utilization_percent"] for each in ended]
    seconds = max(each["sum_received"]["seconds"] for each in ended)
    return Sent(
        num_bytes=sum(each["sum_received"]["bytes"] for each in ended),
        seconds=seconds,
        others_share=watch.others_share,
        spent_s=[
            sum(each[name] for each in used) / 100 * seconds
            for name in ("host_user", "host_system", "remote_user", "remote_system")
        ],
    )


def _iperf3_server() -> tuple[int, subprocess.Popen[str]]:
    """One that takes a single sender, and its port."""
    for _ in range(_MAX_TRIES):
        # Another process may take the port before iperf3 does.
        with socket.create_server((_HOST, 0)) as free:
            port = free.getsockname()[1]
        command = [_IPERF3, "-s", "-1", "-B", _HOST, "-p", str(port), "--forceflush", "--idle-timeout", "30"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        if any("listening" in line for line in server.stdout):
            return port, server
        server.wait(_TIMEOUT_S)
    raise RuntimeError(f"expected a free port for iperf3 within {_MAX_TRIES} tries")


BENCHMARK: Final = Benchmark(
    name="host",
    question="How much do eight ranks of one host send together?",
    run=run,
    default=Size(scale=0.25, num_samples=3),
    misses={
        "unverified / bare loop": "All cores are busy; for a GB, requests and chunks take 0.1 s of a core in Python.",
        "verified / bare loop": "All cores are busy; for a GB, Python takes 0.1 s of a core, and the digests 0.1 s.",
        "8 pairs / 1 pair": "Each rank begins with a manifest and small requests, about 15 ms of a core.",
    },
)
