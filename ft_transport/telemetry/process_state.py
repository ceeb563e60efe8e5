"""The state of a process, as `ProcessStatus.state` returns and ``/state`` sends it: a JSON object.

Its keys are the attributes of `ProcessState`; ``version`` grows when one of them gets another meaning. Readers ignore
unknown keys and accept missing ones: a process of an older version sends fewer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

import msgspec

from ft_transport.errors import PeerProtocolError
from ft_transport.telemetry.record import Number, Phase, Record

VERSION: Final = 1
NUM_RECORDS: Final = 20
NUM_STEPS: Final = 60
NUM_CHANGES: Final = 50
_MAX_PHASES: Final = 60
_MAX_PARTS: Final = 20
_MAX_TEXT: Final = 400

Activity: TypeAlias = Literal["training", "healing", "waiting", "idle"]
"""``training``: takes part in the present step. ``healing``: receives the state first. ``waiting``: for a quorum, or
for other replicas. ``idle``: has not begun, or has no quorum."""

Change: TypeAlias = Literal["left", "joined", "healed"]
"""``left`` and ``joined``: another replica. ``healed``: the replica that reports the change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotStatus:
    """A snapshot that the transport serves.

    Attributes:
        step: The committed step of the state.
        num_bytes: Its size.
        num_readers: Requests that read it now.
    """

    step: Number
    num_bytes: Number
    num_readers: Number = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStatus:
    """A transfer between two processes, running or just ended.

    Attributes:
        peer: The address of the other process, as the system or the job names it.
        replica: The name that the other process gives itself; may be empty.
        role: The sender is a ``source``, a ``relay``, or on the ``same_host``, where the receiver reads its memory.
        step: Step of the state; ``None`` if it is unknown.
        num_bytes: Bytes so far.
        length_s: Since the first request, or until the last one ended, in seconds.
        bytes_per_s: Over the last second or so; at the first look over the whole transfer.
        is_running: Whether a request is under way.
    """

    peer: str
    replica: str = ""
    role: str = "source"
    step: Number | None = None
    num_bytes: Number = 0
    length_s: float = 0.0
    bytes_per_s: float = 0.0
    is_running: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportStatus:
    """The snapshots and transfers of a transport.

    Attributes:
        server: Random id, drawn when the server started.
        replica: The name of the replica.
        address: The URL for peers.
        snapshots: Its served snapshots, oldest first.
        sends: Transfers to receivers.
        receives: Transfers to this process, by peer.
    """

    server: str = ""
    replica: str = ""
    address: str = ""
    snapshots: tuple[SnapshotStatus, ...] = ()
    sends: tuple[TransferStatus, ...] = ()
    receives: tuple[TransferStatus, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """A member of the last quorum.

    Attributes:
        replica_id: Its id.
        step: Its committed step when it requested the quorum; -1 for none.
        addresses: The address at which each of its ranks serves its state.
    """

    replica_id: str
    step: Number
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderStatus:
    """A holder of the lock over the state.

    Attributes:
        kind: ``read`` or ``write``.
        what: The purpose.
        age_s: Time since it took the lock, in seconds.
    """

    kind: str
    what: str
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LockStatus:
    """The lock over the state.

    Attributes:
        holders: The oldest first.
        num_waits: How often a thread had to wait for it.
        waited_s: The sum of those waits, in seconds.
        longest_wait_s: The longest wait, in seconds.
    """

    holders: tuple[HolderStatus, ...] = ()
    num_waits: Number = 0
    waited_s: float = 0.0
    longest_wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStatus:
    """An attempted step.

    Attributes:
        step: The committed step that it began with.
        length_s: From its boundary to its commit, or to its refusal, in seconds.
        period_s: From its boundary to the next one, in seconds; 0 before that.
        is_committed: Whether the step was committed.
        num_participants: Number of replicas that took part.
        cause: Why the step was not committed; else empty.
    """

    step: Number
    length_s: float
    period_s: float = 0.0
    is_committed: bool = True
    num_participants: Number = 0
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerStatus:
    """The state of a manager.

    Attributes:
        replica_id: Unique to this start of the replica; empty without a quorum.
        group_rank: Rank of this process in its replica.
        activity: Its present activity.
        activity_s: Duration of the activity so far, in seconds; 0 if it is unknown.
        step: The committed step of the state.
        batches: Number of batches in that state, over all replicas.
        partial: Why the state is a mix of steps; else empty.
        quorum: Name of the last quorum's process group.
        members: Members of the last quorum.
        num_participants: Number of members that contribute.
        lighthouse: Its address.
        is_lighthouse_lost: Whether the Lighthouse could not be reached since the last quorum; known on rank 0 only.
        lock: The lock over the state.
        steps: The last steps, the newest at the end.
        num_committed: Number of steps committed since the start.
        num_refused: Number of attempted steps that were not.
        rules: The settings that all replicas share; empty before the first quorum, and on other ranks than the first.
        structure: Digests of the structure of the replica's state, by part; as ``rules``.
        store_address: The address of the store where the replica describes its state; as ``rules``.
    """

    replica_id: str = ""
    group_rank: Number = 0
    activity: Activity = "idle"
    activity_s: float = 0.0
    step: Number = 0
    batches: Number = 0
    partial: str = ""
    quorum: str = ""
    members: tuple[MemberStatus, ...] = ()
    num_participants: Number = 0
    lighthouse: str = ""
    is_lighthouse_lost: bool = False
    lock: LockStatus = field(default_factory=LockStatus)
    steps: tuple[StepStatus, ...] = ()
    num_committed: Number = 0
    num_refused: Number = 0
    rules: tuple[str, ...] = ()
    structure: tuple[tuple[str, str], ...] = ()
    store_address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipChange:
    """A change of membership, as one replica saw it.

    Attributes:
        unix_s: When, in seconds since 1970.
        kind: The kind of change.
        replica_id: The replica that left, joined or healed.
        step: The committed step of the quorum that found the change.
        length_s: How long no step was committed before a departure was found, or how long a heal took; else 0.
        text: The change in words, without the replica.
    """

    unix_s: float
    kind: Change
    replica_id: str
    step: Number
    length_s: float = 0.0
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorStatus:
    """An error.

    Attributes:
        unix_s: When, in seconds since 1970.
        about: A peer, or a replica and its step.
        text: The message.
        count: Number of times in a row.
    """

    unix_s: float
    about: str
    text: str
    count: Number = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """The state of a process; see the module.

    Attributes:
        version: Version of this form.
        unix_s: The clock of the process.
        transport: The state of its transport.
        manager: The state of its manager, if it has one.
        records: The records that ended last, the newest at the end.
        running: Records that have not ended, with the outcome ``running``.
        errors: The last errors, the newest at the end.
        changes: The last changes of membership, the newest at the end.
    """

    version: Number = VERSION
    unix_s: float = 0.0
    transport: TransportStatus | None = None
    manager: ManagerStatus | None = None
    records: tuple[Record, ...] = ()
    running: tuple[Record, ...] = ()
    errors: tuple[ErrorStatus, ...] = ()
    changes: tuple[MembershipChange, ...] = ()


_state_decoder: Final = msgspec.json.Decoder(ProcessState)


def decode_state(body: bytes | bytearray) -> ProcessState:
    """Decode the answer of ``/state``.

    Raises:
        PeerProtocolError: The answer has another form.
    """
    try:
        return _state_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerProtocolError(f"expected the state of a process, got something else: {error}") from error


def shortened(record: Record) -> Record:
    """Return a record of bounded size: its first phases and transfers, its last retries, and starts of long texts."""
    phases = record.phases
    if len(phases) > _MAX_PHASES:
        rest = phases[_MAX_PHASES:]
        others = Phase(name="others", start_s=rest[0].start_s, length_s=sum(each.length_s for each in rest))
        phases = (*phases[:_MAX_PHASES], others)
    return replace(
        record,
        replica=record.replica[:120],
        error=record.error[:_MAX_TEXT],
        phases=phases,
        transfers=record.transfers[:_MAX_PARTS],
        retries=tuple(replace(each, cause=each.cause[:_MAX_TEXT]) for each in record.retries[-_MAX_PARTS:]),
        notes={},
    )
