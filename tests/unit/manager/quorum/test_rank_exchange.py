"""The ranks of one replica agree, whichever of them is interrupted where; on threads over a store in this process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import pytest
from torch.distributed import HashStore

from ft_transport.coordination.store import StoreChannel
from ft_transport.credentials import Keys
from ft_transport.errors import DeadlineExceededError, RankGoneError, TransportError
from manager.errors import QuorumError, QuorumTimeoutError
from manager.quorum.rank_exchange import Exchange, RankExchange
from manager.quorum.reports import RankReport

T = TypeVar("T")

LONG = timedelta(seconds=20)
SHORT = timedelta(milliseconds=300)
NUM_COMMITS = 3


class _HandlerError(Exception):
    """Raised in the place of a signal handler."""


class Interrupted:
    """Calls a store in this process; raises once, before or after one call."""

    def __init__(self, store: HashStore) -> None:
        self._store = store
        self.num_calls = 0
        self.at = -1
        self.is_before = True
        self.was_raised = False
        self.has_answered = threading.Event()

    def call(self, function: Callable[[Any], T], timeout: timedelta, *, may_repeat: bool = True) -> T:
        self.num_calls += 1
        is_here = self.num_calls == self.at
        self.was_raised |= is_here
        if is_here and self.is_before:
            raise _HandlerError
        result = function(self._store)
        self.has_answered.set()
        if is_here:
            raise _HandlerError
        return result


class Ranks:
    """The ranks of one replica, each with a connection of its own."""

    def __init__(self, number: int, token: str | None = None) -> None:
        self._store = self.store = HashStore()
        keys = Keys.of(token) if token is not None else None
        self.connections = [Interrupted(self._store) for _ in range(number)]
        self.groups = [
            RankExchange(StoreChannel(connection), "test", rank, number, keys)
            for rank, connection in enumerate(self.connections)
        ]
        self._mutex = threading.Lock()
        self.answers: list[tuple[int, ...]] = []

    def run(self, *ranks: Callable[[], T]) -> list[T]:
        with ThreadPoolExecutor(len(ranks)) as pool:
            return [future.result(60) for future in [pool.submit(rank) for rank in ranks]]

    def quorum(self, rank: int, step: int, timeout: timedelta = LONG) -> bytes:
        return self.groups[rank].exchange(
            Exchange.QUORUM, report(step=step), self._answer, gathering=timeout, answering=timeout
        )

    def commit(self, rank: int, *refusals: str, timeout: timedelta = LONG) -> tuple[str, ...]:
        return self.groups[rank].agree(Exchange.COMMIT, refusals, gathering=timeout, answering=timeout)

    def _answer(self, reports: Sequence[RankReport]) -> bytes:
        with self._mutex:
            self.answers.append(tuple(each.step for each in reports))
            return str(len(self.answers)).encode()

    def num_keys(self) -> int:
        return int(self._store.num_keys())


def report(*, step: int = 3, refusals: tuple[str, ...] = ()) -> RankReport:
    return RankReport(step=step, lineage="x", group="", num_groups=0, address="", refusals=refusals)


def test_every_rank_gets_the_answer_of_rank_0() -> None:
    ranks = Ranks(3)
    assert ranks.run(*(lambda rank=rank: ranks.quorum(rank, 3 + rank) for rank in range(3))) == [b"1"] * 3
    assert ranks.answers == [(3, 4, 5)]
    agreed = ranks.run(lambda: ranks.commit(0), lambda: ranks.commit(1, "no"), lambda: ranks.commit(2))
    assert agreed == [("rank 1: no",)] * 3


@pytest.mark.parametrize("key", ["test/1/answer", "test/1/1"])
def test_with_a_token_nobody_else_commits_for_the_ranks(key: str) -> None:
    other = Ranks(2)
    other.run(lambda: other.commit(0), lambda: other.commit(1, "no"))
    forged = other.store.get(key).decode()
    for token in (None, "right"):
        ranks = Ranks(2, token)
        ranks.store.set(key, forged.replace("rank 1: no", "").replace('"no"', ""))

        def act(rank: int, ranks: Ranks = ranks) -> object:
            try:
                return ranks.commit(rank, *(["no"] if rank else []), timeout=SHORT)
            except QuorumError as error:
                return str(error)

        told = ranks.run(lambda act=act: act(0), lambda act=act: act(1))  # type: ignore[misc]
        if token is not None:
            assert all("signed with the job token" in str(each) or each == ("rank 1: no",) for each in told)


def test_what_ranks_of_another_run_agreed_on_is_no_answer() -> None:
    other = Ranks(2, "right")
    assert other.run(lambda: other.commit(0), lambda: other.commit(1)) == [()] * 2
    ranks = Ranks(2, "right")
    ranks.store.set("test/1/answer", other.store.get("test/1/answer").decode())

    def act(rank: int) -> str:
        with pytest.raises(QuorumError, match="got one to a message of another process") as caught:
            ranks.commit(rank, "no")
        return str(caught.value)

    ranks.run(lambda: act(0), lambda: act(1))


def test_a_long_run_does_not_fill_the_store() -> None:
    ranks = Ranks(2)

    def run(rank: int) -> int:
        for step in range(10):
            ranks.quorum(rank, step)
        return ranks.num_keys()

    few, _ = ranks.run(lambda: run(0), lambda: run(1))
    more, _ = ranks.run(lambda: run(0), lambda: run(1))
    assert more <= few + 2


def test_a_missing_rank_is_named_and_may_come_later() -> None:
    ranks = Ranks(3)
    errors = []

    rank_1_is_here = ranks.connections[1].has_answered

    def ask(rank: int) -> None:
        if rank == 0:
            assert rank_1_is_here.wait(LONG.total_seconds())
        with pytest.raises(QuorumTimeoutError) as caught:
            ranks.quorum(rank, 3, SHORT if rank == 0 else LONG)
        errors.append(str(caught.value))

    for _ in range(4):
        rank_1_is_here.clear()
        ranks.run(lambda: ask(0), lambda: ask(1))
    assert all("expected rank 2 of this replica within 0.3 s" in each for each in errors)
    # What it has missed, it is told at once.
    begin_s = time.monotonic()
    for _ in range(4):
        ask(2)
    assert time.monotonic() - begin_s < LONG.total_seconds() - 5
    assert ranks.run(*(lambda rank=rank: ranks.quorum(rank, 3) for rank in range(3))) == [b"1"] * 3


def test_a_rank_that_is_elsewhere_refuses_the_vote_and_waits_for_nobody() -> None:
    """The start of one rank's step has failed, after the others had begun it."""
    ranks = Ranks(3)

    def vote_and_begin(rank: int) -> tuple[tuple[str, ...], bytes]:
        return ranks.commit(rank), ranks.quorum(rank, 4)

    begin_s = time.monotonic()
    voted = ranks.run(lambda: vote_and_begin(0), lambda: ((), ranks.quorum(1, 4)), lambda: vote_and_begin(2))
    assert time.monotonic() - begin_s < LONG.total_seconds() - 5
    assert [answer for _, answer in voted] == [b"1"] * 3
    assert "rank 0 for commit, rank 1 for quorum, rank 2 for commit" in voted[0][0][0]
    assert "rank 1 for quorum" in voted[2][0][0]
    begun = ranks.run(lambda: ((), ranks.quorum(0, 5)), lambda: vote_and_begin(1), lambda: vote_and_begin(2))
    assert [answer for _, answer in begun] == [b"2"] * 3


