"""The figures as bars, one panel for each benchmark and state."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import matplotlib as mpl

mpl.use("Agg")  # Also where there is no display.

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from benchmarks.report import Group, Role, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS: Final[dict[Role, str]] = {"ours": "#1f6f8b", "peer": "#d98032", "ceiling": "#8a8f98", "other": "#b8bcc4"}
_WIDTH_INCHES: Final = 10.0
_CAPTION_CHARACTERS: Final = 140
_BAR_INCHES: Final = 0.24
_PANEL_INCHES: Final = 0.9
"""Of each panel's title and axis."""


def draw(groups: Sequence[Group], path: Path, *, caption: str) -> None:
    """Draws all groups into one PNG, one below the other: medians, with the lowest and the highest sample."""
    panels = [(group, _shown(group)) for group in groups if group.series]
    if not panels:
        return
    heights = [_PANEL_INCHES + _BAR_INCHES * len(shown) for _, shown in panels]
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(_WIDTH_INCHES, sum(heights) + _PANEL_INCHES),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for (group, shown), row in zip(panels, axes, strict=True):
        _draw_panel(row[0], group, shown)
    roles = dict.fromkeys(series.variant.role for _, shown in panels for series in shown)
    handles = [Patch(color=_COLOURS[role], label=role) for role in roles]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle("\n".join(textwrap.wrap(caption, _CAPTION_CHARACTERS)), fontsize=7, color="#555555")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _shown(group: Group) -> list[Series]:
    """Everything in the unit of the first series, quantity by quantity; a logarithmic axis has no place below 0."""
    quantities = list(dict.fromkeys(series.quantity for series in group.series))
    unit = quantities[0].unit
    shown = [series for series in group.series if series.quantity.unit == unit and series.figure.low > 0]
    return sorted(shown, key=lambda series: quantities.index(series.quantity))


def _draw_panel(axes: Axes, group: Group, shown: Sequence[Series]) -> None:
    for position, series in enumerate(shown):
        figure = series.figure
        spread = [[figure.value - figure.low], [figure.high - figure.value]]
        axes.barh(position, figure.value, 0.8, color=_COLOURS[series.variant.role])
        axes.errorbar(figure.value, position, xerr=spread, fmt="none", ecolor="#333333", elinewidth=0.8, capsize=2)
        text = f"{figure.value:.2f}" if figure.value < 100 else f"{figure.value:.0f}"
        axes.annotate(text, (figure.high, position), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    is_one = len({series.quantity for series in shown}) == 1
    names = [series.variant.name if is_one else f"{series.quantity.name}: {series.variant.name}" for series in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.invert_yaxis()
    if shown:
        axes.set_xlabel(shown[0].quantity.unit)
        if not shown[0].quantity.is_rate:
            axes.set_xscale("log")
        if is_one:
            axes.set_xlabel(f"{shown[0].quantity.name}, {shown[0].quantity.unit}")
    axes.set_title(f"{group.benchmark} · {group.state}: {group.title}", fontsize=9, loc="right")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.1)
