"""What a newcomer finds out before the others hear of it: whether they would refuse it.

The Lighthouse has no call by which a replica leaves: whatever it has heard it waits for, until the heartbeats have run
out. So a newcomer that could not load the state of the others, or that follows other rules, would cost them
``heartbeat_timeout`` at each of its starts. Before its first request it therefore asks the replicas that train what
they look like, and decides with their answers as in a quorum.

The Lighthouse's status page names those replicas, and nobody has signed it. Each answer comes through a connection on
which both sides have proved the job token, where the job has one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final, TypeAlias

from ft_transport.errors import PeerAuthenticationError, TransportError
from ft_transport.keys import TOKEN_VARIABLE
from ft_transport.runtime.handler_safety import SafeExecutor
from ft_transport.telemetry.told import ToldState
from manager.errors import QuorumError
from manager.quorum.decision import DoesNotFit, Member, Rules, decide
from manager.quorum.lighthouse_status import ToldMember

logger = logging.getLogger(__name__)

AskState: TypeAlias = Callable[[str, timedelta], ToldState]

_MAX_ASKED: Final = 8
_ANSWERING: Final = timedelta(seconds=1)
_MAX_SHOWN_CHARACTERS: Final = 100


def refusing_members(
    own: Member, running: Sequence[ToldMember], rules: Rules, ask: AskState, *, has_token: bool
) -> tuple[Member, ...]:
    """Return the members of a quorum in which ``own`` could not load the state; empty if it may ask for one.

    Replicas that do not answer are left out: the quorum then decides. Takes `_ANSWERING` at most.

    Args:
        own: What this replica says of itself.
        running: The replicas that train, as the Lighthouse's page names them.
        rules: This replica's.
        ask: Asks a replica what it tells of itself.
        has_token: Whether this replica has a job token.

    Raises:
        QuorumError: The members would not belong together, or none of them lets in this replica, which has no token.
    """
    # A replica that holds as new a state may be the one whose structure counts.
    ahead = sorted((each for each in running if each.step > own.step and each.addresses), key=lambda each: -each.step)
    if not ahead:
        return ()
    asked = ahead[:_MAX_ASKED]
    with SafeExecutor(len(asked), "ft-transport-foresight") as pool:
        answers = list(pool.map(lambda each: _asked(each, ask), asked))
    # With a token, addresses of strangers on the page keep no replica out: only the quorum shows all members.
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
    """Return what a replica says of itself, as a member of a quorum; ``None`` if it says nothing of it."""
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
