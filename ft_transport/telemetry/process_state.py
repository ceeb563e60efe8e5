"""The format of ``/state``: a JSON object with the state of a process, as `ProcessStatus.state` returns it.

The keys of the object are the attributes of `ProcessState`. ``version`` increases when the meaning of a key changes.
Readers ignore unknown keys and accept missing keys, because a process of another version sends other keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

import msgspec

from ft_transport.errors import PeerProtocolError
from ft_transport.runtime.decoding import DECODE_ERRORS
from ft_transport.telemetry.record import Number, Phase, Record

VERSION: Final = 1
NUM_RECORDS: Final = 20
NUM_STEPS: Final = 60
NUM_CHANGES: Final = 50
_MAX_PHASES: Final = 60
_MAX_PARTS: Final = 20
_MAX_TEXT: Final = 400

Activity: TypeAlias = Literal["training", "healing", "waiting", "idle"]
"""``training``: the replica takes part in the current step. ``healing``: the replica receives the state before
it takes part. ``waiting``: the replica waits for a quorum or for other replicas. ``idle``: training has not begun, or
the replica has no quorum."""

Change: TypeAlias = Literal["left", "joined", "healed"]
"""``left`` and ``joined``: another replica left or joined. ``healed``: the replica that reports the change healed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotStatus:
    """A snapshot that the transport serves.

    Attributes:
        step: Committed step of the state.
        num_bytes: Size of the snapshot.
        num_readers: Number of requests that read the snapshot now.
    """

    step: Number
    num_bytes: Number
    num_readers: Number = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStatus:
    """A running or recently ended transfer between this process and another process.

    Attributes:
        peer: Address of the other process, as the kernel or the job names it.
        replica: Replica name that the other process has sent; empty if it sent none.
        role: Role of the sender, ``source`` or ``relay``; ``same_host`` if the receiver reads the sender's memory.
        step: Step of the state; ``None`` if it is unknown.
        num_bytes: Bytes that were transferred so far.
        length_s: Seconds from the first request until now, or until the end of the last request.
        bytes_per_s: Throughput over about the last second, or over the whole transfer in the first report.
        is_running: Whether a request is in progress.
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
        server: Random id of the server, new at each start.
        replica: Name of the replica.
        address: URL of the server for peers.
        snapshots: Snapshots that the server offers, oldest first.
        sends: Transfers from this process to receivers.
        receives: Transfers from peers to this process.
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
        replica_id: Id of the member.
        step: Committed step of the member when it requested the quorum; -1 without a committed step.
        addresses: URLs at which the member's ranks serve their states, in the order of ranks.
    """

    replica_id: str
    step: Number
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderStatus:
    """A section of code that holds the state lock.

    Attributes:
        kind: Kind of the lock: ``read`` or ``write``.
        what: Purpose of the section.
        age_s: Time since the section acquired the lock, in seconds.
    """

    kind: str
    what: str
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LockStatus:
    """The state lock of a manager.

    Attributes:
        holders: Sections that hold the lock, oldest first.
        num_waits: Number of times that a thread had to wait for the lock.
        waited_s: Sum of those waits, in seconds.
        longest_wait_s: Longest wait, in seconds.
    """

    holders: tuple[HolderStatus, ...] = ()
    num_waits: Number = 0
    waited_s: float = 0.0
    longest_wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStatus:
    """An attempted step. It begins at its step boundary, before ``forward``.

    Attributes:
        step: Committed step of the state when the attempt began.
        length_s: Seconds from the step boundary to the commit or refusal.
        period_s: Seconds from the step boundary to the next step boundary; 0 before the next step boundary.
        is_committed: Whether the step was committed.
        num_participants: Number of replicas that took part.
        cause: Why the step was not committed; empty for a committed step.
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
        replica_id: Id of the replica, new at each start; empty before the first quorum.
        group_rank: Rank of this process in its replica.
        activity: Current activity of the replica.
        activity_s: Duration of the activity so far, in seconds; 0 if it is unknown.
        step: Committed step of the state.
        batches: Total number of batches that the replicas have trained on, up to this state.
        partial: Why the state is a mix of several steps; empty if it is the state of one step.
        quorum: Name of the last quorum's process group.
        members: Members of the last quorum.
        num_participants: Number of members that contribute gradients.
        lighthouse: Address of the Lighthouse.
        is_lighthouse_lost: Whether the Lighthouse has been out of reach since the last quorum; always false on ranks
            other than 0.
        lock: The state lock.
        steps: The last attempted steps, the newest at the end.
        num_committed: Number of steps that were committed since the start.
        num_refused: Number of steps that were attempted and not committed since the start.
        rules: Settings that all replicas must share; empty before the first quorum, and on ranks other than 0.
        structure: Name and digest of each part of the replica's state; empty whenever ``rules`` is empty.
        store_address: Address of the store in which the replica describes its state; empty whenever ``rules`` is empty.
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
class KeptStatus:
    """The states that the keeper of a process holds.

    Attributes:
        step: Newest kept step of this process's own state; ``None`` without one.
        age_s: Time since the keeper received it, in seconds.
        num_bytes: Size of all kept states.
        partners: Ranks on other hosts that copy this rank's state.
        copied_ranks: Ranks of whose states this process has copies.
        copied_step: Newest step of these copies; ``None`` without one.
    """

    step: Number | None = None
    age_s: float = 0.0
    num_bytes: Number = 0
    partners: tuple[Number, ...] = ()
    copied_ranks: tuple[Number, ...] = ()
    copied_step: Number | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipChange:
    """A change of membership, as one replica observed it.

    Attributes:
        unix_s: Time of the observation, in seconds since 1970.
        kind: Kind of the change.
        replica_id: Id of the replica that left, joined or healed.
        step: Committed step of the quorum that showed the change.
        length_s: For ``left``, seconds without a commit before the departure was detected. For ``healed``, duration of
            the heal in seconds. Otherwise 0.
        text: Description of the change, without the name of the replica.
    """

    unix_s: float
    kind: Change
    replica_id: str
    step: Number
    length_s: float = 0.0
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorStatus:
    """A recent error of the process.

    Attributes:
        unix_s: Time of the error, in seconds since 1970.
        about: The peer that the error concerns, or the replica and its step.
        text: Message of the error.
        count: Number of times that the error occurred in a row.
    """

    unix_s: float
    about: str
    text: str
    count: Number = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """The state of a process, as the response to ``/state`` contains it.

    Attributes:
        version: Version of this format.
        unix_s: Time of the process's clock, in seconds since 1970.
        transport: State of the transport.
        manager: State of the manager; ``None`` if the process has no manager.
        kept: States that outlive the process; ``None`` if it keeps none.
        records: Records of the last operations that have ended, the newest at the end.
        running: Records of running operations, with the outcome ``running``.
        errors: The last errors, the newest at the end.
        changes: The last changes of membership, the newest at the end.
    """

    version: Number = VERSION
    unix_s: float = 0.0
    transport: TransportStatus | None = None
    manager: ManagerStatus | None = None
    kept: KeptStatus | None = None
    records: tuple[Record, ...] = ()
    running: tuple[Record, ...] = ()
    errors: tuple[ErrorStatus, ...] = ()
    changes: tuple[MembershipChange, ...] = ()


_state_decoder: Final = msgspec.json.Decoder(ProcessState)


def decode_state(body: bytes | bytearray) -> ProcessState:
    """Decode the body of a response to ``/state``.

    Raises:
        PeerProtocolError: The body does not have the format of this module.
    """
    try:
        return _state_decoder.decode(body)
    except DECODE_ERRORS as error:
        raise PeerProtocolError(f"expected the state of a process, got something else: {error}") from error


def shortened(record: Record) -> Record:
    """Return a record of bounded size: the first phases and transfers, the last retries, truncated texts, and no notes.

    A phase named ``others`` replaces the phases that are left out.
    """
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
