"""The metrics of a process: the table of all metrics, their values, and their encoding for Prometheus.

Each source (a part of the process, such as the state lock) adds to its own values in about a microsecond. Only a
scrape reads the values.
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
"""The last label of the series that counts all events beyond the first `_MAX_SERIES` series of a metric."""

OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0"
TEXT: Final = "text/plain; version=0.0.4"

_MAX_SERIES: Final = 64
_CAUSE: Final = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)
_LOCK_S: Final = (0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_STEP_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_OPERATION_S: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table of metrics. docs/metrics.md explains every metric.

    Attributes:
        name: Name without `PREFIX`; the name of a counter ends in ``_total``.
        help: Description for Prometheus, in one sentence.
        label_names: Names of the labels, separated by spaces.
        known: Values of the label that a scrape shows as 0 before their first event, for a metric with one label.
        bounds: Upper bounds of a histogram's buckets, ascending; empty for counters and gauges.
    """

    name: str
    help: str
    label_names: str = ""
    known: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def kind(self) -> Literal["counter", "gauge", "histogram"]:
        """Type of the metric for Prometheus."""
        return "counter" if self.name.endswith("_total") else "histogram" if self.bounds else "gauge"


_CAUSES: Final = ("TooFewReplicas", "MissedHeartbeats", "AnotherRank", "Abandoned")
_LOCKS: Final = ("read", "write")
_COPIES: Final = ("clone", "copy_on_write")

