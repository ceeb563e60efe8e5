"""What replicas say of themselves counts if they prove the job token, once."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from ft_transport.keys import Keys
from manager import QuorumError
from manager.quorum.decision import Member
from manager.quorum.member_data import MemberTelling

OURS, FOREIGN = Keys.of("ours"), Keys.of("foreign")


def _member(name: str, step: int = 7) -> Member:
    return Member(replica_id=name, step=step, lineage="l", store_address="10.0.0.1:1", addresses=("http://10.0.0.1:2",))


def _participant(member: Member, keys: Keys | None, **changed: Any) -> SimpleNamespace:
    data = MemberTelling(keys).data_of(member)
    said = {"replica_id": member.replica_id, "step": member.step, "store_address": member.store_address, "data": data}
    return SimpleNamespace(**{**said, **changed})


def _names(telling: MemberTelling, *participants: SimpleNamespace) -> list[str]:
    return [member.replica_id for member in telling.members_of(participants, "own")]


@pytest.mark.parametrize("keys", [OURS, None])
def test_what_is_said_arrives(keys: Keys | None) -> None:
    member = dataclasses.replace(
        _member("b"), announced_to=frozenset({"x", "y"}), rules=("r",), structure=(("m", "1"),)
    )
    [found] = MemberTelling(keys).members_of([_participant(member, keys)], "own")
    assert dataclasses.replace(found, process="") == member


@pytest.mark.parametrize(
    "stranger",
    [
        _participant(_member("evil", 1000), None),
        _participant(_member("evil", 1000), FOREIGN),
        _participant(_member("evil"), OURS, step=1000),
        _participant(_member("evil"), OURS, store_address="10.6.6.6:1"),
        _participant(_member("other"), OURS, replica_id="evil"),
        _participant(_member("evil"), OURS, data=None),
        _participant(_member("evil"), OURS, data={"addresses": []}),
    ],
)
def test_who_does_not_prove_the_token_is_not_there(stranger: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    telling = MemberTelling(OURS)
    for _ in range(3):
        participants = [_participant(_member("own"), OURS), stranger, _participant(_member("b"), OURS)]
        assert _names(telling, *participants) == ["own", "b"]
    assert caplog.text.count("do not prove this replica's job token") == 1


def test_an_address_that_was_changed_is_nobodys() -> None:
    said = _participant(_member("b"), OURS)
    said.data["addresses"] = ["http://10.6.6.6:2"]
    assert _names(MemberTelling(OURS), _participant(_member("own"), OURS), _participant(_member("c"), OURS), said) == [
        "own",
        "c",
    ]


def test_what_was_said_before_is_not_believed_again() -> None:
    telling = MemberTelling(OURS)
    old, new = _participant(_member("b", 7), OURS), _participant(_member("b", 8), OURS)
    own = _participant(_member("own"), OURS)
    assert _names(telling, own, old) == ["own", "b"]
    assert _names(telling, own, new) == ["own", "b"]
    assert _names(telling, own, old) == ["own"]
    assert _names(telling, own, new) == ["own", "b"]


@pytest.mark.parametrize(("own", "other"), [(OURS, FOREIGN), (OURS, None), (None, OURS)])
def test_who_comes_to_strangers_alone_may_have_the_wrong_token(own: Keys | None, other: Keys | None) -> None:
    with pytest.raises(QuorumError, match="expected replicas with the same job token"):
        _names(MemberTelling(own), _participant(_member("own"), own), _participant(_member("b"), other))


def test_who_was_there_first_goes_on_alone() -> None:
    telling = MemberTelling(OURS)
    own = _participant(_member("own"), OURS)
    assert _names(telling, own) == ["own"]
    assert _names(telling, own, _participant(_member("evil", 1000), FOREIGN)) == ["own"]


def test_while_the_token_is_replaced_all_are_there() -> None:
    first, second = Keys.of("old new"), Keys.of("new old")
    for telling in (MemberTelling(first), MemberTelling(second)):
        assert _names(telling, _participant(_member("a"), first), _participant(_member("b"), second)) == ["a", "b"]


def test_another_package_in_the_quorum_is_named_without_what_a_terminal_would_act_upon() -> None:
    stranger = _participant(_member("evil\x1b[2J"), None, data={"x": "\x1b[2J"})
    with pytest.raises(QuorumError, match="run this package") as caught:
        _names(MemberTelling(None), stranger)
    assert "\x1b" not in str(caught.value)
