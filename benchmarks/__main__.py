"""The command line: ``python -m benchmarks [NAME|all]`` prints verdicts, and ``report`` writes the pages."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import (
    bucket,
    cap,
    checkpoint,
    clone,
    delta,
    expected,
    fetch,
    figures,
    fleet,
    fleet_simulation,
    follow,
    goodput,
    gpu,
    heal,
    host,
    join,
    keep,
    keep_copies,
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
from benchmarks.report import Group

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
        follow,
        checkpoint,
        bucket,
        reading,
        reading_commands,
        publishing,
        delta,
        tls,
        token,
        same_host,
        host,
        telemetry,
        fleet,
        fleet_simulation,
        goodput,
        expected,
        keep,
        keep_copies,
        gpu,
    )
}
ON_DISK = (
    checkpoint.BENCHMARK,
    goodput.BENCHMARK,
    gpu.BENCHMARK,
    keep.BENCHMARK,
    reading.BENCHMARK,
    reading_commands.BENCHMARK,
)


def main() -> None:
    arguments = _parse()
    if arguments.benchmark == "report":
        figures.write_pages(BENCHMARKS.values())
        return
    # SIGTERM takes the way out of an error, so that the receivers are ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    machine = describe()
    if arguments.full:
        print(", ".join(f"{name} {value}" for name, value in machine.items()))
    for group in _measure(arguments, Console(stderr=True, style="dim", highlight=False)):
        lines = figures.lines_of(group, machine)
        print(f"{group.benchmark}: {group.title}")
        print(
            figures.table(line for line in lines if arguments.full or line.direction),
            *_captions(group, is_full=arguments.full),
            sep="\n",
        )
        if arguments.record and (group.benchmark != gpu.BENCHMARK.name or torch.cuda.is_available()):
            figures.record(lines)
        elif arguments.record:
            print("not recorded, because there is no GPU: the states were small\n")


def _captions(group: Group, *, is_full: bool) -> Iterator[str]:
    """Targets that could not be measured, with the notes; and how many samples were disturbed."""
    missing = [f"not measured: {verdict.text}" for verdict in group.verdicts if verdict.figure is None]
    yield from [*missing, *group.notes] if is_full or missing or not group.verdicts else []
    if num_busy := sum(series.num_busy for series in group.series):
        num_samples = sum(len(series.samples) for series in group.series)
        yield f"{num_busy} of {num_samples} samples ran while others used the machine\n"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures ft_transport beside the machine's ceilings and, if it is installed, torchft. One "
        "benchmark gives its verdict within two minutes on two cores. 'report' makes RESULTS.md and README's table "
        "from the newest recorded figures.",
    )
    parser.add_argument("benchmark", nargs="?", choices=[*BENCHMARKS, "all", "report"], default="all")
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
    parser.add_argument("--record", action="store_true", help="append the figures to benchmarks/figures.jsonl")
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
    if arguments.record and arguments.quick:
        parser.error("expected --record without --quick: small states give no figure to keep")
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
    """The benchmarks that were asked for. ``gpu`` runs by its name only: figures of a CPU must not replace a GPU's."""
    names = {arguments.benchmark} if arguments.benchmark != "all" else BENCHMARKS.keys() - {gpu.BENCHMARK.name}
    return [each for each in BENCHMARKS.values() if each.name in names]


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
