"""Recorded figures: runs append lines, the newest run of a state counts, and the pages are what the lines say."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import figures
from benchmarks.__main__ import BENCHMARKS
from benchmarks.options import Benchmark, Size
from benchmarks.picture import goodput_picture
from benchmarks.report import Group, Named, Quantity, Sample, Verdict

OURS, PEER, RATE = Named("ours", "ours"), Named("theirs", "peer"), Quantity("fetch", "GB/s")


def record(path: Path, value: float, commit: str) -> None:
    group = Group("fetch", "big", "a state")
    for number in range(2):
        group.add(OURS, RATE, Sample(number, value + number))
        group.add(PEER, RATE, Sample(number, 2.0))
    group.verdicts = [
        Verdict.at_least("ours / theirs", group.ratio(OURS, PEER, RATE), 1.0),
        Verdict.at_least("not measured", None, 1.0),
    ]
    figures.record(figures.lines_of(group, {"cpu": commit, "load": [1.0], "torchft": None}), path)


def test_the_newest_run_of_a_state_replaces_the_older_ones(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    record(path, 3.0, "old")
    record(path, 1.0, "new")

    lines = figures.newest(path)

    assert len(path.read_bytes().splitlines()) == 6
    assert [(line.variant, line.median, line.low, line.high) for line in lines] == [
        ("ours", 1.5, 1.0, 2.0),
        ("theirs", 2.0, 2.0, 2.0),
        ("ours / theirs", 0.75, 0.5, 1.0),
    ]
    assert {line.machine for line in lines} == {"cpu new"}
    assert lines[2].is_met is False


def test_a_page_has_figures_targets_and_why_one_is_missed(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    record(path, 1.0, "new")
    misses = {"theirs": "Theirs is fast."}
    fetch, loop = (
        Benchmark(
            name=name, question=f"{name}?", run=lambda _: [], default=Size(scale=1.0, num_samples=1), misses=misses
        )
        for name in ("fetch", "loop")
    )

    page = figures.results_page([fetch, loop], figures.newest(path))

    rows = [re.split(r" *\| *", line)[1:-1] for line in page.splitlines() if line.startswith("| ")]
    assert rows == [
        ["state", "", "figure", "single rounds", "target", ""],
        ["big", "fetch: ours", "1.50 GB/s", "1.00–2.00", "", ""],
        ["big", "fetch: theirs", "2.00 GB/s", "", "", "peer"],
        ["big", "ours / theirs", "0.75 ×", "0.50–1.00", "at least 1.00", "**missed**"],
    ]
    assert "- big, ours / theirs: Theirs is fast." in page
    assert page.endswith("## loop?\n\n`python -m benchmarks loop`\n\nNothing is recorded yet.\n")


def test_results_and_readme_hold_no_figure_that_no_line_backs() -> None:
    lines = figures.newest()

    assert figures.RESULTS.read_text() == figures.results_page(BENCHMARKS.values(), lines)
    assert figures.README.read_text() == figures.with_table(figures.README.read_text(), lines)
    assert figures.PICTURE.read_text() == goodput_picture(lines)


def test_each_missed_target_has_its_sentence() -> None:
    missed = [line for line in figures.newest() if line.is_met is False]
    assert [line.variant for line in missed if not figures.reason(BENCHMARKS[line.benchmark], line)] == []
