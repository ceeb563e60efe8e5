"""Makes the loop of one replica observable from outside.

- `span` marks parts of a step in a profile, under torchft's names. Without a profiler it costs nothing, unlike
  ``torch.profiler.record_function``, which costs microseconds.
- `StallWatch` logs waits that take too long.
- `MembershipLog` logs replicas that join, leave and heal.
- `loop_status` returns the manager's part of ``/state``.
"""

from __future__ import annotations

import functools
import itertools
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import takewhile
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch.autograd import profiler

from ft_transport.errors import escape_peer_text
from ft_transport.runtime.signal_safe import SafeEvent, SafeThread
from ft_transport.telemetry.process_state import (
    NUM_CHANGES,
    Activity,
    Change,
    ManagerStatus,
    MembershipChange,
    MemberStatus,
)
from manager.quorum.decision import Decision, DoesNotFit, StandsBy, UpToDate
from manager.quorum.process_group import group_number
from manager.quorum.quorum_round import Participant

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)

_PREFIX: Final = "torchft::manager::"
_NOTHING: Final = nullcontext()
_IDLE_S: Final = 3600.0
_MAX_ID: Final = 100
_MAX_TEXT: Final = 300
_QUICK_S: Final = 1.0
"""While a quorum forms in the background, a replica is reported as waiting only after this time."""


def span(name: str) -> AbstractContextManager[Any]:
    """Return a context manager that shows up as ``torchft::manager::<name>`` in a profile."""
    # A profiler may be running: torch's own compiler uses the same check.
    return torch.profiler.record_function(_PREFIX + name) if profiler._is_profiler_enabled else _NOTHING


