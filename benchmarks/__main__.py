"""The command line: ``python -m benchmarks [clone|fetch|reshard|stall|loop|heal|checkpoint|all]``."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

try:
    from rich.console import Console
except ImportError:
    sys.exit("the benchmarks need the extra 'bench': pip install -e '.[bench,torchft]'")

from benchmarks import checkpoint, clone, fetch, heal, loop, reshard, stall
from benchmarks.machine import describe, wait_until_quiet
from benchmarks.options import QUICK, Benchmark, Options
from benchmarks.report import Group, as_json, write_json
from benchmarks.tables import make_console, print_group, print_machine

BENCHMARKS = {
    module.BENCHMARK.name: module.BENCHMARK for module in (clone, fetch, reshard, stall, loop, heal, checkpoint)
}


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
        description="Measures ft_transport beside the machine's ceilings and, if it is installed, torchft. One "
        "benchmark gives its verdict within two minutes on two cores.",
    )
    parser.add_argument("benchmark", nargs="?", choices=[*BENCHMARKS, "all"], default="all")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--full", action="store_true", help="whole size, more samples, and what no verdict needs")
    length.add_argument("--quick", action="store_true", help="a tenth of the size, one sample, to see that it runs")
    parser.add_argument("--samples", type=int, metavar="N", help="samples of each kind")
    states = dict.fromkeys(state for benchmark in BENCHMARKS.values() for state in benchmark.states)
    parser.add_argument(
        "--state", choices=list(states), action="append", help="only this state or model; may be given again"
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
    if arguments.samples is not None and arguments.samples < 1:
        parser.error("expected at least one sample")
    if arguments.state is not None and not any(states_of(each, arguments.state) for each in chosen(arguments)):
        parser.error(f"expected a state of {arguments.benchmark}, got {', '.join(arguments.state)}")
    arguments.directory = arguments.directory.absolute()
    if checkpoint.BENCHMARK in chosen(arguments):
        if not arguments.directory.is_dir():
            parser.error(f"expected a directory, got {arguments.directory}")
        if not checkpoint.is_on_disk(arguments.directory):
            parser.error(
                f"expected a directory on a disk, {arguments.directory} is in memory; name another --directory"
            )
    return arguments


def chosen(arguments: argparse.Namespace) -> list[Benchmark]:
    """The benchmarks that were asked for."""
    return [each for each in BENCHMARKS.values() if arguments.benchmark in (each.name, "all")]


def states_of(benchmark: Benchmark, names: Sequence[str] | None) -> tuple[str, ...]:
    """Its own states of those that were asked for; of none, all."""
    return tuple(state for state in benchmark.states if names is None or state in names)


def _measure(arguments: argparse.Namespace, progress: Console) -> Iterator[Group]:
    for benchmark in chosen(arguments):
        states = states_of(benchmark, arguments.state)
        if benchmark.states and not states:
            continue
        size = QUICK if arguments.quick else benchmark.full if arguments.full else benchmark.default
        if arguments.samples is not None:
            size = replace(size, num_samples=arguments.samples)
        yield from benchmark.run(
            Options(
                size=size,
                is_full=arguments.full,
                states=states,
                directory=arguments.directory,
                say=progress.print,
                settle=lambda: wait_until_quiet(arguments.wait_quiet),
            )
        )


def _plain(arguments: argparse.Namespace) -> dict[str, object]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}


if __name__ == "__main__":
    main()
