"""How far each engine is behind the newest version, as metrics of the transport that serves versions."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from ft_transport.publish.report import EngineState
from ft_transport.telemetry.metrics import Reading

_NUM_KEPT: Final = 1000
_MAX_ENGINES: Final = 100
_CREDENTIALS: Final = re.compile(r"//[^/]*@")


class EngineLag:
    """Compares the engines' versions with the published ones. Thread-safe.

    Args:
        states: Returns the states of the engines.
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
        """Record a published version, greater than every earlier one."""
        with self._mutex:
            self._published.append((version, self._clock()))

    def readings(self) -> Iterator[Reading]:
        """See ``telemetry.metrics.Source``. Only the first hundred engines have readings of their own."""
        states, now_s = self._states(), self._clock()
        with self._mutex:
            published = tuple(self._published)
        yield Reading("engines", len(states))
        yield Reading("published_version", published[-1][0] if published else None)
        if not states:
            for name in ("engine_version", "engine_lag_versions", "engine_lag_seconds"):
                yield Reading(name, None)
        for state in states[:_MAX_ENGINES]:
            version = state.version if state.version is not None else -1
            missing = [since_s for number, since_s in published if number > version]
            labels = (_shown(state.url),)
            yield Reading("engine_version", version, labels)
            yield Reading("engine_lag_versions", len(missing), labels)
            yield Reading("engine_lag_seconds", now_s - missing[0] if missing else 0.0, labels)


def _shown(url: str) -> str:
    """Return a URL without its user part, which may contain a password."""
    return _CREDENTIALS.sub("//", url, count=1)
