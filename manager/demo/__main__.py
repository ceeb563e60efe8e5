"""Three replicas train a language model; some are killed, come back and heal; all that they held is compared."""

from __future__ import annotations

import argparse
import os
import queue
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Final

try:
    from rich.console import Console
    from rich.table import Table
except ImportError:
    sys.exit("the demo draws with rich: pip install 'ft-transport[demo]'")

from manager import LighthouseUnavailableError, embedded_lighthouse
from manager.demo.replica import HEARTBEAT_TIMEOUT, NAMES, TIMEOUT
from manager.demo.replica_process import ENDED, Event, ReplicaProcess

_EVENT_TIMEOUT_S: Final = 120.0
_COLORS: Final = {"A": "cyan", "B": "green", "C": "magenta"}


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
        self._running: dict[str, ReplicaProcess] = {}
        self._all: list[ReplicaProcess] = []
        self._lighthouse = ""

    def run(self) -> bool:
        """Runs it. Returns whether all that any replica held at one step was the same."""
        self._lighthouse = embedded_lighthouse(
            min_replicas=1, heartbeat_timeout=HEARTBEAT_TIMEOUT, join_timeout=2 * TIMEOUT
        )
        steps = self._arguments.steps
        try:
            self._console.rule("three replicas train, each on its own batches")
            for name in NAMES:
                self._start(name)
            self._until(lambda: all(len(self._running[name].digests) > steps for name in NAMES))
            self._kill_and_restart("B")
            self._kill_and_restart("A", "C")
            return self._compare()
        finally:
            for replica in self._running.values():
                replica.kill()

    def _start(self, name: str) -> None:
        size = ["--width", str(self._arguments.width), "--num-layers", str(self._arguments.num_layers)]
        replica = ReplicaProcess.start(name, self._events, size, lighthouse=self._lighthouse)
        self._running[name] = replica
        self._all.append(replica)

    def _kill_and_restart(self, *names: str) -> None:
        self._console.rule(f"{' and '.join(names)} killed (SIGKILL), and started again")
        for name in names:
            self._running.pop(name).kill()
        for name in names:
            self._start(name)
        self._until(lambda: all(len(self._running[name].digests) > self._arguments.steps for name in names))

    def _until(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            try:
                event = self._events.get(timeout=_EVENT_TIMEOUT_S)
            except queue.Empty:
                raise SystemExit(f"no replica reported anything for {_EVENT_TIMEOUT_S:.0f} s") from None
            replica = self._running.get(event.replica)
            # What a killed one had still to say is heard, too: it held it.
            sender = next(each for each in self._all if each.process.pid == event.process_id)
            if event.name == ENDED and sender is replica:
                raise SystemExit(f"replica {event.replica} ended before the demo did")
            self._show(event, sender)

    def _show(self, event: Event, sender: ReplicaProcess) -> None:
        fields = event.fields
        style = _COLORS[event.replica]
        if event.name == "boundary":
            sender.digests[fields["step"]] = fields["digest"]
        elif event.name == "healed":
            self._console.print(
                f"  {event.replica}  healed to step {fields['step']} in {fields['seconds'] * 1e3:.0f} ms from "
                f"{fields['source']}",
                style=f"bold {style}",
                highlight=False,
            )
        elif event.name == "step":
            sender.step_seconds[fields["step"]] = fields["seconds"]
            outcome = (
                f"committed by {fields['participants']}"
                if fields["committed"]
                else f"not committed: {fields['error'][:60]}"
            )
            self._console.print(
                f"  {event.replica}  step {fields['step']:4d}  loss {fields['loss']:.6f}  "
                f"state {sender.digests[fields['step']]}  {fields['seconds'] * 1e3:6.0f} ms  {outcome}",
                style=style,
                highlight=False,
            )

    def _compare(self) -> bool:
        """Shows the last steps of all replicas, and checks every step that any start of any of them ever held."""
        self._console.rule("what they held, bit for bit")
        by_step: dict[int, dict[str, str]] = defaultdict(dict)
        differing: set[int] = set()
        for replica in self._all:
            for step, digest in replica.digests.items():
                if any(digest != other for other in by_step[step].values()):
                    differing.add(step)
                by_step[step][replica.name] = digest
        table = Table()
        for heading in ("step", *(f"state of {name}" for name in NAMES), ""):
            table.add_column(heading, no_wrap=True)
        common = [step for step in sorted(by_step) if len(by_step[step]) == len(NAMES)][-self._arguments.steps :]
        for step in common:
            verdict = "[bold red]DIFFERENT[/]" if step in differing else "[green]equal[/]"
            table.add_row(str(step), *(by_step[step][name] for name in NAMES), verdict)
        self._console.print(table)
        seconds = [value for replica in self._all for value in replica.step_seconds.values()]
        self._console.print(
            f"{len(by_step)} steps, {len(self._all) - len(NAMES)} replicas killed and healed; a step took "
            f"{statistics.median(seconds) * 1e3:.0f} ms, the longest one {max(seconds) * 1e3:.0f} ms, which waited for "
            "the Lighthouse to notice a death"
        )
        if differing or not common:
            self._console.print(f"[bold red]{len(differing)} of {len(by_step)} steps differ[/]")
        else:
            self._console.print(f"[bold green]every state of {len(by_step)} steps was the same on all replicas[/]")
        return not differing and bool(common)


def main() -> None:
    """Command line of the demo; exit status 1 if the replicas differ."""
    parser = argparse.ArgumentParser(prog="python -m manager.demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=8, help="steps before, between and after the failures")
    parser.add_argument("--width", type=int, default=192, help="hidden size, a multiple of 64")
    parser.add_argument("--num-layers", type=int, default=2)
    arguments = parser.parse_args()
    # The Lighthouse in this process would write a line for each request.
    os.environ.setdefault("RUST_LOG", "error")
    try:
        is_equal = Demo(Console(), arguments).run()
    except LighthouseUnavailableError as error:
        sys.exit(str(error))
    sys.exit(0 if is_equal else 1)


if __name__ == "__main__":
    main()
