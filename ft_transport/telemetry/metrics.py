"""The metrics of one process: the table of all metrics, their values, and the forms that Prometheus reads.

Code that counts adds to its own values, which takes about a microsecond. Only a scrape reads them.
"""

from __future__ import annotations

import logging
import re
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate, groupby
from types import SimpleNamespace
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from ft_transport.errors import escape_peer_text
from ft_transport.telemetry.record import Record
from ft_transport.telemetry.recorder import Recorder

logger = logging.getLogger(__name__)

PREFIX: Final = "ft_transport_"
OTHER: Final = "other"
"""The last label of every series beyond the first `_MAX_SERIES` of a metric."""

OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0"
TEXT: Final = "text/plain; version=0.0.4"

_MAX_SERIES: Final = 64
_CAUSE: Final = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)
_LOCK_S: Final = (0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_STEP_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_OPERATION_S: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table. docs/metrics.md explains the same rows.

    Attributes:
        name: Without `PREFIX`; the name of a counter ends in ``_total``.
        help: One sentence.
        label_names: Separated by spaces.
        known: Values of the only label that a scrape shows from the beginning, as 0.
        bounds: Bounds of a histogram's buckets, ascending.
    """

    name: str
    help: str
    label_names: str = ""
    known: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def kind(self) -> Literal["counter", "gauge", "histogram"]:
        """Return the type for Prometheus."""
        return "counter" if self.name.endswith("_total") else "histogram" if self.bounds else "gauge"


_CAUSES: Final = ("TooFewReplicas", "MissedHeartbeats", "AnotherRank", "Abandoned")
_LOCKS: Final = ("read", "write")
_COPIES: Final = ("clone", "copy_on_write")

_TABLE: Final[Mapping[str, tuple[Metric, ...]]] = {
    "process": (
        Metric("build_info", "1; the labels name the version, and the replica of the settings.", "version replica"),
        Metric("unreadable_sources", "Parts of this process whose metrics could not be read; the log says why."),
    ),
    "replica": (
        Metric("step", "The committed step that the state shows."),
        Metric("batches_committed", "Batches that went into the state, over all replicas."),
        Metric("state_is_partial", "1 while the state is not that of any one step, else 0."),
    ),
    "peers": (Metric("recoveries_total", "States received from peers and loaded, those of a warm join too."),),
    "checkpoints": (Metric("resumes_total", "States loaded from checkpoints."),),
    "membership": (
        Metric(
            "member_info", "1; the labels name the replica, and the rank of this process in it.", "replica group_rank"
        ),
        Metric("missed_heartbeats_total", "Silences that may count as this replica's death; its rank 0 counts them."),
    ),
    "loop": (
        Metric("steps_committed_total", "Steps that this process has committed."),
        Metric("steps_refused_total", "Steps that began and were not committed, by the first cause.", "cause", _CAUSES),
        Metric("step_seconds", "From one step boundary to the next: the loop's whole step.", bounds=_STEP_S),
        Metric("step_until_commit_seconds", "From a step boundary to the end of should_commit.", bounds=_STEP_S),
        Metric("participants", "Replicas that contribute to the step, by the last quorum."),
        Metric("quorum_seconds", "Wait for the Lighthouse and the other ranks to form a quorum.", bounds=_STEP_S),
        Metric("quorum_failures_total", "Quorums that failed, by the type of the error.", "cause"),
        Metric("process_group_seconds", "Time to form a process group of new members.", bounds=_STEP_S),
        Metric("departures_total", "Other replicas that a quorum no longer had."),
        Metric("standstill_seconds_total", "Time without a commit before a quorum that a replica had left."),
        Metric("recovery_seconds_total", "From this replica's request for a quorum until it had healed."),
    ),
    "lock": (
        Metric("lock_wait_seconds", "Wait of a thread until it had the state lock.", "kind", _LOCKS, _LOCK_S),
        Metric("lock_hold_seconds", "Hold of the state lock; nested sections are one.", "kind", _LOCKS, _LOCK_S),
        Metric("lock_timeouts_total", "Threads without the state lock at their deadline.", "kind", _LOCKS),
    ),
    "copies": (
        Metric("snapshot_copy_bytes_total", "Bytes of the state that were copied for snapshots.", "kind", _COPIES),
        Metric("snapshot_copy_seconds_total", "Time of those copies, waits for readers included.", "kind", _COPIES),
    ),
    "snapshots": (
        Metric("snapshots_alive", "Snapshots that take a place among max_snapshots."),
        Metric("snapshots_published_total", "Snapshots that could be fetched so far."),
        Metric("snapshot_bytes", "Size of the newest snapshot; 0 without one."),
        Metric("requests_reading", "Requests of receivers that read a snapshot at this moment."),
    ),
    "server": (Metric("sent_bytes_total", "Bytes sent to receivers, or lent as memory, by their request.", "route"),),
    "records": (
        Metric("operation_seconds", "Length of finished operations.", "operation outcome", bounds=_OPERATION_S),
        Metric("operation_phase_seconds_total", "Time that operations spent in each phase.", "operation phase"),
        Metric("operation_bytes_total", "Size of the states, checkpoints and versions of operations.", "operation"),
        Metric("operation_last_success_timestamp_seconds", "Time of the last success, since 1970.", "operation"),
        Metric("operation_last_step", "Step, or version, of the last success.", "operation"),
        Metric("retries_total", "Failures that led to another try, by the type of the error.", "operation cause"),
        Metric("transfer_bytes_total", "Bytes that operations received, by the role of the peer.", "operation role"),
        Metric("transfer_seconds_total", "Time of reading from, or writing to, all peers.", "operation role"),
    ),
    "engines": (
        Metric("published_version", "The newest version of weights."),
        Metric("engines", "Engines that are notified of versions."),
        Metric("engine_version", "The version that an engine confirmed last; -1 if none is known.", "engine"),
        Metric("engine_lag_versions", "Published versions that an engine has not confirmed.", "engine"),
        Metric("engine_lag_seconds", "Age of the first of those versions; 0 without any.", "engine"),
    ),
}
"""All metrics, by their source."""
METRICS: Final = {metric.name: metric for metrics in _TABLE.values() for metric in metrics}


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """The observations of a histogram.

    Attributes:
        bounds: Ascending, without the last bucket, which has no bound.
        counts: The number of observations in each bucket.
        total: The sum of all observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Reading(NamedTuple):
    """One value at present.

    Attributes:
        name: Name of the metric.
        value: ``None`` announces a metric that has no value yet.
        labels: Values of its labels, in the order of the metric's names.
    """

    name: str
    value: float | Distribution | None
    labels: tuple[str, ...] = ()


Source: TypeAlias = Callable[[], Iterable[Reading]]
"""Called on any thread by a scrape; holds no lock for long and waits for nothing."""


class MetricValues:
    """The values of all metrics of one source, by labels. Any thread may read them.

    Args:
        source: A key of the table.
        mutex: Guards values that several threads add to. Reentrant: a signal handler may add while its thread is
            adding. Not for a child that forks while another thread adds.
    """

    def __init__(self, source: str, mutex: AbstractContextManager[object] | None = None) -> None:
        self._mutex = mutex if mutex is not None else nullcontext()
        self._values: dict[str, dict[tuple[str, ...], list[float]]] = {}
        for metric in _TABLE[source]:
            shown: Iterable[tuple[str, ...]] = ((label,) for label in metric.known) if metric.label_names else ((),)
            self._values[metric.name] = {labels: _zeros(metric) for labels in shown}

    def add(self, name: str, *labels: str, by: float = 1) -> None:
        """Add ``by`` to a counter, or the observation ``by`` to a histogram."""
        metric = METRICS[name]
        with self._mutex:
            numbers = self._numbers(metric, labels)
            if metric.bounds:
                numbers[bisect_left(metric.bounds, by)] += 1
            numbers[-1] += by

    def set(self, name: str, *labels: str, to: float) -> None:
        """Set a gauge."""
        with self._mutex:
            self._numbers(METRICS[name], labels)[-1] = to

    def readings(self) -> Iterator[Reading]:
        """See `Source`."""
        for name, series in self._values.items():
            if not series:
                yield Reading(name, None)
            for labels, numbers in dict(series).items():
                *counts, total = tuple(numbers)
                bounds = METRICS[name].bounds
                buckets = Distribution(bounds=bounds, counts=tuple(map(int, counts)), total=total)
                yield Reading(name, buckets if bounds else total, labels)

    def _numbers(self, metric: Metric, labels: tuple[str, ...]) -> list[float]:
        series = self._values[metric.name]
        if labels not in series:
            if len(series) >= _MAX_SERIES:
                labels = (*labels[:-1], OTHER)
            return series.setdefault(labels, _zeros(metric))
        return series[labels]


def _zeros(metric: Metric) -> list[float]:
    """Return a 0 for each bucket of a histogram, and for the sum."""
    return [0] * (len(metric.bounds) + bool(metric.bounds) + 1)


class Metrics:
    """Collects the sources of one transport's `ProcessStatus`. Any thread may use it."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()  # a finalizer may end a source at any moment
        self._sources: list[Source] = []
        self._followed: weakref.WeakSet[Recorder] = weakref.WeakSet()
        self._failed: set[Source] = set()
        self._records = MetricValues("records", threading.RLock())
        self.collect(self._records.readings)

    def collect(self, source: Source) -> Callable[[], None]:
        """Have each scrape read ``source``.

        This object owns the source, so a source must not own anything that may be dropped before: refer to the values
        alone, or weakly (`weakly`). The source bounds its labels.

        Returns:
            A function that ends it.
        """
        with self._mutex:
            self._sources.append(source)
        return lambda: self._forget(source)

    def follow(self, recorder: Recorder) -> None:
        """Count the records of ``recorder`` from now on. Idempotent."""
        with self._mutex:
            if recorder in self._followed:
                return
            self._followed.add(recorder)
        # A recorder may outlive this object, and must not collect listeners of closed transports.
        weakref.finalize(self, recorder.subscribe(partial(_count, self._records))).atexit = False

    def readings(self) -> list[Reading]:
        """Return all values, merged if metric and labels are the same, in the order of the names."""
        with self._mutex:
            sources = tuple(self._sources)
        found: dict[tuple[str, tuple[str, ...]], Reading] = {}
        failed: set[Source] = set()
        for source in sources:
            try:
                for reading in source():
                    key = reading.name, reading.labels
                    found[key] = _merged(found[key], reading) if key in found else reading
            except Exception:
                failed.add(source)
                if source not in self._failed:  # once, and not every second
                    logger.exception("the metrics of %s could not be read", getattr(source, "__qualname__", source))
        self._failed = failed
        readings = sorted(found.values(), key=lambda reading: (reading.name, reading.labels))
        return [*readings, Reading("unreadable_sources", len(failed))]

    def _forget(self, source: Source) -> None:
        with self._mutex:
            if source in self._sources:
                self._sources.remove(source)


def _count(values: MetricValues, record: Record) -> None:
    """Add one finished record; a listener of a `Recorder`."""
    kind, add = record.kind, values.add
    add("operation_seconds", kind, record.outcome, by=record.length_s)
    for phase in record.phases:
        add("operation_phase_seconds_total", kind, phase.name, by=phase.length_s)
    for retry in record.retries:
        cause = retry.cause.partition(":")[0]  # the type of the error; peers may have worded anything else
        add("retries_total", kind, cause if _CAUSE.fullmatch(cause) else OTHER)
    for transfer in record.transfers:
        add("transfer_bytes_total", kind, transfer.role, by=transfer.num_bytes)
        add("transfer_seconds_total", kind, transfer.role, by=transfer.length_s)
    if record.outcome == "ok":
        if record.num_bytes:  # saves and publishes have none
            add("operation_bytes_total", kind, by=record.num_bytes)
        values.set("operation_last_success_timestamp_seconds", kind, to=record.begun_unix_s + record.length_s)
        if record.step is not None:
            values.set("operation_last_step", kind, to=record.step)


def weakly(method: Callable[[], Iterable[Reading]]) -> Source:
    """Make a source of a method that does not own its object, and reads nothing once the object is freed."""
    reference: weakref.WeakMethod[Any] = weakref.WeakMethod(method)

    def read() -> Iterator[Reading]:
        alive = reference()
        if alive is not None:
            yield from alive()

    read.__qualname__ = getattr(method, "__qualname__", read.__qualname__)
    return read


@cache
def build_readings(replica: str) -> tuple[Reading, ...]:
    """See `Source`. A source tree on the path has no file that names its version.

    Args:
        replica: The replica's name in the transport's settings.
    """
    try:
        return (Reading("build_info", 1, (version("ft-transport"), replica)),)
    except PackageNotFoundError:
        return (Reading("build_info", 1, ("", replica)),)


def _merged(first: Reading, second: Reading) -> Reading:
    """Return one reading for two sources of the same series: the sum of counters, or the later gauge."""
    match first.value, second.value:
        case Distribution() as one, Distribution() as other:
            counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
            return first._replace(value=Distribution(bounds=one.bounds, counts=counts, total=one.total + other.total))
        case (int() | float() as one, int() | float() as other) if METRICS[first.name].kind == "counter":
            return first._replace(value=one + other)
        case _:
            return second


def accepted(header: str) -> str:
    """Return the form that a request's ``Accept`` asks for: `OPENMETRICS` or `TEXT`. Pure."""
    for each in header.split(","):
        kind, *parameters = (part.strip() for part in each.split(";"))
        versions = [part for part in parameters if part.startswith("version=")]
        if kind == OPENMETRICS.partition(";")[0] and versions in ([], ["version=1.0.0"]):
            return OPENMETRICS
    return TEXT


def encode_metrics(metrics: Metrics, form: str) -> tuple[bytes, str]:
    """Encode all present values for Prometheus.

    The first scrape imports ``prometheus_client``: a process without scrapes does not need it.

    Args:
        metrics: The metrics of one transport; the global registry of ``prometheus_client`` stays unused.
        form: `OPENMETRICS` or `TEXT`.

    Returns:
        The text, and its content type.
    """
    from prometheus_client.exposition import choose_encoder  # noqa: PLC0415

    def collect() -> Iterator[Any]:
        return (_family(list(same)) for _, same in groupby(metrics.readings(), key=lambda each: each.name))

    encode, content_type = choose_encoder(form)
    registry: Any = SimpleNamespace(collect=collect)
    return encode(registry), content_type


def _family(readings: list[Reading]) -> Any:
    from prometheus_client import core  # noqa: PLC0415

    metric = METRICS[readings[0].name]
    kinds: dict[str, Any] = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }
    family = kinds[metric.kind](PREFIX + metric.name, metric.help, labels=metric.label_names.split())
    shown = set()
    for reading in readings:
        labels = tuple(escape_peer_text(each, max_characters=200) for each in reading.labels)
        if labels in shown:  # cut off after the same beginning; a scrape with both would be refused as a whole
            continue
        shown.add(labels)
        match reading.value:
            case Distribution(bounds=bounds, counts=counts, total=total):
                names = [*(str(float(bound)) for bound in bounds), "+Inf"]
                family.add_metric(labels, buckets=list(zip(names, accumulate(counts), strict=True)), sum_value=total)
            case int() | float() as value:
                family.add_metric(labels, value)
            case None:
                pass
    return family
