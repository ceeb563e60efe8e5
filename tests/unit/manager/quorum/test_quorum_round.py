"""Errors of a replica's own are counted alike on all of its ranks, since the last commit."""

from __future__ import annotations

import errno
import os

import pytest

from ft_transport import TransportError
from manager import ReplicaFaultError, ReportedError
from manager.quorum.decision import Decision, UpToDate
from manager.quorum.quorum_round import OwnErrors, QuorumRound, is_own_shortage, refusal_cause


def decision(*members: str) -> Decision:
    return Decision(
        step=3,
        lineage="lineage",
        group="group",
        group_members=members,
        group_addresses=("http://own:1",) * len(members),
        store_address="store:2",
        rank=0,
        num_participants=len(members),
        participating_rank=0,
        role=UpToDate(serves_now=(), serves_next=()),
    )


def refusals(*members: str, is_own: bool) -> list[str]:
    current = QuorumRound(0, decision(*members))
    current.error, current.is_own_error = ReportedError(ValueError("a bad batch")), is_own
    return current.refusals()


def test_every_rank_of_the_replica_learns_whose_error_it_was() -> None:
    """Ranks tell each other their refusals as text."""
    own = [f"rank 1: {reason}" for reason in refusals("own", "other", is_own=True)]
    errors = OwnErrors()
    errors.refused(3, own)
    errors.refused(3, own)
    with pytest.raises(ReplicaFaultError, match=r"3 times.*: (rank 1: ValueError: a bad batch(; )?){3}$"):
        errors.refused(3, own)


def test_a_commit_between_them_counts_anew() -> None:
    errors = OwnErrors()
    for _ in range(3):
        errors.refused(3, refusals("own", "other", is_own=True))
        errors.refused(3, refusals("own", "other", is_own=True))
        errors.committed()


def test_errors_of_others_and_of_a_replica_alone_do_not_count() -> None:
    errors = OwnErrors()
    for _ in range(5):
        errors.refused(3, refusals("own", "other", is_own=False))
        errors.refused(3, refusals("own", is_own=True))
        errors.refused(3, ["expected at least 2 replicas, got 1"])


def test_only_what_this_process_lacks_is_a_shortage() -> None:
    assert is_own_shortage(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    assert not is_own_shortage(ConnectionResetError(errno.ECONNRESET, "reset"))
    assert not is_own_shortage(TransportError("anything"))


@pytest.mark.parametrize(
    ("error", "has_enough", "was_silent", "expected"),
    [
        (ConnectionError("lost"), False, True, "ConnectionError"),
        (None, False, True, "TooFewReplicas"),
        (None, True, True, "MissedHeartbeats"),
        (None, True, False, "AnotherRank"),
    ],
)
def test_a_refused_step_has_one_cause(
    error: Exception | None, has_enough: bool, was_silent: bool, expected: str
) -> None:
    reported = ReportedError(error) if error is not None else None
    assert refusal_cause(reported, has_enough=has_enough, was_silent=was_silent) == expected
