"""Ranks agree, whichever of them fails, dies, is slow, or says what it must not; on threads over a store in memory."""

from __future__ import annotations

import errno
import pickle
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from ranks_on_threads import groups_of, run_ranks
from torch.distributed import HashStore

from ft_transport.coordination.agreement import Agreement
from ft_transport.coordination.ranks import RankGroup
from ft_transport.coordination.votes import AbandonedError
from ft_transport.errors import (
    CheckpointError,
    ConfigurationError,
    PeerProtocolError,
    RankFailedError,
    RankGoneError,
    TransportError,
)

T = TypeVar("T")

LONG = timedelta(seconds=30)
BRIEF = timedelta(milliseconds=200)
AT_ONCE_S = 10.0
NUM_RANKS = 3


def agreements_of(size: int, timeout: timedelta = LONG, store: HashStore | None = None) -> list[Agreement]:
    return [Agreement(group, "test", timeout) for group in groups_of(size, store)]


def on_all(agreements: list[Agreement], act: Callable[[Agreement], T]) -> list[T]:
    return run_ranks(*(lambda each=each: act(each) for each in agreements))  # type: ignore[misc]


def refusal(agreement: Agreement, action: Callable[[], bytes | None], phase: str = "write") -> TransportError:
    with pytest.raises(TransportError) as caught:
        agreement.run_on_all_ranks(phase, action)
    return caught.value


def fail(error: BaseException) -> None:
    raise error


def test_what_each_rank_returns_is_known_to_all() -> None:
    def act(agreement: Agreement) -> tuple[bytes, ...]:
        for number in range(20):
            said = agreement.run_on_all_ranks(f"phase {number}", lambda: b"%d" % agreement.rank)
        return said

    assert on_all(agreements_of(NUM_RANKS), act) == [(b"0", b"1", b"2")] * NUM_RANKS


def test_a_group_of_one_needs_no_store() -> None:
    agreement = Agreement(RankGroup(), "test", LONG)
    assert agreement.run_on_all_ranks("write", lambda: b"here") == (b"here",)
    assert agreement.on_first("write", lambda: agreement.showing_life(lambda: b"here", 1)) == b"here"
    assert agreement.run("write", lambda: 1) == 1


def test_the_first_rank_decides_and_all_know() -> None:
    def act(agreement: Agreement) -> tuple[int, int | None]:
        decided = agreement.value_of_first("decide", lambda: 7 + agreement.rank, msgspec.msgpack.Decoder(int))
        return decided, agreement.on_first("keep", lambda: 9)

    assert on_all(agreements_of(NUM_RANKS), act) == [(7, 9), *[(7, None)] * (NUM_RANKS - 1)]


def test_a_long_run_does_not_fill_the_store() -> None:
    store = HashStore()
    agreements = agreements_of(NUM_RANKS, store=store)

    def run(agreement: Agreement) -> int:
        for _ in range(10):
            agreement.run_on_all_ranks("write", lambda: None)
        return store.num_keys()

    on_all(agreements, run)
    few = store.num_keys()
    on_all(agreements, run)
    assert store.num_keys() <= few


# ---------------------------------------------------------------------------------------------------- a rank that fails


@pytest.mark.parametrize("victim", range(NUM_RANKS))
def test_a_failure_is_the_same_error_on_all_ranks_and_the_next_phase_goes_on(victim: int) -> None:
    def act(agreement: Agreement) -> tuple[str, bool, tuple[bytes, ...]]:
        error = refusal(
            agreement,
            lambda: fail(OSError(errno.EIO, "Input/output error", "/there")) if agreement.rank == victim else None,
        )
        may_try_again = agreement.may_try_again
        assert isinstance(error, RankFailedError)
        return str(error), may_try_again, agreement.run_on_all_ranks("again", lambda: b"good")

    outcomes = on_all(agreements_of(NUM_RANKS), act)
    assert outcomes == [outcomes[0]] * NUM_RANKS
    text, may_try_again, said = outcomes[0]
    assert f"rank {victim} failed in 'write': OSError" in text
    assert "/there" in text
    assert may_try_again
    assert said == (b"good",) * NUM_RANKS


def test_a_rank_that_works_for_long_gives_up_when_another_has_failed() -> None:
    def act(agreement: Agreement) -> str:
        def work() -> None:
            if agreement.rank == 1:
                raise ConfigurationError("cannot be")
            while True:
                agreement.check_others()
                time.sleep(0.001)

        return str(refusal(agreement, work))

    assert on_all(agreements_of(NUM_RANKS), act) == ["rank 1, write: cannot be"] * NUM_RANKS


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_interrupted_tells_the_others_and_goes_its_way(victim: int) -> None:
    def act(agreement: Agreement) -> str:
        if agreement.rank == victim:
            with pytest.raises(KeyboardInterrupt):
                agreement.run_on_all_ranks("write", lambda: fail(KeyboardInterrupt()))
            return ""
        return type(refusal(agreement, lambda: None)).__name__

    outcomes = on_all(agreements_of(NUM_RANKS), act)
    assert outcomes == ["" if rank == victim else "RankFailedError" for rank in range(NUM_RANKS)]


