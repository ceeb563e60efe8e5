"""What records add up to: how often, how long, how many bytes, and why something was tried again."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Final

from ft_transport.telemetry.readings import OTHER, PREFIX, Counts, Durations, Metric, Reading
from ft_transport.telemetry.record import Record

_BOUNDS_S: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
_CAUSE: Final = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)

_LENGTH: Final = Metric(
    name=f"{PREFIX}operation_seconds",
    kind="histogram",
    help="How long heals, fetches, saves, loads and publishes took that have ended.",
    labels=("operation", "outcome"),
)
_PHASES: Final = Metric(
    name=f"{PREFIX}operation_phase_seconds_total",
    kind="counter",
    help="Where the time of operations went.",
    labels=("operation", "phase"),
)
_BYTES: Final = Metric(
    name=f"{PREFIX}operation_bytes_total",
    kind="counter",
    help="Size of what operations were about: states, checkpoints, versions.",
    labels=("operation",),
)
_RETRIES: Final = Metric(
    name=f"{PREFIX}retries_total",
    kind="counter",
    help="What failed in an operation and was tried again, by the type of the error.",
    labels=("operation", "cause"),
)
_TRANSFERRED: Final = Metric(
    name=f"{PREFIX}transfer_bytes_total",
    kind="counter",
    help="Bytes that came from others in operations, by what these were.",
    labels=("operation", "role"),
)
_TRANSFERRING: Final = Metric(
    name=f"{PREFIX}transfer_seconds_total",
    kind="counter",
    help="How long others were read from, or written to; each of them counts.",
    labels=("operation", "role"),
)
_LAST: Final = Metric(
    name=f"{PREFIX}operation_last_success_timestamp_seconds",
    kind="gauge",
    help="When an operation last ended well, in seconds since 1970.",
    labels=("operation",),
)
_LAST_STEP: Final = Metric(
    name=f"{PREFIX}operation_last_step",
    kind="gauge",
    help="The step, or version, of the last operation that ended well.",
    labels=("operation",),
)


class RecordMetrics:
    """Adds records up. Any thread may use it; it knows nobody."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()  # a signal handler may end a record while another one is being added
        self._lengths = Durations(_LENGTH, _BOUNDS_S)
        self._phases = Counts(_PHASES)
        self._bytes = Counts(_BYTES)
        self._retries = Counts(_RETRIES)
        self._transferred = Counts(_TRANSFERRED)
        self._transferring = Counts(_TRANSFERRING)
        self._last: dict[str, tuple[float, int | None]] = {}

    def add(self, record: Record) -> None:
        """Adds one more record; a listener of a `Recorder`."""
        kind = record.kind
        with self._mutex:
            self._lengths.observe(record.length_s, kind, record.outcome)
            for phase in record.phases:
                self._phases.add(kind, phase.name, by=phase.length_s)
            for retry in record.retries:
                self._retries.add(kind, cause_of(retry.cause))
            for transfer in record.transfers:
                self._transferred.add(kind, transfer.role, by=transfer.num_bytes)
                self._transferring.add(kind, transfer.role, by=transfer.length_s)
            if record.outcome == "ok":
                if record.num_bytes:  # a save and a publish do not say
                    self._bytes.add(kind, by=record.num_bytes)
                self._last[kind] = record.begun_unix_s + record.length_s, record.step

    def readings(self) -> Iterator[Reading]:
        """See ``readings.Source``."""
        for each in (
            self._lengths,
            self._phases,
            self._bytes,
            self._retries,
            self._transferred,
            self._transferring,
        ):
            yield from each.readings()
        yield Reading(metric=_LAST, value=None)
        yield Reading(metric=_LAST_STEP, value=None)
        for kind, (ended_unix_s, step) in dict(self._last).items():
            yield Reading(metric=_LAST, labels=(kind,), value=ended_unix_s)
            yield Reading(metric=_LAST_STEP, labels=(kind,), value=step)


def cause_of(text: str) -> str:
    """The type that the text of an error begins with; `OTHER` for anything else, which peers may have worded."""
    name = text.partition(":")[0]
    return name if _CAUSE.fullmatch(name) else OTHER
