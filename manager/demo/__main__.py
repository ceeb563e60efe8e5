"""Replicas train a language model; some are killed, restart and heal. The states at each step are compared.

By default, there are three replicas of one process each. With ``--sharded``, there are two replicas of two ranks each,
and FSDP2 divides the model among the ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Final
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from manager import LighthouseUnavailableError, embedded_lighthouse
from manager.demo.replica import ENDED, HEARTBEAT_TIMEOUT, NAMES, TIMEOUT, Event, ReplicaProcess

_EVENT_TIMEOUT_S: Final = 120.0
_NUM_RANKS: Final = 2
_STEPS_TO_STILLNESS: Final = 5
"""Steps from the newest reported step to the step at which all replicas stop, so that none is past it already."""
_LINE_EVERY_S: Final = 1.0
"""Interval between printed steps of a replica while another one restarts: to print all would fill the terminal."""
_LEAVE_S: Final = 5.0
"""Longest wait for the replicas to exit at the end of the demo; then they are killed."""
_COLORS: Final = {"A": "cyan", "B": "green", "C": "magenta"}


class Demo:
    """One run of the demo.

    Args:
        console: The terminal to which the demo prints.
        arguments: The parsed command line (see `parse`).
    """

    def __init__(self, console: Console, arguments: argparse.Namespace) -> None:
        self._console = console
        self._arguments = arguments
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._names = NAMES[:2] if arguments.sharded else NAMES
        self._num_ranks = _NUM_RANKS if arguments.sharded else 1
        self._running: dict[str, list[ReplicaProcess]] = {}
        self._stores: list[TCPStore] = []
        self._all: list[ReplicaProcess] = []
        self._lighthouse = ""
        self._are_away = False
        self._shown_s: dict[str, float] = {}

    def run(
        self,
        at_rest: Callable[[Sequence[ReplicaProcess]], None] | None = None,
        *,
        before_kill: Callable[[Sequence[ReplicaProcess]], None] | None = None,
    ) -> bool:
        """Run the demo. Return whether the states of all replicas were equal at every step.

        Args:
            at_rest: Called at the end with all processes that were started. Those that still run have stopped training.
            before_kill: Called before each failure with the processes that are about to be killed.
        """
        self._lighthouse = embedded_lighthouse(
            min_replicas=1, heartbeat_timeout=HEARTBEAT_TIMEOUT, join_timeout=2 * TIMEOUT
        )
        steps = self._arguments.steps
        try:
            ranks = f", each of {self._num_ranks} FSDP2 ranks" if self._num_ranks > 1 else ""
            self._console.rule(f"{len(self._names)} replicas{ranks} train, each on its own batches")
            for name in self._names:
                self._start(name)
            self._until(lambda: all(self._has_held(name, steps) for name in self._names))
            for names in ("B",), ("A", "C"):
                if set(names) <= set(self._names):
                    if before_kill is not None:
                        before_kill([process for name in names for process in self._running[name]])
                    self._kill_and_restart(*names)
            if at_rest is not None:
                self._stand_still()
                at_rest(self._all)
            return compare(self._console, self._all, names=self._names, num_ranks=self._num_ranks, num_steps=steps)
        finally:
            # Replicas exit by themselves before they are killed: the Lighthouse would log an error for each request
            # that SIGKILL interrupts.
            running = self._all_running()
            deadline_s = time.monotonic() + _LEAVE_S
            for process in running:
                process.leave()
            for process in running:
                with suppress(subprocess.TimeoutExpired):
                    process.process.wait(max(0.0, deadline_s - time.monotonic()))
            for name in list(self._running):
                self._kill(name)

    def _start(self, name: str) -> None:
        size = ["--width", str(self._arguments.width), "--num-layers", str(self._arguments.num_layers)]
        # The store is in this process, and outlives the ranks, as with torchrun's agent.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stores.append(store)
        start = partial(ReplicaProcess.start, lighthouse=self._lighthouse, num_ranks=self._num_ranks)
        self._running[name] = [
            start(name, self._events, size, rank=rank, store_port=store.port) for rank in range(self._num_ranks)
        ]
        self._all.extend(self._running[name])

    def _all_running(self) -> list[ReplicaProcess]:
        return [process for processes in self._running.values() for process in processes]

    def _kill(self, name: str) -> None:
        for process in self._running.pop(name):
            process.kill()

    def _kill_and_restart(self, *names: str) -> None:
        self._console.rule(f"{' and '.join(names)} killed (SIGKILL) and restarted; the other replicas train on")
        self._are_away = True
        for name in names:
            self._kill(name)
        for name in names:
            self._start(name)
        self._until(lambda: all(any(process.digests for process in self._running[name]) for name in names))
        self._are_away = False
        self._until(lambda: all(self._has_held(name, self._arguments.steps) for name in names))

    def _write_targets(self) -> None:
        """Write the replicas' addresses for Prometheus (``file_sd_configs``), atomically: Prometheus may be reading."""
        if self._arguments.targets is None:
            return
        targets = [
            {
                "targets": [urlsplit(each.metrics).netloc],
                "labels": {"demo_replica": each.name, "process": str(each.process.pid)},
            }
            for each in self._all_running()
            if each.metrics
        ]
        written = self._arguments.targets.with_suffix(".new")
        written.write_text(json.dumps(targets))
        written.replace(self._arguments.targets)

    def _stand_still(self) -> None:
        """Stop the training of all replicas at the same step, so that their metrics do not change any more."""
        running = self._all_running()
        step = max(max(process.digests) for process in running) + _STEPS_TO_STILLNESS
        for process in running:
            process.stand_still(step)
        self._until(lambda: all(process.is_still for process in running))

    def _has_held(self, name: str, num_steps: int) -> bool:
        return all(len(process.digests) > num_steps for process in self._running[name])

    def _until(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            try:
                event = self._events.get(timeout=_EVENT_TIMEOUT_S)
            except queue.Empty:
                raise SystemExit(f"expected a report of a replica, got none in {_EVENT_TIMEOUT_S:.0f} s") from None
            name = event.sender.name
            if event.name == ENDED and event.sender in self._running.get(name, ()):
                raise SystemExit(f"replica {name} ended unexpectedly; its errors are above")
            self._show(event)

    def _show(self, event: Event) -> None:
        sender, fields = event.sender, event.fields
        style = _COLORS[sender.name]
        who = sender.name if self._num_ranks == 1 else f"{sender.name}/{sender.group_rank}"
        sender.record(event)
        if event.name == "serving":
            self._write_targets()
            page = sender.metrics.removesuffix("metrics")
            everyone = f"ft-transport top {self._lighthouse} --serve"
            text = f"  {who}  watch it at {page}, or all replicas with {everyone}"
            self._console.print(text, style=style, soft_wrap=True)
        elif event.name == "healed":
            self._console.print(
                f"  {who}  healed to step {fields['step']} in {fields['seconds'] * 1e3:.0f} ms from {fields['source']}",
                style=f"bold {style}",
                highlight=False,
            )
        elif event.name == "step" and not (self._are_away and self._was_shown(who)):
            outcome = (
                f"committed by {fields['participants']}"
                if fields["committed"]
                else f"not committed: {shorten(fields['error'], 60, placeholder=' …')}"
            )
            self._console.print(
                f"  {who}  step {fields['step']:4d}  loss {fields['loss']:.6f}  "
                f"state {sender.digests[fields['step']]}  {fields['seconds'] * 1e3:6.0f} ms  {outcome}",
                style=style,
                highlight=False,
            )

    def _was_shown(self, who: str) -> bool:
        """Return whether a step of this replica was printed in the last second; if not, record one as printed now."""
        now_s = time.monotonic()
        if now_s - self._shown_s.get(who, -_LINE_EVERY_S) < _LINE_EVERY_S:
            return True
        self._shown_s[who] = now_s
        return False


def main(arguments_of_caller: Sequence[str] | None = None, *, program: str = "python -m manager.demo") -> None:
    """Run the demo from the command line. The exit status is 1 if states of replicas differ.

    Args:
        arguments_of_caller: Arguments without the program's name; ``None`` for those of the process.
        program: Name of the program, for the help text.
    """
    arguments = parse(arguments_of_caller, program=program)
    # Without this, the Lighthouse in this process would log a line for each request.
    os.environ.setdefault("RUST_LOG", "error")
    try:
        is_equal = Demo(Console(), arguments).run()
    except LighthouseUnavailableError as error:
        sys.exit(str(error))
    sys.exit(0 if is_equal else 1)


def parse(arguments_of_caller: Sequence[str] | None, *, program: str) -> argparse.Namespace:
    """Parse the command line of the demo (see `main`)."""
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=8, help="minimum number of steps before, between and after the failures"
    )
    parser.add_argument("--width", type=int, default=192, help="hidden size, a multiple of 64")
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument(
        "--targets", type=Path, metavar="FILE", help="file to which to write the replicas' addresses for Prometheus"
    )
    parser.add_argument("--sharded", action="store_true", help="two replicas of two FSDP2 ranks")
    arguments = parser.parse_args(arguments_of_caller)
    if arguments.width < 64 or arguments.width % 64 or arguments.num_layers < 1 or arguments.steps < 1:
        parser.error("expected a width that is a multiple of 64, and at least one layer and one step")
    return arguments


