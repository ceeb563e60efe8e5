"""What replicas say of themselves counts if they prove the job token, once."""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from ft_transport.keys import Keys
from manager import QuorumError
from manager.quorum.member_data import SignedReports
from manager.quorum.reports import Member

OURS, FOREIGN = Keys.of("ours"), Keys.of("foreign")


def _member(name: str, step: int = 7) -> Member:
    return Member(replica_id=name, step=step, lineage="l", store_address="10.0.0.1:1", addresses=("http://10.0.0.1:2",))


def _participant(member: Member, keys: Keys | None, **changed: Any) -> SimpleNamespace:
    data = SignedReports(keys).data_of(member)
    said = {"replica_id": member.replica_id, "step": member.step, "store_address": member.store_address, "data": data}
    return SimpleNamespace(**{**said, **changed})


def _names(telling: SignedReports, *participants: SimpleNamespace) -> list[str]:
    return [member.replica_id for member in telling.members_of(participants, "own")]


@pytest.mark.parametrize("keys", [OURS, None])
def test_what_is_said_arrives(keys: Keys | None) -> None:
    member = structs.replace(_member("b"), announced_to=frozenset({"x", "y"}), rules=("r",), structure=(("m", "1"),))
    [found] = SignedReports(keys).members_of([_participant(member, keys)], "own")
    assert structs.replace(found, process="", number=0) == member


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
    telling = SignedReports(OURS)
    for _ in range(3):
        participants = [_participant(_member("own"), OURS), stranger, _participant(_member("b"), OURS)]
        assert _names(telling, *participants) == ["own", "b"]
    assert caplog.text.count("do not prove this replica's job token") == 1


def test_an_address_that_was_changed_is_nobodys() -> None:
    said = _participant(_member("b"), OURS)
    said.data["addresses"] = ["http://10.6.6.6:2"]
    assert _names(SignedReports(OURS), _participant(_member("own"), OURS), _participant(_member("c"), OURS), said) == [
        "own",
        "c",
    ]


def test_what_was_said_before_is_not_believed_again() -> None:
    telling = SignedReports(OURS)
    old, new = _participant(_member("b", 7), OURS), _participant(_member("b", 8), OURS)
    own = _participant(_member("own"), OURS)
    assert _names(telling, own, old) == ["own", "b"]
    assert _names(telling, own, new) == ["own", "b"]
    assert _names(telling, own, old) == ["own"]
    assert _names(telling, own, new) == ["own", "b"]


@pytest.mark.parametrize(("own", "other"), [(OURS, FOREIGN), (OURS, None), (None, OURS)])
def test_who_comes_to_strangers_alone_may_have_the_wrong_token(own: Keys | None, other: Keys | None) -> None:
    with pytest.raises(QuorumError, match="expected replicas with the same job token"):
        _names(SignedReports(own), _participant(_member("own"), own), _participant(_member("b"), other))


def test_who_was_there_first_goes_on_alone() -> None:
    telling = SignedReports(OURS)
    own = _participant(_member("own"), OURS)
    assert _names(telling, own) == ["own"]
    assert _names(telling, own, _participant(_member("evil", 1000), FOREIGN)) == ["own"]


def test_while_the_token_is_replaced_all_are_there() -> None:
    first, second = Keys.of("old new"), Keys.of("new old")
    for telling in (SignedReports(first), SignedReports(second)):
        assert _names(telling, _participant(_member("a"), first), _participant(_member("b"), second)) == ["a", "b"]


@pytest.mark.parametrize(("num_ahead", "goes_on"), [(1, ("b", "c", "d")), (2, ()), (3, ("a", "b", "c"))])
def test_where_a_token_was_replaced_too_early_the_job_does_not_fall_in_two(
    num_ahead: int, goes_on: tuple[str, ...]
) -> None:
    names = ("a", "b", "c", "d")
    tokens = dict.fromkeys(names, "old")
    tellings: dict[str, SignedReports] = {}

    def members_of_all() -> dict[str, list[str] | QuorumError]:
        said = [_participant(_member(name), Keys.of(tokens[name])) for name in names]
        found: dict[str, list[str] | QuorumError] = {}
        for name in names:
            try:
                found[name] = [member.replica_id for member in tellings[name].members_of(said, name)]
            except QuorumError as error:
                found[name] = error
        return found

    def read(name: str) -> str:
        return tokens[name]

    now_s = 1000.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ft_transport.keys.time", SimpleNamespace(monotonic=lambda: now_s))
        tellings.update({name: SignedReports(Keys(functools.partial(read, name))) for name in names})
        assert members_of_all() == {key: list(names) for key in names}
        tokens.update(dict.fromkeys(names[:num_ahead], "new"))
        for _ in range(2):
            now_s += 1
            groups = members_of_all()
            going = {name: each for name, each in groups.items() if isinstance(each, list)}
            assert going == {key: list(goes_on) for key in goes_on}
            assert all("'new old'" in str(each) for each in groups.values() if isinstance(each, QuorumError))
        tokens.update(dict.fromkeys(names[num_ahead:], "new"))
        now_s += 1
        assert members_of_all() == {key: list(names) for key in names}, "it goes on where all have it"


def test_what_a_dead_replica_has_said_stops_nobody() -> None:
    telling = SignedReports(OURS)
    own, old, new = (_participant(_member(name), OURS) for name in ("own", "b", "b"))
    assert _names(telling, own, new) == ["own", "b"]
    assert _names(telling, own, old) == ["own"]


def test_another_package_in_the_quorum_is_named_without_what_a_terminal_would_act_upon() -> None:
    stranger = _participant(_member("evil\x1b[2J"), None, data={"x": "\x1b[2J"})
    with pytest.raises(QuorumError, match="run this package") as caught:
        _names(SignedReports(None), stranger)
    assert "\x1b" not in str(caught.value)
