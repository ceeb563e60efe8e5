"""The process group of a rank: it is met once for each key, and what was given up is not met again."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore

from ft_transport.coordination.store import DirectStore, StoreChannel, StoreConnections
from ft_transport.runtime.deadline import Deadline
from manager import QuorumError
from manager.quorum.decision import Decision, UpToDate
from manager.quorum.process_group import QuorumProcessGroup, group_number

TIMEOUT = timedelta(seconds=5)
FIRST, SECOND = "0-00000002", "0-00000004"


class Upstream:
    """Stands in for a process group of torchft's."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def configure(self, *arguments: Any) -> None:
        self.calls.append(("configure", *arguments))

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        raise NotImplementedError

    def abort(self) -> None:
        self.calls.append(("abort",))

    def errored(self) -> Exception | None:
        return None

    def shutdown(self) -> None:
        self.calls.append(("shutdown",))


class OneStore(StoreConnections):
    """Stands in for the stores of all replicas."""

    def __init__(self) -> None:
        super().__init__()
        self._channel = StoreChannel(DirectStore(HashStore()))

    def at(self, address: str) -> StoreChannel:
        del address
        return self._channel


@pytest.fixture
def listening() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/checkpoint/"


def held(upstream: Upstream, stores: StoreConnections | None = None) -> QuorumProcessGroup:
    return QuorumProcessGroup(
        upstream,
        stores=stores or StoreConnections(),
        group_rank=1,
        world_size=2,
        timeout=TIMEOUT,
        connect_timeout=TIMEOUT,
    )


def alone_in(group: str, *, rank: int | None = 0) -> Decision:
    return Decision(
        step=3,
        lineage="lineage",
        group=group,
        group_members=("own",),
        group_addresses=("http://own:1",),
        store_address="store:2",
        rank=rank,
        num_participants=1,
        participating_rank=rank,
        role=UpToDate(serves_now=(), serves_next=()),
    )


def test_a_group_is_set_up_once_for_its_key() -> None:
    upstream = Upstream()
    group = held(upstream)
    assert group.configure(alone_in(FIRST), Deadline(), replica_id="own") > 0
    assert group.configure(alone_in(FIRST), Deadline(), replica_id="own") == 0
    assert upstream.calls == [
        ("configure", f"store:2/ft_transport/{FIRST}/1", "own", 0, 1, group_number(FIRST), 1, 2, None)
    ]
    group.configure(alone_in(SECOND), Deadline(), replica_id="own")
    assert (group.group, group.num_begun, len(upstream.calls)) == (SECOND, 2, 2)


def test_a_replica_that_stands_by_keeps_what_it_has() -> None:
    upstream = Upstream()
    group = held(upstream)
    group.configure(alone_in(FIRST), Deadline(), replica_id="own")
    assert group.configure(alone_in(SECOND, rank=None), Deadline(), replica_id="own") == 0
    assert group.group == FIRST


def test_a_group_that_was_given_up_is_not_set_up_again() -> None:
    upstream = Upstream()
    group = held(upstream)
    group.abort()
    assert not upstream.calls, "there is none to end"
    group.configure(alone_in(FIRST), Deadline(), replica_id="own")
    group.abort()
    assert (group.group, upstream.calls[-1]) == ("", ("abort",))
    with pytest.raises(QuorumError, match=f"the process group {FIRST} was given up in this step"):
        group.configure(alone_in(FIRST), Deadline(), replica_id="own")


def test_a_group_that_was_declined_is_not_set_up_under_its_key(listening: str) -> None:
    """The next attempt has another number, and so another key: under this one the others find the refusal."""
    both = replace(alone_in(FIRST), group_members=("own", "other"), group_addresses=(listening, listening))
    stores = OneStore()
    group, other = held(Upstream(), stores), held(Upstream(), stores)
    group.decline(both, "no snapshot")
    assert group.num_begun == 1
    with pytest.raises(QuorumError, match="was given up in this step"):
        group.configure(both, Deadline(), replica_id="own")
    with pytest.raises(QuorumError, match="own does not set up the process group: no snapshot"):
        other.configure(replace(both, rank=1), Deadline(), replica_id="other")


def test_a_group_that_has_been_met_is_not_declined() -> None:
    group = held(Upstream())
    group.configure(alone_in(FIRST), Deadline(), replica_id="own")
    group.decline(replace(alone_in(FIRST), group_members=("own", "other")), "a reason")
    assert (group.group, group.num_begun) == (FIRST, 1)


def test_nothing_is_set_up_after_the_end() -> None:
    upstream = Upstream()
    group = held(upstream)
    group.configure(alone_in(FIRST), Deadline(), replica_id="own")
    group.close()
    assert (group.group, upstream.calls[-1]) == ("", ("shutdown",))
    with pytest.raises(QuorumError, match="replica own has been shut down"):
        group.configure(alone_in(SECOND), Deadline(), replica_id="own")
