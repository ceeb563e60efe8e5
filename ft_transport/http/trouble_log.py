"""A log that peers can neither fill nor write to: one line per address and minute.

It never contains bytes from a peer: they may contain the job's secret, damaged by a bit, or imitate the log lines of
another peer.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ft_transport.telemetry.process_status import LastErrors

_PERIOD_S: Final = 60.0
_MAX_ADDRESSES: Final = 256
_MAX_FRAMES: Final = 3


@dataclass(slots=True)
class _Told:
    at_s: float
    num_untold: int = 0


class TroubleLog:
    """Logs failures of peers. Used only by one thread.

    Args:
        logger: Gets the lines.
        clock: Monotonic seconds.
        errors: Gets warnings and errors as well, for ``/state``; ``None`` without monitoring.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float], *, errors: LastErrors | None = None) -> None:
        self._errors = errors
        self._logger = logger
        self._clock = clock
        self._told: dict[str, _Told] = {}
        self._num_untold_elsewhere = 0

    def note(self, level: int, about: str, what: str) -> None:
        """Log one line, unless the last minute had a line about the same peer, or lines about too many others.

        Args:
            level: A level of ``logging``.
            about: The peer's address as the system reports it, or another name chosen by the server.
            what: A text of the server's own.
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
        # Moves the address to the end: the latest line is forgotten last.
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
    """Return an error's type and where it was raised, without its message, which may quote a peer's bytes."""
    if error is None:
        return "no error"
    frames = traceback.extract_tb(error.__traceback__)[-_MAX_FRAMES:]
    where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    return f"{type(error).__name__} at {where}" if where else type(error).__name__
