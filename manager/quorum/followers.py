"""The members of a quorum that follow the others while they receive the state (``manager.quorum.following``).

This module is pure, like ``manager.quorum.decision``, which uses it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from manager.quorum.reports import Following, Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Followers:
    """The members that follow, by id.

    Attributes:
        beginning: The members that begin to follow.
        passive: The members that do not contribute.
        recording: The members that have nothing to receive in this quorum.
        unserved: The recording members that need a snapshot at the next step boundary.
        verified: The members whose state was compared, and is the common one.
        compare_next: Whether some need a comparison.
    """

    beginning: frozenset[str]
    passive: frozenset[str]
    recording: frozenset[str]
    unserved: frozenset[str]
    verified: frozenset[str]
    compare_next: bool

    @classmethod
    def of(
        cls, ordered: Sequence[Member], holders: Sequence[Member], unfit: Collection[str], *, min_replica_size: int
    ) -> Followers:
        """Divide the members that follow, or would.

        Args:
            ordered: All members.
            holders: The members with the common state.
            unfit: The ids of the members that cannot load the common state.
            min_replica_size: The smallest number of replicas that can commit a step.
        """
        first = holders[0]
        beginning, passive, recording, verified = set[str](), set[str](), set[str](), set[str]()
        unserved = set[str]()
        compare_next = False
        # With too few others no step is committed: newcomers heal.
        are_enough = len(holders) >= min_replica_size
        for member in ordered if are_enough else ():
            if member.following is Following.NO or member in holders or member.replica_id in unfit:
                continue
            if member.following is Following.WOULD:
                if first.step > 0:
                    beginning.add(member.replica_id)
                continue
            if (member.step, member.lineage) != (first.step, first.lineage):
                continue
            is_equal = _is_equal(member, holders) if member.following is Following.COMPARES else None
            if is_equal:
                verified.add(member.replica_id)
            elif is_equal is None:
                passive.add(member.replica_id)
                has_caught_up = member.following is Following.CAUGHT_UP
                if has_caught_up and not sources_of(member, holders):
                    unserved.add(member.replica_id)
                elif member.following is not Following.RECORDS:
                    compare_next = True
                if not has_caught_up or member.replica_id in unserved:
                    recording.add(member.replica_id)
        return cls(
            beginning=frozenset(beginning),
            passive=frozenset(passive | beginning),
            recording=frozenset(recording),
            unserved=frozenset(unserved),
            verified=frozenset(verified),
            compare_next=compare_next,
        )


def _is_equal(member: Member, holders: Sequence[Member]) -> bool | None:
    """Return whether a member's claim is that of the replicas with the common state; ``None`` without a comparison."""
    own = member.claim
    claims = [each.claim for each in holders if (each.claim.step, each.claim.lineage) == (own.step, own.lineage)]
    return own in claims if claims and own.step >= 0 else None


def sources_of(member: Member, holders: Sequence[Member]) -> tuple[Member, ...]:
    """Return the holders from which ``member`` can heal at this step boundary."""
    if not member.may_heal:
        return ()
    return tuple(
        holder
        for holder in holders
        if not holder.is_full and (holder.can_serve or holder.replica_id in member.announced_to)
    )
