"""Fetch: a state moves to a fresh process over loopback, by us, by torchft, and by a bare loop.

All senders live in this process, which sleeps while a receiver runs. Rounds go through all variants, beginning with
another one each time, so that what the machine does meanwhile befalls all of them alike.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import peers
from benchmarks.ceilings import NUM_CONNECTIONS, bare_sender
from benchmarks.machine import is_busy
from benchmarks.report import Group, Phase, Role, Sample, Series, Verdict
from benchmarks.states import State, StateSpec, build_source, digest_of, num_bytes_of
from ft_transport import HTTPTransport, TransportSettings

_NUM_FETCHES: Final = 3
_RECEIVER_TIMEOUT_S: Final = 300.0
_REPOSITORY: Final = Path(__file__).resolve().parent.parent

RATE: Final = "GB/s"
MEMORY: Final = "MB"

_BUSY: Final = "sender's Python busy"
_HTTP_PEERS: Final = ("torchft_http_0", "torchft_http_8")


@dataclass(frozen=True)
class _Variant:
    """One way to move the state.

    Attributes:
        key: Names it, also for the receiver.
        label: Names it for people.
        role: Whose it is.
        address: Makes its sender ready for one more receiver, and says where that finds it.
        is_busy: Whether another thread of the sender's process keeps Python busy meanwhile, as a training loop may.
    """

    key: str
    label: str
    role: Role
    address: Callable[[], str]
    is_busy: bool = False

    @property
    def num_fetches(self) -> int:
        return 1 if self.is_busy else _NUM_FETCHES


def run(
    specs: Sequence[StateSpec], num_samples: int, say: Callable[[str], None], settle: Callable[[], None]
) -> Iterator[Group]:
    """Measures one state after the other.

    Args:
        specs: The states.
        num_samples: Fresh receivers for each variant.
        say: Takes a line about the progress.
        settle: Called before each sample; returns when it may be taken.
    """
    for spec in specs:
        yield _run_state(spec, num_samples, say, settle)


def _run_state(spec: StateSpec, num_samples: int, say: Callable[[str], None], settle: Callable[[], None]) -> Group:
    state = build_source(spec)
    num_bytes = num_bytes_of(state)
    digest = digest_of(state)
    group = Group("fetch", spec.name, f"{spec.title}, {num_bytes / 1e9:.2f} GB over loopback, fresh receivers")
    with contextlib.ExitStack() as stack:
        variants = _variants(state, num_bytes, stack, group.notes)
        if spec.name == "small":
            # torchft sends so many tensors from a busy interpreter for minutes.
            variants = [variant for variant in variants if not variant.is_busy]
        for round_number in range(num_samples):
            first = round_number % len(variants)
            for variant in variants[first:] + variants[:first]:
                settle()
                with _busy_interpreter() if variant.is_busy else contextlib.nullcontext():
                    outcome = _receive(variant, spec, num_bytes)
                _check(variant, outcome, digest)
                _take_note(group, variant, round_number, num_bytes, outcome)
                rates = [num_bytes / fetch["seconds"] / 1e9 for fetch in outcome["fetches"]]
                say(f"fetch {spec.name} {round_number + 1}/{num_samples} {variant.label}: {rates[0]:.2f} GB/s")
    order = [variant.key for variant in variants]
    group.series.sort(key=lambda series: order.index(series.key))
    group.verdicts = judge(group)
    return group


def _variants(state: State, num_bytes: int, stack: contextlib.ExitStack, notes: list[str]) -> list[_Variant]:
    """Starts all senders; ``stack`` ends them."""
    transport: HTTPTransport[State] = HTTPTransport(
        peers.TIMEOUT, settings=TransportSettings(host="127.0.0.1", advertise="127.0.0.1")
    )
    stack.callback(transport.shutdown)
    transport.send_checkpoint([1], peers.STEP, state, peers.TIMEOUT)
    bare_port = stack.enter_context(bare_sender(num_bytes))
    connections = f"{NUM_CONNECTIONS} connections"
    variants = [
        _Variant("ours_verify", f"ft_transport, in place, {connections}, verified", "ours", transport.metadata),
        _Variant("ours_no_verify", f"ft_transport, in place, {connections}, unverified", "ours", transport.metadata),
        _Variant("ours_fresh", f"ft_transport, fresh memory, {connections}, verified", "ours", transport.metadata),
        _Variant(
            "ours_busy", f"ft_transport, in place, {connections}, verified, {_BUSY}", "ours", transport.metadata, True
        ),
    ]
    if peers.torchft_is_installed():
        for key, num_chunks in zip(_HTTP_PEERS, (0, peers.CHUNKED), strict=True):
            address = stack.enter_context(peers.torchft_http_sender(state, num_chunks))
            label = f"torchft HTTPTransport, fresh memory, num_chunks={num_chunks}"
            variants.append(_Variant(key, label, "peer", lambda address=address: address))
            if not num_chunks:
                label = f"{label}, {_BUSY}"
                variants.append(_Variant(f"{key}_busy", label, "peer", lambda address=address: address, True))
        pg_sender = peers.TorchftPGSender(state)
        label = "torchft PGTransport, in place, gloo"
        variants.append(_Variant("torchft_pg", label, "peer", lambda: pg_sender.start(_NUM_FETCHES)))
    else:
        notes.append("torchft is not installed, so its rows are missing")
    label = f"bare sendfile → recv_into, {connections}"
    variants.append(_Variant("bare", label, "ceiling", lambda: str(bare_port)))
    variants.append(_Variant("bare_fresh", f"{label}, fresh memory", "ceiling", lambda: str(bare_port)))
    return variants


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


def _receive(variant: _Variant, spec: StateSpec, num_bytes: int) -> dict[str, Any]:
    """Runs one fresh receiver and returns what it measured."""
    command = [
        sys.executable, "-m", "benchmarks.receiver",
        "--variant", variant.key,
        "--state", spec.name,
        "--scale", str(spec.scale),
        "--address", variant.address(),
        "--num-bytes", str(num_bytes),
        "--num-fetches", str(variant.num_fetches),
    ]  # fmt: skip
    with subprocess.Popen(
        command, cwd=_REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        try:
            output, errors = process.communicate(timeout=_RECEIVER_TIMEOUT_S)
        finally:
            process.kill()
    if process.returncode != 0:
        raise RuntimeError(f"the receiver of {variant.label!r} failed:\n{errors[-4000:]}")
    outcome: dict[str, Any] = json.loads(output.splitlines()[-1])
    return outcome


def _check(variant: _Variant, outcome: dict[str, Any], digest: str) -> None:
    """A transfer that loses bytes is no faster one."""
    for fetch in outcome["fetches"]:
        if fetch["digest"] not in (None, digest):
            raise RuntimeError(f"{variant.label!r} delivered another state than was sent")


def _take_note(group: Group, variant: _Variant, round_number: int, num_bytes: int, outcome: dict[str, Any]) -> None:
    for index, fetch in enumerate(outcome["fetches"]):
        busy, share = is_busy(fetch["others_share"]), fetch["others_share"]
        rate = Sample(round_number, num_bytes / fetch["seconds"] / 1e9, busy, share)
        phase: Phase = "warm" if index else "cold"
        group.add(variant.key, rate, label=variant.label, role=variant.role, phase=phase, unit=RATE)
        if not index and fetch["peak_bytes"] is not None:
            memory = Sample(round_number, fetch["peak_bytes"] / 1e6, busy, share)
            group.add(variant.key, memory, label=variant.label, role=variant.role, phase=phase, unit=MEMORY)


def judge(group: Group) -> list[Verdict]:
    """The targets of a cold fetch. With many small tensors, all that is asked towards peers is to be no slower."""
    is_small = group.state == "small"

    def cold(key: str) -> Series | None:
        return group.find(key, "cold", RATE)

    verified, unverified, fresh = cold("ours_verify"), cold("ours_no_verify"), cold("ours_fresh")
    bare, process_group = cold("bare"), cold("torchft_pg")
    http = group.best("peer", "cold", RATE, _HTTP_PEERS)
    memory = group.find("ours_verify", "cold", MEMORY)
    to_process_group, to_http, fresh_to_http = (1.0, 1.0, 1.0) if is_small else (1.25, 2.0, 1.5)
    return [
        Verdict.at_least("in place, verified / socket ceiling", group.ratio(verified, bare), 0.75),
        Verdict.at_least("in place, unverified / socket ceiling", group.ratio(unverified, bare), 0.9),
        Verdict.at_least(
            "in place, verified / torchft PGTransport in place", group.ratio(verified, process_group), to_process_group
        ),
        Verdict.at_least(
            "in place, verified / torchft HTTPTransport at its best", group.ratio(verified, http), to_http
        ),
        Verdict.at_least("fresh memory / torchft HTTPTransport at its best", group.ratio(fresh, http), fresh_to_http),
        Verdict.at_least(
            "sender's Python busy: ours / torchft HTTPTransport",
            group.ratio(cold("ours_busy"), cold("torchft_http_0_busy")),
            1.0,
        ),
        Verdict(
            "peak memory above the receiver's own tensors, in place",
            memory.summary.high if memory is not None else None,
            64.0,
            "at most",
            MEMORY,
        ),
    ]
