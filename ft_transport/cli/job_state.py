"""A whole job, as ``ft-transport top`` sees it: values, without a clock or a network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ft_transport.telemetry.process_state import VERSION, ErrorStatus, MembershipChange, ProcessState
from ft_transport.telemetry.record import Record

Presence: TypeAlias = Literal["here", "silent", "gone", "coming"]
"""``here``: it answers. ``silent``: it does not answer, and is a member of the quorum or has a heartbeat. ``gone``: it
does not answer, and is neither. ``coming``: it has a heartbeat, and its address is not known yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownMember:
    """A replica that the quorum or the Lighthouse knows.

    Attributes:
        name: Stays the same when the replica starts again.
        replica_id: Unique to one start of the replica.
        addresses: Where each of its ranks serves its state; empty where that is not known.
        step: The committed step that it held in the last quorum; ``None`` where it has not been in one.
        silent_s: Seconds since its last heartbeat, where that is too old; else ``None``.
    """

    name: str
    replica_id: str
    addresses: tuple[str, ...] = ()
    step: int | None = None
    silent_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownJob:
    """The replicas of a job.

    Attributes:
        members: All that are known.
        lighthouse: Its address; empty if there is none.
        status: Its report of the quorum; empty without one.
        is_lighthouse_read: Whether its page could be read.
    """

    members: tuple[KnownMember, ...] = ()
    lighthouse: str = ""
    status: str = ""
    is_lighthouse_read: bool = False


FindJob: TypeAlias = Callable[[], KnownJob]
"""Finds the replicas of the job; may take a second or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProcess:
    """One rank of one replica.

    Attributes:
        name: See `KnownMember`.
        replica_id: See `KnownMember`.
        group_rank: Which rank of the replica.
        address: Where it was asked; empty where that is not known.
        presence: Whether it answers.
        since_s: For how long, in seconds, counted from the first look.
        error: Why it does not answer; empty if it does.
        step: Its step in the last quorum.
        told: Its last answer, without the lists that `JobState` joins; ``None`` before the first one.
    """

    name: str
    replica_id: str
    group_rank: int = 0
    address: str = ""
    presence: Presence = "coming"
    since_s: float = 0.0
    error: str = ""
    step: int | None = None
    told: ProcessState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A record of one process; its times are by the clock of this process."""

    name: str
    group_rank: int
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class JobError:
    """An error of one process; its time is by the clock of this process."""

    name: str
    group_rank: int
    error: ErrorStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """The job at one moment.

    Attributes:
        version: Version of this format.
        unix_s: The clock of this process.
        took_s: How long the look took, in seconds.
        lighthouse: Its address; empty if there is none.
        status: Its report of the quorum.
        is_lighthouse_read: Whether its page could be read.
        processes: By name and rank.
        num_left_out: How many more processes were not asked, because there are too many.
        records: The last ones of all processes, the newest at the end.
        errors: The last ones of all processes, the newest at the end.
        changes: The last changes of membership, each once, the newest at the end.
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
