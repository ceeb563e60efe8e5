"""Long waits and changes between two quorums are logged once, in words that peers cannot choose."""

from __future__ import annotations

import logging
import re
import threading
import timeit
from types import SimpleNamespace
from typing import Any

import pytest
from interruptions import at_every_place

from ft_transport.telemetry.metrics import MetricValues
from ft_transport.telemetry.process_state import NUM_CHANGES
from manager.quorum.decision import Decision, Heals, Role, StandsBy, UpToDate
from manager.quorum.reports import Member
from manager.quorum.telemetry import MembershipLog, StallWatch
from manager.state.step_log import StepLog

LONG_S = 20.0
HOLDS = UpToDate(serves_now=(), serves_next=())


class Told(logging.Handler):
    """Opens when something was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.event = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self.event.set()


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_long_wait_is_told_once_with_whom_it_waits_for_and_the_stack_of_its_thread(told: Told) -> None:
    logger = logging.getLogger("manager.quorum.telemetry")
    logger.addHandler(told)
    watch = StallWatch(0.05)
    try:
        with watch.waiting("replica a step 3: waiting for b", missing=lambda: "b is asleep"):
            assert told.event.wait(LONG_S)
            told.event.clear()
            assert not told.event.wait(0.3)
    finally:
        watch.close()
        logger.removeHandler(told)
    (text,) = told.texts
    assert re.match(r"replica a step 3: waiting for b for more than 0\.[01] s", text)
    assert " s; b is asleep; thread 'MainThread' is at:" in text
    assert text.count("thread '") == 1
    assert "test_a_long_wait_is_told_once" in text


def test_short_waits_are_not_told(told: Told) -> None:
    logger = logging.getLogger("manager.quorum.telemetry")
    logger.addHandler(told)
    watch = StallWatch(LONG_S)
    with watch.waiting("a"), watch.waiting("b"):
        pass
    watch.close()
    logger.removeHandler(told)
    assert not told.texts
    # After the end it watches no more, and does not fail either.
    with watch.waiting("c"):
        pass


def test_a_handler_that_raises_at_the_beginning_of_a_wait_keeps_no_other_thread_from_waiting() -> None:
    watch = StallWatch(100.0)

    def wait() -> None:
        with watch.waiting("anything"):
            pass

    def check() -> None:
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(10)
        assert not waiting.is_alive()

    at_every_place(wait, check, at_least=5, modules=("manager.quorum.telemetry", "threading"))
    watch.close()


class _Quorums:
    """A log of the replica ``a``, and the quorums that it is told of."""

    def __init__(self, group_rank: int = 0) -> None:
        self.steps = StepLog()
        self.membership: Any = SimpleNamespace(replica_id="a", group_rank=group_rank, members=())
        self.metrics = MetricValues("loop")
        participant: Any = SimpleNamespace(
            name="replica a step 7",
            membership=self.membership,
            state=SimpleNamespace(steps=self.steps),
            metrics=self.metrics,
        )
        self.log = MembershipLog(participant)

    def come(self, members: str, *, group: str | None = None, role: Role = HOLDS, step: int = 7) -> list[str]:
        """One more quorum of members with a letter each; returns the changes that it has added."""
        self.membership.members = tuple(_member(each) for each in members)
        num_before = len(self.log.recent()())
        self.log.log_changes(_decision(tuple(members if group is None else group), role, step))
        return [f"{each.replica_id} {each.kind}" for each in self.log.recent()()[num_before:]]

    def metric(self, name: str) -> float:
        (value,) = (reading.value for reading in self.metrics.readings() if reading.name == name)
        assert isinstance(value, (int, float))
        return value

    def commit(self) -> None:
        self.steps.begin()
        self.steps.end(7)


def _member(replica_id: str) -> Member:
    return Member(replica_id=replica_id, step=7, lineage="x", store_address="", addresses=("http://x",))


def _decision(group: tuple[str, ...], role: Role, step: int) -> Decision:
    return Decision(
        step=step,
        lineage="x",
        group="g",
        group_members=group,
        group_addresses=(),
        store_address="",
        rank=0,
        num_participants=len(group),
        participating_rank=0,
        role=role,
    )


def test_the_first_quorum_and_equal_ones_say_nothing() -> None:
    quorums = _Quorums()
    assert [quorums.come("abc") for _ in range(3)] == [[], [], []]


def test_a_newcomer_that_stands_by_first_joins_once() -> None:
    quorums = _Quorums()
    quorums.come("ab")
    assert quorums.come("abc", group="ab") == []
    heals = UpToDate(serves_now=("c",), serves_next=())
    assert quorums.come("abc", role=heals) == ["c joined"]
    assert quorums.come("abc", role=heals) == []  # the same heal, tried again
    assert quorums.come("abc") == []


def test_a_replica_that_is_behind_and_then_dies_has_left() -> None:
    quorums = _Quorums()
    quorums.come("abc")
    assert quorums.come("abc", group="ab") == []
    assert quorums.come("ab") == ["c left"]


def test_a_replica_that_came_back_under_another_id_between_two_quorums_left_and_joined() -> None:
    quorums = _Quorums()
    quorums.come("ab")
    assert quorums.come("ac") == ["b left", "c joined"]


def test_what_heals_itself_is_no_newcomer() -> None:
    quorums = _Quorums()
    quorums.come("abc", group="bc", role=StandsBy(announced_to=frozenset("bc"), may_heal=True))
    assert quorums.come("abc", role=Heals(sources=())) == []
    quorums.log.log_heal(_decision(("a", "b", "c"), HOLDS, 7), 1.5, "b")
    quorums.log.log_heal(_decision(("a", "b", "c"), HOLDS, 0), 1.5, "b")  # the common start
    (change,) = quorums.log.recent()()
    assert (change.kind, change.text) == ("healed", "healed to step 7 in 1.5 s, from b")


@pytest.mark.parametrize("role", [StandsBy(announced_to=frozenset("b"), may_heal=True), Heals(sources=())])
def test_a_replica_that_was_away_claims_no_standstill_of_the_others(role: Role) -> None:
    quorums = _Quorums()
    quorums.commit()
    quorums.come("abc")
    assert quorums.come("ab", role=role) == ["c left"]
    (change,) = quorums.log.recent()()
    assert change.length_s == 0
    assert "stood still" not in change.text
    assert quorums.metric("departures_total") == 1
    assert quorums.metric("standstill_seconds_total") == 0


def test_several_departures_at_once_are_one_standstill() -> None:
    quorums = _Quorums()
    quorums.commit()
    quorums.come("abcd")
    assert quorums.come("ab") == ["c left", "d left"]
    assert quorums.metric("departures_total") == 2
    assert quorums.metric("standstill_seconds_total") == quorums.log.recent()()[0].length_s > 0


def test_the_last_ones_are_kept() -> None:
    quorums = _Quorums()
    for _ in range(NUM_CHANGES):
        quorums.come("ab")
        quorums.come("a")
    assert len(quorums.log.recent()()) == NUM_CHANGES


@pytest.mark.parametrize(("group_rank", "level"), [(0, logging.WARNING), (1, logging.INFO)])
def test_one_rank_of_a_replica_warns(group_rank: int, level: int, caplog: pytest.LogCaptureFixture) -> None:
    quorums = _Quorums(group_rank)
    with caplog.at_level(logging.INFO):
        quorums.come("ab")
        quorums.come("a")
    assert [record.levelno for record in caplog.records] == [level]


def test_a_hostile_name_moves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    quorums = _Quorums()
    quorums.come("ab")
    quorums.membership.members = (_member("a"), _member("b"), _member("\x1b[2J\n" + "x" * 10_000))
    quorums.log.log_changes(_decision(("a", "b", "\x1b[2J\n" + "x" * 10_000), HOLDS, 7))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "\x1b" not in line
    assert "\n" not in line
    assert len(line) < 400


def test_a_quorum_without_a_change_costs_microseconds() -> None:
    quorums = _Quorums()
    quorums.come("abcdefgh")
    decision = _decision(tuple("abcdefgh"), HOLDS, 7)
    # The quickest of several: the machine has other work.
    assert min(timeit.repeat(lambda: quorums.log.log_changes(decision), number=100, repeat=20)) / 100 < 50e-6
