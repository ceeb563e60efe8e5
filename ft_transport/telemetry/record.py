"""The record of a heal, fetch, save, load or publish, and its export as a line of JSON, as spans, and as a trace.

A record is complete when its operation ends. As JSON, a record is one object on one line, whose keys are the attributes
of `Record`; readers ignore unknown keys.

Spans go to OpenTelemetry and ``torch.profiler``; the trace is for Perfetto's viewer. This module imports neither
OpenTelemetry nor torch, because a process that uses one of them has already imported it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

import msgspec

from ft_transport.errors import RecordError
from ft_transport.runtime.decoding import DECODE_ERRORS

Kind: TypeAlias = Literal["heal", "fetch", "save", "load", "publish"]
Outcome: TypeAlias = Literal["ok", "failed", "abandoned", "running"]
Role: TypeAlias = Literal["source", "relay", "same_host", "engine", "storage"]

KINDS: Final = get_args(Kind)

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
"""A number that fits into 64 bits; a larger number in a peer's JSON is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A phase of an operation, on the thread that records it. The phases of a record follow each other without gaps.

    Attributes:
        name: Name of the phase. The phases of a heal are ``quorum``, ``lock``, ``manifest``, ``plan``, ``transfer``,
            ``verify``, ``load``, ``compare``, ``rendezvous``, ``follow`` and ``first_step``; docs/recoveries.md
            explains them. Two phases of a record may have the same name.
        start_s: Seconds from the beginning of the record to the beginning of the phase.
        length_s: Duration of the phase, in seconds.
    """

    name: str
    start_s: float
    length_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The data that one operation moved between this process and one peer or file.

    Attributes:
        peer: ``host:port`` of a source or relay, as configured or announced; the URL of an engine; or the path of a
            file.
        role: Role of the peer in this operation; ``storage`` for a file.
        num_bytes: Bytes that were received, sent or written.
        length_s: Seconds from the first request to the end of the last request.
        local_address: Local address of the connections; empty without connections.
        peer_address: IP address and port of the peer; empty without connections.
        interface: Network interface that has ``local_address``; empty if the interface is unknown.
        num_connections: Number of connections that were opened.
    """

    peer: str
    role: Role
    num_bytes: Number
    length_s: float
    local_address: str = ""
    peer_address: str = ""
    interface: str = ""
    num_connections: Number = 0

    @property
    def bytes_per_s(self) -> float:
        """Average throughput over ``length_s``; 0 if ``length_s`` is 0."""
        return self.num_bytes / self.length_s if self.length_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """A failure after which the operation continued with another attempt, at the same peer or at another one.

    Attributes:
        at_s: Seconds from the beginning of the record to the failure.
        cause: Type and message of the error, as ``Type: message``.
        peer: The peer that failed; empty if no peer was involved.
    """

    at_s: float
    cause: str
    peer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The record of one operation: its phases, its transfers and its failures.

    Attributes:
        kind: Kind of the operation.
        begun_unix_s: Time at which the operation began, in seconds since 1970.
        length_s: Duration of the operation by the monotonic clock, in seconds.
        outcome: Result of the operation; ``abandoned`` if another operation replaced this one, ``running`` before the
            end.
        replica: Name of this replica in its own settings.
        group_rank: Rank of this process in its replica.
        step: Step of the state that the operation moved, or version of a publish; ``None`` if the operation failed
            before the step was known.
        num_bytes: Size of the whole state, checkpoint or version.
        error: Type and message of the error that ended the operation; empty without an error.
        phases: Phases in order, without gaps.
        transfers: One transfer for each peer and role.
        retries: Failures after which the operation continued, in order.
        notes: Further facts in plain text, by name.
    """

    kind: Kind
    begun_unix_s: float
    length_s: float
    outcome: Outcome
    replica: str = ""
    group_rank: Number = 0
    step: Number | None = None
    num_bytes: Number = 0
    error: str = ""
    phases: tuple[Phase, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    retries: tuple[Retry, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)

    def phase_lengths(self) -> dict[str, float]:
        """Return the total seconds by phase name, in the order in which the names first occur."""
        lengths: dict[str, float] = {}
        for phase in self.phases:
            lengths[phase.name] = lengths.get(phase.name, 0.0) + phase.length_s
        return lengths


_record_decoder: Final = msgspec.json.Decoder(Record)


def now_unix_s() -> float:
    """Return this host's time, in seconds since 1970."""
    return datetime.now(timezone.utc).timestamp()


def encode_json(value: object) -> bytes:
    """Encode a record, or another value that may contain headers or paths, as one line of JSON.

    A header or path whose bytes are not UTF-8 contains lone surrogates (PEP 383), which JSON cannot represent. This
    function replaces each of them with a question mark.
    """
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(value), ensure_ascii=False)
        return msgspec.json.encode(json.loads(text.encode(errors="replace")))


def decode_record(line: bytes | str) -> Record:
    """Decode a record from a line that `encode_json` has encoded.

    Raises:
        RecordError: The line does not contain a record.
    """
    try:
        return _record_decoder.decode(line)
    except DECODE_ERRORS as error:
        raise RecordError(f"expected a record in JSON, got something else: {error}") from error


_TRANSFERS: Final = 1000
"""In a trace, track ``rank`` shows the phases of a rank, and track ``rank + _TRANSFERS`` its transfers."""


def send_spans(record: Record) -> None:
    """Send the spans of a record to this process's OpenTelemetry tracer, if OpenTelemetry is imported."""
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
        # OpenTelemetry accepts only plain values as attributes of an event.
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


def profiler_span(kind: str, phase: str) -> AbstractContextManager[object]:
    """Return a span of ``torch.profiler`` named ``ft_transport::<kind>::<phase>``, without effect if no profiler runs.

    Enter and leave the span on the same thread.
    """
    profiler: Any = sys.modules.get("torch.autograd.profiler")
    if profiler is None or not profiler._is_profiler_enabled:
        return nullcontext()
    span: AbstractContextManager[object] = profiler.record_function(f"ft_transport::{kind}::{phase}")
    return span


def encode_trace(records: Sequence[Record]) -> bytes:
    """Encode records as a trace for Perfetto's viewer, in JSON. Time 0 is the beginning of the first record.

    Each replica is a process, and each rank is a track. Differences between the clocks of the hosts are not corrected.
    """
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