def compare(
    console: Console, started: Sequence[ReplicaProcess], *, names: Sequence[str], num_ranks: int, num_steps: int
) -> bool:
    """Compare the states of all processes at every step, and print a table of the last steps.

    Args:
        console: The terminal.
        started: All processes that were started.
        names: Names of the replicas.
        num_ranks: Number of ranks of each replica.
        num_steps: Number of steps in the table.

    Returns:
        Whether the states of all replicas were equal at every step, and at least one step was common to all.
    """
    console.rule("digests of the states, bit for bit")
    # By step and rank: equal ranks of different replicas have the same shards.
    by_step: dict[tuple[int, int], dict[str, str]] = defaultdict(dict)
    differing: set[tuple[int, int]] = set()
    for process in started:
        for step, digest in process.digests.items():
            key = (step, process.group_rank)
            if any(digest != other for other in by_step[key].values()):
                differing.add(key)
            by_step[key][process.name] = digest
    table = Table()
    place = ("step", "rank") if num_ranks > 1 else ("step",)
    for heading in (*place, *(f"state of {name}" for name in names), ""):
        table.add_column(heading, no_wrap=True)
    common = [key for key in sorted(by_step) if len(by_step[key]) == len(names)]
    for key in common[-num_steps * num_ranks :]:
        verdict = "[bold red]DIFFERENT[/]" if key in differing else "[green]equal[/]"
        shown = [str(number) for number in key[: len(place)]]
        table.add_row(*shown, *(by_step[key][name] for name in names), verdict)
    console.print(table)
    num_compared = len({step for step, _ in by_step})
    seconds = [value for process in started for value in process.step_seconds.values()]
    num_killed = len(started) // num_ranks - len(names)
    console.print(
        f"{num_compared} steps, {num_killed} replica{'s' if num_killed > 1 else ''} killed and healed; a step took "
        f"{statistics.median(seconds) * 1e3:.0f} ms (median), the longest one {max(seconds) * 1e3:.0f} ms, while the "
        "Lighthouse detected that a replica had died"
    )
    if differing or not common:
        console.print(f"[bold red]{len({step for step, _ in differing})} of {num_compared} steps differ[/]")
    else:
        console.print(f"[bold green]all states of {num_compared} steps were the same on all replicas[/]")
    return not differing and bool(common)


if __name__ == "__main__":
    main()
