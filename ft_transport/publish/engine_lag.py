"""How far each engine is behind the newest version, for who scrapes the transport that serves versions."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from ft_transport.publish.report import EngineState
from ft_transport.telemetry.readings import PREFIX, Metric, Reading

_NUM_KEPT: Final = 1000
_MAX_ENGINES: Final = 100
_CREDENTIALS: Final = re.compile(r"//[^/]*@")

_NEWEST: Final = Metric(name=f"{PREFIX}published_version", kind="gauge", help="The newest version of weights.")
_ENGINES: Final = Metric(name=f"{PREFIX}engines", kind="gauge", help="Engines that are notified of versions.")
_VERSION: Final = Metric(
    name=f"{PREFIX}engine_version",
    kind="gauge",
    help="The version that an engine confirmed last; -1 where none is known.",
    labels=("engine",),
)
_LAG: Final = Metric(
    name=f"{PREFIX}engine_lag_versions",
    kind="gauge",
    help="How many versions were published that an engine has not confirmed.",
    labels=("engine",),
)
_LAG_S: Final = Metric(
    name=f"{PREFIX}engine_lag_seconds",
    kind="gauge",
    help="How long ago the first of those was published; 0 where there is none.",
    labels=("engine",),
)


class EngineLag:
    """Compares what engines use with what was published. Any thread may use it.

    Args:
        states: Tells of the engines.
        clock: Monotonic seconds.
    """

    def __init__(
        self, states: Callable[[], Sequence[EngineState]], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._states = states
        self._clock = clock
        self._mutex = threading.Lock()
        self._published: deque[tuple[int, float]] = deque(maxlen=_NUM_KEPT)

    def published(self, version: int) -> None:
        """Note that a version is there, greater than every one before."""
        with self._mutex:
            self._published.append((version, self._clock()))

    def readings(self) -> Iterator[Reading]:
        """See ``telemetry.readings.Source``. Of many engines the first hundred are told apart."""
        states, now_s = self._states(), self._clock()
        with self._mutex:
            published = tuple(self._published)
        yield Reading(metric=_ENGINES, value=len(states))
        yield Reading(metric=_NEWEST, value=published[-1][0] if published else None)
        if not states:
            yield from (Reading(metric=each, value=None) for each in (_VERSION, _LAG, _LAG_S))
        for state in states[:_MAX_ENGINES]:
            version = state.version if state.version is not None else -1
            missing = [since_s for number, since_s in published if number > version]
            labels = (_shown(state.url),)
            yield Reading(metric=_VERSION, labels=labels, value=version)
            yield Reading(metric=_LAG, labels=labels, value=len(missing))
            yield Reading(metric=_LAG_S, labels=labels, value=now_s - missing[0] if missing else 0.0)


def _shown(url: str) -> str:
    """Without what may be a password."""
    return _CREDENTIALS.sub("//", url, count=1)