def test_an_answer_to_what_a_rank_said_before_it_was_interrupted_is_not_taken_for_one_to_what_it_says_now() -> None:
    ranks = Ranks(2)
    connection = ranks.connections[1]
    connection.at, connection.is_before = 1, False
    with pytest.raises(_HandlerError):
        ranks.quorum(1, 3)
    ranks.quorum(0, 3)

    def vote_and_begin() -> tuple[str, ...]:
        refusals = ranks.commit(0)
        ranks.quorum(0, 4)
        return refusals

    refusals, _ = ranks.run(vote_and_begin, lambda: ranks.quorum(1, 9))
    assert "rank 1 for quorum" in refusals[0]
    assert ranks.answers == [(3, 3), (4, 9)]


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("kind", ["quorum", "commit"])
def test_nobody_waits_for_a_rank_that_was_interrupted_and_has_left(kind: str, leaver: int) -> None:
    """Whether or not the other one has its report already, and at whatever number it is."""
    for place in range(1, 4):
        ranks = Ranks(2)
        connection = ranks.connections[leaver]

        def leave(ranks: Ranks = ranks, connection: Interrupted = connection, place: int = place) -> None:
            ranks.quorum(leaver, 3)
            connection.at, connection.is_before = connection.num_calls + place, False
            with contextlib.suppress(_HandlerError, QuorumError):
                _ = ranks.quorum(leaver, 4) if kind == "quorum" else ranks.commit(leaver)
            connection.at = -1
            ranks.groups[leaver].close()

        def go_on(ranks: Ranks = ranks) -> None:
            for step in range(3, 9):
                ranks.quorum(1 - leaver, step)
                ranks.commit(1 - leaver)

        begin_s = time.monotonic()
        with pytest.raises(QuorumError, match="shut down"):
            ranks.run(leave, go_on)
        assert time.monotonic() - begin_s < LONG.total_seconds() - 5


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("error", "raised"), [(RankGoneError("gone"), QuorumError), (DeadlineExceededError("late"), QuorumTimeoutError)]
)
def test_a_store_that_does_not_answer_is_an_error_of_the_quorum(
    rank: int, error: TransportError, raised: type[QuorumError]
) -> None:
    class Gone:
        def call(self, function: Callable[[Any], T], timeout: timedelta, *, may_repeat: bool = True) -> T:
            raise error

    group = RankExchange(StoreChannel(Gone()), "test", rank, 2)
    with pytest.raises(QuorumError, match=error.message) as caught:
        group.agree(Exchange.COMMIT, (), gathering=LONG, answering=LONG)
    assert type(caught.value) is raised
    group.close()


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("kind", ["quorum", "commit"])
def test_ranks_meet_again_wherever_one_was_interrupted(kind: str, victim: int, is_before: bool) -> None:
    """A handler raises there; the rank goes on with what a manager does then. Nobody waits for a timeout."""
    place, was_raised = 0, True
    while was_raised:
        place += 1
        ranks = Ranks(2)
        connection = ranks.connections[victim]
        connection.is_before = is_before

        def run(rank: int, ranks: Ranks = ranks, connection: Interrupted = connection, place: int = place) -> list[Any]:
            committed: list[bytes] = []
            for attempt in range(10):
                if len(committed) == NUM_COMMITS:
                    break
                interrupted = kind if attempt == 1 and rank == victim else ""
                try:
                    if interrupted == "quorum":
                        connection.at = connection.num_calls + place
                    met = ranks.quorum(rank, attempt)
                except _HandlerError:
                    continue
                if rank == victim:
                    connection.at = connection.num_calls + place if interrupted == "commit" else -1
                try:
                    refusals = ranks.commit(rank)
                except _HandlerError:
                    refusals = ranks.commit(rank, "abandoned")
                if not refusals:
                    committed.append(met)
            return committed

        begin_s = time.monotonic()
        committed_0, committed_1 = ranks.run(lambda: run(0), lambda: run(1))
        was_raised = connection.was_raised
        assert time.monotonic() - begin_s < LONG.total_seconds() - 5
        assert len(committed_0) == NUM_COMMITS
        assert committed_0 == committed_1, "they commit together, each time on one quorum"
    assert place > 2
