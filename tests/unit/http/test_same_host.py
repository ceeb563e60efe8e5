"""Memory that a server lends to receivers on its host: to whom, for how long, and what can be done with it."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from certificates import Issued
from other_users import NOBODY, as_root
from served_memory import serving, until
from transport_settings import settings_of

from ft_transport import HTTPTransport, TransportSettings
from ft_transport.credentials import Keys
from ft_transport.errors import (
    PeerAuthenticationError,
    PeerProtocolError,
    PeerUnreachableError,
    SnapshotLimitError,
    SnapshotReplacedError,
    StepNotServedError,
)
from ft_transport.http import shared_memory
from ft_transport.http.client.connection import Connection
from ft_transport.http.client.fetch_settings import Timeouts
from ft_transport.http.peer_address import PeerAddress
from ft_transport.http.server import same_host as same_host_server
from ft_transport.http.shared_memory import LentMemory
from ft_transport.wire.routes import (
    LENT,
    MEMORY_ROUTE,
    METADATA_ROUTE,
    MemoryTicket,
    decode_ticket,
    socket_name,
)

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="abstract unix sockets are Linux's")]

TIMEOUT = timedelta(seconds=20)
ITEMS = 1 << 18


@contextlib.contextmanager
def source(**settings: Any) -> Iterator[HTTPTransport[Any]]:
    chosen: dict[str, Any] = {"host": "127.0.0.1", "lease": timedelta(0), **settings}
    made: HTTPTransport[Any] = HTTPTransport(TIMEOUT, settings=settings_of(**chosen))
    try:
        made.send_checkpoint([], 1, {"w": torch.arange(ITEMS)}, TIMEOUT)
        yield made
    finally:
        made.shutdown()


@contextlib.contextmanager
def connected(
    transport: HTTPTransport[Any], *, token: str | None = None, certificates: Any = None
) -> Iterator[Connection]:
    timeouts = Timeouts(deadline_s=time.monotonic() + 20, connect_timeout_s=20, stall_timeout_s=20, min_bytes_per_s=1)
    keys = Keys.of(token) if token is not None else None
    address = PeerAddress.from_url(transport.metadata())
    with Connection(address, keys=keys, certificates=certificates, timeouts=timeouts) as connection:
        yield connection


def ask(connection: Connection, route: str, step: int = 1, query: str = "") -> bytes:
    response = connection.get(route.format(step=step) + query, headers={}, expected_status=200, answer_within_s=0.0)
    body = bytearray(response.length or 0)
    connection.read_into([memoryview(body)])
    connection.end_response(response)
    return bytes(body)


def ticket_from(connection: Connection) -> tuple[str, MemoryTicket]:
    """The name of the socket, and a ticket for it."""
    ask(connection, METADATA_ROUTE)
    assert connection.same_host is not None
    return connection.same_host, decode_ticket(ask(connection, MEMORY_ROUTE), peer="peer")


@contextlib.contextmanager
def lent_by(transport: HTTPTransport[Any]) -> Iterator[LentMemory]:
    with connected(transport) as connection:
        name, ticket = ticket_from(connection)
        with LentMemory(name, timeout_s=20) as lent:
            lent.borrow(ticket)
            yield lent


def raw(name: str) -> socket.socket:
    address = socket_name(name)
    assert address is not None
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(20)
    made.connect(address)
    return made


def descriptor_from(transport: HTTPTransport[Any]) -> int:
    with connected(transport) as connection:
        name, ticket = ticket_from(connection)
        with raw(name) as sock:
            sock.sendall(ticket.ticket.encode())
            answer, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
    assert answer == LENT
    return descriptors[0]


def test_what_is_lent_is_the_data_of_the_snapshot() -> None:
    with source() as transport:
        descriptor = descriptor_from(transport)
        with connected(transport) as connection:
            _, ticket = ticket_from(connection)
        data = os.pread(descriptor, ticket.data_bytes, ticket.data_start)
        os.close(descriptor)
    assert data == torch.arange(ITEMS).numpy().tobytes()


def test_nobody_can_change_what_is_lent() -> None:
    with source() as transport:
        descriptor = descriptor_from(transport)
        try:
            with pytest.raises(OSError, match=r"Bad file descriptor|not permitted"):
                os.pwrite(descriptor, b"x", 0)
            # Whoever owns a file may open it anew, also to be written: that is what the seal is for.
            again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
            try:
                with pytest.raises(PermissionError):
                    os.pwrite(again, b"x", 0)
                with pytest.raises(PermissionError):
                    os.ftruncate(again, 0)
                with pytest.raises(PermissionError):
                    fcntl.fcntl(again, fcntl.F_ADD_SEALS, 0)
                with pytest.raises(PermissionError):
                    mmap.mmap(again, mmap.PAGESIZE)
            finally:
                os.close(again)
        finally:
            os.close(descriptor)


def test_the_source_still_takes_its_next_snapshots_in_the_same_memory() -> None:
    with source(max_snapshots=1) as transport:
        os.close(descriptor_from(transport))
        for step in range(2, 5):
            until(lambda step=step: takes(transport, step))
            assert transport.fetch(transport.metadata(), step).state["w"][0] == step


def takes(transport: HTTPTransport[Any], step: int) -> bool:
    try:
        transport.send_checkpoint([], step, {"w": torch.arange(ITEMS) + step}, TIMEOUT)
    except SnapshotLimitError:
        return False
    return True


def test_a_ticket_counts_once() -> None:
    with source() as transport, connected(transport) as connection:
        name, ticket = ticket_from(connection)
        with LentMemory(name, timeout_s=20) as first, LentMemory(name, timeout_s=20) as second:
            first.borrow(ticket)
            with pytest.raises(PeerProtocolError, match="no longer lends"):
                second.borrow(ticket)


def test_a_ticket_counts_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_host_server, "_TICKET_S", 0.0)
    with source() as transport, connected(transport) as connection:
        name, ticket = ticket_from(connection)
        monkeypatch.setattr(same_host_server, "_TICKET_S", 10.0)
        with LentMemory(name, timeout_s=20) as lent, pytest.raises(PeerProtocolError, match="no longer lends"):
            lent.borrow(ticket)


def test_who_has_no_ticket_gets_nothing_and_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_host_server, "_TICKET_S", 0.1)
    with source() as transport, connected(transport) as connection:
        ask(connection, METADATA_ROUTE)
        assert connection.same_host is not None
        with raw(connection.same_host) as silent, raw(connection.same_host) as guessing:
            guessing.sendall(b"0" * 32)
            assert guessing.recv(10) == b"G"
            assert silent.recv(10) == b""


def test_a_crowd_at_the_socket_costs_nobody_the_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_host_server, "_MAX_CONNECTIONS", 2)
    with source() as transport, connected(transport) as connection:
        ask(connection, METADATA_ROUTE)
        assert connection.same_host is not None
        with contextlib.ExitStack() as stack:
            crowd = [stack.enter_context(raw(connection.same_host)) for _ in range(4)]
            until(lambda: len(select.select(crowd, [], [], 0)[0]) == 2)
            assert transport.fetch(transport.metadata(), 1).state["w"][7] == 7


def test_a_snapshot_is_kept_while_it_is_lent_and_no_longer() -> None:
    with source(max_snapshots=1) as transport:
        with lent_by(transport) as lent:
            assert not takes(transport, 2)
            assert lent.is_held()
            assert lent.was_held()
            until(lambda: takes(transport, 2))
        assert transport.server.newest_step() == 2


def test_memory_is_taken_back_from_who_does_not_end_where_a_newer_snapshot_wants_it() -> None:
    with source(max_snapshots=1, contended_bytes_per_s=1e9) as transport, lent_by(transport) as lent:
        until(lambda: takes(transport, 2))
        assert not lent.is_held()
        assert not lent.was_held()


def test_memory_is_taken_back_from_who_is_slower_than_a_receiver_may_be() -> None:
    with source(stall_timeout=timedelta(seconds=0.05)) as transport, lent_by(transport) as lent:
        until(lambda: not lent.is_held())
        assert not lent.was_held()


def test_a_shutdown_ends_what_is_lent_and_the_memory_stays_readable() -> None:
    with source() as transport, lent_by(transport) as lent:
        transport.shutdown()
        assert not lent.is_held()
        number = memoryview(bytearray(8))
        lent.read([number], 8 * 5)
        assert int.from_bytes(number, "little") == 5


@pytest.mark.parametrize("num_buffers", [1, 3, 1500])
def test_buffers_are_filled_one_behind_the_other(num_buffers: int) -> None:
    with source() as transport, lent_by(transport) as lent:
        expected, got = memoryview(bytearray(6000)), memoryview(bytearray(6000))
        lent.read([expected], 16)
        size = 6000 // num_buffers
        lent.read([got[at : at + size] for at in range(0, 6000, size)], 16)
        assert got == expected
        assert any(expected)
        with pytest.raises(OSError, match="the memory ends there"):
            lent.read([memoryview(bytearray(8))], 1 << 40)


def test_a_call_that_reads_less_than_it_was_asked_for_is_followed_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    calls: list[int] = []

    def little(descriptor: int, buffers: Sequence[memoryview], position: int) -> int:
        calls.append(preadv(descriptor, [buffers[0][:1000]], position))
        return calls[-1]

    with source() as transport, lent_by(transport) as lent:
        expected, got = memoryview(bytearray(6000)), memoryview(bytearray(6000))
        lent.read([expected], 16)
        monkeypatch.setattr(shared_memory.os, "preadv", little)
        lent.read([got[:2500], got[2500:2600], got[2600:]], 16)
    assert got == expected
    assert calls == [1000, 1000, 500, 100, 1000, 1000, 1000, 400]


def test_a_snapshot_that_is_gone_is_no_more_lent() -> None:
    with source() as transport, connected(transport) as connection:
        ask(connection, METADATA_ROUTE)
        with pytest.raises(SnapshotReplacedError):
            ask(connection, MEMORY_ROUTE, query=f"?snapshot={'0' * 32}")


def test_memory_that_is_not_sealed_is_not_lent() -> None:
    with serving() as served:
        served.put(1)
        assert "FT-Same-Host" not in served.ask("/checkpoint/1/metadata").headers
        assert served.ask("/checkpoint/1/memory").status == 404


def test_turned_off_nothing_is_told_and_nothing_lent() -> None:
    with source(same_host=False) as transport, connected(transport) as connection:
        ask(connection, METADATA_ROUTE)
        assert connection.same_host is None
        with pytest.raises(StepNotServedError, match="lent"):
            ask(connection, MEMORY_ROUTE)


def test_a_ticket_is_for_those_who_know_the_job_token() -> None:
    with source(token="only-for-a-test") as transport:
        with connected(transport, token="only-for-a-test") as connection:
            name, ticket = ticket_from(connection)
            with LentMemory(name, timeout_s=20) as lent:
                lent.borrow(ticket)
        for token in (None, "another-token"):
            with connected(transport, token=token) as connection, pytest.raises(PeerAuthenticationError):
                ask(connection, MEMORY_ROUTE)


def test_a_ticket_is_for_those_who_show_a_certificate(tmp_path: Any) -> None:
    issued = Issued(tmp_path)
    issued.renew()
    settings = TransportSettings(tls=issued.files)
    with source(tls=issued.files) as transport:
        with connected(transport, certificates=settings.certificates()) as connection:
            name, ticket = ticket_from(connection)
            with LentMemory(name, timeout_s=20) as lent:
                lent.borrow(ticket)
        with connected(transport) as connection, pytest.raises(PeerAuthenticationError):
            ask(connection, MEMORY_ROUTE)


# A stranger: connects, shows the ticket, and says whether a descriptor came.
_STRANGER = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(20)
sock.connect(b"\\0" + sys.argv[2].encode())
try:
    sock.sendall(sys.argv[3].encode())
    answer, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
except ConnectionError:
    answer, descriptors = b"", []
print(answer, len(descriptors))
"""


