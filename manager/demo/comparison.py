"""Compares the states of all replicas of the demo at each step, bit for bit, and shows the last ones."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from manager.demo.replica_process import ReplicaProcess


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