_TABLE: Final[Mapping[str, tuple[Metric, ...]]] = {
    "process": (
        Metric("build_info", "Always 1; the labels name the version and the replica.", "version replica"),
        Metric("unreadable_sources", "Parts of this process whose metrics could not be read; the log has the errors."),
    ),
    "replica": (
        Metric("step", "Committed step of the state."),
        Metric("batches_committed", "Batches that the state was trained on, over all replicas."),
        Metric("state_is_partial", "1 while the state is a mix of several steps, else 0."),
    ),
    "peers": (Metric("recoveries_total", "States received from peers and loaded, including those of a warm join."),),
    "keeping": (
        Metric("kept_step", "Step of the newest snapshot that the keeper holds; 0 without one."),
        Metric("kept_snapshots_total", "Snapshots that the keeper received."),
        Metric("kept_snapshots_failed_total", "Snapshots that failed before the keeper received them.", "cause"),
        Metric("kept_resumes_total", "States loaded from the keeper of an earlier process."),
        Metric("kept_copied_step", "Step of the newest copy of another rank's state here; 0 without one."),
        Metric("kept_copies_total", "Copies of other ranks' states that the keeper received."),
        Metric("kept_copies_failed_total", "Copies of other ranks' states that failed.", "cause"),
    ),
    "checkpoints": (Metric("resumes_total", "States loaded from checkpoints."),),
    "membership": (
        Metric("member_info", "Always 1; the labels name the replica and the rank in it.", "replica group_rank"),
        Metric("missed_heartbeats_total", "Gaps in heartbeats so long that the Lighthouse may drop the replica."),
    ),
    "loop": (
        Metric("steps_committed_total", "Steps that this process has committed."),
        Metric("steps_refused_total", "Steps that began and were not committed, by the first cause.", "cause", _CAUSES),
        Metric("step_seconds", "Time from one step boundary to the next.", bounds=_STEP_S),
        Metric("step_until_commit_seconds", "Time from a step boundary to the end of should_commit.", bounds=_STEP_S),
        Metric("participants", "Replicas that contribute to the step, according to the last quorum."),
        Metric("quorum_seconds", "Wait for the Lighthouse and the other ranks to form a quorum.", bounds=_STEP_S),
        Metric("quorum_failures_total", "Quorums that failed, by the type of the error.", "cause"),
        Metric("process_group_seconds", "Time to form a process group of new members.", bounds=_STEP_S),
        Metric("departures_total", "Other replicas that left between two quorums."),
        Metric("standstill_seconds_total", "Time without a commit before a quorum from which a replica had left."),
        Metric("recovery_seconds_total", "Time from this replica's request for a quorum until it had healed."),
    ),
    "lock": (
        Metric("lock_wait_seconds", "Wait of a thread for the state lock.", "kind", _LOCKS, _LOCK_S),
        Metric("lock_hold_seconds", "Time that a thread held the state lock, by section.", "kind", _LOCKS, _LOCK_S),
        Metric("lock_timeouts_total", "Waits for the state lock that reached their deadline.", "kind", _LOCKS),
    ),
    "copies": (
        Metric("snapshot_copy_bytes_total", "Bytes of the state that were copied for snapshots.", "kind", _COPIES),
        Metric("snapshot_copy_seconds_total", "Time of those copies, including waits for readers.", "kind", _COPIES),
    ),
    "snapshots": (
        Metric("snapshots_alive", "Snapshots that count towards max_snapshots."),
        Metric("snapshots_published_total", "Snapshots that receivers could fetch so far."),
        Metric("snapshot_bytes", "Size of the newest snapshot; 0 without a snapshot."),
        Metric("requests_reading", "Requests of receivers that are reading a snapshot now."),
    ),
    "server": (Metric("sent_bytes_total", "Bytes that were sent to receivers or lent as memory, by route.", "route"),),
    "records": (
        Metric("operation_seconds", "Duration of finished operations.", "operation outcome", bounds=_OPERATION_S),
        Metric("operation_phase_seconds_total", "Time that operations spent in each phase.", "operation phase"),
        Metric("operation_bytes_total", "Size of the states, checkpoints and versions of operations.", "operation"),
        Metric("operation_last_success_timestamp_seconds", "End of the last success, since 1970.", "operation"),
        Metric("operation_last_step", "Step or version of the last success.", "operation"),
        Metric("retries_total", "Failures that led to another attempt, by the type of the error.", "operation cause"),
        Metric("transfer_bytes_total", "Bytes that operations transferred, by the role of the peer.", "operation role"),
        Metric("transfer_seconds_total", "Time of transfers, summed over all peers.", "operation role"),
    ),
    "engines": (
        Metric("published_version", "Newest version of the weights."),
        Metric("engines", "Engines that are notified of new versions."),
        Metric("engine_version", "Version that an engine confirmed last; -1 if no version is known.", "engine"),
        Metric("engine_lag_versions", "Published versions that an engine has not confirmed.", "engine"),
        Metric("engine_lag_seconds", "Age of the oldest of those versions; 0 if there are none.", "engine"),
    ),
}
"""All metrics, by the name of the source that has their values."""
METRICS: Final = {metric.name: metric for metrics in _TABLE.values() for metric in metrics}


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """The observations of a histogram.

    Attributes:
        bounds: Upper bound of each bucket, ascending; the last bucket has none.
        counts: Number of observations in each bucket.
        total: Sum of all observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Reading(NamedTuple):
    """The current value of one series of a metric.

    Attributes:
        name: Name of the metric.
        value: Current value; ``None`` for a metric that has no series yet.
        labels: Values of the labels, in the order of the metric's label names.
    """

    name: str
    value: float | Distribution | None
    labels: tuple[str, ...] = ()


Source: TypeAlias = Callable[[], Iterable[Reading]]
"""Function that returns the current values of some metrics. A scrape calls it on any thread; it must not block."""


class MetricValues:
    """The values of all metrics of one source, by metric and labels. Any thread may read them.

    Args:
        source: Name of the source in the table of metrics.
        mutex: Lock for `add` and `set`, needed if several threads call them. It must be reentrant, because a signal
            handler may call `add` during a call of `add`. A child that was forked during a call must not call them.
    """

    def __init__(self, source: str, mutex: AbstractContextManager[object] | None = None) -> None:
        self._mutex = mutex if mutex is not None else nullcontext()
        self._values: dict[str, dict[tuple[str, ...], list[float]]] = {}
        for metric in _TABLE[source]:
            shown: Iterable[tuple[str, ...]] = ((label,) for label in metric.known) if metric.label_names else ((),)
            self._values[metric.name] = {labels: _zeros(metric) for labels in shown}

    def add(self, name: str, *labels: str, by: float = 1) -> None:
        """Add ``by`` to a counter, or add an observation of ``by`` to a histogram."""
        metric = METRICS[name]
        with self._mutex:
            numbers = self._numbers(metric, labels)
            if metric.bounds:
                numbers[bisect_left(metric.bounds, by)] += 1
            numbers[-1] += by

    def set(self, name: str, *labels: str, to: float) -> None:
        """Set the value of a gauge."""
        with self._mutex:
            self._numbers(METRICS[name], labels)[-1] = to

    def readings(self) -> Iterator[Reading]:
        """Return the current values. This method is a `Source`."""
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
    """Return a 0 for each bucket of a histogram and a 0 for its sum; a single 0 for any other metric."""
    return [0] * (len(metric.bounds) + bool(metric.bounds) + 1)


class Metrics:
    """Reads the current values of all sources of one process. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()  # reentrant, because a finalizer may remove a source at any moment
        self._sources: list[Source] = []
        self._counted: weakref.WeakSet[Recorder] = weakref.WeakSet()
        self._failed: set[Source] = set()
        self._records = MetricValues("records", threading.RLock())
        self.collect(self._records.readings)

    def collect(self, source: Source) -> Callable[[], None]:
        """Add a source that each scrape reads.

        This object keeps the source alive. So a source that reads an object with a shorter lifetime must reference that
        object weakly (see `weakly`). The source must limit the number of label values.

        Returns:
            A function that removes the source.
        """
        with self._mutex:
            self._sources.append(source)
        return lambda: self._remove(source)

    def follow(self, recorder: Recorder) -> None:
        """Count the records of ``recorder`` from now on. Idempotent."""
        with self._mutex:
            if recorder in self._counted:
                return
            self._counted.add(recorder)
        # A recorder may outlive this object, and must not accumulate listeners of closed transports.
        weakref.finalize(self, recorder.subscribe(partial(_count, self._records))).atexit = False

    def readings(self) -> list[Reading]:
        """Return the values of all sources, sorted by name; merges values that have the same name and labels."""
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
                if source not in self._failed:  # logs a failure once, and not at each scrape
                    logger.exception("cannot read the metrics of %s", getattr(source, "__qualname__", source))
        self._failed = failed
        readings = sorted(found.values(), key=lambda reading: (reading.name, reading.labels))
        return [*readings, Reading("unreadable_sources", len(failed))]

    def _remove(self, source: Source) -> None:
        with self._mutex:
            if source in self._sources:
                self._sources.remove(source)


