"""The command line: ``python -m benchmarks [NAME|all]`` prints verdicts and writes a picture."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

try:
    from rich.console import Console
except ImportError:
    sys.exit("the benchmarks need the extra 'bench': pip install -e '.[bench,torchft]'")

from benchmarks import (
    cap,
    checkpoint,
    clone,
    delta,
    fetch,
    fleet,
    fleet_simulation,
    heal,
    join,
    loop,
    publishing,
    reading,
    reading_commands,
    reshard,
    same_host,
    stall,
    telemetry,
    tls,
    token,
)
from benchmarks.machine import describe, file_system_of, is_on_disk, wait_until_quiet
from benchmarks.options import FULL, QUICK, Benchmark, Options
from benchmarks.report import Group, write_json
from benchmarks.tables import make_console, print_figures, print_verdicts

BENCHMARKS = {
    module.BENCHMARK.name: module.BENCHMARK
    for module in (
        cap,
        clone,
        fetch,
        reshard,
        stall,
        loop,
        heal,
        join,
        checkpoint,
        reading,
        reading_commands,
        publishing,
        delta,
        tls,
        token,
        same_host,
        telemetry,
        fleet,
        fleet_simulation,
    )
}
ON_DISK = (checkpoint.BENCHMARK, reading.BENCHMARK, reading_commands.BENCHMARK)
_RESULTS = Path(__file__).resolve().parent / "results"


def main() -> None:
    arguments = _parse()
    # SIGTERM takes the way out of an error, so that the receivers are ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    machine = describe()
    caption = ", ".join(f"{name} {value}" for name, value in machine.items() if value is not None)
    console = make_console()
    if arguments.full:
        console.print(caption, style="dim")
    about: dict[str, object] = {"machine": machine, "arguments": {name: str(v) for name, v in vars(arguments).items()}}
    groups: list[Group] = []
    for group in _measure(arguments, Console(stderr=True, style="dim", highlight=False)):
        groups.append(group)
        if arguments.full:
            print_figures(console, group)
        print_verdicts(console, group)
        # Written after each group: a long run that is broken off keeps what it has.
        if arguments.json is not None:
            write_json(arguments.json, groups, about)
    from benchmarks.picture import draw

    draw(groups, arguments.picture or _RESULTS / f"{arguments.benchmark}.png", caption=caption)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures ft_transport beside the machine's ceilings and, if it is installed, torchft. One "
        "benchmark gives its verdict within two minutes on two cores, and draws its figures.",
    )
    parser.add_argument("benchmark", nargs="?", choices=[*BENCHMARKS, "all"], default="all")
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--full", action="store_true", help="whole size, more samples, what no verdict needs, and all figures"
    )
    length.add_argument("--quick", action="store_true", help="a tenth of the size, one sample, to see that it runs")
    parser.add_argument("--samples", type=int, metavar="N", help="samples of each kind")
    states = dict.fromkeys(state for benchmark in BENCHMARKS.values() for state in benchmark.states)
    parser.add_argument(
        "--state",
        "--only",
        choices=list(states),
        action="append",
        help="only this state, model or scenario; may be given again",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(),
        metavar="DIRECTORY",
        help="where checkpoints are written, and removed again; on a disk (default: the current directory)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw there (default: benchmarks/results/NAME.png)"
    )
    parser.add_argument(
        "--wait-quiet",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="before each sample wait at most so long until nothing else uses the machine (default: do not wait)",
    )
    arguments = parser.parse_args()
    if arguments.samples is not None and arguments.samples < 1:
        parser.error("expected at least one sample")
    if arguments.state is not None and not any(states_of(each, arguments.state) for each in chosen(arguments)):
        parser.error(f"expected a state of {arguments.benchmark}, got {', '.join(arguments.state)}")
    arguments.directory = arguments.directory.absolute()
    if any(benchmark in ON_DISK for benchmark in chosen(arguments)):
        if not arguments.directory.is_dir():
            parser.error(f"expected a directory, got {arguments.directory}")
        if not is_on_disk(arguments.directory):
            parser.error(
                f"expected a directory on a disk, {arguments.directory} is on {file_system_of(arguments.directory)}; "
                "name another --directory"
            )
    return arguments


def chosen(arguments: argparse.Namespace) -> list[Benchmark]:
    """The benchmarks that were asked for."""
    return [each for each in BENCHMARKS.values() if arguments.benchmark in (each.name, "all")]


def states_of(benchmark: Benchmark, names: Sequence[str] | None) -> tuple[str, ...]:
    """A benchmark's own states among those that were asked for; all, where none was named."""
    return tuple(state for state in benchmark.states if names is None or state in names)


def _measure(arguments: argparse.Namespace, progress: Console) -> Iterator[Group]:
    for benchmark in chosen(arguments):
        states = states_of(benchmark, arguments.state)
        if benchmark.states and not states:
            continue
        size = QUICK if arguments.quick else FULL if arguments.full else benchmark.default
        if arguments.samples is not None:
            size = replace(size, num_samples=arguments.samples)
        options = Options(
            size=size,
            is_full=arguments.full,
            states=states,
            directory=arguments.directory,
            # The verdicts are all that goes into a file or a pipe.
            say=progress.print if progress.is_terminal else lambda _text: None,
            settle=lambda: wait_until_quiet(arguments.wait_quiet),
        )
        yield from benchmark.run(options)


if __name__ == "__main__":
    main()
