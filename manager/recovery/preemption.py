"""Ends a replica that is about to be preempted: all its ranks stop at the same step, whose state is kept and saved.

A scheduler announces a preemption to one rank or to several, at different moments, by a signal or by a notice that has
to be polled. The ranks agree through the group's key-value store, without a collective in each step:

1. The rank that hears of the preemption sets a key. A thread of every rank looks for that key a few times per second.
2. Each rank posts the first step boundary that it has not passed yet, and does not pass it. That may be the present
   boundary or, in the middle of a step, the next one.
3. The ranks stop at the latest of the posted boundaries. Ranks that are a step behind make that step first; a rank that
   waits at its boundary has already taken part in it.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import FrameType
from typing import Final, NoReturn

from ft_transport import TransportError
from ft_transport.coordination.ranks import RankGroup
from ft_transport.runtime.signal_safe import SafeEvent, SafeThread

logger = logging.getLogger(__name__)

PREEMPTED_EXIT_CODE: Final = 75
"""Exit code of a preempted process: ``EX_TEMPFAIL`` of ``sysexits.h``, "try again later"."""
_POLL_S: Final = 0.1
_EXIT_S: Final = 2.0
"""How much longer than the grace period the exit of the interpreter may take."""
_PURPOSE: Final = "preemption"
_ASKED: Final = "asked"
_DONE: Final = "done"
_REPEATED_S: Final = 2.0
"""A further signal within this time repeats the first one."""


_expecting: weakref.WeakSet[Preemption] = weakref.WeakSet()


def _leave_process_group() -> None:
    """In a forked child, such as a worker of a data loader: leave the parent's process group.

    torchrun and Slurm signal whole groups. The worker would die at once, and the training loop fail without a worker.
    """
    if _expecting:
        with suppress(OSError):
            os.setpgid(0, 0)


os.register_at_fork(after_in_child=_leave_process_group)


class PreemptedExit(SystemExit):
    """Ends a process at the step at which all ranks of a preempted replica stop.

    As a ``SystemExit`` it runs ``finally`` blocks and exit handlers, and passes through ``except Exception``.
    """

    def __init__(self, step: int) -> None:
        super().__init__(PREEMPTED_EXIT_CODE)
        self.step = step

    def __str__(self) -> str:
        return f"preempted at step {self.step}"


class Preemption:
    """Learns of a preemption, and agrees with the other ranks on the step at which to stop.

    Args:
        group: The ranks of the replica.
        signals: The signals that announce a preemption. Their handlers are replaced.
        is_announced: Returns whether a preemption is announced; called repeatedly on a thread. ``None`` for signals
            only.
        grace: Time from the announcement until this process ends, even if the state is not saved yet.
        timeout: Deadline of each call of the key-value store.
    """

    def __init__(
        self,
        group: RankGroup,
        signals: Sequence[signal.Signals],
        is_announced: Callable[[], bool] | None,
        grace: timedelta,
        timeout: timedelta,
    ) -> None:
        self._group = group
        self._is_announced = is_announced
        self._grace_s = grace.total_seconds()
        self._timeout = timeout
        self._channel = group.channel(_PURPOSE, timeout) if group.size > 1 else None
        self._mutex = threading.Lock()
        self._num_signals = 0
        self._signalled_s = 0.0
        self._deadline_s: float | None = None
        self._begun_step = -1
        self._is_asked = False
        self._stop_at: int | None = None
        self._ended = SafeEvent()
        self._is_exiting = False
        self._pid = os.getpid()
        self._handlers = {int(number): signal.signal(number, self._handle) for number in signals}
        _expecting.add(self)
        self._thread = SafeThread(target=self._watch, name="ft-transport-preemption", daemon=True)
        self._thread.start()

    @property
    def left(self) -> timedelta:
        """The time that is left before the process is ended."""
        deadline_s = self._deadline_s if self._deadline_s is not None else math.inf
        return timedelta(seconds=max(0.0, min(deadline_s - time.monotonic(), self._grace_s)))

    def stops_at(self, step: int) -> bool:
        """Return whether this rank stops at the boundary of ``step``. Waits for the other ranks after an announcement.

        The training thread calls this at each boundary. If the result is false, it begins the step.
        """
        with self._mutex:
            if not self._is_asked:
                self._begun_step = step
                return False
        try:
            if self._stop_at is None:
                self._post(step)
            target = self._target()
        except TransportError as error:
            # Another rank, with the store, has ended already.
            logger.warning("stops at step %d without the answers of all ranks: %s", step, error)
            return True
        if target is not None and step < target:
            with self._mutex:
                self._begun_step = step
            return False
        return True

    def exit(self, step: int) -> NoReturn:
        """End this process, which has kept and saved what it could, with exit handlers and ``finally`` blocks.

        Raises:
            PreemptedExit: Always.
        """
        if self._channel is not None:
            # The first rank to exit may take the key-value store along, or make a launcher end the others.
            with suppress(TransportError):
                self._channel.set(f"{_DONE}/{self._group.rank}", "1", self._timeout)
                keys = [f"{_DONE}/{rank}" for rank in range(self._group.size)]
                self._channel.get(keys, self.left, answer_timeout=self._timeout)
        self._is_exiting = True
        self._ended.set()
        raise PreemptedExit(step)

    def close(self) -> None:
        """Expect no preemption any more, unless this process is exiting because of one. Idempotent."""
        if not self._is_exiting and not self._ended.is_set():
            self._ended.set()
            _expecting.discard(self)
            if self._deadline_s is not None:
                faulthandler.cancel_dump_traceback_later()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        # Nothing that needs a lock: the interrupted code may hold it.
        if os.getpid() != self._pid or (self._ended.is_set() and not self._is_exiting):
            # A forked child, such as a worker of a data loader, or after `close`, which any thread may call.
            signal.signal(number, self._handlers[number])
            os.kill(os.getpid(), number)
            return
        now_s = time.monotonic()
        # Schedulers and launchers may both pass the same announcement on.
        if self._num_signals and now_s > self._signalled_s + _REPEATED_S:
            os._exit(PREEMPTED_EXIT_CODE)
        self._num_signals += 1
        self._signalled_s = self._signalled_s or now_s

    def _watch(self) -> None:
        """Look for an announcement here and on other ranks; then end the process after the grace period."""
        while not self._ended.wait(_POLL_S):
            try:
                if self._hears():
                    break
            except Exception as error:
                if self._deadline_s is not None and time.monotonic() > self._deadline_s:
                    break
                logger.warning("cannot find out whether a preemption is announced: %s", error)
        else:
            return
        if not self._ended.wait(self.left.total_seconds()):
            logger.error(
                "the grace period of %g s is over before the state was saved; this process ends", self._grace_s
            )
            os._exit(PREEMPTED_EXIT_CODE)

    def _hears(self) -> bool:
        is_own = self._num_signals > 0 or (self._is_announced is not None and self._is_announced())
        if is_own:
            # Before any call of the store, which may not answer.
            self._arm()
        if is_own and self._channel is not None:
            self._channel.set(_ASKED, "1", self._timeout)
        if not is_own and (self._channel is None or self._channel.missing([_ASKED], self._timeout)):
            return False
        self._arm()
        with self._mutex:
            self._is_asked = True
            if self._begun_step >= 0 and self._stop_at is None:
                self._post(self._begun_step + 1)
        logger.warning("a preemption is announced %s", "to this rank" if is_own else "to another rank")
        return True

    def _arm(self) -> None:
        """Start the grace period, unless it has begun."""
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + self._grace_s
            if sys.__stderr__ is not None:
                # Needs no GIL, which the exit of an interpreter may hold for ever, and no answer of a store.
                faulthandler.dump_traceback_later(self._grace_s + _EXIT_S, exit=True, file=sys.__stderr__)

    def _post(self, step: int) -> None:
        self._stop_at = step
        if self._channel is not None:
            self._channel.set(str(self._group.rank), str(step), self._timeout)

    def _target(self) -> int | None:
        """Return the step at which all ranks stop; ``None`` if not all ranks have answered in the grace period."""
        if self._channel is None:
            return self._stop_at
        keys = [str(rank) for rank in range(self._group.size)]
        found = self._channel.get(keys, self.left, answer_timeout=self._timeout)
        return max(int(each) for each in found) if found is not None else None
