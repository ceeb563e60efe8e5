"""What a publisher and a receiver say to each other: each message proves one thing, to one receiver, once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ft_transport.credentials import Keys
from ft_transport.publish.engines import pulling as module
from ft_transport.publish.engines.pulling import CHALLENGE_S, Challenges, Order, Question, reached_by

KEYS, OTHERS = Keys.of("one-secret"), Keys.of("another-secret")
URL = "http://engine:9000"
ORDER = Order(version=7, address="http://trainer:80/checkpoint/", reached="engine:9000", challenge="c")


def test_a_question_and_its_answer() -> None:
    question = Question.of(URL)
    assert Question.proved(KEYS, question.query(KEYS)) == question
    answer = question.answer(KEYS, 3, "challenge")
    status = question.accepted(KEYS, answer)
    assert status == (3, "challenge")
    assert question.query(None) == {}


def test_a_question_that_was_changed_is_none() -> None:
    query = Question.of(URL).query(KEYS)
    assert Question.proved(OTHERS, query) is None
    changes: list[dict[str, str]] = [{"reached": "other:9000"}, {"nonce": "0" * 32}, {"nonce": ""}, {"signature": "x"}]
    for change in changes:
        assert Question.proved(KEYS, {**query, **change}) is None
    for name in query:
        assert Question.proved(KEYS, {key: value for key, value in query.items() if key != name}) is None


@pytest.mark.parametrize(
    "change", [{"version": 4}, {"version": None}, {"challenge": "d"}, {"proof": "x"}, {"proof": 5}]
)
def test_an_answer_that_was_changed_proves_nothing(change: dict[str, object]) -> None:
    question = Question.of(URL)
    answer = question.answer(KEYS, 3, "challenge")
    assert question.accepted(KEYS, {**answer, **change}) is None
    # To another question, or with another key.
    assert Question.of(URL).accepted(KEYS, answer) is None
    assert question.accepted(OTHERS, answer) is None


@pytest.mark.parametrize("change", [{"version": 8}, {"address": "http://b/"}, {"reached": "b:1"}, {"challenge": "d"}])
def test_an_order_is_signed_as_a_whole(change: dict[str, Any]) -> None:
    read = Order.read(ORDER.version, ORDER.body(KEYS))
    assert read is not None
    order, signature = read
    assert order == ORDER
    assert order.is_proved(KEYS, signature)
    assert not order.is_proved(OTHERS, signature)
    assert not dataclasses.replace(order, **change).is_proved(KEYS, signature)


@pytest.mark.parametrize(
    "body", [None, [], "x", {}, {"address": 5}, {"address": ""}, {"address": "a", "challenge": []}]
)
def test_what_is_no_order_is_none(body: object) -> None:
    assert Order.read(1, body) is None


def test_an_outcome_belongs_to_its_order() -> None:
    said = ORDER.outcome(KEYS, version=None, reason="weights_differ")
    outcome = ORDER.accepted(KEYS, said)
    assert outcome is not None
    assert (outcome.version, outcome.reason) == (None, "weights_differ")
    assert ORDER.accepted(KEYS, {**said, "reason": "stale"}) is None
    assert ORDER.accepted(KEYS, {**said, "version": 7}) is None
    assert ORDER.accepted(KEYS, {**said, "reason": None}) is None
    assert dataclasses.replace(ORDER, challenge="d").accepted(KEYS, said) is None
    # No signature of one kind passes for another.
    assert not ORDER.is_proved(KEYS, str(said["proof"]))
    assert ORDER.accepted(None, {"version": 7}) is not None
    assert ORDER.accepted(None, {"version": 7, "reason": "because"}) is None


def test_a_challenge_counts_once_and_not_for_long() -> None:
    now_s = 100.0
    challenges = Challenges(lambda: now_s)
    first, second = challenges.issue(), challenges.issue()
    assert challenges.use(first)
    assert not challenges.use(first)
    now_s += CHALLENGE_S + 1
    assert not challenges.use(second)
    assert not challenges.use(first)
    assert not Challenges(lambda: now_s).use(challenges.issue())
    for made_up in ("", "x", second[:-1], "f" + second, f"{10**9:x}{second[second.index('-') :]}"):
        assert not challenges.use(made_up)


def test_those_that_were_used_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_USED", 3)
    now_s = 0.0
    challenges = Challenges(lambda: now_s)
    assert [challenges.use(challenges.issue()) for _ in range(5)] == [True] * 3 + [False] * 2
    now_s += CHALLENGE_S
    assert challenges.use(challenges.issue())


@pytest.mark.parametrize(
    ("url", "reached"),
    [
        ("http://Engine:9000", "engine:9000"),
        ("http://engine", "engine:80"),
        ("https://engine/prefix", "engine:443"),
        ("http://[0:0::1]:5", "[::1]:5"),
    ],
)
def test_one_form_for_each_address(url: str, reached: str) -> None:
    assert reached_by(url) == reached
