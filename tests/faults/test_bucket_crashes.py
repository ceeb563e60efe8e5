"""Trainers that save to a bucket are killed at any request, while other requests fail."""

from __future__ import annotations

import bucket_crashes as script
import pytest
from buckets import used_bucket

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.usefixtures("obstore_ready")]


def test_a_trainer_killed_at_any_request_loses_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    with used_bucket(monkeypatch) as bucket:
        seen = script.run(bucket, num_lives=3, seed=7)
    assert seen["saved"] >= 1
    assert seen["loaded"] >= 1
