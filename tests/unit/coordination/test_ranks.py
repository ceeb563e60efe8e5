"""Members of a process group meet before they set it up, and wait for none that is dead; over a store in memory."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from ranks_on_threads import run_ranks
from torch.distributed import HashStore

from ft_transport.coordination.ranks import decline, decode_message, rendezvous
from ft_transport.coordination.store import DirectStore, StoreChannel, nobody_listens
from ft_transport.errors import DeadlineExceededError, PeerProtocolError, RankGoneError

LONG = timedelta(seconds=60)
AT_ONCE_S = 20.0


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture
def listening() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/checkpoint/"


@pytest.fixture
def dead() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}/checkpoint/"


def arrive(store: Any, rank: int, addresses: list[str], timeout: timedelta = LONG) -> None:
    names = [f"replica_{other}" for other in range(len(addresses))]
    channel = StoreChannel(DirectStore(store))
    rendezvous(store=channel, prefix="here", rank=rank, names=names, addresses=addresses, timeout=timeout)


def test_members_who_all_come_meet(store: HashStore, listening: str) -> None:
    run_ranks(*(lambda rank=rank: arrive(store, rank, [listening] * 3) for rank in range(3)))  # type: ignore[misc]


def test_a_member_that_is_slow_is_waited_for(store: HashStore, listening: str) -> None:
    """For longer than the others wait before they probe its address."""
    with pytest.raises(DeadlineExceededError):
        arrive(store, 0, [listening] * 2, timedelta(seconds=0.5))
    run_ranks(lambda: arrive(store, 0, [listening] * 2), lambda: arrive(store, 1, [listening] * 2))


def test_a_dead_member_is_named_at_once(store: HashStore, listening: str, dead: str) -> None:
    started_s = time.monotonic()
    with pytest.raises(RankGoneError, match="replica_1 is dead: no process listens at http://127") as caught:
        arrive(store, 0, [listening, dead])
    assert caught.value.ranks == (1,)
    assert time.monotonic() - started_s < AT_ONCE_S


def test_a_member_that_dies_on_the_way_is_noticed(store: HashStore, listening: str) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    dying = f"http://127.0.0.1:{server.getsockname()[1]}/checkpoint/"

    def die() -> None:
        # It was still there when the others began.
        server.accept()[0].close()
        server.close()

    def come() -> None:
        with pytest.raises(RankGoneError, match="replica_1 is dead"):
            arrive(store, 0, [listening, dying])

    started_s = time.monotonic()
    run_ranks(die, come)
    assert time.monotonic() - started_s < AT_ONCE_S


def test_one_that_lives_and_does_not_come_is_named_at_the_deadline(store: HashStore, listening: str) -> None:
    with pytest.raises(DeadlineExceededError, match=r"\['replica_1'\] to set up the process group within 0\.3 s"):
        arrive(store, 0, [listening, listening], timedelta(seconds=0.3))


def test_a_member_that_gives_up_ends_the_wait_of_all(store: HashStore, listening: str) -> None:
    def give_up() -> None:
        channel = StoreChannel(DirectStore(store))
        decline(store=channel, prefix="here", name="replica_1", reason="no snapshot", timeout=LONG)

    def come() -> None:
        # The third never comes.
        with pytest.raises(RankGoneError, match="replica_1 does not set up the process group: no snapshot"):
            arrive(store, 0, [listening] * 3)

    started_s = time.monotonic()
    run_ranks(come, give_up)
    with pytest.raises(RankGoneError, match="no snapshot"):
        arrive(store, 2, [listening] * 3)
    assert time.monotonic() - started_s < AT_ONCE_S


def test_an_address_that_says_nothing_counts_as_alive(listening: str, dead: str) -> None:
    assert nobody_listens(dead, AT_ONCE_S)
    assert not nobody_listens(listening, AT_ONCE_S)
    assert not nobody_listens("http://nowhere.invalid:1/", AT_ONCE_S)


def test_a_name_that_nobody_answers_for_costs_no_more_than_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    def wait(*_args: object, **_kwargs: object) -> list[object]:
        answered.wait(60)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", wait)
    began_s = time.monotonic()
    assert not nobody_listens("http://slow.example:1/", 0.2)
    assert time.monotonic() - began_s < AT_ONCE_S
    answered.set()
    for thread in threading.enumerate():
        if thread.name == "ft-transport-look-up":
            thread.join(AT_ONCE_S)


def test_a_value_of_the_kind_comes() -> None:
    assert decode_message(b'{"a":1}', msgspec.json.Decoder(dict[str, int])) == {"a": 1}
    assert decode_message(b"\x92\x01\x02", msgspec.msgpack.Decoder(list[int])) == [1, 2]


@pytest.mark.parametrize(
    "encoded",
    [b"", b"\xff", b'"\xff"', b"[" * 100_000, b"\x91" * 100_000, b'{"a":"b"}', b"\xdd\xff\xff\xff\xff", b"\xa1\xff"],
)
def test_anything_else_is_a_typed_error(encoded: bytes) -> None:
    for decode in (
        lambda: decode_message(encoded, msgspec.json.Decoder(dict[str, int])),
        lambda: decode_message(encoded, msgspec.msgpack.Decoder(dict[str, int])),
    ):
        with pytest.raises(PeerProtocolError, match="expected a dict of another rank") as caught:
            decode()
        assert len(str(caught.value)) < 1000
