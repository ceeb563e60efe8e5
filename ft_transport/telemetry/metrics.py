"""The metrics of one process: who keeps numbers says here how to read them."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from ft_transport.telemetry.readings import PREFIX, Distribution, Metric, Reading, Source
from ft_transport.telemetry.record_metrics import RecordMetrics
from ft_transport.telemetry.recorder import Recorder

logger = logging.getLogger(__name__)

_UNREADABLE: Final = Metric(
    name=f"{PREFIX}unreadable_sources",
    kind="gauge",
    help="Parts of this process whose numbers are missing here, because reading them failed; the log says why.",
)


class Metrics:
    """What is counted, wherever that is. Any thread may use it. Belongs to the `Watch` of one transport."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()  # what a dropped object has registered goes while anything may be going on
        self._sources: list[Source] = []
        self._followed: weakref.WeakSet[Recorder] = weakref.WeakSet()
        self._failed: set[Source] = set()
        self._records = RecordMetrics()
        self.collect(self._records.readings)

    def collect(self, source: Source) -> Callable[[], None]:
        """Have ``source`` read whenever somebody looks.

        It is kept for as long as this object, so it must not keep anything that may be dropped before: let it refer to
        the numbers alone, or weakly (`weakly`). Labels are bounded by whoever counts.

        Returns:
            What ends it.
        """
        with self._mutex:
            self._sources.append(source)
        return lambda: self._forget(source)

    def follow(self, recorder: Recorder) -> None:
        """Add up the records of ``recorder`` from now on; those of one that is followed already count once."""
        with self._mutex:
            if recorder in self._followed:
                return
            self._followed.add(recorder)
        # A recorder may outlive this object, and must not gather listeners of transports that are gone.
        weakref.finalize(self, recorder.subscribe(self._records.add)).atexit = False

    def readings(self) -> list[Reading]:
        """All numbers, those of one metric and the same labels added up, in the order of the names."""
        with self._mutex:
            sources = tuple(self._sources)
        found: dict[tuple[str, tuple[str, ...]], Reading] = {}
        failed: set[Source] = set()
        for source in sources:
            try:
                for reading in source():
                    key = reading.metric.name, reading.labels
                    found[key] = _merged(found[key], reading) if key in found else reading
            except Exception:
                failed.add(source)
                if source not in self._failed:  # once, and not every second
                    logger.exception("the metrics of %s could not be read", getattr(source, "__qualname__", source))
        self._failed = failed
        return [
            *sorted(found.values(), key=lambda reading: (reading.metric.name, reading.labels)),
            Reading(metric=_UNREADABLE, value=len(failed)),
        ]

    def _forget(self, source: Source) -> None:
        with self._mutex:
            if source in self._sources:
                self._sources.remove(source)


def weakly(method: Callable[[], Iterable[Reading]]) -> Source:
    """A method as a source that does not keep its object; where that is gone, there is nothing to read."""
    reference: weakref.WeakMethod[Any] = weakref.WeakMethod(method)

    def read() -> Iterator[Reading]:
        alive = reference()
        if alive is not None:
            yield from alive()

    read.__qualname__ = getattr(method, "__qualname__", read.__qualname__)
    return read


def _merged(first: Reading, second: Reading) -> Reading:
    """Two sources have the same number: counters are added up; of a gauge the later one is taken."""
    match first.value, second.value:
        case Distribution() as one, Distribution() as other:
            counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
            total = Distribution(bounds=one.bounds, counts=counts, total=one.total + other.total)
            return Reading(metric=first.metric, labels=first.labels, value=total)
        case (int() | float() as one, int() | float() as other) if first.metric.kind == "counter":
            return Reading(metric=first.metric, labels=first.labels, value=one + other)
        case _:
            return second
