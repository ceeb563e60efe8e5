"""Sends heartbeats to the Lighthouse, and detects when the Lighthouse may have declared this replica dead.

Native threads of torchft's ``ManagerServer`` send the heartbeats, so that a replica stays a member while Python code
holds the GIL. Nothing reports whether these heartbeats arrive. So a Python thread sends a few heartbeats too, and the
answers show that the Lighthouse is reachable.

If the Python thread was silent for a long time, another thread may have held the GIL while the native threads ran. Or
the whole process was stopped, by ``SIGSTOP``, a frozen container or a paused machine. To distinguish these two cases,
this module reads how often the native threads have given up the processor. The kernel counts that, and each heartbeat
increases the count by nearly the same number.
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
_MOST_RUNS: Final = 5.0
"""Assumed number of runs of the native threads for a heartbeat, until it is measured. In torchft 0.2, it is 4.

The assumption is rather too high, so that a lapse is not overlooked. With 5, code may hold the GIL for 5 heartbeat
timeouts before the measurement, and for any time after it.
"""
_SHARE_OF_TIMEOUT: Final = 0.25
_SHARE_OF_WINDOW: Final = 0.5
_NUM_WINDOWS: Final = 16
_SHARE_OF_SIGN: Final = 0.01
"""`MissedHeartbeats.now` returns the same sign for this share of the timeout, because a new one costs 0.1 ms."""
_SHORT_READ_S: Final = 0.02
_NUM_READS: Final = 3

_starting = threading.Lock()


def _tasks() -> frozenset[str]:
    with suppress(OSError):
        return frozenset(os.listdir(_TASKS))
    return frozenset()


def _runs_of(task: str) -> int | None:
    try:
        # This runs in each step, and `pathlib` or `open` would take four times as long.
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
    """A sign of life: a moment at which this replica was running.

    Attributes:
        sent_s: The moment, by the monotonic clock.
        num_runs: Result of `Heartbeat.num_runs` at that moment.
    """

    sent_s: float
    num_runs: int | None


class MissedHeartbeats:
    """Counts how often the Lighthouse may have declared this replica dead. Any thread may call it.

    Args:
        timeout_s: The Lighthouse declares a replica dead after this many seconds without a heartbeat.
        interval_s: Seconds between two heartbeats of the native threads.
        num_runs: Returns how often the native threads have run; see `Heartbeat.num_runs`.
        clock: Returns monotonic seconds.
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
        """Return a sign of life for now. If the Lighthouse answers a message that is sent later, pass it to `note`."""
        last = self._newest
        if last is not None and self._clock() - last.sent_s < self._timeout_s * _SHARE_OF_SIGN:
            return last
        for _ in range(_NUM_READS):
            # Reading the count releases the GIL. If that took long, read again: time and count must belong together.
            begun_s, num_runs = self._clock(), self._num_runs()
            if self._clock() - begun_s < _SHORT_READ_S:
                break
        self._newest = sign = Sign(begun_s, num_runs)
        return sign

    def note(self, sign: Sign) -> None:
        """Record that the Lighthouse has answered a message.

        Args:
            sign: The sign of life that `now` returned before the message was sent.
        """
        with self._mutex:
            self._judge(sign)
            self._has_failed = False
            if sign.sent_s > self._last.sent_s:
                self._last = sign
                self._learn(sign)

    def note_failure(self) -> None:
        """Record that the Lighthouse did not answer a message."""
        with self._mutex:
            self._has_failed = True

    def count(self) -> int:
        """Return how often the Lighthouse may have declared this replica dead so far."""
        with self._mutex:
            # Only after a silence, because a new sign of life costs a system call for each thread.
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
        """Estimate for how many seconds the native threads have sent heartbeats since the last sign of life."""
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
        start: Starts the native threads; returns their owner, an object with a method ``shutdown``.
        beat: Sends one heartbeat, and waits for the answer for at most the given time.
        name: Name of the replica and of the Lighthouse, for messages.
        interval: Time between two heartbeats of the native threads.
        timeout: The Lighthouse declares a replica dead after this time without a heartbeat.

    Attributes:
        missed_heartbeats: Counts how often the Lighthouse may have declared this replica dead.
        was_unreachable: Whether the Lighthouse has been unreachable since the caller last set this attribute to false.
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
        with _starting:
            before = _tasks()
            self._native: Any = start()
            # The threads are not found by name: under load, a thread may get its name much later.
            self._native_tasks = _tasks() - before
        self.missed_heartbeats = MissedHeartbeats(timeout.total_seconds(), interval.total_seconds(), self.num_runs)
        self._thread = SafeThread(target=self._run, name="ft-transport-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the heartbeats."""
        self._closed.set()
        native, self._native = self._native, None
        if native is not None:
            native.shutdown()
        self._thread.join()

    def num_runs(self) -> int | None:
        """Return how often the native threads have given up the processor; ``None`` if the kernel does not count it."""
        # Skip threads that another library started at the same moment: they have other names, or have ended.
        counts = [count for task in self._native_tasks if (count := _runs_of(task)) is not None]
        return sum(counts) if counts else None

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
                    logger.warning("%s: does not answer heartbeats: %s", self._name, str(error))
                is_silenced = True
            else:
                is_silenced = False
                self.missed_heartbeats.note(sign)
