"""Collects the state of a job for ``ft-transport top``: requests ``/state`` of all processes, and merges the responses.

This module contacts only addresses that a quorum or the Lighthouse names, never an address in a browser's request. If
the job has a token, each process must first prove that it knows the token.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from ft_transport.errors import PeerProtocolError, TransportError
from ft_transport.http.client.peer_status import Connect, ask_state
from ft_transport.runtime.threads import SafeExecutor
from ft_transport.telemetry.process_state import (
    VERSION,
    ErrorStatus,
    MembershipChange,
    ProcessState,
    shortened,
)
from ft_transport.telemetry.record import Record, encode_json, now_unix_s
from manager.quorum.members import name_of

Presence: TypeAlias = Literal["here", "silent", "gone", "coming"]
"""State of a process in ``ft-transport top``.

``here``: the process responds. ``silent``: it does not respond, but it is in the quorum or sends heartbeats. ``gone``:
it does not respond, and neither is in the quorum nor sends heartbeats. ``coming``: it sends heartbeats, but its address
is still unknown.
"""

MAX_PROCESSES: Final = 512
_WITHIN_S: Final = 1.0
_ROUND_S: Final = 3.0
"""Time limit of one collection, over all processes."""
_FRESH_S: Final = 0.5
_MAX_AT_ONCE: Final = 32
_MAX_KEPT_BYTES: Final = 128 << 10
"""Limit of the encoded state of one process, without its records and errors; several times the usual size."""
_NUM_FLOWS: Final = 64
_FORGET_S: Final = 600.0
"""Seconds until a replica that left is no longer shown. A replica with the same name replaces it earlier."""
_NUM_LAST: Final = 30
"""How many of the latest records, errors, membership changes and steps are shown."""
_MAX_TEXT: Final = 300
_LATE: Final = ""
"""Result for a process that was not asked, because the time limit of the collection had passed."""
_Key: TypeAlias = tuple[str, int]
"""The id of a replica, and the group rank of a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownMember:
    """A replica that the quorum or the Lighthouse names.

    Attributes:
        name: Configured name of the replica, the same after a restart.
        replica_id: Id of one run of the replica, different after a restart.
        addresses: Addresses of the ranks of the replica, in the order of ranks; empty if they are unknown.
        step: The committed step of the replica in the last quorum; ``None`` if it has not been in a quorum.
        silent_s: Seconds since the last heartbeat, if the heartbeat is overdue; otherwise ``None``.
    """

    name: str
    replica_id: str
    addresses: tuple[str, ...] = ()
    step: int | None = None
    silent_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownJob:
    """The replicas of a job, and the state of its Lighthouse.

    Attributes:
        members: All known replicas.
        lighthouse: Address of the Lighthouse; empty if the job has none.
        status: The Lighthouse's text about the quorum; empty if there is none.
        is_lighthouse_read: Whether the Lighthouse's page could be read.
    """

    members: tuple[KnownMember, ...] = ()
    lighthouse: str = ""
    status: str = ""
    is_lighthouse_read: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProcess:
    """The process of one rank of one replica.

    Attributes:
        name: As in `KnownMember`.
        replica_id: As in `KnownMember`.
        group_rank: Rank of the process within the replica.
        address: Address of the process; empty if it is unknown.
        presence: Whether the process responds; see `Presence`.
        since_s: Seconds since ``presence`` changed, or since the first collection.
        error: Why the process does not respond; empty if it responds.
        step: The step of the replica in the last quorum.
        state: The last response, without the lists that `JobState` merges; ``None`` before the first response.
    """

    name: str
    replica_id: str
    group_rank: int = 0
    address: str = ""
    presence: Presence = "coming"
    since_s: float = 0.0
    error: str = ""
    step: int | None = None
    state: ProcessState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A record from one process of the job, with its times converted to the clock of the collecting process."""

    name: str
    group_rank: int
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class JobError:
    """An error from one process of the job, with its time converted to the clock of the collecting process."""

    name: str
    group_rank: int
    error: ErrorStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """The state of a job at one moment.

    Attributes:
        version: Version of this format.
        unix_s: Time of the collection, by the clock of the collecting process.
        took_s: Length of the collection, in seconds.
        lighthouse: Address of the Lighthouse; empty if the job has none.
        status: The Lighthouse's text about the quorum.
        is_lighthouse_read: Whether the Lighthouse's page could be read.
        processes: All processes, sorted by name and rank.
        num_left_out: Number of processes that were not asked, because the job has too many.
        records: The latest records of all processes, the newest at the end.
        errors: The latest errors of all processes, the newest at the end.
        changes: The latest changes of membership without duplicates, the newest at the end.
    """

    version: int = VERSION
    unix_s: float = 0.0
    took_s: float = 0.0
    lighthouse: str = ""
    status: str = ""
    is_lighthouse_read: bool = False
    processes: tuple[JobProcess, ...] = ()
    num_left_out: int = 0
    records: tuple[JobRecord, ...] = ()
    errors: tuple[JobError, ...] = ()
    changes: tuple[MembershipChange, ...] = ()


@dataclass(slots=True)
class _Seen:
    """The data about one process that is stored between collections.

    Attributes:
        process: The process, with the complete ``state`` of its last response.
        since_s: Time of the last change of its presence, by the clock of `JobWatch`.
        ahead_s: Seconds by which the clock of this host is ahead of the process's clock.
    """

    process: JobProcess
    since_s: float
    ahead_s: float = 0.0


class JobWatch:
    """Collects the state of a job on request. Thread-safe.

    Args:
        find: Function that finds the replicas of the job, in one or two seconds.
        connect: Function that connects to a process, with the job token.
        clock: Returns monotonic time, in seconds.
    """

    def __init__(
        self, find: Callable[[], KnownJob], connect: Connect, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._find = find
        self._connect = connect
        self._clock = clock
        self._seen: dict[_Key, _Seen] = {}
        self._num_looks = 0
        self._last: tuple[float, JobState] | None = None
        self._mutex = threading.Lock()

    def look(self) -> JobState:
        """Collect the state now, in a few seconds at most. If another thread is collecting, wait for it first."""
        with self._mutex:
            return self._look()

    def recent(self) -> JobState:
        """Return the last collected state, or collect a new one if the last one is too old.

        A state is too old after half a second, or after the time that its collection took if that is longer. So, for
        any number of browsers, collections begin at most twice a second and take at most half of the time.
        """
        with self._mutex:
            if self._last is None or self._clock() - self._last[0] > max(_FRESH_S, self._last[1].took_s):
                job = self._look()
                self._last = self._clock(), job
            return self._last[1]

    def _look(self) -> JobState:
        began_s = self._clock()
        job = self._find()
        num_left_out = self._note_members(job)
        answers = self._ask_all()
        now_s = self._clock()
        known = {member.replica_id for member in job.members}
        expected = known - {member.replica_id for member in job.members if member.silent_s is not None}
        for key, seen in self._seen.items():
            _update(seen, answers.get(key), now_s, is_expected=key[0] in expected)
        self._forget_the_past(now_s, known)
        return self._state(job, now_s, took_s=now_s - began_s, num_left_out=num_left_out)

    def _note_members(self, job: KnownJob) -> int:
        """Add new members and update known ones. Return the number of processes beyond `MAX_PROCESSES`."""
        now_s, num_left_out = self._clock(), 0
        for member in job.members:
            for rank, address in enumerate(member.addresses or ("",)):
                seen = self._seen.get((member.replica_id, rank))
                if seen is None:
                    if member.silent_s is not None and not address:
                        continue  # The replica left before the first collection.
                    if len(self._seen) >= MAX_PROCESSES:
                        num_left_out += 1
                        continue
                    new = JobProcess(name=member.name, replica_id=member.replica_id, group_rank=rank)
                    seen = self._seen[member.replica_id, rank] = _Seen(new, now_s)
                seen.process = replace(
                    seen.process,
                    address=address or seen.process.address,
                    step=member.step if member.step is not None else seen.process.step,
                )
        return num_left_out

    def _ask_all(self) -> dict[_Key, ProcessState | str]:
        """Request the state of all processes. Return the state, an error message or `_LATE` for each process."""
        keys = [key for key, seen in self._seen.items() if seen.process.address]
        if not keys:
            return {}
        # Begin with a different process each time, so that the time limit does not always hit the same processes.
        self._num_looks += 1
        first = self._num_looks * _MAX_AT_ONCE % len(keys)
        until_s = self._clock() + _ROUND_S
        with SafeExecutor(min(_MAX_AT_ONCE, len(keys)), "ft-transport-watch") as pool:
            asking = {
                key: pool.submit(self._ask, self._seen[key].process.address, until_s)
                for key in keys[first:] + keys[:first]
            }
        return {key: future.result() for key, future in asking.items()}

    def _ask(self, address: str, until_s: float) -> ProcessState | str:
        within_s = min(_WITHIN_S, until_s - self._clock())
        if within_s <= 0:
            return _LATE
        try:
            return _bounded(ask_state(address, self._connect, within_s), address)
        except (TransportError, OSError) as error:
            return f"{type(error).__name__}: {error}"[:_MAX_TEXT]

    def _forget_the_past(self, now_s: float, known: set[str]) -> None:
        """Remove replicas that left long ago, and those that a later run with the same name has replaced."""
        rows = [seen.process for seen in self._seen.values()]
        there = {
            (row.name, row.group_rank)
            for row in rows
            if row.presence in ("here", "coming") or (row.presence == "silent" and row.replica_id in known)
        }

        def is_past(seen: _Seen) -> bool:
            row = seen.process
            if row.presence == "gone":
                return (row.name, row.group_rank) in there or now_s - seen.since_s > _FORGET_S
            return row.presence == "coming" and row.replica_id not in known

        self._seen = {key: seen for key, seen in self._seen.items() if not is_past(seen)}

    def _state(self, job: KnownJob, now_s: float, *, took_s: float, num_left_out: int) -> JobState:
        processes: list[JobProcess] = []
        records: list[JobRecord] = []
        errors: list[JobError] = []
        changes: dict[tuple[str, str, float], MembershipChange] = {}
        for seen in sorted(
            self._seen.values(), key=lambda seen: (seen.process.name, seen.process.group_rank, seen.process.replica_id)
        ):
            row, state, ahead_s = seen.process, seen.process.state, seen.ahead_s
            if state is not None:
                for record in state.records:
                    shifted = replace(record, begun_unix_s=record.begun_unix_s + ahead_s)
                    records.append(JobRecord(name=row.name, group_rank=row.group_rank, record=shifted))
                for error in state.errors:
                    late = replace(error, unix_s=error.unix_s + ahead_s)
                    errors.append(JobError(name=row.name, group_rank=row.group_rank, error=late))
                for change in state.changes:
                    # All remaining replicas report the same change: keep the earliest report.
                    moved = replace(change, unix_s=change.unix_s + ahead_s)
                    key = change.kind, change.replica_id, change.step
                    changes[key] = min(changes.get(key, moved), moved, key=lambda each: each.unix_s)
                state = replace(state, records=(), errors=(), changes=())
            processes.append(replace(row, since_s=now_s - seen.since_s, state=state))
        ordered = sorted(changes.values(), key=lambda each: each.unix_s)
        processes += _departed(ordered, {each.name for each in processes})
        records.sort(key=lambda each: each.record.begun_unix_s + each.record.length_s)
        errors.sort(key=lambda each: each.error.unix_s)
        return JobState(
            unix_s=now_unix_s(),
            took_s=took_s,
            lighthouse=job.lighthouse,
            status=job.status[:_MAX_TEXT],
            is_lighthouse_read=job.is_lighthouse_read,
            processes=tuple(processes),
            num_left_out=num_left_out,
            records=tuple(records[-_NUM_LAST:]),
            errors=tuple(errors[-_NUM_LAST:]),
            changes=tuple(ordered[-_NUM_LAST:]),
        )


def _update(seen: _Seen, answer: ProcessState | str | None, now_s: float, *, is_expected: bool) -> None:
    row = seen.process
    presence: Presence
    if answer is None:
        presence = "coming" if is_expected else "gone"
    elif answer == _LATE:
        return
    elif isinstance(answer, str):
        presence = "silent" if is_expected else "gone"
        row = replace(row, error=answer)
    else:
        presence = "here"
        row = replace(row, state=answer, error="")
        seen.ahead_s = now_unix_s() - answer.unix_s if answer.unix_s else 0.0
    # A silent process that is now gone has been absent since it became silent.
    if presence != row.presence and (presence, row.presence) != ("gone", "silent"):
        seen.since_s = now_s
    seen.process = replace(row, presence=presence)


def _departed(changes: Iterable[MembershipChange], names: set[str]) -> Iterator[JobProcess]:
    """Yield the replicas that left before the first collection, according to the remaining replicas.

    Args:
        changes: Changes of membership, sorted by time.
        names: Names of the replicas that were already found.
    """
    for name, change in {name_of(change.replica_id): change for change in changes}.items():
        since_s = now_unix_s() - change.unix_s
        if change.kind == "left" and name not in names and since_s < _FORGET_S:
            yield JobProcess(
                name=name, replica_id=change.replica_id, address="", presence="gone", since_s=since_s, step=change.step
            )


def _bounded(state: ProcessState, peer: str) -> ProcessState:
    """Return a state with shortened lists and texts, because each browser receives the states of all processes.

    Raises:
        PeerProtocolError: The shortened state is larger than `_MAX_KEPT_BYTES`.
    """
    manager, transport = state.manager, state.transport
    if manager is not None:
        manager = replace(manager, members=(), steps=manager.steps[-_NUM_LAST:], rules=(), structure=())
    if transport is not None:
        transport = replace(transport, sends=transport.sends[-_NUM_FLOWS:], receives=transport.receives[-_NUM_FLOWS:])
    kept = replace(
        state,
        manager=manager,
        transport=transport,
        running=tuple(shortened(replace(each, retries=each.retries[-8:])) for each in state.running[-8:]),
        records=tuple(shortened(record) for record in state.records[-_NUM_LAST:]),
        errors=state.errors[-_NUM_LAST:],
        changes=tuple(
            replace(each, replica_id=each.replica_id[:_MAX_TEXT], text=each.text[:_MAX_TEXT])
            for each in state.changes[-_NUM_LAST:]
        ),
    )
    num_bytes = len(encode_json(replace(kept, records=(), errors=())))
    if num_bytes > _MAX_KEPT_BYTES:
        raise PeerProtocolError(
            f"expected the state of a process in at most {_MAX_KEPT_BYTES} bytes, got {num_bytes} bytes", peer=peer
        )
    return kept