def _count(values: MetricValues, record: Record) -> None:
    """Add the values of a finished record; the `Recorder` calls this."""
    kind, add = record.kind, values.add
    add("operation_seconds", kind, record.outcome, by=record.length_s)
    for phase in record.phases:
        add("operation_phase_seconds_total", kind, phase.name, by=phase.length_s)
    for retry in record.retries:
        cause = retry.cause.partition(":")[0]  # the type of the error; a peer may have written anything in its place
        add("retries_total", kind, cause if _CAUSE.fullmatch(cause) else OTHER)
    for transfer in record.transfers:
        add("transfer_bytes_total", kind, transfer.role, by=transfer.num_bytes)
        add("transfer_seconds_total", kind, transfer.role, by=transfer.length_s)
    if record.outcome == "ok":
        if record.num_bytes:
            add("operation_bytes_total", kind, by=record.num_bytes)
        values.set("operation_last_success_timestamp_seconds", kind, to=record.begun_unix_s + record.length_s)
        if record.step is not None:
            values.set("operation_last_step", kind, to=record.step)


def weakly(method: Callable[[], Iterable[Reading]]) -> Source:
    """Return a source that calls ``method`` but does not keep its object alive; empty after the object is freed."""
    reference: weakref.WeakMethod[Any] = weakref.WeakMethod(method)

    def read() -> Iterator[Reading]:
        alive = reference()
        if alive is not None:
            yield from alive()

    read.__qualname__ = getattr(method, "__qualname__", read.__qualname__)
    return read


@cache
def build_readings(replica: str) -> tuple[Reading, ...]:
    """Return the reading of ``build_info``, with an empty version if the package is not installed.

    Args:
        replica: Name of the replica in the transport's settings.
    """
    try:
        return (Reading("build_info", 1, (version("ft-transport"), replica)),)
    except PackageNotFoundError:
        return (Reading("build_info", 1, ("", replica)),)


def _merged(first: Reading, second: Reading) -> Reading:
    """Merge two readings of the same series: return their sum, or the second reading for a gauge."""
    match first.value, second.value:
        case Distribution() as one, Distribution() as other:
            counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
            return first._replace(value=Distribution(bounds=one.bounds, counts=counts, total=one.total + other.total))
        case (int() | float() as one, int() | float() as other) if METRICS[first.name].kind == "counter":
            return first._replace(value=one + other)
        case _:
            return second


def accepted(header: str) -> str:
    """Return the format that a request's ``Accept`` header asks for: `OPENMETRICS` or `TEXT`."""
    for each in header.split(","):
        kind, *parameters = (part.strip() for part in each.split(";"))
        versions = [part for part in parameters if part.startswith("version=")]
        if kind == OPENMETRICS.partition(";")[0] and versions in ([], ["version=1.0.0"]):
            return OPENMETRICS
    return TEXT


def encode_metrics(metrics: Metrics, form: str) -> tuple[bytes, str]:
    """Encode all current values for Prometheus.

    The first call imports ``prometheus_client``, so that a process without scrapes does not import it.

    Args:
        metrics: The metrics of one process; the global registry of ``prometheus_client`` is not used.
        form: Format: `OPENMETRICS` or `TEXT`.

    Returns:
        The encoded text and its content type.
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
        if labels in shown:  # equal after the cut; Prometheus would refuse a whole scrape with a duplicate
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
