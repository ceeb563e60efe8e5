"""Recorded figures: one JSON line each in ``figures.jsonl``, and the pages that are made of the newest lines."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.fetch import VERIFIED
from benchmarks.goodput import GOODPUT, NEXT
from benchmarks.keep import BACK, PAUSE
from benchmarks.options import Benchmark
from benchmarks.picture import expected_picture, goodput_picture
from benchmarks.report import Direction, Figure, Group, Role, Verdict

_ROOT: Final = Path(__file__).resolve().parent.parent
LINES: Final = _ROOT / "benchmarks" / "figures.jsonl"
RESULTS: Final = _ROOT / "benchmarks" / "RESULTS.md"
README: Final = _ROOT / "README.md"
PICTURE: Final = _ROOT / "docs" / "goodput.svg"
EXPECTED_PICTURE: Final = _ROOT / "docs" / "expected-goodput.svg"
_README_TABLE: Final = re.compile(r"(?<=<!-- figures -->\n).*?(?=<!-- end of figures -->)", re.DOTALL)
_HEADER: Final = """# Results

`python -m benchmarks report` makes this page from the newest lines of `benchmarks/figures.jsonl`;
`python -m benchmarks NAME --full --record` adds lines. A figure is a median; the next column has the lowest and the
highest of single rounds. Compare figures of one state only: other tenants share the machines, and each state names its
run.
"""
_ROWS: Final = (
    ("first fetch into existing tensors, 2 GB, verified", "fetch", "big", "first fetch", VERIFIED.name),
    ("copy of the state in memory, 2 GB", "clone", "big", "warm", ""),
    ("longest wait of a step while a slow receiver reads", "stall", "trainer", "longest wait before the optimizer", ""),
    ("step, 1,000 tensors, gradients one by one", "loop", "1000", "a step, gradients one by one", ""),
    ("step, 1,000 tensors, gradients in one bucket", "loop", "1000", "a step, gradients in one bucket", ""),
    ("recovery of a replica, 1 GB, 1 % of the weights trained (LoRA)", "heal", "adapter", "quorum to first commit", ""),
    ("recovery of a replica, 1 GB, all weights trained", "heal", "adamw", "quorum to first commit", ""),
    ("SIGKILL of one of 3 replicas: the others commit again after", "goodput", "three", NEXT.name, ""),
    ("a SIGKILL every 15 s, 3 replicas: work left", "goodput", "three", GOODPUT.name, ""),
    ("1 GB kept every 10 steps: such a step is longer by", "keep", "tensors300", PAUSE.name, ""),
    ("a killed process has 1 GB again, on the same host, after", "keep", "tensors300", BACK.name, ""),
    ("pause for a durable checkpoint, 2 GB", "checkpoint", "big", "pause", ""),
    ("save to disk, 2 GB", "checkpoint", "big", "durable", ""),
)
"""README's rows: what they say, benchmark, state, quantity, and the variant where ours has several."""
_LABELS: Final = {
    ("warm", "the faster memory copy"): "memmove or Tensor.copy_, the faster one",
    ("durable", "bare write and fsync, bare preadv"): "only write and fsync",
    ("load", "bare write and fsync, bare preadv"): "only preadv",
}
"""Labels on the pages, by quantity and variant, for recorded names that are unclear there."""


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One figure of one run: the samples of a variant, or a verdict, which has a direction and no role."""

    benchmark: str
    state: str
    title: str
    variant: str
    role: Role | None = None
    quantity: str = ""
    unit: str
    median: float
    low: float | None = None
    high: float | None = None
    direction: Direction | None = None
    target: float | None = None
    commit: str
    machine: str
    date: str

    @property
    def run(self) -> tuple[str, ...]:
        return self.benchmark, self.state, self.commit, self.machine, self.date

    @property
    def is_met(self) -> bool | None:
        return Verdict("", Figure(self.median, 0, 0), self.target, self.direction).met if self.direction else None

    @property
    def label(self) -> str:
        return _LABELS.get((self.quantity, self.variant), self.variant)

    @property
    def value(self) -> str:
        return f"{_number(self.median)} {self.unit}"

    @property
    def cells(self) -> tuple[str, ...]:
        name = f"{self.quantity}: {self.label}" if self.quantity else self.label
        spread = f"{_number(self.low)}–{_number(self.high)}" if self.low and self.high and self.low < self.high else ""
        target = f"{self.direction} {_number(self.target)}" if self.target is not None else ""
        met = {True: "met", False: "**missed**", None: self.role if self.role in ("peer", "ceiling") else ""}[
            self.is_met
        ]
        return self.state, name, self.value, spread, target, met


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}"


def lines_of(group: Group, machine: Mapping[str, object]) -> list[Line]:
    """All figures of a group that was measured now."""
    git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    common = {
        "benchmark": group.benchmark,
        "state": group.state,
        "title": group.title,
        "commit": subprocess.run(git, cwd=_ROOT, capture_output=True, text=True, check=False).stdout.strip(),
        "machine": ", ".join(
            f"{name} {value}" for name, value in machine.items() if isinstance(value, str | int | float)
        ),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    measured = [
        {
            "variant": each.variant.name,
            "role": each.variant.role,
            "quantity": each.quantity.name,
            **_rounded(each.figure),
        }
        for each in group.series
    ]
    judged = [
        {"variant": each.text, "direction": each.direction, "target": each.limit, **_rounded(each.figure)}
        for each in group.verdicts
        if each.figure is not None
    ]
    return [msgspec.convert({**common, **fields}, Line) for fields in [*measured, *judged]]


def record(lines: Iterable[Line], path: Path = LINES) -> None:
    """Appends lines."""
    with path.open("ab") as file:
        file.writelines(msgspec.json.encode(line) + b"\n" for line in lines)


def table(lines: Iterable[Line]) -> str:
    """A row for each line."""
    return _markdown([("state", "", "figure", "single rounds", "target", ""), *(line.cells for line in lines)])


def _markdown(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head, *body = (f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows)
    return "\n".join([head, f"|{'|'.join('-' * (width + 2) for width in widths)}|", *body, ""])


def _rounded(figure: Figure) -> dict[str, object]:
    values = {"median": figure.value, "low": figure.low, "high": figure.high}
    return {"unit": figure.unit, **{name: float(f"{value:.4g}") for name, value in values.items()}}


def newest(path: Path = LINES) -> list[Line]:
    """The lines of the newest run of each benchmark and state."""
    lines = [msgspec.json.decode(line, type=Line) for line in path.read_bytes().splitlines()]
    last = {(line.benchmark, line.state): line.run for line in lines}
    return [line for line in lines if line.run == last[line.benchmark, line.state]]


def results_page(benchmarks: Iterable[Benchmark], lines: Sequence[Line]) -> str:
    """A table for each benchmark, with the run of each state, and why a target is missed."""
    parts = [_HEADER]
    for benchmark in benchmarks:
        of = [line for line in lines if line.benchmark == benchmark.name]
        parts += [f"## {benchmark.question}\n", f"`python -m benchmarks {benchmark.name}`\n"]
        if not of:
            parts.append("Nothing is recorded yet.\n")
            continue
        runs = {
            line.state: f"- {line.state}: {line.title} (commit {line.commit}, {line.date}; {line.machine})"
            for line in of
        }
        why = [f"- {line.state}, {line.variant}: {reason(benchmark, line)}" for line in of if line.is_met is False]
        parts += ["\n".join(runs.values()) + "\n", table(of)]
        if why:
            parts.append("\n".join(["Why a target is missed:\n", *why]) + "\n")
    return "\n".join(parts)


def reason(benchmark: Benchmark, missed: Line) -> str | None:
    """The sentence on a missed target."""
    return next((why for part, why in benchmark.misses.items() if part in missed.variant), None)


def with_table(readme: str, lines: Sequence[Line]) -> str:
    """The README with the table of the newest figures."""
    rows = [("measurement", "ft-transport", "best other program", "reference")]
    for words, benchmark, state, quantity, variant in _ROWS:
        of = [line for line in lines if (line.benchmark, line.state, line.quantity) == (benchmark, state, quantity)]
        best = {line.role: line for line in sorted(of, key=_badness, reverse=True)}
        ours = next((line for line in of if line.variant == variant), best["ours"])
        peer, ceiling = (
            f"{best[role].value}, {best[role].label}" if role in best else "" for role in ("peer", "ceiling")
        )
        rows.append((words, ours.value, peer, ceiling))
    return _README_TABLE.sub(lambda _match: _markdown(rows), readme)


def _badness(line: Line) -> float:
    return -line.median if line.unit.endswith("/s") else line.median


def write_pages(benchmarks: Iterable[Benchmark]) -> None:
    """Writes RESULTS.md, the table of README.md, and the pictures above it."""
    lines = newest()
    RESULTS.write_text(results_page(benchmarks, lines), encoding="utf-8")
    README.write_text(with_table(README.read_text(encoding="utf-8"), lines), encoding="utf-8")
    PICTURE.write_text(goodput_picture(lines), encoding="utf-8")
    EXPECTED_PICTURE.write_text(expected_picture(), encoding="utf-8")
