"""Records as OpenTelemetry spans, if the process uses OpenTelemetry: a span for each record, a child for each phase.

Nothing is imported for it: a process that uses OpenTelemetry has imported it. Without a tracer provider of the user's,
OpenTelemetry itself drops the spans.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from ft_transport.telemetry.record import Record

_MODULE: Final = "opentelemetry.trace"
_TRACER: Final = "ft_transport"
_NS: Final = 1_000_000_000


def tell_spans(record: Record) -> None:
    """Pass the spans of a record to the process's tracer, with the times of the record."""
    trace: Any = sys.modules.get(_MODULE)
    if trace is None:
        return
    tracer = trace.get_tracer(_TRACER)
    begun_s, end_s = record.begun_unix_s, record.begun_unix_s + record.length_s
    whole = tracer.start_span(f"ft_transport.{record.kind}", start_time=_ns(begun_s), attributes=_attributes(record))
    within = trace.set_span_in_context(whole)
    for phase in record.phases:
        start_s = begun_s + phase.start_s
        child = tracer.start_span(f"ft_transport.{record.kind}.{phase.name}", context=within, start_time=_ns(start_s))
        child.end(_ns(start_s + phase.length_s))
    for retry in record.retries:
        whole.add_event("retry", {"cause": retry.cause, "peer": retry.peer}, timestamp=_ns(begun_s + retry.at_s))
    for transfer in record.transfers:
        # Attributes of an event are plain values only.
        told = {"peer": transfer.peer, "role": transfer.role, "interface": transfer.interface}
        whole.add_event(
            "transfer",
            {**told, "bytes": transfer.num_bytes, "bytes_per_s": transfer.bytes_per_s},
            timestamp=_ns(end_s),
        )
    if record.outcome == "failed":
        whole.set_status(trace.StatusCode.ERROR, record.error)
    whole.end(_ns(end_s))


def _attributes(record: Record) -> dict[str, str | int]:
    told: dict[str, str | int] = {
        "ft_transport.replica": record.replica,
        "ft_transport.group_rank": record.group_rank,
        "ft_transport.outcome": record.outcome,
        "ft_transport.bytes": record.num_bytes,
    }
    return told if record.step is None else {**told, "ft_transport.step": record.step}


def _ns(unix_s: float) -> int:
    return round(unix_s * _NS)
