"""What all ranks make of what each of them has said."""

from __future__ import annotations

import contextlib
import errno
import random

import pytest

from ft_transport.coordination.votes import (
    RETRYABLE_ERRNOS,
    AbandonedError,
    GiveUp,
    GoOn,
    TryAgain,
    Verdict,
    Vote,
    decode,
    decode_all,
    describe,
    encode,
    encode_all,
    rebuild,
    tally,
)
from ft_transport.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointInUseError,
    CheckpointNotFoundError,
    FetchFailedError,
    IntegrityError,
    PeerNotReadyError,
    PeerProtocolError,
    PeerUnreachableError,
    RankFailedError,
    RankGoneError,
    ReplicasDivergedError,
    RestoreError,
    StepNotServedError,
    TransportError,
    UnsupportedLeafError,
    WriterFailedError,
)


class OwnError(Exception):
    """Of a library that the other ranks may not have."""


def voted(*errors: BaseException | None, phase: str = "write") -> list[Vote | None]:
    """A vote of each rank: of one that succeeded where there is no error."""
    return [
        Vote(phase=phase, payload=bytes([rank])) if error is None else Vote(phase=phase, failure=describe(error))
        for rank, error in enumerate(errors)
    ]


def given_up(decision: Verdict) -> TransportError:
    assert isinstance(decision, GiveUp)
    return decision.error


PASSES = OSError(errno.EIO, "Input/output error", "/there")
STAYS = PermissionError(errno.EACCES, "Permission denied", "/here")


def test_if_none_failed_all_get_what_each_has_said() -> None:
    assert tally(voted(None, None, None)) == GoOn((b"\x00", b"\x01", b"\x02"))


def test_a_failure_names_its_rank_phase_and_cause() -> None:
    error = given_up(tally(voted(None, STAYS, None), step=7))
    assert isinstance(error, RankFailedError)
    assert (error.rank, error.phase, error.cause_type, error.errno) == (1, "write", "PermissionError", errno.EACCES)
    assert str(error) == "rank 1 failed in 'write': PermissionError: [Errno 13] Permission denied: '/here' (step 7)"
    assert isinstance(error.__cause__, PermissionError)
    assert (error.__cause__.errno, error.__cause__.filename) == (errno.EACCES, "/here")
    assert str(error.__cause__) == str(STAYS)


@pytest.mark.parametrize("votes", [voted(PASSES, STAYS), voted(STAYS, PASSES), voted(None, PASSES, STAYS)])
def test_what_does_not_pass_outweighs_what_may(votes: list[Vote | None]) -> None:
    error = given_up(tally(votes))
    assert isinstance(error, RankFailedError)
    assert error.cause_type == "PermissionError"
    assert "failed, too" in str(error)


@pytest.mark.parametrize(
    "error",
    [*(OSError(number, "Permission denied") for number in sorted(RETRYABLE_ERRNOS)), WriterFailedError("gone")],
    ids=lambda error: f"{type(error).__name__} {getattr(error, 'errno', '')}",
)
def test_what_may_pass_is_tried_again_whatever_the_text(error: Exception) -> None:
    decision = tally(voted(None, error, error))
    assert isinstance(decision, TryAgain)
    assert isinstance(decision.error, RankFailedError | WriterFailedError)
    assert "rank 1 (rank 2 failed, too)" in str(decision.error)


@pytest.mark.parametrize(
    "error",
    [
        *(OSError(number, "Input/output error, try again") for number in (errno.EACCES, errno.EPERM, errno.ENOSPC)),
        *(OSError(number, "try again") for number in (errno.EDQUOT, errno.EROFS, errno.ENOENT, errno.ENOTDIR)),
        ValueError("[Errno 5] Input/output error"),
        UnsupportedLeafError("no"),
    ],
    ids=lambda error: f"{type(error).__name__} {getattr(error, 'errno', '')}",
)
def test_errnos_that_do_not_pass_are_not_tried_again_whatever_the_text(error: Exception) -> None:
    assert isinstance(tally(voted(error, None)), GiveUp)


