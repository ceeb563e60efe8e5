"""The figures as grouped bars, one panel for each benchmark and state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import matplotlib as mpl

mpl.use("Agg")  # Also where there is no display.

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from benchmarks.report import Group, Phase, Role, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS: Final[dict[Role, str]] = {
    "ours": "#1f6f8b",
    "peer": "#d98032",
    "ceiling": "#8a8f98",
    "other": "#b8bcc4",
}
_NAMES: Final[dict[Role, str]] = {"ours": "ft_transport", "peer": "torchft", "ceiling": "ceiling", "other": "other"}
_BAR_HEIGHT: Final = 0.38
_WARM_ALPHA: Final = 0.45
_PANEL_INCHES: Final = (7.2, 3.6)


def draw(groups: Sequence[Group], path: Path) -> None:
    """Draws all groups into one PNG: a row of panels for each benchmark."""
    benchmarks = list(dict.fromkeys(group.benchmark for group in groups))
    num_columns = max(sum(group.benchmark == name for group in groups) for name in benchmarks)
    figure, axes = plt.subplots(
        len(benchmarks),
        num_columns,
        figsize=(_PANEL_INCHES[0] * num_columns, _PANEL_INCHES[1] * len(benchmarks)),
        squeeze=False,
        layout="constrained",
    )
    for row, name in enumerate(benchmarks):
        panels = [group for group in groups if group.benchmark == name]
        for column in range(num_columns):
            if column < len(panels):
                _draw_panel(axes[row][column], panels[column])
            else:
                axes[row][column].set_axis_off()
    roles = dict.fromkeys(series.role for group in groups for series in group.series)
    handles = [Patch(color=_COLOURS[role], label="peer" if role == "peer" else _NAMES[role]) for role in roles]
    handles.append(Patch(color="#555555", label="cold (the first)"))
    handles.append(Patch(color="#555555", alpha=_WARM_ALPHA, label="warm (later ones)"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_panel(axes: Axes, group: Group) -> None:
    unit = "ms" if group.benchmark in ("stall", "loop", "heal", "checkpoint") else "GB/s"
    shown = [series for series in group.series if series.unit == unit and _belongs_in_picture(group, series)]
    bars = list(dict.fromkeys((series.key, series.label, series.role) for series in shown))
    for position, (key, _, role) in enumerate(bars):
        present: list[tuple[Phase, Series]] = []
        for phase in ("cold", "warm"):
            series = group.find(key, phase, unit)
            if series is not None:
                present.append((phase, series))
        for index, (phase, series) in enumerate(present):
            # Two bars beside each other, or one in the middle.
            offset = (index - (len(present) - 1) / 2) * _BAR_HEIGHT
            _draw_bar(axes, position + offset, series, _COLOURS[role], 1.0 if phase == "cold" else _WARM_ALPHA)
    axes.set_yticks(range(len(bars)), [_tick_label(group, key, label, role) for key, label, role in bars])
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    if unit == "ms":
        axes.set_xscale("log")
    axes.set_title(f"{group.benchmark}: {group.title}", fontsize=10, loc="right")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.14)


def _belongs_in_picture(group: Group, series: Series) -> bool:
    """Of the stall, what the trainer feels; of the loop, what is above 0; of the rest, all."""
    if group.benchmark == "loop":
        return all(sample.value > 0 for sample in series.samples)
    return group.benchmark != "stall" or series.key.rpartition("_")[2] in (
        "wait",
        "clone",
        "lost",
        "transfer",
        "during",
    )


def _draw_bar(axes: Axes, position: float, series: Series, colour: str, alpha: float) -> None:
    summary = series.summary
    spread = [[summary.median - summary.low], [summary.high - summary.median]]
    axes.barh(position, summary.median, _BAR_HEIGHT, color=colour, alpha=alpha)
    axes.errorbar(summary.median, position, xerr=spread, fmt="none", ecolor="#333333", elinewidth=0.8, capsize=2)
    text = f"{summary.median:.2f}" if summary.median < 100 else f"{summary.median:.0f}"
    axes.annotate(text, (summary.high, position), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)


def _tick_label(group: Group, key: str, label: str, role: Role) -> str:
    text = f"{_NAMES[role]}: {label}" if group.benchmark in ("stall", "loop", "heal") else label
    if group.benchmark == "checkpoint":
        text = f"{label}: {key.rpartition('_')[2]}"
    # A long label is folded at the comma nearest to its middle, where there is room for two lines.
    commas = [index for index, character in enumerate(text) if character == ","]
    if len(text) < 34 or not commas or group.benchmark == "checkpoint":
        return text
    fold = min(commas, key=lambda index: abs(index - len(text) // 2))
    return f"{text[: fold + 1]}\n{text[fold + 2 :]}"
