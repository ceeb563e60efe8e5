"""The report on the terminal: verdicts, and all figures where they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.report import Figure, Group, Quantity, Role, Series, Variant, Verdict, ratio

_WIDTH: Final = 150
"""Of a report that goes to a file; a terminal has its own."""
_STYLES: Final[dict[Role, str]] = {"ours": "bold", "peer": "", "ceiling": "cyan", "other": "dim"}


def make_console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=_WIDTH, highlight=False)


def print_verdicts(console: Console, group: Group) -> None:
    """One row for each target; the notes only where one of them could not be measured."""
    table = _table()
    for title in ("target", "measured", "single rounds", "limit", ""):
        table.add_column(title, justify="left" if title in ("target", "") else "right", no_wrap=title != "target")
    for verdict in group.verdicts:
        table.add_row(escape(verdict.text), *_verdict_cells(verdict))
    captions = [_busy(group)]
    if not group.verdicts or any(verdict.figure is None for verdict in group.verdicts):
        captions += group.notes
    _print(console, group, table, captions)


def print_figures(console: Console, group: Group) -> None:
    """Variants and quantities, the longer of the two as rows; each figure beside the ceiling and the best peer."""
    variants = {series.variant.name: series.variant for series in group.series}
    quantities = dict.fromkeys(series.quantity for series in group.series)
    table = _table()
    table.add_column("")
    if len(variants) > len(quantities):
        for quantity in quantities:
            table.add_column(_title(quantity), justify="right")
        for variant in variants.values():
            cells = [_cell(group, variant, quantity) for quantity in quantities]
            table.add_row(escape(variant.name), *cells, style=_STYLES[variant.role])
    else:
        for variant in variants.values():
            table.add_column(escape(variant.name), justify="right", style=_STYLES[variant.role])
        for quantity in quantities:
            table.add_row(_title(quantity), *(_cell(group, variant, quantity) for variant in variants.values()))
    _print(console, group, table, group.notes)


def _table() -> Table:
    return Table(box=None, pad_edge=False, header_style="dim")


def _print(console: Console, group: Group, table: Table, captions: Sequence[str]) -> None:
    console.print(f"[bold]{group.benchmark} · {escape(group.state)}[/]  {escape(group.title)}")
    console.print(table)
    for caption in captions:
        if caption:
            console.print(escape(caption), style="dim")
    console.print()


def _verdict_cells(verdict: Verdict) -> list[str]:
    sign = "≥" if verdict.direction == "at least" else "≤"
    figure = verdict.figure
    limit = f"{sign} {verdict.limit:.2f}" if verdict.limit is not None else "none"
    if figure is None:
        return ["–", "", limit, "[dim]not measured[/]"]
    word = {True: "[green]met[/]", False: "[red]missed[/]", None: "[dim]shown only[/]"}[verdict.met]
    return [f"{figure.value:.2f} {figure.unit}", _spread(figure), limit, word]


def _busy(group: Group) -> str:
    num_busy = sum(series.num_busy for series in group.series)
    num_samples = sum(len(series.samples) for series in group.series)
    return f"{num_busy} of {num_samples} samples ran while others used the machine" if num_busy else ""


def _title(quantity: Quantity) -> str:
    return escape(f"{quantity.name}, {quantity.unit}")


def _cell(group: Group, variant: Variant, quantity: Quantity) -> str:
    series = group.find(variant, quantity)
    if series is None:
        return ""
    figure = series.figure
    busy = f"*{series.num_busy}" if series.num_busy else ""
    return f"{_number(figure.value)}{busy} ({_spread(figure)})" + "".join(_beside(group, series))


def _beside(group: Group, series: Series) -> list[str]:
    """The ratio of ours to the ceiling and to the best peer, of a peer to the ceiling; of rates and times only."""
    if not series.quantity.unit.endswith("s"):
        return []
    roles: tuple[Role, ...] = {"ours": ("ceiling", "peer"), "peer": ("ceiling",)}.get(series.variant.role, ())  # type: ignore[assignment]
    found = [(role, ratio(series, group.best_of(role, series.quantity))) for role in roles]
    return [f"\n{figure.value:.2f} of {role}" for role, figure in found if figure is not None]


def _spread(figure: Figure) -> str:
    return f"{_number(figure.low)}–{_number(figure.high)}"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}"
