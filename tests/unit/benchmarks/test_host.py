"""Host: the figures of a sample are of a gigabyte, and of all cores."""

from __future__ import annotations

import os

import pytest

from benchmarks.host import BARE, COLD, IN_USE, SPENT, VERIFIED, Sent, judge
from benchmarks.report import Group, Sample


def test_what_limits_the_rate_is_told_by_the_gigabyte_and_by_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    sent = Sent(num_bytes=2 * 10**9, seconds=0.5, others_share=None, spent_s=[0.1, 0.2, 0.3, 0.4])
    assert sent.rate == pytest.approx(4.0)
    assert [sent.limits[quantity] for quantity in SPENT] == pytest.approx([0.05, 0.1, 0.15, 0.2])
    assert sent.limits[IN_USE] == pytest.approx(50.0)


def test_without_iperf3_only_its_own_verdict_is_missing() -> None:
    group = Group("host", "ranks", "title")
    for variant, rate in ((VERIFIED, 3.0), (BARE, 4.0)):
        group.add(variant, COLD, Sample(0, rate))
    verdicts = {verdict.text: verdict for verdict in judge(group)}
    assert verdicts["8 pairs, verified / bare loop"].met
    assert verdicts["8 pairs, verified / iperf3"].figure is None
