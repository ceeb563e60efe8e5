"""Starts the two replicas, shows what they report, and compares them."""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import IO, Any, Final

try:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
    from rich.table import Table
except ImportError:
    sys.exit("the demo draws with rich: pip install 'ft-transport[demo]'")

_EVENT_TIMEOUT_S: Final = 120.0
_ENDED: Final = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line from one replica, and when it came."""

    replica: str
    name: str
    fields: dict[str, Any]
    received_s: float


@dataclass(slots=True)
class ReplicaProcess:
    """A replica and the thread that reads its reports."""

    name: str
    process: subprocess.Popen[str]
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    step_ends_s: dict[int, float] = field(default_factory=dict)

    @classmethod
    def start(cls, name: str, events: queue.SimpleQueue[Event], arguments: list[str]) -> ReplicaProcess:
        """Starts the process; its events arrive in the queue."""
        process = subprocess.Popen(
            [sys.executable, "-m", "manager.demo.replica", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None, "it was asked for a pipe"
        threading.Thread(target=_read_events, args=(name, process.stdout, events), daemon=True).start()
        return cls(name, process)

    def stop(self) -> None:
        """Lets the replica end, and ends it if it does not."""
        assert self.process.stdin is not None, "it was asked for a pipe"
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _read_events(name: str, lines: IO[str], events: queue.SimpleQueue[Event]) -> None:
    for line in lines:
        fields = json.loads(line)
        events.put(Event(replica=name, name=fields.pop("event"), fields=fields, received_s=time.monotonic()))
    events.put(Event(replica=name, name=_ENDED, fields={}, received_s=time.monotonic()))


class Demo:
    """One run of the demo.

    Args:
        console: Where to draw.
        arguments: Size and length of the run.
    """

    def __init__(self, console: Console, arguments: argparse.Namespace) -> None:
        self._console = console
        self._arguments = arguments
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._replicas: dict[str, ReplicaProcess] = {}
        self._transfer: tuple[float, float] | None = None
        self._recovered_step = -1

    def run(self) -> bool:
        """Runs it. Returns whether both replicas agreed in everything."""
        try:
            self._train_first()
            self._recover_second()
            agreed = self._compare()
            self._show_step_times()
            return agreed
        finally:
            for replica in self._replicas.values():
                replica.stop()

    def _start(self, name: str, seed: int, *more: str) -> ReplicaProcess:
        size = ["--width", str(self._arguments.width), "--num-layers", str(self._arguments.num_layers)]
        replica = ReplicaProcess.start(name, self._events, ["--seed", str(seed), *size, *more])
        self._replicas[name] = replica
        return replica

    def _next(self) -> Event:
        """The next event; steps are noted and shown on the way."""
        try:
            event = self._events.get(timeout=_EVENT_TIMEOUT_S)
        except queue.Empty:
            raise SystemExit(f"no replica reported anything for {_EVENT_TIMEOUT_S:.0f} s") from None
        if event.name == _ENDED:
            raise SystemExit(f"replica {event.replica} ended before the demo did")
        if event.name == "step":
            replica = self._replicas[event.replica]
            step = event.fields["step"]
            replica.steps[step] = event.fields
            replica.step_ends_s[step] = event.received_s
            self._console.print(
                f"  {event.replica}  step {step:4d}  loss {event.fields['loss']:.6f}  "
                f"state {event.fields['digest']}  {event.fields['seconds'] * 1e3:6.1f} ms",
                style="green" if event.replica == "B" else "cyan",
                highlight=False,
            )
        return event

    def _train_first(self) -> None:
        self._console.rule("replica A trains")
        first = self._start("A", 1)
        while len(first.steps) < self._arguments.steps:
            event = self._next()
            if event.name == "ready":
                self._address = event.fields["address"]

    def _recover_second(self) -> None:
        self._console.rule("replica B starts late, with other weights; A trains on")
        self._start("B", 2, "--recover-from", self._address)
        columns = (TextColumn("  B receives"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=self._console) as progress:
            bar = progress.add_task("receive", total=None, visible=False)
            while True:
                event = self._next()
                if event.name == "stale":
                    self._console.print(
                        f"  B  before      loss {event.fields['loss']:.6f}  state {event.fields['digest']}  (batch 0)"
                    )
                elif event.name == "progress":
                    progress.update(
                        bar, completed=event.fields["done"], total=event.fields["total"], visible=True, refresh=True
                    )
                elif event.name == "recovered":
                    break
        self._recovered_step = event.fields["step"]
        self._transfer = (event.received_s - event.fields["seconds"], event.received_s)
        self._console.print(
            f"  B recovered step {self._recovered_step} in {event.fields['seconds'] * 1e3:.0f} ms, "
            "from the request to the loaded state"
        )

    def _compare(self) -> bool:
        self._console.rule("both train on, on the same batches")
        first, second = self._replicas["A"], self._replicas["B"]
        last = self._recovered_step + self._arguments.steps - 1
        while last not in first.steps or last not in second.steps:
            self._next()
        table = Table(title="the same batch, bit for bit")
        for heading in ("step", "loss A", "loss B", "state A", "state B", ""):
            table.add_column(heading, no_wrap=True)
        differing = 0
        for step in range(self._recovered_step, last + 1):
            a, b = first.steps[step], second.steps[step]
            equal = a["loss"] == b["loss"] and a["digest"] == b["digest"]
            differing += not equal
            verdict = "[green]equal[/]" if equal else "[bold red]DIFFERENT[/]"
            table.add_row(str(step), f"{a['loss']:.6f}", f"{b['loss']:.6f}", a["digest"], b["digest"], verdict)
        self._console.print(table)
        num_steps = last + 1 - self._recovered_step
        if differing:
            self._console.print(f"[bold red]{differing} of {num_steps} steps differ[/]")
        else:
            self._console.print(f"[bold green]{num_steps} of {num_steps} steps equal: loss and every bit of state[/]")
        return not differing

    def _show_step_times(self) -> None:
        assert self._transfer is not None, "the second replica has recovered"
        begin_s, end_s = self._transfer
        first = self._replicas["A"]
        phases: dict[str, list[dict[str, Any]]] = {"before": [], "during": [], "after": []}
        for step, ended_s in first.step_ends_s.items():
            fields = first.steps[step]
            if ended_s < begin_s:
                phases["before"].append(fields)
            elif ended_s - fields["seconds"] <= end_s:
                phases["during"].append(fields)
            else:
                phases["after"].append(fields)
        table = Table(
            "recovery of B", "steps of A", "median step", "longest step", "longest wait for the lock",
            title="A did not pause",
        )  # fmt: skip
        for phase, steps in phases.items():
            if steps:
                seconds = [fields["seconds"] for fields in steps]
                waits = [fields["waited_seconds"] for fields in steps]
                table.add_row(
                    phase,
                    str(len(steps)),
                    f"{statistics.median(seconds) * 1e3:.1f} ms",
                    f"{max(seconds) * 1e3:.1f} ms",
                    f"{max(waits) * 1e3:.1f} ms",
                )
        self._console.print(table)


def main() -> None:
    """Command line of the demo; exit status 1 if the replicas differ."""
    parser = argparse.ArgumentParser(prog="python -m manager.demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=15, help="steps before, and compared after, the recovery")
    parser.add_argument("--width", type=int, default=384, help="hidden size, a multiple of 64")
    parser.add_argument("--num-layers", type=int, default=4)
    arguments = parser.parse_args()
    sys.exit(0 if Demo(Console(), arguments).run() else 1)


if __name__ == "__main__":
    main()