def stranger(user: int, name: str, ticket: str) -> str:
    address = socket_name(name)
    assert address is not None
    command = [sys.executable, "-c", _STRANGER, str(user), address[1:].decode(), ticket]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


@as_root
@pytest.mark.parametrize("user", [1000, NOBODY])
def test_another_user_gets_no_descriptor_with_a_ticket_that_is_good(user: int) -> None:
    with source() as transport, connected(transport) as connection:
        name, ticket = ticket_from(connection)
        assert stranger(user, name, ticket.ticket) == "b'' 0"
        # And it was good.
        assert stranger(0, name, ticket.ticket) == "b'L' 1"


_IMPOSTOR = """
import os, socket, sys
os.setgroups([]); os.setgid(1000); os.setuid(1000)
sock = socket.socket(socket.AF_UNIX)
sock.bind(b"\\0" + sys.argv[1].encode())
sock.listen()
print("listening", flush=True)
sys.stdin.read()
"""


@as_root
def test_what_another_user_lends_is_not_taken() -> None:
    name = "0123456789abcdef"
    address = socket_name(name)
    assert address is not None
    with subprocess.Popen(
        [sys.executable, "-c", _IMPOSTOR, address[1:].decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as impostor:
        assert impostor.stdout is not None
        assert impostor.stdout.readline() == "listening\n"
        with pytest.raises(PeerProtocolError, match="another user"):
            LentMemory(name, timeout_s=20)
        impostor.communicate(timeout=20)


@pytest.mark.parametrize("name", ["", "../../x", "0123456789abcdeg", "0123456789abcdef\0", "0" * 200])
def test_a_name_that_is_none_reaches_nothing(name: str) -> None:
    with pytest.raises(PeerProtocolError, match="name of a socket"):
        LentMemory(name, timeout_s=1)


def test_nobody_at_the_socket_is_another_host() -> None:
    with pytest.raises(PeerUnreachableError, match="no source on this host"):
        LentMemory("fedcba9876543210", timeout_s=1)


@contextlib.contextmanager
def lending(descriptor: int, answer: bytes = LENT, *, timeout_s: float = 20.0) -> Iterator[LentMemory]:
    """What a receiver has of a source of this user that lends whatever it is given."""
    name = os.urandom(8).hex()
    address = socket_name(name)
    assert address is not None
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()

    def serve() -> None:
        with listener, listener.accept()[0] as accepted:
            accepted.recv(32)
            if descriptor >= 0:
                socket.send_fds(accepted, [answer], [descriptor])
            elif answer:
                accepted.send(answer)
            else:
                accepted.recv(1)  # Until the receiver gives up.

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with LentMemory(name, timeout_s=timeout_s) as lent:
            yield lent
    finally:
        thread.join()


SEALED = fcntl.F_SEAL_SHRINK | 0x10


@pytest.mark.parametrize(
    ("seals", "start", "num_bytes"),
    [
        *((seals, 0, 1 << 16) for seals in (0, fcntl.F_SEAL_SHRINK, 0x10)),
        *((SEALED, start, num_bytes) for start, num_bytes in ((0, (1 << 16) + 1), (1 << 16, 1), (1, 4096))),
    ],
)
def test_memory_that_may_still_change_or_does_not_hold_the_snapshot_is_not_taken(
    seals: int, start: int, num_bytes: int
) -> None:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 1 << 16)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    with lending(descriptor) as lent, pytest.raises(PeerProtocolError, match="expected sealed"):
        lent.borrow(MemoryTicket("0" * 32, start, num_bytes))
    os.close(descriptor)


def test_what_is_no_file_is_not_taken_and_not_kept(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    before = len(os.listdir("/proc/self/fd"))
    with lending(descriptor) as lent, pytest.raises((PeerProtocolError, PeerUnreachableError)):
        lent.borrow(MemoryTicket("0" * 32, 0, 4096))
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(descriptor)


@pytest.mark.parametrize("answer", [LENT, b"G", b"x"])
def test_an_answer_without_a_descriptor_is_refused(answer: bytes) -> None:
    with lending(-1, answer) as lent, pytest.raises(PeerProtocolError):
        lent.borrow(MemoryTicket("0" * 32, 0, 4096))


def test_a_source_that_says_nothing_is_waited_for_as_long_as_asked() -> None:
    began_s = time.monotonic()
    with lending(-1, b"", timeout_s=0.1) as lent, pytest.raises(PeerUnreachableError, match="no response"):
        lent.borrow(MemoryTicket("0" * 32, 0, 4096))
    assert time.monotonic() - began_s < 10


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b'{"ticket": "x", "data_start": 0, "data_bytes": 0}',
        b'{"ticket": "\x89", "data_start": 0, "data_bytes": 0}',
        b'{"a": ' + b"[" * 9_000,
    ],
)
def test_what_is_no_ticket_is_refused(body: bytes) -> None:
    with pytest.raises(PeerProtocolError, match="ticket"):
        decode_ticket(body, peer="peer")
