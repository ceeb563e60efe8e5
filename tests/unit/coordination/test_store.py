"""Keys of a store: what is set is read, what is set once stays, and every wait ends; over a store in memory."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from ranks_on_threads import run_ranks
from torch.distributed import HashStore

from ft_transport.coordination.ranks import RankMessages
from ft_transport.coordination.store import AT_ONCE, DirectStore, StoreChannel
from ft_transport.errors import RankGoneError
from ft_transport.runtime.deadline import Backoff

LONG = timedelta(seconds=30)
BRIEF = timedelta(milliseconds=50)
AT_ONCE_S = 10.0


@pytest.fixture
def channel() -> StoreChannel:
    return StoreChannel(DirectStore(HashStore()))


def test_what_is_set_is_read(channel: StoreChannel) -> None:
    channel.set("one", "1", LONG)
    channel.post("two", b"2", LONG)
    assert channel.get(["one", "two"], AT_ONCE) == [b"1", b"2"]
    assert channel.missing(["one", "three", "two"], LONG) == ["three"]
    channel.remove("one", LONG)
    assert channel.missing(["one", "two"], LONG) == ["one"]


def test_of_several_who_set_a_key_once_the_first_is_read_by_all(channel: StoreChannel) -> None:
    channel.set("old", "x", LONG)
    set_by = run_ranks(
        *(lambda rank=rank: channel.set_once("key", f"{rank}", LONG, remove=["old"]) for rank in range(8))  # type: ignore[misc]
    )
    assert len(set(set_by)) == 1
    assert channel.get(["key"], AT_ONCE) == set_by[:1]
    assert channel.missing(["old"], LONG) == ["old"]


def test_a_key_is_replaced_only_where_it_has_the_value_that_is_expected(channel: StoreChannel) -> None:
    channel.set("key", "mine", LONG)
    channel.replace("key", "another's", "none", LONG)
    assert channel.get(["key"], AT_ONCE) == [b"mine"]
    channel.replace("key", "mine", "none", LONG)
    assert channel.get(["key"], AT_ONCE) == [b"none"]


def test_a_counter_counts_every_rank(channel: StoreChannel) -> None:
    counted = run_ranks(*(lambda: channel.add("number", 1, LONG) for _ in range(8)))
    assert sorted(counted) == list(range(1, 9))


def test_a_wait_ends_when_all_keys_are_set(channel: StoreChannel) -> None:
    def come() -> list[bytes] | None:
        channel.set("one", "1", LONG)
        assert channel.get(["one", "two"], BRIEF, answer_timeout=LONG) is None
        channel.set("two", "2", LONG)
        return None

    assert run_ranks(lambda: channel.get(["one", "two"], LONG), come)[0] == [b"1", b"2"]


def test_a_wait_ends_with_its_timeout(channel: StoreChannel) -> None:
    began_s = time.monotonic()
    assert channel.get(["never"], BRIEF) is None
    assert channel.get(["never"], AT_ONCE) is None
    assert BRIEF.total_seconds() <= time.monotonic() - began_s < AT_ONCE_S


def test_a_wait_ends_where_it_is_told_to(channel: StoreChannel) -> None:
    began_s = time.monotonic()
    waiting = threading.Timer(BRIEF.total_seconds(), lambda: channel.set("left", "", LONG))
    waiting.start()
    assert channel.get(["never"], LONG, unless=["also never", "left"]) is None
    waiting.join()
    assert time.monotonic() - began_s < AT_ONCE_S


def test_a_store_that_is_gone_is_an_error_of_ours_and_other_errors_stay_what_they_are() -> None:
    def fail(error: Exception) -> Any:
        raise error

    channel = StoreChannel(DirectStore(None))
    with pytest.raises(RankGoneError, match=r"store of torch\.distributed to answer: Broken pipe"):
        channel.call(lambda store: fail(RuntimeError("Broken pipe")), LONG)
    with pytest.raises(ValueError, match="mine"):
        channel.call(lambda store: fail(ValueError("mine")), LONG)


def test_a_long_wait_looks_seldom_and_a_short_one_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, pauses = [0.0], []

    def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        now_s[0] += pause_s

    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(time, "sleep", sleep)
    backoff = Backoff()
    while now_s[0] < 60:
        backoff.pause(at_most_s=60 - now_s[0] + 1e-9)
    assert pauses[0] < 0.001
    assert pauses == [*sorted(pauses[:-1]), pauses[-1]]
    assert max(pauses) == 0.05
    assert sum(pauses[:50]) < 0.02
    assert now_s[0] < 60.001


# ------------------------------------------------------------------------------------------------------- heartbeats


def messages_of(rank: int, channel: StoreChannel, timeout: timedelta = LONG) -> RankMessages:
    return RankMessages(channel, None, rank=rank, timeout=timeout)


def test_a_rank_is_waited_for_as_long_as_its_heartbeat_moves(channel: StoreChannel) -> None:
    silence = timedelta(seconds=0.4)
    beating, silent = messages_of(1, channel, silence), messages_of(2, channel, silence)
    silent.beat()
    is_over = threading.Event()

    def beat() -> None:
        began_s = time.monotonic()
        while time.monotonic() < began_s + 3 * silence.total_seconds():
            beating.beat()
            time.sleep(0.02)
        assert not is_over.is_set()
        beating.post("one", b"1")

    def wait() -> list[bytes | None]:
        found = messages_of(0, channel, silence).wait({1: "one", 2: "two"})
        is_over.set()
        return found

    assert run_ranks(wait, beat)[0] == [b"1", None]


def test_a_wait_for_ranks_that_are_alive_ends_with_its_deadline(channel: StoreChannel) -> None:
    messages = messages_of(0, channel)
    messages.post("one", b"1")
    began_s = time.monotonic()
    assert messages.wait({1: "one", 2: "two"}, deadline_s=began_s + BRIEF.total_seconds()) == [b"1", None]
    assert BRIEF.total_seconds() <= time.monotonic() - began_s < AT_ONCE_S


def test_heartbeats_that_come_too_often_are_left_out(channel: StoreChannel) -> None:
    messages = messages_of(0, channel)
    for _ in range(10):
        messages.beat()
    assert channel.get(["alive/0"], AT_ONCE) == [b"1"]


class _AnswersBetweenTwoLooks:
    """A store in which another rank answers and leaves, right after the first look for its answer."""

    def __init__(self) -> None:
        self._store = HashStore()

    def check(self, keys: list[str]) -> bool:
        found = self._store.check(keys)
        if keys == ["answer"]:
            self._store.set("answer", "yes")
            self._store.set("left", "")
        return bool(found)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))


def test_an_answer_is_found_though_the_rank_that_gave_it_has_left() -> None:
    channel = StoreChannel(DirectStore(_AnswersBetweenTwoLooks()))  # type: ignore[arg-type]
    assert channel.get(["answer"], LONG, unless=["left"]) == [b"yes"]
