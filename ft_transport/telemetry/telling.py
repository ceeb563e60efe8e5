"""The parts of `ToldState` that every process tells: its clock, its records, its errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from typing import Final

from ft_transport.telemetry.record import Record
from ft_transport.telemetry.recorder import Recorder
from ft_transport.telemetry.told import NUM_RECORDS, VERSION, Running, shortened
from ft_transport.telemetry.watch import Watch

_MAX_RUNNING: Final = 20


def tell_process(watch: Watch) -> None:
    """Have the watch tell the version, the clock, the errors, and the records of its recorder."""
    watch.tell("version", _version)
    watch.tell("unix_s", _unix_s)
    watch.tell("errors", watch.errors.recent)
    tell_records(watch, [watch.recorder])


def tell_records(watch: Watch, recorders: Sequence[Recorder]) -> None:
    """Have the watch tell the last records of these recorders, and what they record now."""
    watch.tell("records", partial(_records, tuple(recorders)))
    watch.tell("running", partial(_running, tuple(recorders)))


def _records(recorders: Sequence[Recorder]) -> list[Record]:
    records = [record for recorder in recorders for record in recorder.recent()]
    records.sort(key=lambda record: record.begun_unix_s + record.length_s)
    return [shortened(record) for record in records[-NUM_RECORDS:]]


def _running(recorders: Sequence[Recorder]) -> list[Running]:
    running = [each for recorder in recorders for each in recorder.running()]
    return [replace(each, replica=each.replica[:120]) for each in running[-_MAX_RUNNING:]]


def _version() -> int:
    return VERSION


def _unix_s() -> float:
    return datetime.now(timezone.utc).timestamp()
