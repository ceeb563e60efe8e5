"""Builds the state of a process for ``/state``, from parts that are read only when a client requests ``/state``.

A training step does no work for ``/state``: each part reads values that its owner stores for its own use.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias

from ft_transport.telemetry.metrics import Metrics
from ft_transport.telemetry.process_state import NUM_RECORDS, VERSION, ErrorStatus, shortened
from ft_transport.telemetry.record import Record, now_unix_s
from ft_transport.telemetry.recorder import Recorder

logger = logging.getLogger(__name__)

_MAX_TEXT: Final = 400
_WINDOW_S: Final = 0.8
"""Shortest time over which `Rates` computes a rate, where possible."""
_MAX_VALUES: Final = 4096
_Sample: TypeAlias = tuple[float, int]

Part = Callable[[], object]
"""Returns a value that can be encoded as JSON. Any thread may call it; it must not block."""


class LastErrors:
    """The last errors of a process; the log has all errors. Any thread or signal handler may use it."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        self._errors: deque[ErrorStatus] = deque(maxlen=30)

    def note(self, about: str, text: str) -> None:
        """Add an error, or increase the count of the last error if it is the same.

        Args:
            about: Address of the peer that the error concerns, or name of the replica.
            text: Message of the error.
        """
        error = ErrorStatus(unix_s=now_unix_s(), about=about[:_MAX_TEXT], text=text[:_MAX_TEXT])
        with self._mutex:
            last = self._errors[-1] if self._errors else None
            if last is not None and (last.about, last.text) == (error.about, error.text):
                self._errors[-1] = replace(error, count=last.count + 1)
            else:
                self._errors.append(error)

    def recent(self) -> tuple[ErrorStatus, ...]:
        """Return the last errors, the newest at the end."""
        with self._mutex:
            return tuple(self._errors)


class ProcessStatus:
    """The parts of a process's state, by name, and the process's metrics. Thread-safe.

    At first, the parts are ``version``, ``unix_s``, ``errors``, ``records`` and ``running``. Other packages add parts
    with `set_part`.

    Args:
        recorder: Records the operations of the process.

    Attributes:
        recorder: The recorder.
        metrics: Metrics of the process, including those of the recorder.
        errors: The last errors of the process.
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
        """Set the function that returns the part ``name`` of the state; replaces an earlier function of that name.

        This object keeps the function alive. So a function that reads an object with a shorter lifetime must reference
        that object weakly.
        """
        with self._mutex:
            self._parts[name] = part

    def set_recorders(self, recorders: Sequence[Recorder]) -> None:
        """Set the recorders from which the state takes the last records and those of running operations."""
        self.set_part("records", partial(_records, tuple(recorders)))
        self.set_part("running", partial(_running, tuple(recorders)))

    def state(self) -> dict[str, object]:
        """Return all parts of the state, by name. A part is ``None`` if its function raises; the log has the error."""
        with self._mutex:
            parts = dict(self._parts)
        return {name: _read(name, part) for name, part in parts.items()}


class Rates:
    """Computes recent rates of growing byte counts. Each request of a client adds a sample. Thread-safe.

    Several clients may send requests at different times. Each client receives a rate over at least `_WINDOW_S`, unless
    the first sample is more recent.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        # Two samples of each count: their time, and the count at that time.
        self._samples: dict[Hashable, tuple[_Sample, _Sample]] = {}

    def of(self, key: Hashable, num_bytes: int, *, began_s: float, now_s: float) -> float:
        """Return the recent rate of one count, in bytes per second.

        Args:
            key: Identifies the count.
            num_bytes: Current count. If it is smaller than before, the rate starts from ``began_s`` again.
            began_s: Time at which the count was 0, in seconds by any clock.
            now_s: Current time, in seconds by the same clock.
        """
        with self._mutex:
            beginning = began_s, 0
            earlier, latest = self._samples.pop(key, (beginning, beginning))
            if num_bytes < latest[1]:
                earlier = latest = beginning
            if now_s - latest[0] >= _WINDOW_S:
                earlier, latest = latest, (now_s, num_bytes)
            self._samples[key] = earlier, latest  # moves the key to the end
            if len(self._samples) > _MAX_VALUES:
                del self._samples[next(iter(self._samples))]
            length_s = now_s - earlier[0]
            return (num_bytes - earlier[1]) / length_s if length_s > 0 else 0.0


def _read(name: str, part: Part) -> object:
    try:
        return part()
    except Exception:
        logger.exception("cannot read the part %s of this process's state; /state reports it as null", name)
        return None


def _records(recorders: Sequence[Recorder]) -> list[Record]:
    records = [record for recorder in recorders for record in recorder.recent()]
    records.sort(key=lambda record: record.begun_unix_s + record.length_s)
    return [shortened(record) for record in records[-NUM_RECORDS:]]


def _running(recorders: Sequence[Recorder]) -> list[Record]:
    running = [each for recorder in recorders for each in recorder.running()]
    return running[-20:]
