"""How large a run is, and what all benchmarks of it share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from benchmarks.report import Group, Variant

T = TypeVar("T", bound=Variant)
U = TypeVar("U")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of states, as a part of their full size, and the number of samples of each kind."""

    scale: float
    num_samples: int


QUICK: Final = Size(scale=0.1, num_samples=1)
FULL: Final = Size(scale=1.0, num_samples=5)


def rotated(items: Sequence[U], turn: int) -> list[U]:
    """All items, beginning with another one each turn."""
    first = turn % len(items)
    return [*items[first:], *items[:first]]


def _nothing(_text: str = "") -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a benchmark is run with.

    Attributes:
        size: How large and how often.
        is_full: Whether to measure also what no verdict needs.
        states: Which of the benchmark's states or models.
        directory: Where files are written, and removed again.
        say: Takes a line about the progress.
        settle: Called before each sample; returns when it may be taken.
    """

    size: Size
    is_full: bool = False
    states: tuple[str, ...] = ()
    directory: Path = field(default_factory=Path)
    say: Callable[[str], None] = _nothing
    settle: Callable[[], None] = _nothing

    @property
    def scale(self) -> float:
        return self.size.scale

    def rounds(self, title: str, variants: tuple[T, ...]) -> Iterator[tuple[int, T]]:
        """Rounds through all variants, each beginning with another one; yields the round's number and the variant.

        What the machine does meanwhile then befalls all variants alike.
        """
        num_rounds = self.size.num_samples
        for number in range(num_rounds):
            for variant in rotated(variants, number):
                self.settle()
                self.say(f"{title} {number + 1}/{num_rounds} {variant.name}")
                yield number, variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A question by name.

    Attributes:
        name: Names it on the command line.
        question: Heads its section of RESULTS.md.
        run: Measures one group after the other.
        states: What it can be asked of; empty where it has one state only.
        default: The size that gives the verdict within two minutes on two cores.
        misses: Why a target is missed, by a part of the verdict's text.
    """

    name: str
    question: str
    run: Callable[[Options], Iterable[Group]]
    states: tuple[str, ...] = ()
    default: Size
    misses: Mapping[str, str] = field(default_factory=dict)
