"""Lets a newcomer find out whether the running replicas would refuse it, before its first request for a quorum.

A replica cannot leave the Lighthouse: after a replica's first request the Lighthouse waits for it until its heartbeats
expire. So a newcomer that cannot load the others' state, or has other rules, would stop them for ``heartbeat_timeout``
at each of its starts. Therefore it first asks the running replicas for their structure and rules, and runs the
quorum's decision on the answers.

The Lighthouse's status page names these replicas; it is not authenticated. Each answer arrives through a connection on
which both sides have proved the job token, if the job has one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final, TypeAlias

from ft_transport.errors import PeerAuthenticationError, TransportError
from ft_transport.keys import TOKEN_VARIABLE
from ft_transport.runtime.handler_safety import SafeExecutor
from ft_transport.telemetry.process_state import ProcessState
from manager.errors import QuorumError
from manager.quorum.decision import DoesNotFit, Rules, decide
from manager.quorum.lighthouse_status import ToldMember
from manager.quorum.reports import Member

logger = logging.getLogger(__name__)

AskState: TypeAlias = Callable[[str, timedelta], ProcessState]

_MAX_ASKED: Final = 8
_ANSWERING: Final = timedelta(seconds=1)
_MAX_SHOWN_CHARACTERS: Final = 100


def refusing_members(
    own: Member, running: Sequence[ToldMember], rules: Rules, ask: AskState, *, has_token: bool
) -> tuple[Member, ...]:
    """Return the members of a quorum that would refuse ``own``; empty if it may ask for a quorum.

    Replicas that do not answer are left out; the real quorum decides about them. Takes `_ANSWERING` at most.

    Args:
        own: This replica's report.
        running: The running replicas, from the Lighthouse's status page.
        rules: This replica's rules.
        ask: Asks a replica for its state report.
        has_token: Whether this replica has a job token.

    Raises:
        QuorumError: The members' settings differ, or all of them reject this replica, which has no token.
    """
    # Only replicas ahead of this one: otherwise this replica's structure may be the one that counts.
    ahead = sorted((each for each in running if each.step > own.step and each.addresses), key=lambda each: -each.step)
    if not ahead:
        return ()
    asked = ahead[:_MAX_ASKED]
    with SafeExecutor(len(asked), "ft-transport-foresight") as pool:
        answers = list(pool.map(lambda each: _asked(each, ask), asked))
    # With a token, forged addresses on the page must not keep a replica out: the quorum alone shows all members.
    is_stranger = not has_token and all(isinstance(answer, PeerAuthenticationError) for answer in answers)
    if is_stranger and len(asked) == len(ahead):
        shown = ", ".join(repr(each.replica_id[:_MAX_SHOWN_CHARACTERS]) for each in asked)
        raise QuorumError(
            "expected replicas with the same job token and certificates; this replica has no token "
            f"({TOKEN_VARIABLE}), and those that train do not let it in: {shown}: {answers[0]}"
        )
    members = (*(answer for answer in answers if isinstance(answer, Member)), own)
    if len(members) == 1:
        return ()
    is_refused = isinstance(decide(members, own.replica_id, rules).role, DoesNotFit)
    return members if is_refused else ()


def _asked(named: ToldMember, ask: AskState) -> Member | Exception | None:
    """Return a replica's report as a member of a quorum, an error, or ``None`` if another replica answers."""
    try:
        told = ask(named.addresses[0], _ANSWERING).manager
    except (TransportError, OSError) as error:
        logger.debug("replica %s does not tell what it looks like: %s", named.replica_id, error)
        return error
    if told is None or told.replica_id != named.replica_id or not told.rules:
        return None
    return Member(
        replica_id=named.replica_id,
        step=named.step,
        lineage="",
        store_address=told.store_address,
        addresses=named.addresses,
        rules=told.rules,
        structure=told.structure,
    )