@pytest.mark.parametrize("abandoned", [(0,), (0, 1), (1, 2)])
def test_who_gave_up_because_of_another_is_not_blamed(abandoned: tuple[int, ...]) -> None:
    errors: list[BaseException] = [PASSES, PASSES, PASSES]
    for rank in abandoned:
        errors[rank] = AbandonedError("gave up")
    decision = tally(voted(*errors))
    # And what it gave up with does not count when it is asked whether the cause may pass.
    assert isinstance(decision, TryAgain)
    assert decision.error.rank == min({0, 1, 2} - set(abandoned))  # type: ignore[attr-defined]
    assert not any(f"{rank} failed, too" in str(decision.error) for rank in abandoned)


def test_if_all_say_that_they_gave_up_it_is_a_failure_nevertheless() -> None:
    error = given_up(tally(voted(None, AbandonedError("gave up"))))
    assert isinstance(error, RankFailedError)
    assert error.rank == 1


def test_ranks_that_did_not_vote_are_named() -> None:
    votes = voted(None, PASSES, None, STAYS)
    votes[0] = votes[2] = None
    error = given_up(tally(votes, step=3))
    assert isinstance(error, RankGoneError)
    assert error.ranks == (0, 2)
    assert "'write'" in str(error)
    assert "ranks 0, 2" in str(error)
    assert "step 3" in str(error)
    error = given_up(tally([voted(None)[0], *[None] * 1000]))
    assert isinstance(error, RankGoneError)
    assert error.ranks == tuple(range(1, 1001))
    assert "1, 2, 3, 4, 5, 6, 7, 8, …" in str(error)


def test_ranks_in_different_places_of_the_program_are_told_so() -> None:
    votes = [Vote(phase="write"), Vote(phase="commit"), Vote(phase="write", failure=describe(STAYS))]
    error = given_up(tally(votes))
    assert isinstance(error, CheckpointError)
    assert "rank 0: 'write'; rank 1: 'commit'" in str(error)


@pytest.mark.parametrize(
    "error",
    [
        CheckpointNotFoundError("expected one"),
        CheckpointExistsError("expected none"),
        CheckpointInUseError("expected to be alone"),
        CheckpointDamagedError("rank-0: short; rank-1: gone", files=("rank-0", "rank-1")),
        ReplicasDivergedError("expected the same", path="model.weight"),
    ],
)
def test_what_is_about_all_ranks_is_told_as_it_was_said(error: CheckpointError) -> None:
    told = given_up(tally(voted(None, error), step=9))
    assert type(told) is type(error)
    assert isinstance(told, CheckpointError)
    assert (told.message, told.path, told.step, told.rank) == (error.message, error.path, 9, 1)
    if isinstance(error, CheckpointDamagedError):
        assert isinstance(told, CheckpointDamagedError)
        assert told.files == error.files


def test_an_error_of_ours_is_raised_again_with_the_rank_and_its_path() -> None:
    told = given_up(tally(voted(None, None, UnsupportedLeafError("no encoding", path="model.lock")), step=4))
    assert isinstance(told, UnsupportedLeafError)
    assert str(told) == "rank 2, write: no encoding (at model.lock, step 4)"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OwnError("odd"), None),
        (KeyboardInterrupt(), None),
        (SystemExit(3), None),
        (OSError("no number"), OSError),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"), None),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_that_other_ranks_may_not_raise_is_told_by_its_name(
    error: BaseException, cause: type[OSError] | None
) -> None:
    told = given_up(tally(voted(None, error)))
    assert isinstance(told, RankFailedError)
    assert (told.cause_type, told.errno, type(told.__cause__)) == (type(error).__name__, None, cause or type(None))
    assert f"rank 1 failed in 'write': {type(error).__name__}" in str(told)
    assert cause is not None or isinstance(rebuild(describe(error)), CheckpointError)


def test_a_very_long_message_is_cut() -> None:
    assert len(describe(ValueError("x" * 100_000)).message) <= 2000


