"""Records as spans of three tools: OpenTelemetry, ``torch.profiler``, and Perfetto's trace viewer.

This module imports neither OpenTelemetry nor torch: a process that uses one of them has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from ft_transport.telemetry.record import Record

_TRANSFERS: Final = 1000
"""Added to a rank for the line of its transfers, which overlap each other."""


def send_spans(record: Record) -> None:
    """Pass the spans of a record to the process's tracer, with the times of the record."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return
    tracer = trace.get_tracer("ft_transport")
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
        values = {"peer": transfer.peer, "role": transfer.role, "interface": transfer.interface}
        whole.add_event(
            "transfer",
            {**values, "bytes": transfer.num_bytes, "bytes_per_s": transfer.bytes_per_s},
            timestamp=_ns(end_s),
        )
    if record.outcome == "failed":
        whole.set_status(trace.StatusCode.ERROR, record.error)
    whole.end(_ns(end_s))


def _attributes(record: Record) -> dict[str, str | int]:
    values: dict[str, str | int] = {
        "ft_transport.replica": record.replica,
        "ft_transport.group_rank": record.group_rank,
        "ft_transport.outcome": record.outcome,
        "ft_transport.bytes": record.num_bytes,
    }
    return values if record.step is None else {**values, "ft_transport.step": record.step}


def _ns(unix_s: float) -> int:
    return round(unix_s * 1_000_000_000)


class ProfiledPhase:
    """The span of the current phase, while a profiler runs. Used by one thread at a time."""

    def __init__(self) -> None:
        self._span: Any = None

    def begin(self, kind: str, phase: str) -> None:
        """End the previous span, and begin ``ft_transport::<kind>::<phase>``."""
        self.end()
        profiler: Any = sys.modules.get("torch.autograd.profiler")
        if profiler is not None and profiler._is_profiler_enabled:
            span = profiler.record_function(f"ft_transport::{kind}::{phase}")
            span.__enter__()
            self._span = span

    def end(self) -> None:
        """End the span, if there is one."""
        span, self._span = self._span, None
        if span is not None:
            span.__exit__(None, None, None)


def encode_trace(records: Sequence[Record]) -> bytes:
    """Return JSON. Times begin with the first record; clocks of different hosts are not adjusted."""
    begin_s = min((record.begun_unix_s for record in records), default=0.0)
    replicas = {name: number for number, name in enumerate(sorted({record.replica for record in records}), 1)}
    events = [event for name, number in replicas.items() for event in _names(name, number, records)]
    for record in records:
        events += _events(record, replicas[record.replica], record.begun_unix_s - begin_s)
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _names(replica: str, process: int, records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": replica or "without a name"}}
    for rank in sorted({record.group_rank for record in records if record.replica == replica}):
        for line, name in ((rank, f"rank {rank}"), (rank + _TRANSFERS, f"rank {rank}, transfers")):
            yield {"ph": "M", "name": "thread_name", "pid": process, "tid": line, "args": {"name": name}}


def _events(record: Record, process: int, start_s: float) -> Iterator[dict[str, Any]]:
    whole = {"step": record.step, "bytes": record.num_bytes, "outcome": record.outcome, "error": record.error}
    where = {"pid": process, "tid": record.group_rank, "cat": record.kind}
    yield _complete(record.kind, start_s, record.length_s, where, {**whole, **record.notes})
    for phase in record.phases:
        yield _complete(phase.name, start_s + phase.start_s, phase.length_s, where, {})
    transfer_s = next((phase.start_s for phase in record.phases if phase.name == "transfer"), 0.0)
    for transfer in record.transfers:
        line = {**where, "tid": record.group_rank + _TRANSFERS}
        arguments = {**msgspec.to_builtins(transfer), "bytes_per_s": transfer.bytes_per_s}
        yield _complete(f"{transfer.role} {transfer.peer}", start_s + transfer_s, transfer.length_s, line, arguments)
    for retry in record.retries:
        yield {
            "ph": "i",
            "s": "t",
            "name": retry.cause,
            "ts": (start_s + retry.at_s) * 1e6,
            **where,
            "args": {"peer": retry.peer},
        }


def _complete(
    name: str, start_s: float, length_s: float, where: dict[str, Any], arguments: dict[str, Any]
) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": start_s * 1e6, "dur": length_s * 1e6, **where, "args": arguments}
