"""From samples to figures: medians with their spread, ratios to ceilings and peers, verdicts on targets.

Everything is computed from the samples of one run; only the targets are known in advance.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Role = Literal["ours", "peer", "ceiling", "other"]
Direction = Literal["at least", "at most"]

_BUSY_SHARE = 0.1
"""Above this share of the cores, taken by others, a sample is marked."""


class Variant(Protocol):
    """One of the things that a benchmark compares."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> Role: ...


@dataclass(frozen=True, slots=True)
class Named:
    """A variant that is measured in passing, and needs nothing but its name."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True)
class Quantity:
    """What is measured of a variant; rates end in ``/s``, and the highest is the best of them."""

    name: str
    unit: str

    @property
    def is_rate(self) -> bool:
        return self.unit.endswith("/s")


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured value.

    Attributes:
        round: Samples of different series with the same round were taken one after the other.
        value: In the unit of its quantity.
        others_share: The share of the cores that other processes took meanwhile, if known.
    """

    round: int
    value: float
    others_share: float | None = None

    @property
    def is_busy(self) -> bool:
        return self.others_share is not None and self.others_share > _BUSY_SHARE


@dataclass(frozen=True, slots=True)
class Figure:
    """A value to judge, and the lowest and highest of single rounds."""

    value: float
    low: float
    high: float
    unit: str = "×"


@dataclass(slots=True)
class Series:
    """Samples of one quantity of one variant, in the order in which they were taken."""

    variant: Variant
    quantity: Quantity
    samples: list[Sample] = field(default_factory=list)

    @property
    def figure(self) -> Figure:
        """The median and the extremes."""
        values = [sample.value for sample in self.samples]
        return Figure(statistics.median(values), min(values), max(values), self.quantity.unit)

    @property
    def num_busy(self) -> int:
        return sum(sample.is_busy for sample in self.samples)


def ratio(numerator: Series | None, denominator: Series | None) -> Figure | None:
    """The ratio of the medians, and the spread over single rounds; ``None`` where one side was not measured."""
    if numerator is None or denominator is None:
        return None
    value = numerator.figure.value / denominator.figure.value
    pairs = paired_ratios(numerator.samples, denominator.samples) or [value]
    return Figure(value, min(pairs), max(pairs))


def paired_ratios(numerators: Iterable[Sample], denominators: Iterable[Sample]) -> list[float]:
    """Ratios of samples of the same round; several of one round are averaged first.

    A machine that is slow for a while is slow for both sides, which a ratio of the medians does not show.
    """
    above, below = _means_by_round(numerators), _means_by_round(denominators)
    return [above[number] / below[number] for number in sorted(above.keys() & below.keys())]


def _means_by_round(samples: Iterable[Sample]) -> dict[int, float]:
    by_round: dict[int, list[float]] = {}
    for sample in samples:
        by_round.setdefault(sample.round, []).append(sample.value)
    return {number: statistics.fmean(values) for number, values in by_round.items()}


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target and what was measured.

    Attributes:
        text: What is compared.
        figure: What was measured; ``None`` where it could not be.
        limit: The target; ``None`` where the figure is only shown.
        direction: On which side of ``limit`` the value should be.
    """

    text: str
    figure: Figure | None
    limit: float | None
    direction: Direction

    @classmethod
    def at_least(cls, text: str, figure: Figure | None, limit: float) -> Verdict:
        return cls(text, figure, limit, "at least")

    @classmethod
    def at_most(cls, text: str, figure: Figure | None, limit: float) -> Verdict:
        return cls(text, figure, limit, "at most")

    @property
    def met(self) -> bool | None:
        if self.figure is None or self.limit is None:
            return None
        return self.figure.value >= self.limit if self.direction == "at least" else self.figure.value <= self.limit


@dataclass(slots=True)
class Group:
    """The figures of one benchmark with one state.

    Attributes:
        benchmark: Its name.
        state: Name of the state.
        title: What was moved, with its size.
        series: One for each quantity of each variant, in the order in which they are shown.
        verdicts: The targets.
        notes: What a reader has to know.
    """

    benchmark: str
    state: str
    title: str
    series: list[Series] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, variant: Variant, quantity: Quantity, sample: Sample) -> None:
        series = self.find(variant, quantity)
        if series is None:
            series = Series(variant, quantity)
            self.series.append(series)
        series.samples.append(sample)

    def find(self, variant: Variant, quantity: Quantity) -> Series | None:
        for series in self.series:
            if (series.variant.name, series.quantity) == (variant.name, quantity):
                return series
        return None

    def ratio(self, numerator: Variant, denominator: Variant, quantity: Quantity) -> Figure | None:
        """One variant's quantity against another's."""
        return ratio(self.find(numerator, quantity), self.find(denominator, quantity))

    def figure(self, variant: Variant, quantity: Quantity) -> Figure | None:
        series = self.find(variant, quantity)
        return series.figure if series is not None else None

    def best(self, variants: Iterable[Variant], quantity: Quantity) -> Series | None:
        """The highest median of a rate, the lowest of anything else."""
        found = [series for variant in variants if (series := self.find(variant, quantity)) is not None]
        sign = 1 if quantity.is_rate else -1
        return max(found, key=lambda series: sign * series.figure.value, default=None)

    def best_of(self, role: Role, quantity: Quantity) -> Series | None:
        return self.best([series.variant for series in self.series if series.variant.role == role], quantity)

    def sort(self, variants: Sequence[Variant]) -> None:
        """Shows ``variants`` in this order, however the rounds began."""
        names = [variant.name for variant in variants]
        self.series.sort(key=lambda series: names.index(series.variant.name))
