"""A store is connected to once, however slow its name is looked up, and nobody waits longer for it than asked."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from programs import Program
from quorum_threads import lighthouse, make_manager, run_replicas
from torch.distributed import TCPStore

from ft_transport.coordination.ranks import rendezvous
from ft_transport.coordination.store import StoreConnections
from ft_transport.errors import DeadlineExceededError, RankGoneError
from manager import Manager

LONG = timedelta(seconds=30)
SLOW_S = 1.0

pytestmark = [pytest.mark.usefixtures("quorum_ready"), pytest.mark.timeout(60)]

_SERVE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def stores() -> Iterator[StoreConnections]:
    stores = StoreConnections()
    yield stores
    stores.close()


@pytest.fixture
def servers() -> Iterator[list[TCPStore]]:
    """A store; it ends when the list is emptied."""
    servers = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    yield servers
    servers.clear()


def test_a_stopped_store_is_not_waited_for_longer_than_asked(stores: StoreConnections) -> None:
    brief = timedelta(milliseconds=50)
    command = [sys.executable, "-c", _SERVE]
    with Program(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        connection = stores.at(f"127.0.0.1:{port}")
        connection.set("key", "value", LONG)
        os.kill(process.pid, signal.SIGSTOP)
        try:
            for call in (
                lambda: connection.get(["other"], brief),
                lambda: connection.missing(["key"], brief),
                lambda: connection.add("number", 1, brief),
            ):
                start_s = time.monotonic()
                with pytest.raises(DeadlineExceededError, match=rf"the store at 127.0.0.1:{port} to answer"):
                    call()
                assert time.monotonic() - start_s < brief.total_seconds() + 0.5
        finally:
            os.kill(process.pid, signal.SIGCONT)
        assert connection.get(["key"], LONG) == [b"value"]
        process.kill()


def test_a_store_that_was_started_again_is_connected_to_again(
    stores: StoreConnections, servers: list[TCPStore]
) -> None:
    port = servers[0].port
    connection = stores.at(f"127.0.0.1:{port}")
    connection.set("key", "value", LONG)
    servers.clear()
    servers.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))
    connection.set("key", "another", LONG)
    assert connection.get(["key"], LONG) == [b"another"]


@pytest.mark.parametrize("is_connected", [False, True])
def test_a_store_whose_replica_is_dead_is_given_up_at_once(
    stores: StoreConnections, servers: list[TCPStore], is_connected: bool
) -> None:
    """A client of torch's tries until its timeout is over, and with it all members that meet in that store."""
    port = servers[0].port
    connection = stores.at(f"127.0.0.1:{port}")
    if is_connected:
        connection.set("key", "value", LONG)
    servers.clear()
    start_s = time.monotonic()
    with pytest.raises(RankGoneError, match=rf"the store at 127.0.0.1:{port} to answer: no process listens there"):
        connection.set("key", "another", LONG)
    assert time.monotonic() - start_s < 5.0


def test_a_member_whose_store_dies_while_the_others_meet_in_it_is_not_waited_for(
    stores: StoreConnections, servers: list[TCPStore]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as alive:
        address = f"http://127.0.0.1:{alive.getsockname()[1]}/"
        timer = threading.Timer(0.5, servers.clear)
        timer.start()
        start_s = time.monotonic()
        with pytest.raises(RankGoneError, match="no process listens there"):
            rendezvous(
                store=stores.at(f"127.0.0.1:{servers[0].port}"),
                prefix="here",
                rank=0,
                names=["a", "b"],
                addresses=[address, address],
                timeout=LONG,
            )
        assert time.monotonic() - start_s < 5.0
        timer.join()


def test_closing_frees_whoever_waits(stores: StoreConnections, servers: list[TCPStore]) -> None:
    connection = stores.at(f"127.0.0.1:{servers[0].port}")
    timer = threading.Timer(0.1, stores.close)
    timer.start()
    start_s = time.monotonic()
    with pytest.raises(RankGoneError):
        connection.get(["never"], timedelta(seconds=2))
    timer.join()
    assert time.monotonic() - start_s < 1.0


class Lookups:
    """Counts the clients that are made, and holds each up as a slow look-up of its host's name does."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_lookups = 0
        holders = [
            module for name, module in list(sys.modules.items()) if name.startswith(("ft_transport.", "manager."))
        ]
        for holder in holders:
            if hasattr(holder, "TCPStore"):
                patch.setattr(holder, "TCPStore", self._make)

    def _make(self, *arguments: Any, is_master: bool, **keywords: Any) -> TCPStore:
        if not is_master:
            self.num_lookups += 1
            time.sleep(SLOW_S)
        return TCPStore(*arguments, is_master=is_master, **keywords)


def test_closing_frees_whoever_waits_for_the_connection(
    monkeypatch: pytest.MonkeyPatch, stores: StoreConnections, servers: list[TCPStore]
) -> None:
    lookups = Lookups(monkeypatch)
    connection = stores.at(f"127.0.0.1:{servers[0].port}")
    timer = threading.Timer(0.1, stores.close)
    timer.start()
    start_s = time.monotonic()
    with pytest.raises(RankGoneError, match="has been shut down"):
        connection.get(["never"], timedelta(seconds=20))
    assert time.monotonic() - start_s < SLOW_S
    timer.join()
    # Nobody waits for the look-up itself, which cannot be ended.
    for thread in threading.enumerate():
        if thread.name == "ft-transport-store":
            thread.join(5)
    assert lookups.num_lookups == 1


def test_a_slow_resolver_costs_no_quorum_after_the_first_contact(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups = Lookups(monkeypatch)

    def train(manager: Manager) -> float:
        manager.start_quorum()
        manager.allreduce(torch.ones(1)).wait()
        assert manager.should_commit()
        # Both give the group up, and meet in another one.
        manager.start_quorum()
        manager.wait_quorum()
        manager.report_error(RuntimeError("for the test"))
        assert not manager.should_commit()
        start_s = time.monotonic()
        manager.start_quorum()
        manager.allreduce(torch.ones(1)).wait()
        assert manager.should_commit()
        return time.monotonic() - start_s

    with lighthouse(min_replicas=2) as address:
        managers = [make_manager(address, name, min_replica_size=2, has_part=True) for name in "ab"]
        try:
            durations_s = run_replicas(*(lambda manager=manager: train(manager) for manager in managers))
        finally:
            for manager in managers:
                manager.shutdown()
    # Both meet in the store of the first, which that one has in its own process.
    assert lookups.num_lookups == 1
    assert max(durations_s) < SLOW_S


def test_stores_of_replicas_that_are_gone_keep_no_connection(stores: StoreConnections) -> None:
    """Every replica that starts again brings a store of its own."""

    def num_connections() -> int:
        return sum(thread.name == "ft-transport-store" for thread in threading.enumerate())

    servers = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(20)]
    own = stores.own("127.0.0.1", servers[0].port, servers[0])
    own.set("key", "value", LONG)
    for server in servers[1:]:
        stores.at(f"127.0.0.1:{server.port}").set("key", "value", LONG)
    assert num_connections() < 12
    assert own.get(["key"], LONG) == [b"value"]
    assert stores.at(f"127.0.0.1:{servers[1].port}").get(["key"], LONG) == [b"value"]
    servers.clear()
