"""The report on the terminal."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.checkpoint import MS, QUANTITIES, RATE
from benchmarks.report import Group, Phase, Ratio, Role, Series, Summary

_PHASES: Final[tuple[Phase, ...]] = ("cold", "warm")
_TIMES: Final[dict[str, list[tuple[Role, Phase, str]]]] = {
    "stall": [
        ("ours", "cold", "ft_transport, new arena"),
        ("ours", "warm", "ft_transport, warm arena"),
        ("peer", "cold", "torchft"),
    ],
    "loop": [("ours", "warm", "ft_transport"), ("peer", "warm", "torchft"), ("ceiling", "warm", "no manager")],
    "heal": [("ours", "warm", "ft_transport"), ("peer", "warm", "torchft")],
}
"""Benchmarks whose figures are milliseconds, with their columns."""
_WIDTH: Final = 150
"""Of a report that goes to a file; a terminal has its own."""


def make_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def print_machine(console: Console, machine: dict[str, object]) -> None:
    parts = [f"{name} {value}" for name, value in machine.items() if value is not None]
    console.print(", ".join(parts), style="dim", highlight=False)


def print_group(console: Console, group: Group) -> None:
    """A table of the figures, the targets, and the notes."""
    console.print(f"\n[bold]{group.benchmark} · {group.state}[/]  {group.title}", highlight=False)
    if group.benchmark in _TIMES:
        _print_times(console, group)
    elif group.benchmark == "checkpoint":
        _print_quantities(console, group)
    else:
        _print_rates(console, group)
    _print_verdicts(console, group)
    for note in group.notes:
        console.print(f"  note: {note}", style="dim", highlight=False)
    if any(sample.busy for series in group.series for sample in series.samples):
        console.print("  * that many samples ran while others used the machine", style="dim", highlight=False)


def _print_rates(console: Console, group: Group) -> None:
    """Rows are what was measured, columns cold and warm, each beside the ceiling and the best peer."""
    has_peers = any(series.role == "peer" for series in group.series)
    has_memory = any(series.unit == "MB" for series in group.series)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for phase in _PHASES:
        table.add_column(f"{phase} GB/s", justify="right", no_wrap=True)
        table.add_column("min–max", justify="right", style="dim", no_wrap=True)
        table.add_column("/ ceiling", justify="right", no_wrap=True)
        if has_peers:
            table.add_column("/ best peer", justify="right", no_wrap=True)
    if has_memory:
        table.add_column("peak MB", justify="right", no_wrap=True)
    rows = dict.fromkeys((s.key, s.label, s.role) for s in group.series if s.unit == "GB/s")
    for key, label, role in rows:
        cells = []
        for phase in _PHASES:
            cells += _rate_cells(group, key, phase, has_peers)
        if has_memory:
            memory = group.find(key, "cold", "MB")
            cells.append(f"{memory.summary.high:.0f}" if memory is not None else "")
        table.add_row(label, *cells, style="bold" if role == "ours" else "cyan" if role == "ceiling" else "")
    console.print(table)


def _rate_cells(group: Group, key: str, phase: Phase, has_peers: bool) -> list[str]:
    series = group.find(key, phase, "GB/s")
    if series is None:
        return [""] * (4 if has_peers else 3)
    summary = series.summary
    cells = [_number(summary.median) + _busy_mark(summary), f"{_number(summary.low)}–{_number(summary.high)}"]
    # A warm clone's ceiling is a warm copy, and so is a cold one's: there is no cold ceiling to compare it with.
    ceiling = group.best("ceiling", phase, "GB/s") or group.best("ceiling", "warm", "GB/s")
    cells.append(_ratio(series, ceiling))
    if has_peers:
        cells.append(_ratio(series, group.best("peer", phase, "GB/s")) if series.role == "ours" else "")
    return cells


def _ratio(series: Series, other: Series | None) -> str:
    if other is None or other is series:
        return ""
    return f"{Ratio.between(series, other).of_medians:.2f}"


def _print_times(console: Console, group: Group) -> None:
    """Rows are quantities, columns are ours and the peer."""
    columns = _TIMES[group.benchmark]
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("ms")
    for _, _, title in columns:
        table.add_column(title, justify="right", no_wrap=True)
        table.add_column("min–max", justify="right", style="dim", no_wrap=True)
    for label in dict.fromkeys(series.label for series in group.series):
        cells = []
        for role, phase, _ in columns:
            found = [s for s in group.series if (s.label, s.role, s.phase) == (label, role, phase)]
            cells += _time_cells(found[0]) if found else ["", ""]
        table.add_row(label, *cells)
    console.print(table)


def _print_quantities(console: Console, group: Group) -> None:
    """Rows are who or what was measured, columns are quantities, each as time and as rate."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for quantity in QUANTITIES:
        table.add_column(f"{quantity} ms", justify="right", no_wrap=True)
        table.add_column("min–max", justify="right", style="dim", no_wrap=True)
        table.add_column("GB/s", justify="right", no_wrap=True)
    for name, label, role in dict.fromkeys((s.key.rpartition("_")[0], s.label, s.role) for s in group.series):
        cells = []
        for quantity in QUANTITIES:
            time, rate = (group.find(f"{name}_{quantity}", "warm", unit) for unit in (MS, RATE))
            cells += ["", "", ""] if time is None or rate is None else [*_time_cells(time), _time_cells(rate)[0]]
        table.add_row(label, *cells, style="bold" if role == "ours" else "cyan" if role == "ceiling" else "")
    console.print(table)


def _time_cells(series: Series) -> list[str]:
    summary = series.summary
    return [_number(summary.median) + _busy_mark(summary), f"{_number(summary.low)}–{_number(summary.high)}"]


def _busy_mark(summary: Summary) -> str:
    return f"*{summary.num_busy}" if summary.num_busy else ""


def _print_verdicts(console: Console, group: Group) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for verdict in group.verdicts:
        if verdict.value is None:
            word, style, value = "not measured", "dim", "–"
        else:
            word, style = ("met", "green") if verdict.met else ("missed", "red")
            value = f"{verdict.value:.2f} {verdict.unit}"
        sign = "≥" if verdict.direction == "at least" else "≤"
        spread = f"{verdict.spread[0]:.2f}–{verdict.spread[1]:.2f} in single rounds" if verdict.spread else ""
        table.add_row(
            f"  {verdict.text}",
            value,
            f"[dim]{spread}[/]",
            f"{sign} {verdict.limit:.2f} {verdict.unit}",
            f"[{style}]{word}[/]",
        )
    console.print(table)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}"
