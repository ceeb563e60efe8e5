"""How long threads wait for a state lock, and how long they hold it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ft_transport.telemetry.readings import PREFIX, Counts, Durations, Metric, Reading
from manager.errors import Kind

_KNOWN: Final = (("read",), ("write",))
_BOUNDS_S: Final = (0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_WAITS: Final = Metric(
    name=f"{PREFIX}lock_wait_seconds",
    kind="histogram",
    help="How long a thread waited for the state lock until it had it.",
    labels=("kind",),
)
_HOLDS: Final = Metric(
    name=f"{PREFIX}lock_hold_seconds",
    kind="histogram",
    help="How long the state lock was held; sections that a thread nests are one.",
    labels=("kind",),
)
_TIMEOUTS: Final = Metric(
    name=f"{PREFIX}lock_timeouts_total",
    kind="counter",
    help="How often the state lock was not to be had until the deadline.",
    labels=("kind",),
)


@dataclass(slots=True, eq=False)
class LockWaits:
    """Number and length of threads' waits for a lock; approximate if several waits end at once.

    Attributes:
        num: Number of waits.
        total_s: Their sum in seconds.
        longest_s: The longest wait in seconds.
    """

    num: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0

    def note(self, waited_s: float) -> None:
        """Add a wait."""
        self.num += 1
        self.total_s += waited_s
        self.longest_s = max(self.longest_s, waited_s)


class LockCosts:
    """Sums of waits and holds of a lock, updated under the lock's mutex. Any thread may read.

    Attributes:
        contended: The waits of threads that did not get the lock at once.
    """

    __slots__ = ("_holds", "_timeouts", "_waits", "contended")

    def __init__(self) -> None:
        """Start at zero."""
        self.contended = LockWaits()
        self._waits = Durations(_WAITS, _BOUNDS_S, known=_KNOWN)
        self._holds = Durations(_HOLDS, _BOUNDS_S, known=_KNOWN)
        self._timeouts = Counts(_TIMEOUTS, known=_KNOWN)

    def waited(self, kind: Kind, waited_s: float) -> None:
        """Add the wait of a thread that got the lock."""
        self._waits.observe(waited_s, kind)

    def held(self, kind: Kind, held_s: float) -> None:
        """Add the hold of a thread that released the lock."""
        self._holds.observe(held_s, kind)

    def timed_out(self, kind: Kind) -> None:
        """Count a wait that reached its deadline."""
        self._timeouts.add(kind)

    def readings(self) -> Iterator[Reading]:
        """See ``telemetry.readings.Source``."""
        for each in (self._waits, self._holds, self._timeouts):
            yield from each.readings()
