"""How long and how large a run is, and what all benchmarks of it share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from benchmarks.report import Group


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large states are, as a part of their full size, and how many samples are taken of each kind."""

    scale: float
    num_samples: int


T = TypeVar("T")

QUICK: Final = Size(scale=0.1, num_samples=1)


def _nothing(_text: str = "") -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a benchmark is run with.

    Attributes:
        size: How large and how often.
        is_full: Whether what no verdict needs is measured, too.
        states: Which of the benchmark's states or models.
        directory: Where files are written, and removed again.
        say: Takes a line about the progress.
        settle: Called before each sample; returns when it may be taken.
    """

    size: Size
    is_full: bool = False
    states: tuple[str, ...]
    directory: Path = field(default_factory=Path)
    say: Callable[[str], None] = _nothing
    settle: Callable[[], None] = _nothing

    @property
    def scale(self) -> float:
        return self.size.scale

    @property
    def num_samples(self) -> int:
        return self.size.num_samples


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A question by name.

    Attributes:
        name: Names it on the command line.
        run: Measures one group after the other.
        states: What it can be asked of; empty where it has one state only.
        default: So that the verdict is there within two minutes on two cores.
        full: So that the figures can be published.
    """

    name: str
    run: Callable[[Options], Iterable[Group]]
    states: tuple[str, ...] = ()
    default: Size
    full: Size = field(default_factory=lambda: Size(scale=1.0, num_samples=5))


def turns(variants: tuple[T, ...], num_rounds: int) -> Iterator[tuple[int, T]]:
    """Rounds through all variants, each beginning with another one; yields the round's number and the variant."""
    for number in range(num_rounds):
        first = number % len(variants)
        for variant in variants[first:] + variants[:first]:
            yield number, variant
