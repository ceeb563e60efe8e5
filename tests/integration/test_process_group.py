"""The collectives between replicas: a group can be given up, and then nobody waits for it."""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from made_objects import made
from quorum_threads import run_replicas
from torch.distributed import AllreduceOptions, PrefixStore, TCPStore

from manager.collectives import gloo
from manager.collectives.gloo import GlooProcessGroup, GlooSockets, WatchedWork

LONG = timedelta(seconds=60)
AT_ONCE_S = 20.0

pytestmark = pytest.mark.usefixtures("quorum_ready")


@pytest.fixture
def stores() -> Iterator[list[TCPStore]]:
    made = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    yield made
    made.clear()


@pytest.fixture
def groups() -> Iterator[list[GlooProcessGroup]]:
    """Three, which have not met."""
    made = [GlooProcessGroup(LONG, LONG) for _ in range(3)]
    yield made
    for group in made:
        group.shutdown()


@pytest.fixture
def met(stores: list[TCPStore], groups: list[GlooProcessGroup]) -> Callable[[int], list[GlooProcessGroup]]:
    """Sets up as many groups as asked for, with each other."""

    def meet(number: int) -> list[GlooProcessGroup]:
        address = f"127.0.0.1:{stores[0].port}/here"
        members = enumerate(groups[:number])
        run_replicas(*(partial(each.configure, address, f"r{rank}", rank, number) for rank, each in members))
        return groups[:number]

    return meet


def reduce(group: GlooProcessGroup) -> Any:
    return group.allreduce([torch.ones(3)], AllreduceOptions())


def failing_after_s(work: Any) -> float:
    started_s = time.monotonic()
    # At times gloo does not notice, and the work's own look at the connections does.
    with pytest.raises((RuntimeError, ConnectionError), match=r"Connection (closed|reset)|has closed its connection"):
        work.wait()
    return time.monotonic() - started_s


def test_members_who_wait_for_one_that_gives_up_fail_at_once(met: Callable[[int], list[GlooProcessGroup]]) -> None:
    groups = met(3)
    # Works of before, which somebody still holds, must not keep the connections.
    held = run_replicas(*(lambda group=group: _waited(reduce(group)) for group in groups))
    waits = [
        groups[0].abort,
        lambda: failing_after_s(reduce(groups[1])),
        lambda: failing_after_s(reduce(groups[2])),
    ]
    _, *seconds = run_replicas(*waits)
    assert max(seconds) < AT_ONCE_S
    del held


def _waited(work: Any) -> Any:
    work.wait()
    return work


def test_a_collective_of_ones_own_is_given_up_too(met: Callable[[int], list[GlooProcessGroup]]) -> None:
    first, _ = met(2)
    work = reduce(first)
    outcome: list[float] = []
    waiting = threading.Thread(target=lambda: outcome.append(failing_after_s(work)))
    waiting.start()
    started_s = time.monotonic()
    first.abort()
    assert time.monotonic() - started_s < AT_ONCE_S
    waiting.join(AT_ONCE_S)
    assert outcome
    with pytest.raises(RuntimeError, match="has been aborted"):
        reduce(first)


