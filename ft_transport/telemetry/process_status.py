"""The state of a process, as ``/state`` shows it: parts that are read only on request.

Nothing is counted twice for it, and a step costs nothing without requests: each part reads values that its owner has
anyway.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from ft_transport.telemetry.metrics import Metrics
from ft_transport.telemetry.process_state import NUM_RECORDS, VERSION, ErrorStatus, shortened
from ft_transport.telemetry.record import Record, now_unix_s
from ft_transport.telemetry.recorder import Recorder

logger = logging.getLogger(__name__)

_MAX_TEXT: Final = 400
_WINDOW_S: Final = 0.8
"""More frequent requests get the rate since an earlier look."""
_MAX_KEPT: Final = 4096

Part = Callable[[], object]
"""Returns a value for JSON. Called on any thread; takes no lock for long and waits for nothing."""


class LastErrors:
    """The last errors of a process; the log has all of them. Any thread may use it, also a signal handler."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        self._kept: deque[ErrorStatus] = deque(maxlen=30)

    def note(self, about: str, text: str) -> None:
        """Add an error, or count the same one again.

        Args:
            about: A peer's address, or a replica.
            text: The error, in words of ours.
        """
        error = ErrorStatus(unix_s=now_unix_s(), about=about[:_MAX_TEXT], text=text[:_MAX_TEXT])
        with self._mutex:
            last = self._kept[-1] if self._kept else None
            if last is not None and (last.about, last.text) == (error.about, error.text):
                self._kept[-1] = replace(error, count=last.count + 1)
            else:
                self._kept.append(error)

    def recent(self) -> tuple[ErrorStatus, ...]:
        """Return the last errors, the newest at the end."""
        with self._mutex:
            return tuple(self._kept)


class ProcessStatus:
    """The parts of one process's state, by name. Any thread may use it.

    It begins with the version, the clock, the errors and the records.

    Args:
        recorder: Has the last records.

    Attributes:
        recorder: See the argument.
        metrics: The metrics of the process, with those of the recorder.
        errors: The last errors.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.metrics = Metrics()
        self.metrics.follow(recorder)
        self.errors = LastErrors()
        self._mutex = threading.Lock()
        self._parts: dict[str, Part] = {"version": lambda: VERSION, "unix_s": now_unix_s, "errors": self.errors.recent}
        self.set_recorders([recorder])

    def set_part(self, name: str, part: Part) -> None:
        """Set the part that is read for ``name``, in place of an earlier one.

        This object owns the part for good: a part that reads an object which may be dropped before refers to it weakly.
        """
        with self._mutex:
            self._parts[name] = part

    def set_recorders(self, recorders: Sequence[Recorder]) -> None:
        """Set the recorders whose records, running and ended ones, are parts of the state."""
        self.set_part("records", partial(_records, tuple(recorders)))
        self.set_part("running", partial(_running, tuple(recorders)))

    def state(self) -> dict[str, object]:
        """Return all parts, by name; a part that fails is ``None``, and logged."""
        with self._mutex:
            parts = dict(self._parts)
        return {name: _asked(name, part) for name, part in parts.items()}


@dataclass(slots=True)
class _Looks:
    earlier: tuple[float, int]
    latest: tuple[float, int]


class Rates:
    """Remembers the last looks at values that grow. Any thread may use it.

    Several clients may ask at different moments: each gets a rate over at least `_WINDOW_S`, if that much has passed.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._looks: dict[Hashable, _Looks] = {}

    def of(self, key: Hashable, num_bytes: int, *, began_s: float, now_s: float) -> float:
        """Return the recent rate in bytes per second.

        Args:
            key: Identifies the value.
            num_bytes: Its present size; a smaller number than before restarts it.
            began_s: When it began with 0, by any clock.
            now_s: Now, by the same.
        """
        with self._mutex:
            looks = self._looks.pop(key, None)
            if looks is None or num_bytes < looks.latest[1]:
                looks = _Looks((began_s, 0), (began_s, 0))
            if now_s - looks.latest[0] >= _WINDOW_S:
                looks.earlier, looks.latest = looks.latest, (now_s, num_bytes)
            self._looks[key] = looks  # the newest at the end
            if len(self._looks) > _MAX_KEPT:
                del self._looks[next(iter(self._looks))]
            length_s = now_s - looks.earlier[0]
            return (num_bytes - looks.earlier[1]) / length_s if length_s > 0 else 0.0


def _asked(name: str, part: Part) -> object:
    try:
        return part()
    except Exception:
        logger.exception("the part %s of this process's state could not be read", name)
        return None


def _records(recorders: Sequence[Recorder]) -> list[Record]:
    records = [record for recorder in recorders for record in recorder.recent()]
    records.sort(key=lambda record: record.begun_unix_s + record.length_s)
    return [shortened(record) for record in records[-NUM_RECORDS:]]


def _running(recorders: Sequence[Recorder]) -> list[Record]:
    running = [each for recorder in recorders for each in recorder.running()]
    return running[-20:]
