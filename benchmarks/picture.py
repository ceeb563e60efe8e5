"""Draws how much work failures leave, from recorded figures, as an SVG picture for the README."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Final, NamedTuple

from benchmarks.goodput import GOODPUT, NEXT

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
