from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.report import Group, Named, Quantity, Sample, Verdict
from benchmarks.tables import print_figures, print_verdicts

OURS, PEER, CEILING = Named("ours", "ours"), Named("theirs", "peer"), Named("bare", "ceiling")
RATE = Quantity("fetch", "GB/s")


@pytest.fixture
def group() -> Group:
    group = Group("fetch", "big", "a state", notes=["a note"])
    for variant, value in ((OURS, 3.0), (PEER, 1.0), (CEILING, 4.0)):
        group.add(variant, RATE, Sample(0, value, 0.5 if variant is PEER else 0.0))
    group.verdicts.append(Verdict.at_least("ours / bare", group.ratio(OURS, CEILING, RATE), 0.8))
    return group


def printed(console: Console) -> str:
    return console.export_text()


@pytest.fixture
def console() -> Iterator[Console]:
    with open("/dev/null", "w", encoding="utf-8") as nowhere:
        yield Console(file=nowhere, record=True, width=150)


class TestVerdicts:
    def test_name_figure_target_and_word(self, console: Console, group: Group) -> None:
        print_verdicts(console, group)
        text = printed(console)
        for each in ("fetch · big", "ours / bare", "0.75 ×", "≥ 0.80", "missed", "1 of 3 samples"):
            assert each in text
        assert "a note" not in text

    def test_what_was_not_measured_comes_with_the_notes(self, console: Console, group: Group) -> None:
        group.verdicts.append(Verdict.at_least("ours / none", None, 1.0))
        print_verdicts(console, group)
        text = printed(console)
        assert "not measured" in text
        assert "a note" in text


class TestFigures:
    def test_ours_beside_the_ceiling_and_the_best_peer(self, console: Console, group: Group) -> None:
        print_figures(console, group)
        text = printed(console)
        for each in ("3.00 (3.00–3.00)", "0.75 of ceiling", "3.00 of peer", "0.25 of ceiling", "1.00*1"):
            assert each in text


def test_picture_of_figures_with_and_without_a_spread(tmp_path: Path, group: Group) -> None:
    pytest.importorskip("matplotlib", reason="the extra bench brings it")
    from benchmarks.picture import draw

    below = Quantity("over no manager", "ms")
    group.add(OURS, below, Sample(0, -1.0))
    loop = Group("loop", "4", "steps")
    loop.add(OURS, below, Sample(0, -1.0))
    empty = Group("heal", "replica", "nothing was measured")
    draw([group, loop, empty], tmp_path / "results" / "picture.png", caption="a machine")
    assert (tmp_path / "results" / "picture.png").stat().st_size > 0
