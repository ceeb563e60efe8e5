"""Sends heartbeats to the Lighthouse, and detects that it may have missed some.

Native threads send them (torchft's ``ManagerServer``), so that a replica stays a member while other code holds the GIL.
A slow Python thread sends a few more; their answers show that the Lighthouse is reachable.

After a long silence of the Python thread, the native threads may have been silent as well, or not: they run while the
GIL is held, and stop with the process (``SIGSTOP``, a frozen container, a paused machine). The kernel counts how often
they give up the processor, a nearly constant number between two heartbeats.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any, Final

from ft_transport.runtime.signal_safe import SafeEvent, SafeThread
from manager.errors import QuorumError

logger = logging.getLogger(__name__)

_TASKS: Final = "/proc/self/task"
_NATIVE_NAMES: Final = (b"Name:\ttorchft", b"Name:\ttokio")
_COUNTER: Final = b"\nvoluntary_ctxt_switches:"
_MOST_STATUS_BYTES: Final = 16 * 1024
_MOST_RUNS: Final = 6.0
"""Assumed number of runs of native threads for each heartbeat before a measurement: four in torchft 0.2."""
_SHARE_OF_TIMEOUT: Final = 0.25
_SHARE_OF_WINDOW: Final = 0.5
_NUM_WINDOWS: Final = 16
_SHARE_OF_SIGN: Final = 0.01
"""A sign serves all messages within this share of the timeout, because taking one costs a step 0.1 ms."""
_SHORT_READ_S: Final = 0.02
_NUM_READS: Final = 3

_starting = threading.Lock()


class NativeThreads:
    """The kernel's counters of the threads that ``start`` starts.

    Args:
        start: Starts the threads.

    Attributes:
        owner: The result of ``start``.
    """

    def __init__(self, start: Callable[[], Any]) -> None:
        with _starting:
            before = _tasks()
            self.owner: Any = start()
            # Not by name: under load a thread names itself later, even after another group has been started.
            self._tasks = _tasks() - before

    def num_runs(self) -> int | None:
        """Return how often the threads have given up the processor; ``None`` if the kernel does not say."""
        # Threads of other libraries that began at the same moment have other names, or have ended.
        counts = [count for task in self._tasks if (count := _num_runs(task)) is not None]
        return sum(counts) if counts else None


def _tasks() -> frozenset[str]:
    with suppress(OSError):
        return frozenset(os.listdir(_TASKS))
    return frozenset()


def _num_runs(task: str) -> int | None:
    try:
        # `pathlib` and `open` would take four times as long: this runs in each step.
        file = os.open(f"{_TASKS}/{task}/status", os.O_RDONLY)
        try:
            status = os.read(file, _MOST_STATUS_BYTES)
        finally:
            os.close(file)
        return int(status.split(_COUNTER, 1)[1].split(None, 1)[0]) if status.startswith(_NATIVE_NAMES) else None
    except (OSError, IndexError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Sign:
    """A moment at which this replica was alive: the time, and the native threads' number of runs."""

    sent_s: float
    num_runs: int | None


