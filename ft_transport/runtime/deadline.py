"""When a call has to be over, where its caller said so."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from datetime import timedelta

_SHORTEST = timedelta(milliseconds=1)
"""Waits that may still happen after the deadline: torch and torchft refuse a timeout of zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """One point in time that all waits of a call share, however many waits there are.

    Attributes:
        at_s: In seconds of the monotonic clock; infinite where the caller gave no timeout.
    """

    at_s: float = math.inf

    @classmethod
    def after(cls, timeout: timedelta | None) -> Deadline:
        """Begin to count now; ``None`` sets no deadline."""
        return cls() if timeout is None else cls(at_s=time.monotonic() + timeout.total_seconds())

    def cap(self, timeout: timedelta) -> timedelta:
        """Shorten the timeout of one wait to what is left; at least a millisecond."""
        left_s = self.at_s - time.monotonic()
        return timeout if left_s >= timeout.total_seconds() else max(_SHORTEST, timedelta(seconds=left_s))

    def left(self) -> timedelta | None:
        """Return what is left, at least a millisecond; ``None`` if there is no deadline."""
        return None if self.at_s == math.inf else self.cap(timedelta.max)

    def is_over(self) -> bool:
        """Whether it has passed."""
        return time.monotonic() >= self.at_s
