"""The threads of a fetch around a machine that leaves them nothing to do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

import pytest

from ft_transport import DeadlineExceededError, PeerUnreachableError, TransportSettings
from ft_transport.http.connection import Connection
from ft_transport.http.fetch_pool import FetchPool, FetchSettings
from ft_transport.http.peer_address import PeerAddress
from ft_transport.wire.fetch import FetchMachine, Request, SourceIndex


class _NothingToTake:
    """Work that can never be done, and does not say so."""

    num_left = 1

    def take(self, *_: object) -> None:
        return None

    landed = put_back = find_hopeless = time_passed = take


class _NoWire:
    def receive(self, connection: Connection, request: Request[int]) -> Iterator[tuple[int, int]]:
        raise AssertionError("nothing is asked for")


@pytest.mark.parametrize("progress_timeout", [None, timedelta(seconds=0.2)])
def test_workers_that_wait_for_each_other_end_with_the_time(progress_timeout: timedelta | None) -> None:
    settings = FetchSettings.of(
        TransportSettings(),
        keys=None,
        certificates=None,
        num_connections=2,
        timeout=timedelta(seconds=60 if progress_timeout else 0.2),
        unreachable_timeout=None,
        progress_timeout=progress_timeout,
    )
    machine: FetchMachine[int] = FetchMachine(_NothingToTake(), sources=["source"], max_failures=1)
    peer = PeerAddress.from_url("http://127.0.0.1:1/checkpoint/")
    pool = FetchPool([peer], machine, _NoWire(), settings, num_workers=2, step=3, total_bytes=10)
    began_s = time.monotonic()
    with pytest.raises(DeadlineExceededError, match=r"0 of 10 bytes"):
        pool.run()
    assert time.monotonic() - began_s < 5


class _AskingOnce(_NothingToTake):
    """Asks the source for its only chunk, and then for nothing any more."""

    def __init__(self) -> None:
        self._asked = False

    def take(self, *_: object) -> tuple[SourceIndex, range] | None:  # type: ignore[override]
        if self._asked:
            return None
        self._asked = True
        return SourceIndex(0), range(1)


class _Refusing:
    def receive(self, connection: Connection, request: Request[int]) -> Iterator[tuple[int, int]]:
        raise PeerUnreachableError("nobody is there", peer="source:1")


def test_a_fetch_that_ends_with_the_time_says_what_went_wrong_last() -> None:
    settings = FetchSettings.of(
        TransportSettings(),
        keys=None,
        certificates=None,
        num_connections=2,
        timeout=timedelta(seconds=0.3),
        unreachable_timeout=None,
        progress_timeout=None,
    )
    machine: FetchMachine[int] = FetchMachine(_AskingOnce(), sources=["source"], max_failures=3)
    peer = PeerAddress.from_url("http://127.0.0.1:1/checkpoint/")
    pool = FetchPool([peer], machine, _Refusing(), settings, num_workers=2, step=3, total_bytes=10)
    with pytest.raises(DeadlineExceededError, match="the deadline passed; last: nobody is there") as caught:
        pool.run()
    assert caught.value.peer == "source:1"
