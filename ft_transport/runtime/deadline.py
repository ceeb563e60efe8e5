"""The deadline of a call, and the pauses between the polls of a wait."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

_SHORTEST = timedelta(milliseconds=1)
"""Shortest timeout that is returned, even after the deadline: torch and torchft refuse a timeout of zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """The point in time at which all waits of one call end.

    Attributes:
        at_s: Time on the monotonic clock, in seconds; infinite if the call has no timeout.
    """

    at_s: float = math.inf

    @classmethod
    def after(cls, timeout: timedelta | None) -> Deadline:
        """Return the deadline ``timeout`` from now; for ``None``, a deadline that never passes."""
        return cls() if timeout is None else cls(at_s=time.monotonic() + timeout.total_seconds())

    def cap(self, timeout: timedelta) -> timedelta:
        """Return ``timeout``, or the remaining time if that is shorter; at least a millisecond."""
        left_s = self.at_s - time.monotonic()
        return timeout if left_s >= timeout.total_seconds() else max(_SHORTEST, timedelta(seconds=left_s))

    def left(self) -> timedelta | None:
        """Return the remaining time, at least a millisecond; ``None`` if the deadline never passes."""
        return None if self.at_s == math.inf else self.cap(timedelta.max)

    def is_over(self) -> bool:
        """Return whether the deadline has passed."""
        return time.monotonic() >= self.at_s


_SHORTEST_PAUSE_S: Final = 0.0002
_LONGEST_PAUSE_S: Final = 0.05
_PAUSE_SHARE: Final = 0.05
"""Length of a pause as a fraction of the time waited so far: a long wait polls rarely and spares the training
thread."""


class Backoff:
    """Pauses between the polls of one wait. The pauses grow with the time waited so far.

    Args:
        longest_s: The longest pause, in seconds.
    """

    def __init__(self, longest_s: float = _LONGEST_PAUSE_S) -> None:
        self._began_s = time.monotonic()
        self._longest_s = longest_s

    def pause(self, at_most_s: float) -> None:
        """Sleep until the next poll, for at most ``at_most_s`` seconds."""
        share_s = _PAUSE_SHARE * (time.monotonic() - self._began_s)
        time.sleep(min(max(_SHORTEST_PAUSE_S, share_s), self._longest_s, at_most_s))
