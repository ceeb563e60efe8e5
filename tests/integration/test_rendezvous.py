"""Members of a process group meet before they set it up, and nobody waits for one that is dead."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from quorum_threads import run_replicas
from torch.distributed import TCPStore

from manager.collectives.rendezvous import rendezvous
from manager.collectives.stores import StoreConnections
from manager.errors import QuorumError

LONG = timedelta(seconds=60)
AT_ONCE_S = 20.0

pytestmark = pytest.mark.usefixtures("quorum_ready")


@pytest.fixture
def store_address() -> Iterator[str]:
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    yield f"127.0.0.1:{stores[0].port}"
    stores.clear()


@pytest.fixture
def listening() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/checkpoint/"


@pytest.fixture
def dead() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}/checkpoint/"


def arrive(store_address: str, rank: int, addresses: list[str], timeout: timedelta = LONG) -> None:
    names = [f"replica_{other}" for other in range(len(addresses))]
    stores = StoreConnections()
    store = stores.at_address(store_address)
    try:
        rendezvous(store=store, prefix="here", rank=rank, names=names, addresses=addresses, timeout=timeout)
    finally:
        stores.close()


def test_members_who_all_come_meet(store_address: str, listening: str) -> None:
    run_replicas(*(lambda rank=rank: arrive(store_address, rank, [listening] * 3) for rank in range(3)))


def test_a_dead_member_is_named_at_once(store_address: str, listening: str, dead: str) -> None:
    started_s = time.monotonic()
    with pytest.raises(QuorumError, match="replica_1 is dead: nobody listens at http://127"):
        arrive(store_address, 0, [listening, dead])
    assert time.monotonic() - started_s < AT_ONCE_S


def test_a_member_that_dies_on_the_way_is_noticed(store_address: str, listening: str) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    dying = f"http://127.0.0.1:{server.getsockname()[1]}/checkpoint/"

    def die() -> None:
        # It was still there when the others began.
        server.accept()[0].close()
        server.close()

    def come() -> str:
        with pytest.raises(QuorumError, match="replica_1 is dead") as caught:
            arrive(store_address, 0, [listening, dying])
        return str(caught.value)

    started_s = time.monotonic()
    run_replicas(die, come)
    assert time.monotonic() - started_s < AT_ONCE_S


def test_one_that_lives_and_does_not_come_is_named_at_the_deadline(store_address: str, listening: str) -> None:
    with pytest.raises(QuorumError, match=r"\['replica_1'\] to come within 0\.3 s"):
        arrive(store_address, 0, [listening, listening], timedelta(seconds=0.3))


def test_a_store_that_is_not_there_is_named(listening: str, dead: str) -> None:
    with pytest.raises(QuorumError, match=r"the store at 127.* to answer"):
        arrive(dead.removeprefix("http://").partition("/")[0], 0, [listening, listening], timedelta(seconds=0.5))
