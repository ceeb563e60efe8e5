"""Who is asked for a state, and who receives it with this one."""

from __future__ import annotations

from typing import Any

import pytest

from ft_transport.errors import ConfigurationError
from ft_transport.http.peer_address import PeerAddress
from ft_transport.transfer.sources import FetchPeers

OWN = "http://own:1/checkpoint/"
FIRST, SECOND = "http://first:2/checkpoint/", "http://second:3/checkpoint/"


def names(peers: Any) -> list[str]:
    return [str(each) for each in peers]


def test_one_source_is_a_url() -> None:
    peers = FetchPeers.of(FIRST, relays=(), own=OWN)
    assert peers == FetchPeers(sources=[PeerAddress(host="first", port=2)])


@pytest.mark.parametrize("relays", [(), [], [OWN], (OWN, OWN)])
def test_who_receives_alone_has_no_relays(relays: Any) -> None:
    peers = FetchPeers.of([FIRST, SECOND], relays=relays, own=OWN)
    assert names(peers.sources) == ["first:2", "second:3"]
    assert (list(peers.receivers), peers.own) == ([], 0)


def test_all_receivers_have_the_same_order() -> None:
    urls = [SECOND, OWN, FIRST]
    seen = [FetchPeers.of("http://source:9", relays=urls, own=own) for own in urls]
    assert {tuple(names(each.receivers)) for each in seen} == {("first:2", "own:1", "second:3")}
    assert [each.own for each in seen] == [2, 1, 0]


def test_one_that_the_others_have_not_named_is_a_receiver_too() -> None:
    peers = FetchPeers.of("http://source:9", relays=[FIRST, FIRST], own=OWN)
    assert (names(peers.receivers), peers.own) == (["first:2", "own:1"], 1)


@pytest.mark.parametrize(
    ("sources", "relays", "message"),
    [
        ([], (), r"the URLs of one or more sources, got \[\]"),
        (None, (), "the URL of a peer, got None"),
        ([1], (), "the URL of a peer, got 1"),
        (FIRST, SECOND, "a sequence of addresses as relays, got 'http://second"),
        (FIRST, None, "a sequence of addresses as relays, got None"),
        (FIRST, ["second"], "a URL like"),
    ],
)
def test_what_is_no_peer_is_refused(sources: Any, relays: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        FetchPeers.of(sources, relays=relays, own=OWN)
