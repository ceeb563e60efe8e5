"""Numbers that a process keeps for who watches it, in the sense of Prometheus, without Prometheus.

Whoever has something to count adds to a plain number of its own, which takes a microsecond at most and no lock. When
somebody looks, and never else, the numbers are read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

PREFIX: Final = "ft_transport_"
OTHER: Final = "other"
"""Stands for all label values that came when there were too many already."""

_MAX_SERIES: Final = 64

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """What a number means. The table of them all is docs/metrics.md.

    Attributes:
        name: With the prefix; that of a counter ends in ``_total``.
        kind: What Prometheus may do with it.
        help: In a sentence.
        labels: Their names.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self.name.startswith(PREFIX), "one prefix for all"
        assert self.name.endswith("_total") == (self.kind == "counter"), "what is counted ends in _total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """How many observations there were up to each bound, in all, and their sum.

    Attributes:
        bounds: Ascending; the last bucket, which has none, is not among them.
        counts: For each bound and for what is above all: how many lie there and not below.
        total: The sum of all observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One number, as it is now.

    Attributes:
        metric: What it means.
        labels: Their values, in the order of the metric's names.
        value: The number; ``None`` where there is none yet, so that who looks learns what there may be.
    """

    metric: Metric
    value: float | Distribution | None
    labels: tuple[str, ...] = ()


Source: TypeAlias = Callable[[], Iterable[Reading]]
"""Called on any thread when somebody looks; takes no lock for long and waits for nothing."""


class Counts:
    """A counter, with a number for each combination of labels. One thread at a time adds; any may read.

    Args:
        metric: What is counted.
        known: Labels that are shown from the beginning, as 0.
        max_series: So many combinations are told apart; what comes later has `OTHER` as its last label.
    """

    __slots__ = ("_max_series", "_metric", "_values")

    def __init__(self, metric: Metric, *, known: Sequence[tuple[str, ...]] = (), max_series: int = _MAX_SERIES) -> None:
        assert metric.kind == "counter", "it only grows"
        self._metric = metric
        self._max_series = max_series
        self._values: dict[tuple[str, ...], float] = dict.fromkeys(known, 0)
        if not metric.labels:
            self._values[()] = 0

    def add(self, *labels: str, by: float = 1) -> None:
        """Counts ``by`` more."""
        key = bounded(labels, self._values, self._max_series)
        self._values[key] = self._values.get(key, 0) + by

    def total(self) -> float:
        """Over all labels."""
        return sum(dict(self._values).values())

    def readings(self) -> Iterator[Reading]:
        """See `Source`."""
        if not self._values:
            yield Reading(metric=self._metric, value=None)
        for labels, value in dict(self._values).items():
            yield Reading(metric=self._metric, labels=labels, value=value)


class Durations:
    """A histogram, by labels. One thread at a time adds; any may read.

    Args:
        metric: What is observed.
        bounds: Of its buckets, ascending.
        known: Labels that are shown from the beginning.
        max_series: As for `Counts`.
    """

    __slots__ = ("_bounds", "_max_series", "_metric", "_values")

    def __init__(
        self,
        metric: Metric,
        bounds: Sequence[float],
        *,
        known: Sequence[tuple[str, ...]] = (),
        max_series: int = _MAX_SERIES,
    ) -> None:
        assert metric.kind == "histogram", "its buckets are told"
        self._metric = metric
        self._bounds = tuple(bounds)
        self._max_series = max_series
        self._values: dict[tuple[str, ...], list[float]] = {}
        for labels in known if metric.labels else [()]:
            self._values[labels] = self._nothing()

    def observe(self, value: float, *labels: str) -> None:
        """Adds one observation."""
        key = bounded(labels, self._values, self._max_series)
        numbers = self._values.get(key)
        if numbers is None:
            numbers = self._values[key] = self._nothing()
        numbers[bisect_left(self._bounds, value)] += 1
        numbers[-1] += value

    def readings(self) -> Iterator[Reading]:
        """See `Source`."""
        if not self._values:
            yield Reading(metric=self._metric, value=None)
        for labels, numbers in dict(self._values).items():
            *counts, total = tuple(numbers)
            value = Distribution(bounds=self._bounds, counts=tuple(map(int, counts)), total=total)
            yield Reading(metric=self._metric, labels=labels, value=value)

    def _nothing(self) -> list[float]:
        """For each bucket a number, and the sum."""
        return [0] * (len(self._bounds) + 1) + [0.0]


def bounded(labels: tuple[str, ...], known: Collection[tuple[str, ...]], most: int) -> tuple[str, ...]:
    """The labels, or where there are too many already, those with `OTHER` for the last one."""
    return labels if labels in known or len(known) < most else (*labels[:-1], OTHER)