# ----------------------------------------------------------------------------------------- a rank that dies, or is slow


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_gone_is_named_on_all_others(victim: int) -> None:
    """It shows no sign of life; nobody waits for longer than that is allowed to take."""
    # On a busy machine a thread that lives may be silent for longer than BRIEF.
    agreements = agreements_of(NUM_RANKS, 5 * BRIEF)
    began_s = time.monotonic()
    errors = on_all(
        [each for each in agreements if each.rank != victim], lambda agreement: refusal(agreement, lambda: None)
    )
    assert time.monotonic() - began_s < AT_ONCE_S
    for error in errors:
        assert isinstance(error, RankGoneError)
        assert victim in error.ranks
    assert len({str(error) for error in errors}) == 1


def test_a_rank_that_comes_too_late_hears_that_it_was_given_up_and_may_come_again() -> None:
    agreements = agreements_of(2, BRIEF)
    (first,) = on_all(agreements[:1], lambda agreement: refusal(agreement, lambda: None))
    (late,) = on_all(agreements[1:], lambda agreement: refusal(agreement, lambda: None))
    assert str(late) == str(first)
    assert on_all(agreements, lambda agreement: agreement.run_on_all_ranks("again", lambda: b"x")) == [(b"x", b"x")] * 2


@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_shows_life_is_waited_for(slow: int) -> None:
    """For several times as long as one that shows none."""
    agreements = agreements_of(2, BRIEF)
    release = threading.Event()
    timer = threading.Timer(4 * BRIEF.total_seconds(), release.set)
    timer.start()

    def act(agreement: Agreement) -> tuple[bytes, ...]:
        def work() -> bytes:
            if agreement.rank == slow:
                agreement.showing_life(release.wait, LONG.total_seconds())
            return b"done"

        return agreement.run_on_all_ranks("write", work)

    assert on_all(agreements, act) == [(b"done", b"done")] * 2
    timer.join()


# -------------------------------------------------------------------------------------------- ranks that do not fit


def test_ranks_in_different_phases_learn_it() -> None:
    errors = on_all(
        agreements_of(NUM_RANKS),
        lambda agreement: refusal(agreement, lambda: None, "load" if agreement.rank == 2 else "save"),
    )
    assert {type(error) for error in errors} == {CheckpointError}
    assert {str(error) for error in errors} == {
        "expected all ranks in the same phase, got rank 0: 'save'; rank 1: 'save'; rank 2: 'load'"
    }


class _Code:
    """Writes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "has run")


@pytest.mark.parametrize("hostile", [0, 1])
def test_a_rank_that_sends_a_pickle_runs_nothing_on_the_others(hostile: int, tmp_path: Path) -> None:
    store = HashStore()
    agreements = agreements_of(2, store=store)
    sent = pickle.dumps(_Code(tmp_path / "ran"), 0)
    pickle.loads(sent)
    assert (tmp_path / "ran").exists(), "it is a live one"
    (tmp_path / "ran").unlink()
    store.set("test/verdict/1" if hostile == 0 else "test/vote/1/1", sent.decode())
    error = refusal(agreements[1 - hostile], lambda: None)
    assert isinstance(error, PeerProtocolError)
    assert "expected votes of ranks" in str(error)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "sent", [b"", b"\xc1", msgspec.msgpack.encode({"phase": "write"}), b"\x93", b"\x93\xa5write\xc0\xc4\xff"]
)
def test_a_vote_that_is_none_is_refused_on_all_and_its_rank_is_named(sent: bytes) -> None:
    store = HashStore()
    agreements = agreements_of(NUM_RANKS, store=store)

    def act(agreement: Agreement) -> str:
        if agreement.rank == 1:
            store.set("test/vote/1/1", sent)
            agreement._cast = lambda messages, vote: None  # type: ignore[method-assign]
        return str(refusal(agreement, lambda: None))

    texts = on_all(agreements, act)
    assert texts == [texts[0]] * NUM_RANKS
    assert texts[0].startswith("rank 1, write: expected votes of ranks")


def test_giving_up_a_part_is_no_failure_of_its_own() -> None:
    def act(agreement: Agreement) -> str:
        error = AbandonedError("another has failed") if agreement.rank == 0 else ConfigurationError("cannot be")
        return str(refusal(agreement, lambda: fail(error)))

    assert on_all(agreements_of(2), act) == ["rank 1, write: cannot be"] * 2
