"""A fetch is bound to one snapshot; where a newer one has taken its place, the fetch begins again with that."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from ft_transport.errors import FetchFailedError, MessageDamagedError, SnapshotReplacedError, TransportError
from ft_transport.http.fetch_settings import FetchSettings
from ft_transport.telemetry.recorder import current

R = TypeVar("R")

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0


def with_restarts(settings: FetchSettings, receive: Callable[[], R]) -> R:
    """Begins again where a newer snapshot has taken the place of the one that a fetch was bound to."""
    touched = False
    pause_s = 0.0
    while True:
        try:
            return receive()
        except Exception as error:
            if not isinstance(error, TransportError):
                if touched:
                    error.destination_touched = True  # type: ignore[attr-defined]
                raise
            # What an earlier attempt did to the receiver's tensors holds for the last one as well.
            error.destination_touched = touched = touched or error.destination_touched
            last = error.failures[-1] if isinstance(error, FetchFailedError) else error
            if isinstance(last, MessageDamagedError) and last.refusal is not None:
                last = last.refusal
            if not isinstance(last, SnapshotReplacedError):
                raise
            recording = current()
            if recording is not None:
                recording.retry(last, peer=last.peer or "")
        # At once the first time, and then ever later, in case the peer says so of all that it serves.
        time.sleep(max(0.0, min(pause_s, settings.timeouts.end_s() - time.monotonic())))
        pause_s = min(max(_FIRST_PAUSE_S, 2 * pause_s), _LONGEST_PAUSE_S)