@pytest.mark.parametrize("seed", range(20))
def test_all_ranks_decide_alike_from_what_has_travelled(seed: int) -> None:
    pick = random.Random(seed)
    known: list[BaseException | None] = [None, PASSES, STAYS, AbandonedError("gave up"), WriterFailedError("died")]
    votes = voted(*(pick.choice(known) for _ in range(5)))
    if seed % 4 == 0:
        votes[seed % 5] = None
    sent = encode_all([decode(encode(vote)) if vote is not None else None for vote in votes])
    travelled = decode_all(sent, len(votes))
    assert travelled == votes
    here, there = tally(votes), tally(travelled)
    assert type(here) is type(there)
    assert getattr(here, "payloads", ()) == getattr(there, "payloads", ())
    assert str(getattr(here, "error", None)) == str(getattr(there, "error", None))


_FAILURES = (
    PeerUnreachableError("expected an answer, got none", peer="host:1", step=3),
    IntegrityError("chunk 2", chunk=2, expected=2**64 - 1, actual=1, peer="host:1", step="latest"),
)


@pytest.mark.parametrize(
    "error",
    [
        PASSES,
        STAYS,
        ValueError("bad"),
        WriterFailedError("died"),
        ReplicasDivergedError("differ", path="w"),
        CheckpointDamagedError("bad", files=("one", "two"), step=3, path="w"),
        PeerNotReadyError("not yet", retry_after_s=0.5, after=7, peer="host:1"),
        StepNotServedError("gone", served=(1, 2), is_past=True, peer="host:1", step=3),
        FetchFailedError("expected a source", failures=_FAILURES, step=3),
        RankGoneError("gone", ranks=(1, 2), step=3),
        *_FAILURES,
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_another_process_is_raised_here_as_it_was(error: Exception) -> None:
    travelled = decode(encode(Vote(phase="write", failure=describe(error)))).failure
    assert travelled is not None
    again = rebuild(travelled)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert describe(again) == describe(error)
    assert getattr(again, "retryable", None) == getattr(error, "retryable", None)


def test_what_has_landed_on_one_rank_is_not_said_of_another() -> None:
    error = RestoreError("expected another shape", path="w")
    error.destination_touched = True
    assert not given_up(tally(voted(error, None))).destination_touched
    again = rebuild(describe(error))
    assert isinstance(again, RestoreError)
    assert not again.destination_touched


def test_what_the_writer_abandoned_is_known_as_such_in_the_trainer() -> None:
    again = rebuild(describe(AbandonedError("gave up")))
    assert isinstance(again, AbandonedError)
    assert describe(again).is_consequence


@pytest.mark.parametrize(
    "error",
    [RestoreError("no such \udcff", path="w\udcff"), OSError(errno.EIO, "broken", "/file\udcff"), ValueError("\ud800")],
    ids=lambda error: type(error).__name__,
)
def test_an_error_with_what_is_no_character_reaches_the_others(error: Exception) -> None:
    travelled = decode(encode(Vote(phase="write", failure=describe(error)))).failure
    assert travelled is not None
    assert "\\ud" in str(rebuild(travelled))


@pytest.mark.parametrize("surplus", [b"\x91" * 5_000 + b"\x01", b"\xa1\xff", b"\xdd\xff\xff\xff\xff"])
def test_a_vote_with_more_than_it_should_have_is_a_typed_error(surplus: bytes) -> None:
    encoded = encode(voted(None)[0])
    with contextlib.suppress(PeerProtocolError):
        decode(bytes([encoded[0] + 1]) + encoded[1:] + surplus)


@pytest.mark.parametrize("encoded", [b"[" * 100_000, b'["\\ud800",' * 3, b"\xff", b'[["\xff"]]', b"1" * 10_000])
def test_votes_that_are_none_are_a_typed_error(encoded: bytes) -> None:
    with pytest.raises(PeerProtocolError):
        decode_all(encoded, 1)