def spanned(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that makes each call of a function a `span`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with span(name):
                return function(*args, **kwargs)

        return call

    return decorate


@dataclass(slots=True, kw_only=True)
class _Wait:
    stalled_s: float
    what: str
    missing: Callable[[], str] | None
    thread_id: int


class StallWatch:
    """Logs each wait of one manager that takes too long. The logging thread starts with the first wait.

    Args:
        after_s: Length of a wait, in seconds, after which it is logged. Each wait is logged once.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        # Changed without a lock, by atomic operations: an exception of a signal handler could leave a lock locked.
        self._waits: dict[int, _Wait] = {}
        self._keys = itertools.count()
        self._starting = threading.Lock()
        self._thread: SafeThread | None = None
        self._closed = SafeEvent()

    @contextmanager
    def waiting(
        self, what: str, *, missing: Callable[[], str] | None = None, thread_id: int | None = None
    ) -> Iterator[None]:
        """Log a warning if the body of the ``with`` block takes too long.

        Args:
            what: The replica, its step and what it waits for, as the start of the log message.
            missing: Returns a description of the missing replicas; called on the thread of this object.
            thread_id: The thread whose stack the message shows; ``None`` for the calling thread.
        """
        wait = _Wait(
            stalled_s=time.monotonic() + self._after_s,
            what=what,
            missing=missing,
            thread_id=thread_id if thread_id is not None else threading.get_ident(),
        )
        key = next(self._keys)
        try:
            self._waits[key] = wait
            if self._thread is None:
                self._start()
            yield
        finally:
            self._waits.pop(key, None)

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._closed.is_set():
                thread = SafeThread(target=self._run, name="ft-transport-stall-watch", daemon=True)
                thread.start()
                self._thread = thread

    def close(self) -> None:
        """End the thread."""
        with self._starting:
            self._closed.set()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        # With this interval, a wait is logged after at most 1.5 times ``after_s``.
        while not self._closed.wait(self._after_s / 2):
            now_s = time.monotonic()
            for wait in list(self._waits.values()):
                if wait.stalled_s <= now_s:
                    wait.stalled_s = now_s + _IDLE_S
                    self._log(wait)

    def _log(self, wait: _Wait) -> None:
        missing = wait.missing() if wait.missing is not None else ""
        logger.warning(
            "%s for more than %.1f s%s; %s", wait.what, self._after_s, f"; {missing}" if missing else "", _stack(wait)
        )


def _stack(wait: _Wait) -> str:
    frame = sys._current_frames().get(wait.thread_id)
    if frame is None:
        return "the waiting thread has ended"
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stack = "".join(traceback.format_stack(frame)).rstrip()
    return f"thread {names.get(wait.thread_id, '?')!r} is at:\n{stack}"


class MembershipLog:
    """Logs which replicas have joined, left or healed since the previous quorum.

    Rank 0 of a replica logs at WARNING, its other ranks log at INFO. Only the quorum thread may call it, or the
    training thread while the quorum thread is idle; any thread may call the function that `recent` returns.

    Args:
        participant: This replica and its quorum.
    """

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._changes: deque[MembershipChange] = deque(maxlen=NUM_CHANGES)
        self._present: frozenset[str] = frozenset()
        self._known: frozenset[str] = frozenset()
        self._healing: tuple[str, ...] = ()
        self._last_quorum_s = 0.0

    def log_changes(self, decision: Decision) -> None:
        """Log the replicas that joined or left since the previous quorum. If there are none, only compare two sets.

        Args:
            decision: The decision of the new quorum.
        """
        role, membership = decision.role, self._participant.membership
        if isinstance(role, DoesNotFit):
            return
        now_s = time.monotonic()
        ago_s, self._last_quorum_s = now_s - self._last_quorum_s, now_s
        present = frozenset([member.replica_id for member in membership.members])
        healing = role.serves_now if isinstance(role, UpToDate) else ()
        if present == self._present and healing == self._healing:
            return
        group, known, is_first = frozenset(decision.group_members), self._known, not self._present
        following = role.following if isinstance(role, UpToDate) else frozenset[str]()
        joined = (group - known | {*healing} - {*self._healing} - following) - {membership.replica_id}
        self._present, self._healing, self._known = present, healing, known & present | group
        if is_first:
            return
        if known - present:
            self._log_departures(sorted(known - present), decision, now_s, ago_s)
        for replica_id in sorted(joined):
            does = "heals to" if replica_id in healing else "is at"
            does = "follows from" if replica_id in following else does
            text = f"joined: {does} step {decision.step}; {_replicas(decision)} train"
            self._log("joined", replica_id, decision.step, text)

    def log_heal(self, decision: Decision, length_s: float, source: str) -> None:
        """Log that this replica has healed. At step 0, when replicas receive the initial state, log nothing.

        Args:
            decision: The decision of the quorum in which this replica healed.
            length_s: Seconds since the replica asked for a quorum.
            source: The replicas that served the state, as text.
        """
        if decision.step == 0:
            return
        self._participant.metrics.add("recovery_seconds_total", by=length_s)
        sources = escape_peer_text(source, max_characters=_MAX_ID)
        text = f"healed to step {decision.step} in {length_s:.1f} s, from {sources}"
        self._log("healed", self._participant.membership.replica_id, decision.step, text, length_s)

    def recent(self) -> Callable[[], tuple[MembershipChange, ...]]:
        """Return a function that returns the latest changes, oldest first. The function keeps no replica alive."""
        changes = self._changes
        return lambda: tuple(changes.copy())

    def _log_departures(self, left: list[str], decision: Decision, now_s: float, ago_s: float) -> None:
        steps, cost, standstill_s = self._participant.state.steps, "", 0.0
        # A replica that is behind cannot know how long the other replicas stood still.
        if isinstance(decision.role, UpToDate) and steps.num_committed:
            refused = list(takewhile(lambda step: not step.is_committed, reversed(steps.recent())))
            # Since the last commit, count only attempts at a step: between steps the loop may do other work.
            standstill_s = now_s - steps.began_s + sum(step.period_s for step in refused)
            lost = f", {len(refused)} attempted step{'s' * (len(refused) != 1)} lost" if refused else ""
            cost = f"all stood still for {standstill_s:.1f} s{lost}; "
        self._participant.metrics.add("departures_total", by=len(left))
        self._participant.metrics.add("standstill_seconds_total", by=standstill_s)
        is_alone = len(decision.group_members) == 1
        for replica_id in left:
            text = f"left: {cost}last in a quorum {ago_s:.1f} s ago; {_replicas(decision)} train{'s' * is_alone} now"
            self._log("left", replica_id, decision.step, text, standstill_s)

    def _log(self, kind: Change, replica_id: str, step: int, text: str, length_s: float = 0.0) -> None:
        participant = self._participant
        subject = escape_peer_text(replica_id, max_characters=_MAX_ID)
        self._changes.append(
            MembershipChange(
                unix_s=datetime.now(timezone.utc).timestamp(),
                kind=kind,
                replica_id=subject,
                step=step,
                length_s=length_s,
                text=text[:_MAX_TEXT],
            )
        )
        level = logging.INFO if participant.membership.group_rank else logging.WARNING
        logger.log(level, "%s: %s%s", participant.name, "" if kind == "healed" else f"replica {subject} ", text)


def _replicas(decision: Decision) -> str:
    count = len(decision.group_members)
    return f"{count} replica{'s' * (count != 1)}"


def begin_heal_record(participant: Participant, began_s: float, *, refusal: str) -> None:
    """Begin the record of a heal, or continue it.

    Args:
        participant: This replica.
        began_s: When the replica began to wait for the quorum, by the monotonic clock.
        refusal: Why this replica does not follow the others instead; may be empty.
    """
    transport, membership = participant.replica.transport, participant.membership
    if participant.healing is not None:
        participant.healing.enter()
    elif transport is not None:
        participant.healing = transport.recorder.begin(
            "heal",
            replica=membership.replica_id,
            group_rank=membership.group_rank,
            phase="quorum",
            began_s=began_s,
        )
        if refusal:
            participant.healing.note(replay=f"not used: {refusal}")


def end_heal_record(participant: Participant, error: BaseException) -> None:
    """End the record of a heal that failed."""
    healing, participant.healing = participant.healing, None
    if healing is not None:
        healing.end("failed", error=error)


def loop_status(participant: Participant) -> ManagerStatus:
    """Return the status of a manager in a quorum, for ``/state``. Any thread may call it."""
    state, membership, current = participant.state, participant.membership, participant.round
    decision, report = current.decision if current is not None else None, membership.last_report
    activity = _activity(participant)
    return replace(
        state.status(),
        replica_id=membership.replica_id,
        group_rank=membership.group_rank,
        activity=activity,
        activity_s=time.monotonic() - state.steps.began_s if activity != "idle" else 0.0,
        quorum=str(group_number(decision.group)) if decision is not None else "",
        members=tuple(
            MemberStatus(replica_id=member.replica_id, step=member.step, addresses=member.addresses)
            for member in membership.members
        ),
        num_participants=decision.num_participants if decision is not None else 0,
        lighthouse=membership.lighthouse,
        is_lighthouse_lost=membership.is_lighthouse_lost(),
        rules=report.rules if report is not None else (),
        structure=report.structure if report is not None else (),
        store_address=report.store_address if report is not None else "",
    )


def _activity(participant: Participant) -> Activity:
    current, steps = participant.round, participant.state.steps
    if current is None:
        return "idle"
    if participant.healing is not None:
        return "healing"
    is_new = not steps.num_committed
    if not current.quorum.done() and (is_new or time.monotonic() - steps.began_s > _QUICK_S):
        return "waiting"
    decision = current.decision
    if decision is not None and isinstance(decision.role, (StandsBy, DoesNotFit)):
        return "waiting"
    return "training"
