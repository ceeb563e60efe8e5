"""The command line: ``python -m benchmarks [clone|fetch|reshard|stall|loop|heal|checkpoint|all]``."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

try:
    from rich.console import Console
except ImportError:
    sys.exit("the benchmarks need the extra 'bench': pip install -e '.[bench,torchft]'")

from benchmarks import checkpoint, clone, fetch, heal, loop, reshard, stall
from benchmarks.machine import describe, wait_until_quiet
from benchmarks.report import Group, as_json, write_json
from benchmarks.states import CHECKPOINT_STATE_NAMES, QUICK_SCALE, STATE_NAMES, StateSpec
from benchmarks.tables import make_console, print_group, print_machine


def main() -> None:
    arguments = _parse()
    # Ended from outside, the receivers must be ended too: by the same way out as after an error.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    machine = describe()
    console = make_console()
    progress = Console(stderr=True, style="dim", highlight=False)
    print_machine(console, machine)
    started_s = time.monotonic()
    groups: list[Group] = []
    for group in _measure(arguments, progress):
        groups.append(group)
        print_group(console, group)
        # Written after each group: a long run that is broken off keeps what it has.
        if arguments.json is not None:
            write_json(arguments.json, as_json(groups, machine, _plain(arguments)))
    if arguments.picture is not None:
        from benchmarks.picture import draw

        draw(groups, arguments.picture)
    progress.print(f"took {time.monotonic() - started_s:.0f} s")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures ft_transport beside the machine's ceilings and, if it is installed, torchft.",
    )
    parser.add_argument(
        "benchmark",
        nargs="?",
        choices=["clone", "fetch", "reshard", "stall", "loop", "heal", "checkpoint", "all"],
        default="all",
    )
    parser.add_argument("--full", action="store_true", help="also what no verdict needs (loop: two replicas, parts)")
    parser.add_argument("--quick", action="store_true", help="a quarter of the size, two samples")
    parser.add_argument("--samples", type=int, metavar="N", help="samples of each kind (default: 5, quick: 2)")
    parser.add_argument(
        "--state",
        choices=list(dict.fromkeys(STATE_NAMES + CHECKPOINT_STATE_NAMES + loop.MODEL_NAMES)),
        action="append",
        help="only this state, or this model of the loop; may be given again",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(),
        metavar="DIRECTORY",
        help="where checkpoints are written, and removed again; on a disk (default: the current directory)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the figures there, as PNG")
    parser.add_argument(
        "--wait-quiet",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="before each sample wait so long at most until nothing else uses the machine (default: do not wait)",
    )
    arguments = parser.parse_args()
    if arguments.samples is None:
        arguments.samples = 2 if arguments.quick else 5
    if arguments.samples < 1:
        parser.error("expected at least one sample")
    arguments.directory = arguments.directory.absolute()
    if arguments.benchmark in ("checkpoint", "all"):
        if not arguments.directory.is_dir():
            parser.error(f"expected a directory, got {arguments.directory}")
        if not checkpoint.is_on_disk(arguments.directory):
            parser.error(
                f"expected a directory on a disk, {arguments.directory} is in memory; name another --directory"
            )
    return arguments


def _measure(arguments: argparse.Namespace, progress: Console) -> Iterator[Group]:
    scale = QUICK_SCALE if arguments.quick else 1.0
    specs = [StateSpec(name, scale) for name in arguments.state or STATE_NAMES]

    def say(text: str) -> None:
        progress.print(text)

    def settle() -> None:
        wait_until_quiet(arguments.wait_quiet)

    if arguments.benchmark in ("clone", "all"):
        yield from clone.run(specs, arguments.samples, say, settle)
    if arguments.benchmark in ("fetch", "all"):
        yield from fetch.run(specs, arguments.samples, say, settle)
    if arguments.benchmark in ("reshard", "all"):
        yield reshard.run(scale, arguments.samples, say, settle)
    if arguments.benchmark in ("stall", "all"):
        yield stall.run(scale, arguments.samples, say, settle)
    if arguments.benchmark in ("loop", "all"):
        names = arguments.state or loop.MODEL_NAMES
        yield from loop.run(names, arguments.samples, say, settle, is_full=arguments.full)
    if arguments.benchmark in ("heal", "all"):
        yield from heal.run(arguments.state or heal.STATE_NAMES, scale, arguments.samples, say, settle)
    if arguments.benchmark in ("checkpoint", "all"):
        checkpoint_specs = [StateSpec(name, scale) for name in arguments.state or CHECKPOINT_STATE_NAMES]
        yield from checkpoint.run(checkpoint_specs, arguments.samples, arguments.directory, say, settle)


def _plain(arguments: argparse.Namespace) -> dict[str, object]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}


if __name__ == "__main__":
    main()
