"""Replicas train a language model; some are killed, come back and heal; all that they held is compared.

Three replicas of one process each, or, with ``--sharded``, two of two ranks among which FSDP2 divides the model.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from rich.console import Console
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from manager import LighthouseUnavailableError, embedded_lighthouse
from manager.demo.comparison import compare
from manager.demo.replica import HEARTBEAT_TIMEOUT, NAMES, TIMEOUT
from manager.demo.replica_process import ENDED, Event, Launch, ReplicaProcess

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
            running = [process for processes in self._running.values() for process in processes]
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
        launches: list[Launch | None] = [None]
        if self._num_ranks > 1:
            # As torchrun's agent does: the store outlives the ranks.
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._stores.append(store)
            launches = [Launch(group_rank, self._num_ranks, store.port) for group_rank in range(self._num_ranks)]
        self._running[name] = [
            ReplicaProcess.start(name, self._events, size, lighthouse=self._lighthouse, launch=launch)
            for launch in launches
        ]
        self._all.extend(self._running[name])

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
                "targets": [urlsplit(process.metrics).netloc],
                "labels": {"demo_replica": name, "process": str(process.process.pid)},
            }
            for name, processes in self._running.items()
            for process in processes
            if process.metrics
        ]
        written = self._arguments.targets.with_suffix(".new")
        written.write_text(json.dumps(targets))
        written.replace(self._arguments.targets)

    def _stand_still(self) -> None:
        """Stop all replicas at one step, so that their metrics do not change any more."""
        running = [process for processes in self._running.values() for process in processes]
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


if __name__ == "__main__":
    main()
