from collections.abc import Iterator

import pytest

from ft_transport.telemetry.record import Transfer
from ft_transport.telemetry.recorder import Recorder

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # A process sets it once; other tests share this one.
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


def test_a_record_is_a_span_with_a_child_for_each_phase(exporter: InMemorySpanExporter) -> None:
    recorder = Recorder()
    recording = recorder.begin("heal", replica="r", phase="quorum")
    recording.phase("transfer")
    recording.transfer(Transfer(peer="a:1", role="source", num_bytes=10, length_s=1.0))
    recording.retry(OSError("gone"), peer="a:1")
    recording.tell(step=4)
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
