"""Records survive their journey through a file, become spans and traces, and what is no record is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ft_transport.errors import RecordError
from ft_transport.telemetry.record import Phase, Record, Retry, Transfer, decode_record, encode_json, encode_trace
from ft_transport.telemetry.recorder import Recorder

RECORD = Record(
    kind="heal",
    begun_unix_s=1.7e9,
    length_s=2.5,
    outcome="ok",
    replica="b",
    step=7,
    num_bytes=4096,
    phases=(Phase(name="quorum", start_s=0.0, length_s=0.5), Phase(name="transfer", start_s=0.5, length_s=2.0)),
    transfers=(Transfer(peer="http://a:1", role="source", num_bytes=4096, length_s=2.0, interface="eth0"),),
    retries=(Retry(at_s=0.6, cause="PeerUnreachableError: gone", peer="http://c:1"),),
    notes={"advertised": "http://b:1"},
)


def test_a_record_survives_its_line() -> None:
    line = encode_json(RECORD)
    assert b"\n" not in line
    assert decode_record(line) == RECORD
    assert decode_record(line.decode()) == RECORD


def test_what_quotes_a_path_of_any_bytes_is_written_too(tmp_path: Path) -> None:
    recorder = Recorder(path=tmp_path / "records")
    record = recorder.begin("save").end("failed", error=os.fsdecode(b"no room for /x/\xff"))
    assert record is not None
    assert decode_record((tmp_path / "records").read_bytes()).error == "no room for /x/?"


def test_what_a_newer_version_adds_is_passed_over() -> None:
    assert decode_record(encode_json(RECORD)[:-1] + b',"later":1}') == RECORD


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"kind": "party"}', b"\xff"])
def test_what_is_no_record_is_refused(line: bytes | str) -> None:
    with pytest.raises(RecordError, match="expected a record in JSON"):
        decode_record(line)


def test_phases_of_one_name_are_summed_up() -> None:
    phases = tuple(Phase(name=name, start_s=0.0, length_s=1.0) for name in ("manifest", "transfer", "manifest"))
    record = Record(kind="heal", begun_unix_s=0, length_s=3, outcome="ok", phases=phases)
    assert record.phase_lengths() == {"manifest": 2.0, "transfer": 1.0}


def events(*records: Record) -> list[dict[str, Any]]:
    return json.loads(encode_trace(records))["traceEvents"]  # type: ignore[no-any-return]


HEAL = Record(
    kind="heal",
    begun_unix_s=1000.5,
    length_s=3.0,
    outcome="ok",
    replica="b",
    group_rank=1,
    phases=(Phase(name="quorum", start_s=0.0, length_s=1.0), Phase(name="transfer", start_s=1.0, length_s=2.0)),
    transfers=(Transfer(peer="a:1", role="source", num_bytes=10, length_s=2.0),),
    retries=(Retry(at_s=1.5, cause="PeerUnreachableError: x", peer="a:1"),),
)
SAVE = Record(kind="save", begun_unix_s=1000.0, length_s=1.0, outcome="ok", replica="a")


def test_a_trace_has_a_process_for_each_replica_and_phases_and_retries_at_their_time() -> None:
    traced = events(HEAL, SAVE)
    named = {(e["name"], e["pid"], e.get("tid")): e["args"]["name"] for e in traced if e["ph"] == "M"}
    assert named["process_name", 1, None] == "a"
    assert named["process_name", 2, None] == "b"
    assert named["thread_name", 2, 1] == "rank 1"
    whole = {each["name"]: each for each in traced if each["ph"] == "X"}
    assert (whole["save"]["ts"], whole["save"]["dur"]) == (0.0, 1e6)
    assert (whole["heal"]["ts"], whole["heal"]["dur"]) == (0.5e6, 3e6)
    assert (whole["transfer"]["ts"], whole["transfer"]["dur"]) == (1.5e6, 2e6)
    assert whole["source a:1"]["tid"] != whole["heal"]["tid"]
    assert whole["source a:1"]["args"]["bytes_per_s"] == 5.0
    (instant,) = (each for each in traced if each["ph"] == "i")
    assert (instant["name"], instant["ts"]) == ("PeerUnreachableError: x", 2e6)
    assert events() == []


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # A process sets it once; other tests share this one.
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


def test_a_record_is_a_span_with_a_child_for_each_phase(exporter: Any) -> None:
    recorder = Recorder()
    recording = recorder.begin("heal", replica="r", phase="quorum")
    recording.phase("transfer")
    recording.transfer(Transfer(peer="a:1", role="source", num_bytes=10, length_s=1.0))
    recording.retry(OSError("gone"), peer="a:1")
    recording.describe(step=4)
    recording.end("failed", error=ValueError("no"))
    (record,) = recorder.recent()
    *phases, whole = exporter.get_finished_spans()
    assert [phase.name for phase in phases] == ["ft_transport.heal.quorum", "ft_transport.heal.transfer"]
    assert whole.name == "ft_transport.heal"
    assert whole.context is not None
    assert all(phase.parent is not None and phase.parent.span_id == whole.context.span_id for phase in phases)
    assert whole.attributes is not None
    assert (whole.attributes["ft_transport.step"], whole.attributes["ft_transport.replica"]) == (4, "r")
    assert [event.name for event in whole.events] == ["retry", "transfer"]
    assert whole.status.description == "ValueError: no"
    assert whole.start_time == round(record.begun_unix_s * 1e9)
    assert phases[0].end_time == phases[1].start_time


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
