"""A pause of the machine is told from one of this process."""

from __future__ import annotations

import os
import signal
import time

import pytest
from machine_pauses import MachinePauses, watching_for_pauses


def test_a_watcher_that_stands_still_reports_that_time() -> None:
    with watching_for_pauses() as found:
        start_s = time.monotonic()
        assert found.watcher is not None
        os.kill(found.watcher, signal.SIGSTOP)
        time.sleep(0.8)  # what is measured
        os.kill(found.watcher, signal.SIGCONT)
        end_s = time.monotonic()
    assert found.overlap_s(start_s, end_s) == pytest.approx(end_s - start_s, abs=0.3)


def test_pauses_count_as_far_as_they_overlap() -> None:
    found = MachinePauses(None, [(1.0, 2.0), (5.0, 9.0)])
    assert found.overlap_s(0.0, 10.0) == 5.0
    assert found.overlap_s(1.5, 6.0) == 1.5
    assert found.overlap_s(2.0, 5.0) == 0.0
