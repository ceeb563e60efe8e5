"""A job as a whole, as one of its processes or ``ft-transport top`` sees it: values, without a clock or a network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ft_transport.telemetry.record import Record
from ft_transport.telemetry.told import VERSION, ToldChange, ToldError, ToldState

Presence: TypeAlias = Literal["here", "silent", "gone", "coming"]
"""``here``: it answers. ``silent``: it does not, and is still counted on. ``gone``: it does not, and nobody counts on
it. ``coming``: the Lighthouse hears it, and nobody has told yet where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownMember:
    """A replica that the quorum or the Lighthouse knows.

    Attributes:
        name: What stays when it is started again.
        replica_id: Unique to one start of it.
        addresses: Where each of its ranks serves its state; empty where that is not known.
        step: The committed step that it held in the last quorum; ``None`` where it has not been in one.
        silent_s: For how long the Lighthouse has not heard it, in seconds; ``None`` if it has.
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
        status: What it says of the quorum; empty if it says nothing.
        is_lighthouse_read: Whether its page could be read.
    """

    members: tuple[KnownMember, ...] = ()
    lighthouse: str = ""
    status: str = ""
    is_lighthouse_read: bool = False


FindJob: TypeAlias = Callable[[], KnownJob]
"""Finds out who belongs to the job; may take a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProcess:
    """One rank of one replica.

    Attributes:
        name: See `KnownMember`.
        replica_id: See `KnownMember`.
        group_rank: Which rank of the replica.
        address: Where it was asked; empty where that is not known.
        presence: Whether it answers.
        since_s: For how long it has been so, in seconds, as far as anybody has looked.
        error: Why it does not answer; empty if it does.
        step: What is known of its step without an answer.
        told: What it has told last, without what `JobState` has; ``None`` if it never has.
    """

    name: str
    replica_id: str
    group_rank: int = 0
    address: str = ""
    presence: Presence = "coming"
    since_s: float = 0.0
    error: str = ""
    step: int | None = None
    told: ToldState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A record, and whose it is; its begin is by the clock of who looks."""

    name: str
    group_rank: int
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class JobError:
    """An error, and whose it is; its time is by the clock of who looks."""

    name: str
    group_rank: int
    error: ToldError


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """The job at one moment.

    Attributes:
        version: Of this form.
        unix_s: The clock of who looks.
        took_s: How long asking all of them has taken, in seconds.
        lighthouse: Its address; empty if there is none.
        status: What it says of the quorum.
        is_lighthouse_read: Whether its page could be read.
        processes: By name and rank.
        num_left_out: So many more processes were not asked, because there are too many.
        records: The last ones of all, the newest at the end.
        errors: The last ones of all, the newest at the end.
        changes: The last changes of membership, each once, the newest at the end; times are by the clock of who looks.
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
    changes: tuple[ToldChange, ...] = ()
