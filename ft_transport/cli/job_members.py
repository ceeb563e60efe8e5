"""Finds the replicas of a job: through its Lighthouse, or through one of its processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ft_transport.cli.job_state import KnownJob, KnownMember
from ft_transport.errors import TransportError
from ft_transport.http.client.rate_probe import Connect, ask_state
from ft_transport.http.peer_address import PeerAddress
from ft_transport.telemetry.process_state import ManagerStatus, MemberStatus, TransportStatus
from manager.quorum.lighthouse import name_of
from manager.quorum.lighthouse_status import LighthouseStatus, read_status

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
        """Asks the process, unless the address turned out to be that of a Lighthouse, and then the Lighthouse."""
        if not self._is_lighthouse:
            self._ask_process()
        status = read_status(self._lighthouse, _STATUS_S) if self._lighthouse else None
        if status is not None and status.reason and self._lighthouse == self._address:
            self._is_lighthouse = True
        return job_of(self._lighthouse, status, self._members, self._alone)

    def _ask_process(self) -> None:
        try:
            told = ask_state(self._address, self._connect, _STATE_S)
        except TransportError:
            return
        manager = told.manager if told.manager is not None else ManagerStatus()
        self._lighthouse, self._members = manager.lighthouse, manager.members
        transport = told.transport if told.transport is not None else TransportStatus()
        name = manager.replica_id or transport.replica
        self._alone = (KnownMember(name=name_of(name) or "the process", replica_id=name, addresses=(self._address,)),)


def job_of(
    lighthouse: str,
    status: LighthouseStatus | None,
    members: Sequence[MemberStatus],
    alone: tuple[KnownMember, ...] = (),
) -> KnownJob:
    """Joins what the Lighthouse's page says with the members of a quorum.

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
