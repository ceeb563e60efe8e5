"""Replicas train a language model; some are killed, come back and heal; all that they held is compared.

Three replicas of one process each, or, with ``--sharded``, two of two ranks among which FSDP2 divides the model.
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
from typing import Final
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from manager import LighthouseUnavailableError, embedded_lighthouse
from manager.demo.replica import HEARTBEAT_TIMEOUT, NAMES, TIMEOUT
from manager.demo.replica_process import ENDED, Event, ReplicaProcess

_EVENT_TIMEOUT_S: Final = 120.0
_NUM_RANKS: Final = 2
_STEPS_TO_STILLNESS: Final = 5
"""Lead, in steps, that the fastest replica may have by the time it gets the request."""
_LINE_EVERY_S: Final = 1.0
"""Interval of the lines of a replica that trains while another one restarts: a line for each step would fill the
terminal."""
_LEAVE_S: Final = 5.0
_COLORS: Final = {"A": "cyan", "B": "green", "C": "magenta"}


class Demo:
    """One run of the demo.

    Args:
        console: The terminal.
        arguments: Size and length of the run.
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
        """Run the demo. Return whether all states of one step were equal on all replicas.

        Args:
            before_kill: Called before each failure with the processes that are about to be killed.
            at_rest: Called at the end with every process that was started, while the running ones stand still.
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
            # A request that a SIGKILL cuts off is an error to the Lighthouse, which would log it as the demo's last
            # line.
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
        # As torchrun's agent does: the store outlives the ranks.
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
        self._console.rule(f"{' and '.join(names)} killed (SIGKILL), and started again; the others train on")
        self._are_away = True
        for name in names:
            self._kill(name)
        for name in names:
            self._start(name)
        self._until(lambda: all(any(process.digests for process in self._running[name]) for name in names))
        self._are_away = False
        self._until(lambda: all(self._has_held(name, self._arguments.steps) for name in names))

    def _write_targets(self) -> None:
        """Write Prometheus's targets, in the form of its ``file_sd_configs``; atomically, because it may be reading."""
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
        """Stop all replicas at one step, so that their metrics do not change any more."""
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
                raise SystemExit(f"no replica reported anything for {_EVENT_TIMEOUT_S:.0f} s") from None
            # The last reports of a killed replica count, too: it had that state.
            sender = next(each for each in self._all if each.process.pid == event.process_id)
            if event.name == ENDED and sender in self._running.get(event.replica, ()):
                raise SystemExit(f"replica {event.replica} ended before the demo did")
            self._show(event, sender)

    def _show(self, event: Event, sender: ReplicaProcess) -> None:
        fields = event.fields
        style = _COLORS[event.replica]
        who = event.replica if self._num_ranks == 1 else f"{event.replica}/{sender.group_rank}"
        sender.note(event)
        if event.name == "serving":
            self._write_targets()
            page = sender.metrics.removesuffix("metrics")
            everyone = f"ft-transport top {self._lighthouse} --serve"
            self._console.print(f"  {who}  watch it at {page}, or all with {everyone}", style=style, soft_wrap=True)
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
                else f"not committed: {fields['error'][:60]}"
            )
            self._console.print(
                f"  {who}  step {fields['step']:4d}  loss {fields['loss']:.6f}  "
                f"state {sender.digests[fields['step']]}  {fields['seconds'] * 1e3:6.0f} ms  {outcome}",
                style=style,
                highlight=False,
            )

    def _was_shown(self, who: str) -> bool:
        """Return whether a step of this replica was shown within the last second; otherwise note that one is now."""
        now_s = time.monotonic()
        if now_s - self._shown_s.get(who, -_LINE_EVERY_S) < _LINE_EVERY_S:
            return True
        self._shown_s[who] = now_s
        return False


def main(arguments_of_caller: Sequence[str] | None = None, *, program: str = "python -m manager.demo") -> None:
    """Command line of the demo; exit status 1 if the replicas differ.

    Args:
        arguments_of_caller: Without the name of the program; ``None`` takes those of the process.
        program: Its name, for its help.
    """
    arguments = parse(arguments_of_caller, program=program)
    # The Lighthouse in this process would write a line for each request.
    os.environ.setdefault("RUST_LOG", "error")
    try:
        is_equal = Demo(Console(), arguments).run()
    except LighthouseUnavailableError as error:
        sys.exit(str(error))
    sys.exit(0 if is_equal else 1)


def parse(arguments_of_caller: Sequence[str] | None, *, program: str) -> argparse.Namespace:
    """Parse size and length of a run from the command line; see `main`."""
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=8, help="at least so many steps before, between and after the failures"
    )
    parser.add_argument("--width", type=int, default=192, help="hidden size, a multiple of 64")
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument(
        "--targets", type=Path, metavar="FILE", help="keep Prometheus' file_sd_configs of the replicas in this file"
    )
    parser.add_argument("--sharded", action="store_true", help="two replicas of two FSDP2 ranks")
    arguments = parser.parse_args(arguments_of_caller)
    if arguments.width < 64 or arguments.width % 64 or arguments.num_layers < 1 or arguments.steps < 1:
        parser.error("expected a width that is a multiple of 64, and at least one layer and one step")
    return arguments


def compare(
    console: Console, started: Sequence[ReplicaProcess], *, names: Sequence[str], num_ranks: int, num_steps: int
) -> bool:
    """Show the last steps of all replicas, and compare the states of every step over all starts.

    Args:
        console: The terminal.
        started: Every process that was started.
        names: Names of the replicas.
        num_ranks: Number of ranks of each replica.
        num_steps: Number of steps to show.

    Returns:
        Whether all states of one step were equal on all replicas, and all replicas had a common step.
    """
    console.rule("what they held, bit for bit")
    # Ranks of the same number have the same part.
    by_step: dict[tuple[int, int], dict[str, str]] = defaultdict(dict)
    differing: set[tuple[int, int]] = set()
    for process in started:
        for step, digest in process.digests.items():
            held = (step, process.group_rank)
            if any(digest != other for other in by_step[held].values()):
                differing.add(held)
            by_step[held][process.name] = digest
    table = Table()
    place = ("step", "rank") if num_ranks > 1 else ("step",)
    for heading in (*place, *(f"state of {name}" for name in names), ""):
        table.add_column(heading, no_wrap=True)
    common = [held for held in sorted(by_step) if len(by_step[held]) == len(names)]
    for held in common[-num_steps * num_ranks :]:
        verdict = "[bold red]DIFFERENT[/]" if held in differing else "[green]equal[/]"
        shown = [str(number) for number in held[: len(place)]]
        table.add_row(*shown, *(by_step[held][name] for name in names), verdict)
    console.print(table)
    num_held = len({step for step, _ in by_step})
    seconds = [value for process in started for value in process.step_seconds.values()]
    num_killed = len(started) // num_ranks - len(names)
    console.print(
        f"{num_held} steps, {num_killed} replica{'s' if num_killed > 1 else ''} killed and healed; a step took "
        f"{statistics.median(seconds) * 1e3:.0f} ms, the longest one {max(seconds) * 1e3:.0f} ms, which waited for "
        "the Lighthouse to notice a death"
    )
    if differing or not common:
        console.print(f"[bold red]{len({step for step, _ in differing})} of {num_held} steps differ[/]")
    else:
        console.print(f"[bold green]every state of {num_held} steps was the same on all replicas[/]")
    return not differing and bool(common)


if __name__ == "__main__":
    main()
