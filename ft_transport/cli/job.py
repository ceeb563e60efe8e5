"""A whole job as ``ft-transport top`` sees it: its state as values, and the finder of its replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from ft_transport.errors import TransportError
from ft_transport.http.client.rate_probe import Connect, ask_state
from ft_transport.http.peer_address import PeerAddress
from ft_transport.telemetry.process_state import (
    VERSION,
    ErrorStatus,
    ManagerStatus,
    MembershipChange,
    MemberStatus,
    ProcessState,
    TransportStatus,
)
from ft_transport.telemetry.record import Record
from manager.quorum.members import LighthouseStatus, name_of, read_status

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
        state: Its last answer, without the lists that `JobState` joins; ``None`` before the first one.
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


_STATUS_S: Final = 0.5
_STATE_S: Final = 1.0
_MAX_ADDRESSES: Final = 64


class JobFinder:
    """Finds the replicas again at each call, which takes a second or two. Not thread-safe.

    A process names its Lighthouse and the members of its last quorum. Both stay known after that process has exited.

    Args:
        address: ``host:port`` or URL of the Lighthouse, or of a process of the job.
        connect: Connects to a process.

    Raises:
        ConfigurationError: The address is of another form.
    """

    def __init__(self, address: str, connect: Connect) -> None:
        self._address = self._lighthouse = address if "://" in address else f"http://{address}"
        PeerAddress.from_url(self._address)
        self._connect = connect
        self._is_lighthouse = False
        self._members: tuple[MemberStatus, ...] = ()
        self._alone: tuple[KnownMember, ...] = ()

    def __call__(self) -> KnownJob:
        """Ask the process, unless the address turned out to be that of a Lighthouse, and then the Lighthouse."""
        if not self._is_lighthouse:
            self._ask_process()
        status = read_status(self._lighthouse, _STATUS_S) if self._lighthouse else None
        if status is not None and status.reason and self._lighthouse == self._address:
            self._is_lighthouse = True
        return job_of(self._lighthouse, status, self._members, self._alone)

    def _ask_process(self) -> None:
        try:
            state = ask_state(self._address, self._connect, _STATE_S)
        except TransportError:
            return
        manager = state.manager if state.manager is not None else ManagerStatus()
        self._lighthouse, self._members = manager.lighthouse, manager.members
        transport = state.transport if state.transport is not None else TransportStatus()
        name = manager.replica_id or transport.replica
        self._alone = (KnownMember(name=name_of(name) or "the process", replica_id=name, addresses=(self._address,)),)


def job_of(
    lighthouse: str,
    status: LighthouseStatus | None,
    members: Sequence[MemberStatus],
    alone: tuple[KnownMember, ...] = (),
) -> KnownJob:
    """Join the Lighthouse's page with the members of a quorum.

    Args:
        lighthouse: Its address; empty for a job without one.
        status: Its page's text; ``None`` if it cannot be read. The addresses there are not authenticated.
        members: The members of a process's last quorum.
        alone: A process that has been in no quorum.
    """
    page = status if status is not None else LighthouseStatus(reason="", num_asking=None, alive=(), silent=())
    addresses = {each.replica_id: each.addresses for each in page.members}
    addresses.update({each.replica_id: each.addresses for each in members})
    steps = {each.replica_id: each.step for each in members}
    steps.update({each.replica_id: each.step for each in page.members})
    silent_s = dict(page.silent)
    found = tuple(
        KnownMember(
            name=name_of(replica_id),
            replica_id=replica_id,
            addresses=addresses.get(replica_id, ())[:_MAX_ADDRESSES],
            step=steps.get(replica_id),
            silent_s=silent_s.get(replica_id),
        )
        for replica_id in dict.fromkeys([*addresses, *page.alive, *silent_s])
    )
    return KnownJob(
        members=found or alone, lighthouse=lighthouse, status=page.reason, is_lighthouse_read=status is not None
    )
