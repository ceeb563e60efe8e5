"""A log that no peer can fill, and in which no peer can write: one line for each address and minute.

What a peer sent never gets here, not even in part: it may hold the secret of the job, damaged by a bit, or lines that
look like those of somebody else.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ft_transport.telemetry.watch import LastErrors

_PERIOD_S: Final = 60.0
_MAX_ADDRESSES: Final = 256
_MAX_FRAMES: Final = 3


@dataclass(slots=True)
class _Told:
    at_s: float
    num_untold: int = 0


class TroubleLog:
    """Logs what goes wrong with peers. Belongs to one thread.

    Args:
        logger: Takes the lines.
        clock: Monotonic seconds.
        errors: Gets what is worth a warning as well, for who watches; ``None`` where nobody can.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float], *, errors: LastErrors | None = None) -> None:
        self._errors = errors
        self._logger = logger
        self._clock = clock
        self._told: dict[str, _Told] = {}
        self._num_untold_elsewhere = 0

    def note(self, level: int, about: str, what: str) -> None:
        """Logs one line, unless there was one about the same within a minute, or about too many others.

        Args:
            level: Of ``logging``.
            about: The peer's address as the system gives it, or another name of ours.
            what: In words of ours.
        """
        if not self._logger.isEnabledFor(level):
            return
        now_s = self._clock()
        told = self._told.get(about)
        if told is not None and now_s - told.at_s < _PERIOD_S:
            told.num_untold += 1
            return
        if told is None and len(self._told) >= _MAX_ADDRESSES and not self._forget_the_past(now_s):
            self._num_untold_elsewhere += 1
            return
        untold = told.num_untold if told is not None else 0
        more = f"; {untold} more of the kind since the last line about it" if untold else ""
        if self._num_untold_elsewhere:
            more += f"; {self._num_untold_elsewhere} about other addresses"
            self._num_untold_elsewhere = 0
        # In this order: what is told last is forgotten last.
        self._told.pop(about, None)
        self._told[about] = _Told(now_s)
        self._logger.log(level, "%s: %s%s", about, what, more)
        if self._errors is not None and level >= logging.WARNING:
            self._errors.note(about, what)

    def _forget_the_past(self, now_s: float) -> bool:
        past = [about for about, told in self._told.items() if now_s - told.at_s >= _PERIOD_S]
        for about in past:
            del self._told[about]
        return bool(past)


def describe_failure(error: BaseException | None) -> str:
    """The type of an error and where it was raised. Not its message: that may hold what a peer has sent."""
    if error is None:
        return "no error"
    frames = traceback.extract_tb(error.__traceback__)[-_MAX_FRAMES:]
    where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    return f"{type(error).__name__} at {where}" if where else type(error).__name__
