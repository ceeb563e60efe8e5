"""Who belongs to the job, for who watches it: the members of the last quorum, and what the Lighthouse's page says."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Final

from ft_transport.telemetry.job import FindJob, KnownJob, KnownMember
from manager.quorum.decision import Member
from manager.quorum.lighthouse import name_of
from manager.quorum.lighthouse_status import LighthouseStatus, read_status
from manager.quorum.membership import Membership

_STATUS_S: Final = 0.5
_MAX_ADDRESSES: Final = 64


def known_job(lighthouse: str, members: Sequence[Member] = ()) -> KnownJob:
    """Ask a Lighthouse who is there, and add the members of a quorum. Takes half a second at most.

    Args:
        lighthouse: Its address; empty if there is none.
        members: Of a quorum of this process, if it was in one.
    """
    status = read_status(lighthouse, _STATUS_S) if lighthouse else None
    return job_of(lighthouse, status, members)


def job_of(lighthouse: str, status: LighthouseStatus | None, members: Sequence[Member]) -> KnownJob:
    """What is known of the job. What nobody has proved are the addresses that only the page has."""
    addresses = {each.replica_id: each.addresses for each in status.members} if status is not None else {}
    steps = {each.replica_id: each.step for each in status.members} if status is not None else {}
    addresses.update({each.replica_id: each.addresses for each in members})
    steps.update({each.replica_id: each.step for each in members if each.replica_id not in steps})
    silent_s = dict(status.silent) if status is not None else {}
    alive = status.alive if status is not None else ()
    names = dict.fromkeys([*addresses, *alive, *silent_s])
    return KnownJob(
        members=tuple(
            KnownMember(
                name=name_of(replica_id),
                replica_id=replica_id,
                addresses=addresses.get(replica_id, ())[:_MAX_ADDRESSES],
                step=steps.get(replica_id),
                silent_s=silent_s.get(replica_id),
            )
            for replica_id in names
        ),
        lighthouse=lighthouse,
        status=status.reason if status is not None else "",
        is_lighthouse_read=status is not None,
    )


def finding_job(membership: Membership) -> FindJob:
    """What says who belongs to the job of ``membership``, for as long as somebody else keeps that."""
    found = weakref.ref(membership)

    def find() -> KnownJob:
        present = found()
        return known_job(present.lighthouse, present.members) if present is not None else KnownJob()

    return find
