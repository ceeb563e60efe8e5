"""What one process of a replica is about now: what ``GET /status`` answers, as JSON, and people look at.

Who reads it ignores keys that it does not know, and takes the defaults below for what is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from ft_transport.errors import RecordError
from ft_transport.telemetry.record import Record, Role

Activity: TypeAlias = Literal["serving", "training", "waiting", "healing", "stopped"]
Direction: TypeAlias = Literal["in", "out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What goes between this process and one peer now, or went until a moment ago.

    Attributes:
        peer: The replica if it says which it is, else its address.
        direction: ``in`` comes here.
        role: What the peer is to this process, or this process to the peer if ``out``.
        num_bytes: Since it began.
        bytes_per_s: Over the last second or so.
        length_s: Since it began, in seconds.
    """

    peer: str
    direction: Direction
    role: Role
    num_bytes: int
    bytes_per_s: float
    length_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotStatus:
    """A snapshot that is alive: its name, step, bytes, seconds since it was taken, and who reads it now."""

    name: str
    step: int
    num_bytes: int
    age_s: float
    num_readers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LockStatus:
    """Waits for the lock over the state, in seconds, since the process began.

    Attributes:
        num_writes: Times that the trainer took it to write.
        write_wait_s: That it waited for readers, in all.
        longest_write_wait_s: The longest of them.
        num_reads: Times that it was taken to read.
        read_hold_s: For how long, in all.
    """

    num_writes: int = 0
    write_wait_s: float = 0.0
    longest_write_wait_s: float = 0.0
    num_reads: int = 0
    read_hold_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Another replica as this one was last told: its name, step, and the URL of its process of the same rank."""

    replica: str
    step: int = 0
    url: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """See the module.

    Attributes:
        replica: How this replica calls itself; empty without a manager.
        group_rank: Of this process in its replica.
        activity: ``serving`` where there is no manager that could tell.
        step: The last that was committed; ``None`` before one is known.
        url: Where this process is reached by its peers.
        version: Of ft_transport.
        now_unix_s: When this was said, in seconds since 1970.
        up_s: How long the process serves, in seconds.
        quorum_id: Of the last quorum; 0 if there was none.
        num_committed: Steps committed since the process began.
        num_refused: Steps that were not.
        members: Of the last quorum, without this one.
        snapshots: That are alive, the newest at the end.
        traffic: Of now.
        lock: Its waits.
        records: The last ones to have ended, the newest at the end; 20 at most.
        errors: The last ones that were told, the newest at the end; 20 at most.
    """

    replica: str = ""
    group_rank: int = 0
    activity: Activity = "serving"
    step: int | None = None
    url: str = ""
    version: str = ""
    now_unix_s: float = 0.0
    up_s: float = 0.0
    quorum_id: int = 0
    num_committed: int = 0
    num_refused: int = 0
    members: tuple[Member, ...] = ()
    snapshots: tuple[SnapshotStatus, ...] = ()
    traffic: tuple[Traffic, ...] = ()
    lock: LockStatus = LockStatus()
    records: tuple[Record, ...] = ()
    errors: tuple[str, ...] = ()


def encode_status(status: Status) -> bytes:
    """One object of JSON."""
    return msgspec.json.encode(status)


def decode_status(body: bytes | str) -> Status:
    """The inverse of `encode_status`.

    Raises:
        RecordError: The body is no status.
    """
    try:
        return msgspec.json.decode(body, type=Status)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RecordError(f"expected a status in JSON, got something else: {error}") from error
