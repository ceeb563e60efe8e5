"""Phases in a real profile of torch."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ft_transport.telemetry.recorder import Recorder


def _spans(prof: profile, path: Path) -> list[str]:
    prof.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    named = [event for event in events if event.get("name", "").startswith("ft_transport::")]
    return [event["name"] for event in sorted(named, key=lambda event: event["ts"])]


def test_each_phase_is_a_span_of_the_profile(tmp_path: Path) -> None:
    recorder = Recorder()
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        with recorder.begin("heal", phase="quorum") as heal:
            heal.phase("manifest")
            with recorder.begin("fetch", phase="transfer"):
                torch.ones(8).add_(1)
            heal.phase("load")
        torch.ones(8).add_(1)
    assert _spans(prof, tmp_path / "trace.json") == [
        f"ft_transport::heal::{phase}" for phase in ("quorum", "manifest", "transfer", "load")
    ]


def test_a_record_that_was_begun_before_the_profile_shows_the_phases_since(tmp_path: Path) -> None:
    recorder = Recorder()
    recording = recorder.begin("save", phase="clone")
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        recording.phase("write")
        recording.end()
    recorder.begin("load", phase="find").end()
    assert _spans(prof, tmp_path / "trace.json") == ["ft_transport::save::write"]
