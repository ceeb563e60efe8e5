from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.checkpoint import MS, file_system_of, is_on_disk, judge
from benchmarks.report import Group, Sample


def group_of(**medians: float) -> Group:
    group = Group("checkpoint", "big", "title")
    for key, value in medians.items():
        group.add(key, Sample(0, value), label=key, role="other", phase="warm", unit=MS)
    return group


class TestJudge:
    def test_ours_against_the_fastest_of_each_kind(self) -> None:
        group = group_of(
            ours_pause=11.0,
            clone_pause=11.0,
            memmove_pause=8.0,
            copy_pause=20.0,
            ours_durable=100.0,
            bare_durable=90.0,
            thread_durable=400.0,
            thread_kept_durable=300.0,
            process_durable=50.0,
            process_kept_durable=500.0,
            ours_load=30.0,
            dcp_load=60.0,
        )
        verdicts = judge(group)
        assert [verdict.value for verdict in verdicts] == pytest.approx([1.0, 1.375, 0.9, 3.0, 0.5, 2.0])
        assert [verdict.met for verdict in verdicts] == [True, False, True, True, False, True]

    def test_what_was_not_measured_has_no_verdict(self) -> None:
        assert [verdict.met for verdict in judge(group_of(ours_pause=1.0, ours_durable=1.0, ours_load=1.0))] == [
            None
        ] * 6


class TestFileSystem:
    def test_of_this_system(self) -> None:
        assert not is_on_disk(Path("/dev/shm"))
        assert file_system_of(Path("/proc")) == "proc"
