from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import savers
from benchmarks.checkpoint import judge
from benchmarks.machine import file_system_of, is_on_disk
from benchmarks.report import Group, Quantity, Sample, Variant
from benchmarks.savers import DURABLE, LOAD, OURS, PAUSE, PROCESSES, THREADS


def group_of(*figures: tuple[Variant, Quantity, float]) -> Group:
    group = Group("checkpoint", "big", "title")
    for variant, quantity, value in figures:
        group.add(variant, quantity, Sample(0, value))
    return group


class TestJudge:
    def test_ours_against_the_fastest_of_each_kind(self) -> None:
        group = group_of(
            (OURS, PAUSE, 11.0),
            (savers.CLONE, PAUSE, 11.0),
            (savers.MEMMOVE, PAUSE, 8.0),
            (savers.COPY, PAUSE, 20.0),
            (OURS, DURABLE, 100.0),
            (savers.BARE, DURABLE, 90.0),
            (THREADS[0], DURABLE, 400.0),
            (THREADS[1], DURABLE, 300.0),
            (PROCESSES[0], DURABLE, 50.0),
            (PROCESSES[1], DURABLE, 500.0),
            (OURS, LOAD, 30.0),
            (savers.DCP_LOAD, LOAD, 60.0),
        )
        verdicts = judge(group)
        values = [verdict.figure.value for verdict in verdicts if verdict.figure is not None]
        assert values == pytest.approx([1.0, 1.375, 0.9, 3.0, 0.5, 2.0])
        assert [verdict.met for verdict in verdicts] == [True, False, True, True, False, True]

    def test_what_was_not_measured_has_no_verdict(self) -> None:
        group = group_of((OURS, PAUSE, 1.0), (OURS, DURABLE, 1.0), (OURS, LOAD, 1.0))
        assert [verdict.met for verdict in judge(group)] == [None] * 6


class TestFileSystem:
    def test_of_this_system(self) -> None:
        assert not is_on_disk(Path("/dev/shm"))
        assert file_system_of(Path("/proc")) == "proc"
