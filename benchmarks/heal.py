"""Heal: how fast a replica that joins is trained again, with our manager and with torchft's.

Replicas are processes (``benchmarks.replica``) under a Lighthouse of their own; ours and torchft's by turns. One
replica trains, another one joins. Measured from the first quorum that has it among its members to the end of
its first committed step, and what the healthy replica's longest step took meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import peers
from benchmarks.machine import Watch, is_busy
from benchmarks.replicas.lighthouse import lighthouse
from benchmarks.report import Group, Role, Sample, Verdict

_HEAL_STATE_BYTES: Final = 1_000_000_000
_HEALTHY_STEPS: Final = 40
_STEPS_AFTER: Final = 4
_TIMEOUT_S: Final = 300.0
_REPOSITORY: Final = Path(__file__).resolve().parent.parent
_LABELS: Final = {"ours": "ft_transport", "torchft": "torchft"}

MS: Final = "ms"
_HEALED: Final = "quorum to first commit"


class _Replica:
    """A replica's process and what it has reported."""

    def __init__(self, kind: str, name: str, lighthouse: str, arguments: list[str]) -> None:
        self.events: list[dict[str, Any]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.replica", kind, name, *arguments],
            cwd=_REPOSITORY,
            env={**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse, "RUST_LOG": "error", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def find(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]

    def committed(self) -> list[dict[str, Any]]:
        return [event for event in self.find("step") if event["committed"]]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"expected a replica that trains, its process: {self.process.poll()}")
            time.sleep(0.02)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with contextlib.suppress(json.JSONDecodeError):
                    self.events.append(json.loads(line))


@contextlib.contextmanager
def _replicas(kind: str, min_replicas: int, arguments: list[str]) -> Iterator[list[_Replica]]:
    with lighthouse(min_replicas) as address:
        yield from _replicas_under(address, kind, arguments)


def _replicas_under(address: str, kind: str, arguments: list[str]) -> Iterator[list[_Replica]]:
    made: list[_Replica] = []
    try:
        made.extend(_Replica(kind, name, address, arguments) for name in ("a", "b"))
        for replica in made:
            replica.wait_for(lambda replica=replica: bool(replica.find("ready")))  # type: ignore[misc]
        yield made
    finally:
        for replica in made:
            replica.close()


@dataclass(frozen=True)
class _Tools:
    """How often to measure, how to tell of it, and how to wait for a quiet machine."""

    num_samples: int
    say: Callable[[str], None]
    settle: Callable[[], None]

    def rounds(self, what: str) -> Iterator[tuple[int, str]]:
        for number in range(self.num_samples):
            for kind, label in _LABELS.items():
                self.settle()
                self.say(f"{what} {number + 1}/{self.num_samples} {label}")
                yield number, kind


@dataclass(frozen=True)
class _Notes:
    """Where the samples of one run of one kind go."""

    group: Group
    round_number: int
    kind: str
    others_share: float | None

    def take(self, what: str, seconds: float) -> None:
        role: Role = "ours" if self.kind == "ours" else "peer"
        sample = Sample(self.round_number, seconds * 1e3, is_busy(self.others_share), self.others_share)
        self.group.add(f"{self.kind}, {what}", sample, label=what, role=role, phase="warm", unit=MS)


def run(scale: float, num_samples: int, say: Callable[[str], None], settle: Callable[[], None]) -> Iterator[Group]:
    """Measures ours and torchft's by turns."""
    if not peers.torchft_is_installed():
        group = Group("heal", "replica", "a replica joins")
        group.notes.append("it needs the Lighthouse of torchft, which is not installed")
        yield group
        return
    tools = _Tools(num_samples, say, settle)
    yield _run_heal("adapter", ["--adapter"], scale, tools)
    yield _run_heal("adamw", [], scale, tools)


def _run_heal(state: str, flags: list[str], scale: float, tools: _Tools) -> Group:
    state_bytes = int(_HEAL_STATE_BYTES * scale)
    what = "frozen weights and an adapter under AdamW" if flags else "all under AdamW"
    group = Group("heal", state, f"a replica of {state_bytes / 1e6:.0f} MB joins, {what}")
    for round_number, kind in tools.rounds(f"heal {state}"):
        with _replicas(kind, 1, ["--state-bytes", str(state_bytes), *flags]) as (healthy, joining):
            watch = Watch([os.getpid(), healthy.process.pid, joining.process.pid])
            healthy.go()
            healthy.wait_for(lambda healthy=healthy: len(healthy.committed()) >= _HEALTHY_STEPS)  # type: ignore[misc]
            watch.start()
            joining.go()
            joining.wait_for(lambda joining=joining: len(joining.committed()) >= _STEPS_AFTER)  # type: ignore[misc]
            _note_heal(_Notes(group, round_number, kind, watch.stop()), healthy, joining)
    group.verdicts = [_verdict(group, _HEALED, 0.5)]
    group.notes.append("ours compares every bit of the loaded state with the source's, and torchft does not")
    return group


def _note_heal(notes: _Notes, healthy: _Replica, joining: _Replica) -> None:
    quorum_s = joining.find("quorum")[0]["at_s"]
    first = joining.committed()[0]
    notes.take(_HEALED, first["ended_s"] - quorum_s)
    for part in joining.find("part"):
        if part["at_s"] <= first["ended_s"]:
            notes.take(f"of it: {part['name']}", part["seconds"])
    steps = healthy.find("step")
    before = [_seconds(step) for step in steps if step["ended_s"] < quorum_s][-_HEALTHY_STEPS // 2 :]
    during = [_seconds(step) for step in steps if step["ended_s"] >= quorum_s and step["began_s"] <= first["ended_s"]]
    notes.take("healthy replica's median step before", statistics.median(before))
    notes.take("healthy replica's longest step meanwhile", max(during))


def _verdict(group: Group, what: str, limit: float) -> Verdict:
    ratio = group.ratio(group.find(f"ours, {what}", "warm", MS), group.find(f"torchft, {what}", "warm", MS))
    text = f"{what}: ours / torchft"
    if ratio is None:
        return Verdict(text, None, limit, "at most")
    return Verdict(text, ratio.of_medians, limit, "at most", spread=(ratio.paired_low, ratio.paired_high))


def _seconds(step: dict[str, Any]) -> float:
    return float(step["ended_s"] - step["began_s"])