class MissedHeartbeats:
    """Counts silences after which the Lighthouse may have declared this replica dead. Any thread may call it.

    Args:
        timeout_s: The Lighthouse's heartbeat timeout in seconds.
        interval_s: Seconds between two heartbeats of the native threads.
        num_runs: See `NativeThreads`.
        clock: Returns seconds.
    """

    def __init__(
        self,
        timeout_s: float,
        interval_s: float,
        num_runs: Callable[[], int | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s = timeout_s
        self._assumed_rate = _MOST_RUNS / interval_s
        self._num_runs = num_runs
        self._clock = clock
        self._mutex = threading.Lock()
        self._rates: deque[float] = deque(maxlen=_NUM_WINDOWS)
        self._num_lapses = 0
        self._has_failed = False
        self._newest: Sign | None = None
        self._last = self._window = self.now()

    def now(self) -> Sign:
        """Return the sign of a message that is about to be sent."""
        last = self._newest
        if last is not None and self._clock() - last.sent_s < self._timeout_s * _SHARE_OF_SIGN:
            return last
        for _ in range(_NUM_READS):
            # Reading releases the GIL: time and number must belong to one moment.
            begun_s, num_runs = self._clock(), self._num_runs()
            if self._clock() - begun_s < _SHORT_READ_S:
                break
        self._newest = sign = Sign(begun_s, num_runs)
        return sign

    def note(self, sign: Sign) -> None:
        """Record that the Lighthouse has answered the message of this sign."""
        with self._mutex:
            self._judge(sign)
            self._has_failed = False
            if sign.sent_s > self._last.sent_s:
                self._last = sign
                self._learn(sign)

    def note_failure(self) -> None:
        """Record that the Lighthouse was unreachable."""
        with self._mutex:
            self._has_failed = True

    def count(self) -> int:
        """Return the number of silences so far."""
        with self._mutex:
            # Not in each step: a new sign asks the kernel.
            if self._clock() - self._last.sent_s >= self._timeout_s:
                self._judge(self.now())
            return self._num_lapses

    def _judge(self, now: Sign) -> None:
        silent_s = now.sent_s - self._last.sent_s
        if silent_s < self._timeout_s:
            return
        if self._has_failed or silent_s - self._running_s(now) >= self._timeout_s:
            self._num_lapses += 1
        # Each silence counts once.
        self._last = self._window = now

    def _running_s(self, now: Sign) -> float:
        """Return for how many seconds the native threads have run since the last sign."""
        if now.num_runs is None or self._last.num_runs is None:
            return 0.0
        rate = median(self._rates) if self._rates else self._assumed_rate
        return (now.num_runs - self._last.num_runs) / rate

    def _learn(self, sign: Sign) -> None:
        window_s = sign.sent_s - self._window.sent_s
        if window_s < self._timeout_s * _SHARE_OF_WINDOW:
            return
        if sign.num_runs is not None and self._window.num_runs is not None and sign.num_runs > self._window.num_runs:
            self._rates.append((sign.num_runs - self._window.num_runs) / window_s)
        self._window = sign


class Heartbeat:
    """Sends heartbeats until `close`.

    Args:
        start: Starts the native threads; its result has ``shutdown()``.
        beat: Sends one more heartbeat and waits for the answer.
        name: Names the Lighthouse in messages.
        interval: Time between two heartbeats of the native threads.
        timeout: The Lighthouse's heartbeat timeout.

    Attributes:
        missed_heartbeats: Counts silences.
        was_unreachable: Set when the Lighthouse was unreachable; the reader clears it.
    """

    def __init__(
        self,
        *,
        start: Callable[[], Any],
        beat: Callable[[timedelta], object],
        name: str,
        interval: timedelta,
        timeout: timedelta,
    ) -> None:
        self._beat = beat
        self._name = name
        self._timeout = timeout
        self._pause_s = max(interval.total_seconds(), timeout.total_seconds() * _SHARE_OF_TIMEOUT)
        self._closed = SafeEvent()
        self.was_unreachable = False
        self._native = NativeThreads(start)
        self.missed_heartbeats = MissedHeartbeats(
            timeout.total_seconds(), interval.total_seconds(), self._native.num_runs
        )
        self._thread = SafeThread(target=self._run, name="ft-transport-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the heartbeats."""
        self._closed.set()
        native, self._native.owner = self._native.owner, None
        if native is not None:
            native.shutdown()
        self._thread.join()

    def _run(self) -> None:
        is_silenced = False
        while not self._closed.wait(self._pause_s):
            sign = self.missed_heartbeats.now()
            try:
                self._beat(self._timeout)
            except (RuntimeError, OSError, QuorumError) as error:
                self.missed_heartbeats.note_failure()
                self.was_unreachable = self.was_unreachable or not isinstance(error, TimeoutError)
                if not is_silenced:
                    logger.warning("%s: no heartbeat reaches it: %s", self._name, error)
                is_silenced = True
            else:
                is_silenced = False
                self.missed_heartbeats.note(sign)