def test_too_few_descriptors_are_found_before_gloo_ends_the_process() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The lowest numbers that are free, up to the limit, are what is left.
    unused = [os.dup(0) for _ in range(4)]
    for descriptor in unused:
        os.close(descriptor)
    GlooProcessGroup.check_descriptors(2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (unused[-1] + 1, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            GlooProcessGroup.check_descriptors(2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_member_may_come_late(met: Callable[[int], list[GlooProcessGroup]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "_LOOK_AFTER_S", 0.1)
    first, second = met(2)
    work = reduce(first)
    outcome: list[bool] = []
    waiting = threading.Thread(target=lambda: outcome.append(work.wait()))
    waiting.start()
    # Longer than gloo is trusted to notice an end by itself.
    waiting.join(0.3)
    assert not outcome
    reduce(second).wait()
    waiting.join(AT_ONCE_S)
    assert outcome == [True]


def sockets(is_wanted: Callable[[socket.socket], bool] = lambda _: True) -> set[int]:
    """Inodes of this process's sockets."""
    found = set()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            candidate = socket.socket(fileno=int(name))
            if is_wanted(candidate):
                found.add(os.fstat(int(name)).st_ino)
            candidate.detach()
    return found


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_that_is_forked_while_members_meet_has_none_of_their_connections(
    stores: list[TCPStore], groups: list[GlooProcessGroup], tmp_path: Path
) -> None:
    def fork() -> None:
        child = os.fork()
        if not child:
            (tmp_path / "sockets").write_text(json.dumps(list(sockets())))
            os._exit(0)
        os.waitpid(child, 0)

    members = [
        threading.Thread(target=group.configure, args=(f"127.0.0.1:{stores[0].port}/here", f"r{rank}", rank, 2))
        for rank, group in enumerate(groups[:2])
    ]
    forking = threading.Thread(target=fork)
    with made(GlooSockets) as held:
        members[0].start()
        # Where it listens; it waits for the other one now.
        stores[0].wait(["here/0/0"], LONG)
        forking.start()
        forking.join(0.3)
        assert forking.is_alive()
        members[1].start()
        for thread in (*members, forking):
            thread.join(AT_ONCE_S)
    assert len(held) == 2
    ours = sockets(lambda each: any(known.is_mine(each) for known in held))
    # Where each member listens, and both ends of the connection.
    assert len(ours) == 4
    assert ours.isdisjoint(json.loads((tmp_path / "sockets").read_text()))


class NeverDone:
    """Stands in for a work of gloo that has missed the end of its connection (``Work::wait`` in torch's Work.cpp)."""

    def wait(self, timeout: timedelta) -> bool:
        time.sleep(timeout.total_seconds())
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False


def told(address: tuple[str, int]) -> bytes:
    """What a member puts into the store for the others (gloo/rendezvous/context.cc): no name, and a ``sockaddr``."""
    family, port = socket.AF_INET.to_bytes(2, "little"), address[1].to_bytes(2, "big")
    sockaddr = (family + port + socket.inet_aton(address[0])).ljust(128, b"\0")
    return struct.pack("<QQ", 0, len(sockaddr)) + sockaddr


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[GlooSockets, socket.socket, socket.socket]]:
    monkeypatch.setattr(gloo, "_LOOK_AFTER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        own = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    with own, other:
        sockets = GlooSockets(told(own.getsockname()), [told(other.getsockname())])
        assert len(sockets) == 1
        yield sockets, own, other


@pytest.mark.parametrize("end", ["other", "own", "shut down"])
def test_an_end_that_gloo_misses_is_noticed(
    connected: tuple[GlooSockets, socket.socket, socket.socket], end: str
) -> None:
    sockets, own, other = connected
    assert not sockets.have_ended()
    if end == "shut down":
        sockets.shut_down()
    else:
        (own if end == "own" else other).close()
    started_s = time.monotonic()
    with pytest.raises(ConnectionError, match="has closed its connection"):
        WatchedWork(NeverDone(), sockets, LONG).wait()
    assert time.monotonic() - started_s < AT_ONCE_S


def test_what_gloo_still_runs_is_dropped_on_another_thread(
    connected: tuple[GlooSockets, socket.socket, socket.socket],
    stores: list[TCPStore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dropped_on: list[str] = []
    num_dropped = threading.Semaphore(0)

    class Slow(NeverDone):
        """Its destructor waits, as those of gloo do."""

        # Not a method: the frame of one, which the error keeps, would refer to the object.
        wait = staticmethod(NeverDone().wait)
        set_timeout = staticmethod(lambda timeout: None)

        def __del__(self) -> None:
            dropped_on.append(threading.current_thread().name)
            num_dropped.release()

    connected[2].close()
    with pytest.raises(ConnectionError):
        WatchedWork(Slow(), connected[0], LONG).wait()

    def meet(store: PrefixStore, rank: int, world_size: int, timeout: timedelta) -> Slow:
        for member in range(world_size):
            store.set(f"0/{member}", "")
        return Slow()

    monkeypatch.setattr(gloo, "ProcessGroupGloo", meet)
    group = GlooProcessGroup()
    group.configure(f"127.0.0.1:{stores[0].port}/here", "r0", 0, 2)
    group.shutdown()
    for _ in range(2):
        assert num_dropped.acquire(timeout=AT_ONCE_S)
    assert set(dropped_on) == {"ft-transport-gloo-end"}


_ENDING = """
import threading
from datetime import timedelta
from functools import partial
import torch
from torch.distributed import AllreduceOptions, TCPStore
from manager import GlooProcessGroup

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
groups = [GlooProcessGroup(timedelta(seconds=60)) for _ in range(2)]

def train(rank):
    groups[rank].configure(f"127.0.0.1:{store.port}/here", f"r{rank}", rank, 2)
    groups[rank].allreduce([torch.ones(3)], AllreduceOptions()).wait()

threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for group in groups:
    group.shutdown()
raise SystemExit(3)
"""


def test_a_process_that_has_given_up_its_group_ends_as_it_wants() -> None:
    ended = subprocess.run([sys.executable, "-c", _ENDING], check=False, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (3, "")


def test_a_member_that_is_silent_is_waited_for_until_the_timeout(
    connected: tuple[GlooSockets, socket.socket, socket.socket],
) -> None:
    with pytest.raises(RuntimeError, match="timed out"):
        WatchedWork(NeverDone(), connected[0], timedelta(seconds=0.3)).wait()


def test_every_connection_of_a_group_is_found_and_no_other(met: Callable[[int], list[GlooProcessGroup]]) -> None:
    with made(GlooSockets) as found:
        met(3)
    assert len(found) == 3
    # Two of its own, and what there is by then between the two others, because all are in this process.
    assert {len(sockets) for sockets in found} <= {2, 3, 4}


def test_an_address_that_cannot_be_read_finds_nothing() -> None:
    assert len(GlooSockets(b"", [])) == 0
    assert len(GlooSockets(b"\xff" * 40, [b"\0" * 80])) == 0
