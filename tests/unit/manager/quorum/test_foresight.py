"""A newcomer that the others would refuse finds that out before its first quorum; in doubt the quorum decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
from msgspec import structs

from ft_transport.errors import DeadlineExceededError, PeerAuthenticationError
from ft_transport.telemetry.process_state import ManagerStatus, ProcessState
from manager import QuorumError
from manager.quorum import foresight
from manager.quorum.decision import Rules
from manager.quorum.lighthouse_status import ToldMember
from manager.quorum.reports import Member

RULES = Rules(min_replica_size=1)
COMMON, OTHER = (("model", "1"),), (("model", "2"),)
OWN = Member(
    replica_id="new:1",
    step=0,
    lineage="",
    store_address="h:1",
    addresses=("http://new",),
    rules=RULES.told(),
    structure=OTHER,
)

Answer = ManagerStatus | Exception | None


def refusing_members(
    own: Member,
    running: tuple[ToldMember, ...],
    rules: Rules,
    ask: Callable[[str, timedelta], ProcessState],
    *,
    has_token: bool = False,
) -> tuple[Member, ...]:
    return foresight.refusing_members(own, running, rules, ask, has_token=has_token)


def _told(name: str, **changed: object) -> ManagerStatus:
    told = ManagerStatus(replica_id=f"{name}:1", rules=RULES.told(), structure=COMMON, store_address=f"{name}:2")
    return replace(told, **changed)  # type: ignore[arg-type]


def _running(*names: str, step: int = 7) -> tuple[ToldMember, ...]:
    return tuple(ToldMember(replica_id=f"{name}:1", step=step, addresses=(f"http://{name}",)) for name in names)


def _ask(**answers: Answer) -> Callable[[str, timedelta], ProcessState]:
    def ask(address: str, timeout: timedelta) -> ProcessState:
        assert timeout > timedelta(0)
        answer = answers[address.removeprefix("http://")]
        if isinstance(answer, Exception):
            raise answer
        return ProcessState(manager=answer)

    return ask


def test_one_that_does_not_fit_learns_which_replica_it_does_not_fit() -> None:
    members = refusing_members(OWN, _running("a"), RULES, _ask(a=_told("a")))
    assert [(each.replica_id, each.step, each.store_address) for each in members] == [
        ("a:1", 7, "a:2"),
        ("new:1", 0, "h:1"),
    ]


@pytest.mark.parametrize(
    "answer",
    [
        _told("a", structure=OTHER),
        _told("a", structure=()),
        _told("another at this address"),
        ManagerStatus(replica_id="a:1"),
        None,
        DeadlineExceededError("late"),
        ConnectionRefusedError("gone"),
    ],
    ids=["fits", "compares nothing", "another one", "an older version", "no manager", "late", "gone"],
)
def test_in_doubt_the_quorum_decides(answer: Answer) -> None:
    assert refusing_members(OWN, _running("a"), RULES, _ask(a=answer)) == ()


def test_what_most_look_like_counts() -> None:
    ask = _ask(a=_told("a"), b=_told("b", structure=OTHER), c=_told("c", structure=OTHER))
    assert refusing_members(OWN, _running("a", "b", "c"), RULES, ask) == ()
    assert refusing_members(structs.replace(OWN, structure=COMMON), _running("a", "b", "c"), RULES, ask) != ()


def test_one_whose_own_state_is_as_new_asks_nobody() -> None:
    assert refusing_members(structs.replace(OWN, step=7), _running("a"), RULES, _ask()) == ()
    assert refusing_members(OWN, (), RULES, _ask()) == ()


def test_other_rules_are_named() -> None:
    rules = Rules(min_replica_size=2)
    with pytest.raises(QuorumError, match=r"same rules.*min_replica_size=2"):
        refusing_members(structs.replace(OWN, rules=rules.told()), _running("a"), rules, _ask(a=_told("a")))


def test_another_number_of_ranks_is_named() -> None:
    with pytest.raises(QuorumError, match="same number of ranks"):
        refusing_members(structs.replace(OWN, addresses=("x", "y")), _running("a"), RULES, _ask(a=_told("a")))


def test_one_without_a_token_names_the_replicas_that_have_one() -> None:
    stranger = PeerAuthenticationError("no proof")
    with pytest.raises(QuorumError, match=r"same job token.*'a:1', 'b:1'"):
        refusing_members(OWN, _running("a", "b"), RULES, _ask(a=stranger, b=stranger))
    # The other one may be of this job.
    late = DeadlineExceededError("late")
    assert refusing_members(OWN, _running("a", "b"), RULES, _ask(a=stranger, b=late)) == ()
    assert refusing_members(OWN, _running("a", "b"), RULES, _ask(a=stranger, b=_told("b"))) != ()


def test_strangers_on_the_page_keep_no_replica_with_a_token_out() -> None:
    stranger = PeerAuthenticationError("no proof")
    assert refusing_members(OWN, _running("a"), RULES, _ask(a=stranger), has_token=True) == ()


def test_a_large_job_is_not_asked_as_a_whole() -> None:
    names = [f"n{number}" for number in range(50)]
    asked: list[str] = []

    def ask(address: str, timeout: timedelta) -> ProcessState:
        del timeout
        asked.append(address)
        raise PeerAuthenticationError("no proof")

    assert refusing_members(OWN, _running(*names), RULES, ask) == ()
    assert len(asked) < 10
