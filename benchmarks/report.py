"""From samples to figures: medians and spread, ratios to the ceiling and to peers, verdicts on the targets.

Everything here is computed from the samples of one run; nothing is known in advance but the targets.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Role = Literal["ours", "peer", "ceiling", "other"]
Phase = Literal["cold", "warm"]
Direction = Literal["at least", "at most"]


@dataclass(frozen=True)
class Sample:
    """One measured value.

    Attributes:
        round: Samples of different series with the same round were taken one after the other.
        value: In the unit of its series.
        busy: Whether others used the machine meanwhile.
        others_share: The share of the cores that they took, if known.
    """

    round: int
    value: float
    busy: bool = False
    others_share: float | None = None


@dataclass(frozen=True)
class Summary:
    """The middle of a series, and how far it spreads."""

    median: float
    low: float
    high: float
    lower_quartile: float
    upper_quartile: float
    num_samples: int
    num_busy: int

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Summary:
        values = sorted(sample.value for sample in samples)
        if len(values) > 1:
            lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
        else:
            lower = upper = values[0]
        return cls(
            median=statistics.median(values),
            low=values[0],
            high=values[-1],
            lower_quartile=lower,
            upper_quartile=upper,
            num_samples=len(values),
            num_busy=sum(sample.busy for sample in samples),
        )


@dataclass
class Series:
    """Samples of one quantity.

    Attributes:
        key: Names what was measured; the same in ``cold`` and ``warm``.
        label: The same for people.
        role: Whose it is.
        phase: A process's or arena's first use, or a later one.
        unit: Of the values.
        samples: In the order in which they were taken.
    """

    key: str
    label: str
    role: Role
    phase: Phase
    unit: str
    samples: list[Sample] = field(default_factory=list)

    @property
    def summary(self) -> Summary:
        return Summary.of(self.samples)


@dataclass(frozen=True)
class Ratio:
    """One series against another: the ratio of the medians, and the spread over pairs from the same round."""

    of_medians: float
    paired_median: float
    paired_low: float
    paired_high: float

    @classmethod
    def between(cls, numerator: Series, denominator: Series) -> Ratio:
        pairs = paired_ratios(numerator.samples, denominator.samples)
        of_medians = numerator.summary.median / denominator.summary.median
        if not pairs:
            return cls(of_medians, of_medians, of_medians, of_medians)
        return cls(of_medians, statistics.median(pairs), min(pairs), max(pairs))


def paired_ratios(numerators: Iterable[Sample], denominators: Iterable[Sample]) -> list[float]:
    """Ratios of samples of the same round; several of one round are averaged first.

    A machine that was slow for a while was so for both, which a ratio of the medians does not see.
    """
    above, below = _means_by_round(numerators), _means_by_round(denominators)
    return [above[number] / below[number] for number in sorted(above.keys() & below.keys())]


def _means_by_round(samples: Iterable[Sample]) -> dict[int, float]:
    by_round: dict[int, list[float]] = {}
    for sample in samples:
        by_round.setdefault(sample.round, []).append(sample.value)
    return {number: statistics.fmean(values) for number, values in by_round.items()}


@dataclass(frozen=True)
class Verdict:
    """A target and what was measured.

    Attributes:
        text: What is compared.
        value: The ratio of the medians, or another figure; ``None`` where it could not be measured.
        limit: The target.
        direction: On which side of it ``value`` should be.
        unit: Of value and limit.
        spread: The lowest and the highest of single rounds.
    """

    text: str
    value: float | None
    limit: float
    direction: Direction
    unit: str = "×"
    spread: tuple[float, float] | None = None

    @classmethod
    def of_ratio(cls, text: str, ratio: Ratio | None, limit: float, direction: Direction) -> Verdict:
        """A target for a ratio: of the medians, with the spread of single rounds."""
        if ratio is None:
            return cls(text, None, limit, direction)
        return cls(text, ratio.of_medians, limit, direction, spread=(ratio.paired_low, ratio.paired_high))

    @classmethod
    def of_series(cls, text: str, series: Series | None, limit: float, direction: Direction) -> Verdict:
        """A target for a quantity: its median, with its spread."""
        if series is None:
            return cls(text, None, limit, direction)
        summary = series.summary
        return cls(text, summary.median, limit, direction, series.unit, spread=(summary.low, summary.high))

    @classmethod
    def at_least(cls, text: str, ratio: Ratio | None, limit: float) -> Verdict:
        """A target for a ratio, from which on it is met."""
        return cls.of_ratio(text, ratio, limit, "at least")

    @classmethod
    def at_most(cls, text: str, ratio: Ratio | None, limit: float) -> Verdict:
        """A target for a ratio, up to which it is met."""
        return cls.of_ratio(text, ratio, limit, "at most")

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.limit if self.direction == "at least" else self.value <= self.limit


@dataclass
class Group:
    """One benchmark with one state.

    Attributes:
        benchmark: ``clone``, ``fetch``, ``reshard``, ``stall``, ``loop``, ``heal`` or ``checkpoint``.
        state: Name of the state.
        title: What was moved, with its size.
        series: The figures.
        verdicts: The targets.
        notes: What a reader has to know.
    """

    benchmark: str
    state: str
    title: str
    series: list[Series] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, key: str, sample: Sample, *, label: str, role: Role, phase: Phase, unit: str) -> None:
        """Appends a sample to its series, which is made with the first one."""
        series = self.find(key, phase, unit)
        if series is None:
            series = Series(key, label, role, phase, unit)
            self.series.append(series)
        series.samples.append(sample)

    def find(self, key: str, phase: Phase, unit: str) -> Series | None:
        for series in self.series:
            if (series.key, series.phase, series.unit) == (key, phase, unit):
                return series
        return None

    def best(self, role: Role, phase: Phase, unit: str, keys: Sequence[str] = ()) -> Series | None:
        """The series of a role (only ``keys`` if given) with the highest median."""
        candidates = [
            series
            for series in self.series
            if series.role == role and series.phase == phase and series.unit == unit
            if not keys or series.key in keys
        ]
        return max(candidates, key=lambda series: series.summary.median, default=None)

    @staticmethod
    def ratio(numerator: Series | None, denominator: Series | None) -> Ratio | None:
        """One series against another, ``None`` if one of them was not measured."""
        if numerator is None or denominator is None:
            return None
        return Ratio.between(numerator, denominator)


def as_json(groups: Sequence[Group], machine: dict[str, object], arguments: dict[str, object]) -> dict[str, object]:
    """Everything, raw samples included."""
    return {
        "machine": machine,
        "arguments": arguments,
        "results": [
            {
                "benchmark": group.benchmark,
                "state": group.state,
                "title": group.title,
                "series": [
                    {
                        "key": series.key,
                        "label": series.label,
                        "role": series.role,
                        "phase": series.phase,
                        "unit": series.unit,
                        **vars(series.summary),
                        "samples": [vars(sample) for sample in series.samples],
                    }
                    for series in group.series
                ],
                "verdicts": [{**vars(verdict), "met": verdict.met} for verdict in group.verdicts],
                "notes": group.notes,
            }
            for group in groups
        ],
    }


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
