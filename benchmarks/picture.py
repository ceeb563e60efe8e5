"""Draws how much work failures leave, as SVG pictures for the README: from recorded figures, and from the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Final, NamedTuple

from benchmarks.goodput import GOODPUT, NEXT
from benchmarks.goodput_model import Job, expected, expected_with_restarts, following, healing

if TYPE_CHECKING:
    from benchmarks.figures import Line

_WIDTH, _ROW, _BAR = 720, 26, 16
_LABELS, _PANEL, _GAP = 230, 190, 50
_OURS, _OTHERS = "#3b7dd8", "#9aa5b1"
_STYLE: Final = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}.soft{fill:#57606a}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.soft{fill:#9da7b1}}"
)


class _Panel(NamedTuple):
    title: str
    quantity: str
    most: float
    unit: str


def goodput_picture(lines: Sequence[Line]) -> str:
    """Return an SVG picture of the newest figures of the benchmark ``goodput``.

    Args:
        lines: The newest lines of all benchmarks.
    """
    found = {(line.state, line.variant, line.quantity): line.median for line in lines if line.benchmark == "goodput"}
    longest_s = max((value for (_, _, quantity), value in found.items() if quantity == NEXT.name), default=1.0)
    panels = (
        _Panel("work left, of an undisturbed run", GOODPUT.name, 1.0, ""),
        _Panel("standstill after each death", NEXT.name, longest_s, " s"),
    )
    parts = [_text(_LABELS + index * (_PANEL + _GAP), 18, panel.title, "soft") for index, panel in enumerate(panels)]
    top = 30
    for state, title in {line.state: line.title for line in lines if line.benchmark == "goodput"}.items():
        parts.append(_text(0, top + 13, title))
        top += _ROW
        for variant in dict.fromkeys(name for (each, name, quantity) in found if each == state and quantity):
            parts.append(_text(12, top + 13, variant, "soft"))
            for index, panel in enumerate(panels):
                value = found.get((state, variant, panel.quantity))
                if value is not None:
                    left = _LABELS + index * (_PANEL + _GAP)
                    parts.append(_bar(left, top, _PANEL * value / panel.most, variant))
                    parts.append(_text(left + _PANEL * value / panel.most + 6, top + 13, f"{value:.2f}{panel.unit}"))
            top += _ROW
        top += 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" width="{_WIDTH}" role="img" '
        f'aria-label="work left and standstill with failures">\n<style>{_STYLE}</style>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _text(left: float, base: float, text: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text x="{left:.0f}" y="{base:.0f}"{kind}>{escape(text)}</text>'


def _bar(left: float, top: float, width: float, variant: str) -> str:
    colour = _OURS if variant.startswith("ft_transport") else _OTHERS
    return f'<rect x="{left:.0f}" y="{top}" width="{max(1.0, width):.0f}" height="{_BAR}" rx="2" fill="{colour}"/>'


_CHART_WIDTH, _CHART_HEIGHT, _LEFT, _TOP = 290, 170, 40, 52
_DAY_S: Final = 86400.0
_NOTICE_S, _TORCHFT_NOTICE_S, _RESTART_S, _STEP_S = 0.2, 5.1, 30.0, 2.0
"""The first two as the benchmark ``goodput`` measures them with three replicas; the others are assumptions."""
_COPY_BYTES_PER_S, _OPTIMIZER_SHARE = 1e10, 0.1
_GIGABIT_BYTES = 1e9 / 8
_COLOURS: Final = {
    "newcomers follow": "#3b7dd8",
    "newcomers heal": "#7fb0ea",
    "torchft": "#e0823d",
    "restart from a checkpoint": "#9aa5b1",
}


def expected_goodputs(job: Job) -> Mapping[str, float]:
    """Return the work that failures leave of a job, by name of the way to recover."""
    follows = following(job, _NOTICE_S, copy_bytes_per_s=_COPY_BYTES_PER_S, optimizer_share=_OPTIMIZER_SHARE)
    return {
        "newcomers follow": expected(job, follows),
        "newcomers heal": expected(job, healing(job, _NOTICE_S)),
        "torchft": expected(job, healing(job, _TORCHFT_NOTICE_S, overlapped_s=job.step_s)),
        "restart from a checkpoint": expected_with_restarts(job, _TORCHFT_NOTICE_S),
    }


def expected_picture() -> str:
    """Return an SVG picture of the model of goodput: by number of replicas, and by how often one dies."""

    def job(num_replicas: float, mtbf_days: float) -> Job:
        return Job(
            num_replicas=int(num_replicas),
            mtbf_s=mtbf_days * _DAY_S,
            step_s=_STEP_S,
            state_bytes=20e9,
            bytes_per_s=25 * _GIGABIT_BYTES,
            restart_s=_RESTART_S,
        )

    counts = [10 ** (1 + 3 * index / 24) for index in range(25)]
    days = [365 ** (index / 24) for index in range(25)]
    charts = (
        ("replicas, of which each dies once in 7 days", {10.0: "10", 100.0: "100", 1e3: "1,000", 1e4: "10,000"},
         [(each, expected_goodputs(job(each, 7))) for each in counts]),
        ("one replica of 2,000 dies once in this time", {1.0: "1 day", 7.0: "a week", 30.0: "a month", 365.0: "a year"},
         [(each, expected_goodputs(job(2000, each))) for each in days]),
    )  # fmt: skip
    parts = [
        _text(_LEFT, 14, "work left by failures, of an undisturbed run (model; 20 GB a rank, 25 Gbit/s, steps of 2 s)")
    ]
    left = _LEFT
    for name, colour in _COLOURS.items():
        parts.append(f'<rect x="{left}" y="26" width="14" height="4" fill="{colour}"/>')
        parts.append(_text(left + 18, 33, name, "soft"))
        left += 40 + 7 * len(name)
    for index, (title, ticks, points) in enumerate(charts):
        parts += _chart(_LEFT + index * (_CHART_WIDTH + 60), title, ticks, points)
    height = _TOP + _CHART_HEIGHT + 44
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img" '
        f'aria-label="work left by failures, by number of replicas and by their rate">\n<style>{_STYLE}</style>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _chart(
    left: float, title: str, ticks: Mapping[float, str], points: Sequence[tuple[float, Mapping[str, float]]]
) -> list[str]:
    first, last = math.log(points[0][0]), math.log(points[-1][0])
    bottom = _TOP + _CHART_HEIGHT

    def at(value: float) -> float:
        return left + _CHART_WIDTH * (math.log(value) - first) / (last - first)

    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        level = bottom - _CHART_HEIGHT * share
        parts.append(f'<path d="M{left:.0f} {level:.0f}h{_CHART_WIDTH}" stroke="#8884" fill="none"/>')
        parts.append(_text(left - 34, level + 4, f"{share:.2f}", "soft"))
    parts += [_text(at(value) - 3 * len(text), bottom + 18, text, "soft") for value, text in ticks.items()]
    parts.append(_text(left, bottom + 36, title, "soft"))
    for name, colour in _COLOURS.items():
        path = " ".join(f"{at(value):.1f},{bottom - _CHART_HEIGHT * found[name]:.1f}" for value, found in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
    return parts
