"""What replicas say of themselves counts if they prove the job token, once."""

from __future__ import annotations

import functools
import html
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from scripted_peer import Peer, scripted

from ft_transport.credentials import Keys
from ft_transport.errors import DeadlineExceededError, PeerAuthenticationError
from ft_transport.telemetry.process_state import ManagerStatus, ProcessState
from manager import QuorumError
from manager.quorum import members
from manager.quorum.decision import Rules
from manager.quorum.members import RunningMember, SignedReports, parse_status, read_status
from manager.quorum.reports import Member

OURS, FOREIGN = Keys.of("ours"), Keys.of("foreign")
HEARTBEAT = '<li class="heartbeat\n {kind}\n">\n {name}: seen {age}s ago\n</li>'
MEMBER = "<b>{name}</b> <br/>\n Step: {step} <br/>\n Manager: {addresses} <br/>"
SPACES = " " * 200_000
HOSTILE_NAMES = (
    "x: seen 1..2s ago",
    "x: seen .s ago",
    "x: seen 0.1s ago: seen ",
    "a\nb",
    "\n",
    "<b>x</b> <br/>\n  Step: 5 <br/>\n  Manager: http://127.0.0.1:1 <br/>",
    SPACES + "a\nb",
    ": seen " * 20_000,
    "[" + "9" * 5_000 + "/1 participants",
    "quorum status: ok",
    "\x1b[2J\x1b]0;mine\x07\u202e",
)
RULES = Rules(min_replica_size=1)
COMMON, OTHER = (("model", "1"),), (("model", "2"),)
OWN = Member(
    replica_id="new:1",
    step=0,
    lineage="",
    store_address="h:1",
    addresses=("http://new",),
    rules=RULES.as_text(),
    structure=OTHER,
)

refusing_members = functools.partial(members.refusing_members, has_token=False)

Answer = ManagerStatus | Exception | None


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
        patch.setattr("ft_transport.credentials.time", SimpleNamespace(monotonic=lambda: now_s))
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


def heartbeat(name: str, kind: str = "", age: str = "0.1") -> str:
    return HEARTBEAT.format(kind=kind, name=html.escape(name), age=age)


def within(seconds: float, action: Callable[[], object]) -> None:
    began_s = time.process_time()
    action()
    assert time.process_time() - began_s < seconds


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=lambda name: ascii(name[:30]))
@pytest.mark.parametrize("kind", ["", "old"])
def test_a_name_cannot_move_the_terminal_or_take_the_room_of_others(name: str, kind: str) -> None:
    status = parse_status(heartbeat(name, kind) + heartbeat("genuine:1", kind))
    told = status.missing("own:1")
    assert "genuine:1" in told
    assert told.isprintable()
    assert len(told) < 1_000


@pytest.mark.parametrize(
    "page",
    [
        heartbeat(SPACES + "a\nb"),
        '<li class="heartbeat' + SPACES,
        '<li class="heartbeat' * 20_000,
        '<li class="heartbeat">' + SPACES,
        MEMBER.format(name="a:1", step=3, addresses=SPACES + "b").replace("<br/>", "", 2),
        MEMBER.format(name="a:1", step=3, addresses="x" + SPACES + "y<"),
        "<b>" * 100_000,
        "quorum status:" + SPACES,
        "[" + "9" * 300_000,
    ],
    ids=lambda page: ascii(page[:40]),
)
def test_no_page_takes_long(page: str) -> None:
    within(2, lambda: parse_status(page))


def test_numbers_that_are_none_are_left_out() -> None:
    many = "9" * 5_000
    page = heartbeat("a:1", age=many) + heartbeat("b:1", "old", "1.2.3") + heartbeat("c:1", age="٣")
    page += MEMBER.format(name="c:1", step=many, addresses="http://127.0.0.1:1") + f"[{many}/1 participants"
    status = parse_status(page)
    assert (status.alive, status.silent, status.members, status.num_asking) == ((), (), (), None)


@contextmanager
def trickling(piece: bytes) -> Iterator[str]:
    """A server that sends a little more before a reader would give it up."""
    is_over = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        while not is_over.wait(0.02):
            peer.send(piece)

    with scripted(script) as port:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            is_over.set()


@pytest.mark.parametrize("piece", [b"H", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_page_that_trickles_is_given_up(piece: bytes) -> None:
    with trickling(piece) as address:
        began_s = time.monotonic()
        assert read_status(address, 0.1) is None
        assert time.monotonic() - began_s < 5


def test_a_page_without_end_is_read_in_part() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\n\r\n" + heartbeat("a:1").encode() + b" " * (64 << 20))

    with scripted(script) as port:
        status = read_status(f"http://127.0.0.1:{port}", 2.0)
    assert status is None or status.alive == ("a:1",)


def test_what_is_no_answer_is_none() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(b"SSH-2.0-x\r\n\r\n" + heartbeat("a:1").encode())

    with scripted(script) as port:
        assert read_status(f"http://127.0.0.1:{port}", 2.0) is None
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert read_status(f"http://127.0.0.1:{silent.getsockname()[1]}", 0.1) is None


def _told(name: str, **changed: object) -> ManagerStatus:
    told = ManagerStatus(replica_id=f"{name}:1", rules=RULES.as_text(), structure=COMMON, store_address=f"{name}:2")
    return replace(told, **changed)  # type: ignore[arg-type]


def _running(*names: str, step: int = 7) -> tuple[RunningMember, ...]:
    return tuple(RunningMember(replica_id=f"{name}:1", step=step, addresses=(f"http://{name}",)) for name in names)


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
        refusing_members(structs.replace(OWN, rules=rules.as_text()), _running("a"), rules, _ask(a=_told("a")))


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
