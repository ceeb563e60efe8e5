"""Limits the throughput of a fetch, so that it hardly disturbs its source."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from ft_transport.http.fetch_settings import FetchSettings
from ft_transport.settings import FetchProgress, check_rate

_NUM_CONNECTIONS = 1
"""Several connections would request their chunks at the same moment."""


def paced(settings: FetchSettings, max_bytes_per_s: float | None) -> FetchSettings:
    """Return the settings with a limit on the throughput; ``None`` for no limit.

    Raises:
        ConfigurationError: The limit is not a positive number.
    """
    if max_bytes_per_s is None:
        return settings
    check_rate("max_bytes_per_s", max_bytes_per_s)
    pace = _Pace(max_bytes_per_s, settings.on_progress, settings.timeouts.end_s)
    return dataclasses.replace(settings, num_connections=_NUM_CONNECTIONS, on_progress=pace)


class _Pace:
    """Sleeps after each chunk for as long as its bytes may take; does not catch up after a late chunk."""

    def __init__(
        self,
        max_bytes_per_s: float,
        on_progress: Callable[[FetchProgress], None] | None,
        end_s: Callable[[], float],
    ) -> None:
        self._seconds_per_byte = 1 / max_bytes_per_s
        self._on_progress = on_progress
        self._end_s = end_s
        self._next_s = time.monotonic()
        self._num_before = 0

    def __call__(self, progress: FetchProgress) -> None:
        if self._on_progress is not None:
            self._on_progress(progress)
        # A restarted fetch counts from zero.
        num_bytes = progress.done_bytes - min(self._num_before, progress.done_bytes - 1)
        self._num_before = progress.done_bytes
        now_s = time.monotonic()
        self._next_s = max(now_s, self._next_s) + num_bytes * self._seconds_per_byte
        time.sleep(max(0.0, min(self._next_s, self._end_s()) - now_s))
