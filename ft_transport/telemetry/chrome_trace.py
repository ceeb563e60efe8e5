"""Records as a trace that Perfetto and chrome://tracing show: a process for each replica, a line for each rank.

The format is Google's "Trace Event Format": complete events (``X``) for phases and transfers, instants (``i``) for
retries, times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from ft_transport.telemetry.record import Record

_TRANSFERS: Final = 1000
"""Added to a rank for the line of its transfers, which overlap each other."""


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
