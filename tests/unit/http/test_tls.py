"""TLS between peers: who is refused and how both sides say so, and peers that stall. The wire: test_tls_wire.py."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from http.client import HTTPSConnection, IncompleteRead
from pathlib import Path
from typing import Any

import pytest
import torch
from certificates import HOST, Issued, client_context, issue
from encrypted_transports import TIMEOUT, connection, port_of, transport
from programs import run
from served_memory import serving, until

from ft_transport import (
    DeadlineExceededError,
    FetchFailedError,
    HTTPTransport,
    PeerAuthenticationError,
    PeerError,
    PeerUnreachableError,
    credentials,
)
from ft_transport.coordination.store import nobody_listens
from ft_transport.credentials import AUTHORITY_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE
from ft_transport.http.server import connection_slots, listener, tls_protocol

WEIGHTS = b"these are weights in the clear. "
DATA = WEIGHTS * 40_000
STATE = {"layer": torch.frombuffer(bytearray(WEIGHTS * 20_000), dtype=torch.uint8)}


@pytest.fixture
def source(issued: Issued) -> Iterator[HTTPTransport[Any]]:
    with transport(issued) as made:
        made.send_checkpoint([], 1, STATE, TIMEOUT)
        yield made


def refusal(receiver: HTTPTransport[Any], address: str) -> PeerError:
    with pytest.raises(PeerError) as raised:
        receiver.fetch(address, 1, timeout=TIMEOUT)
    return raised.value


def test_the_address_that_peers_are_told_is_reached(issued: Issued) -> None:
    with transport(issued) as made:
        assert made.metadata().startswith(f"https://{HOST}:")
        made.check_address(TIMEOUT)
        assert not nobody_listens(made.metadata(), 1.0)
        address = made.metadata()
    assert nobody_listens(address, 1.0)


# ------------------------------------------------------------------------------------------------------- who is refused


def expired(directory: Path) -> Issued:
    return issue(directory, from_days=-9, to_days=-1)


def not_yet_valid(directory: Path) -> Issued:
    return issue(directory, from_days=1, to_days=9)


def foreign(directory: Path) -> Issued:
    return issue(directory, signed_by="another job")


def named_otherwise(directory: Path) -> Issued:
    return issue(directory, "another.example")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (expired, "certificate has expired"),
        (not_yet_valid, "not yet valid"),
        (foreign, "unable to get local issuer certificate"),
        (named_otherwise, "IP address mismatch"),
    ],
)
def test_a_receiver_refuses_a_server_by_its_certificate(issued: Issued, tmp_path: Path, make: Any, told: str) -> None:
    with transport(make(tmp_path / "server")) as sender, transport(issued) as receiver:
        error = refusal(receiver, sender.metadata())
    assert isinstance(error, PeerAuthenticationError)
    assert f"this side does not accept the server's certificate: {error.message.partition(': ')[2]}" in error.message
    assert told in error.message
    assert error.peer == f"{HOST}:{port_of(sender)}"


@pytest.mark.parametrize(
    "case",
    [
        (expired, "expired", "certificate has expired"),
        (not_yet_valid, "bad certificate", "not yet valid"),
        (foreign, "unknown ca", "unable to get local issuer certificate"),
    ],
)
def test_a_server_refuses_a_receiver_by_its_certificate(
    source: HTTPTransport[Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    case: tuple[Any, str, str],
) -> None:
    make, told_here, told_there = case
    with transport(make(tmp_path / "receiver")) as receiver, caplog.at_level(logging.WARNING, "ft_transport"):
        errors = [refusal(receiver, source.metadata()) for _ in range(3)]
    for error in errors:
        assert isinstance(error, PeerAuthenticationError)
        assert "the server does not accept this side's certificate" in error.message
        assert told_here in error.message
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1, "one for each peer and minute"
    assert lines[0].startswith(f"{HOST}: a connection was refused: this side does not accept the receiver's c")
    assert told_there in lines[0]


def test_a_certificate_for_any_host_is_enough_where_only_the_chain_is_checked(tmp_path: Path) -> None:
    with (
        transport(named_otherwise(tmp_path / "server")) as sender,
        transport(issue(tmp_path / "receiver", verify="chain")) as receiver,
        transport(issue(tmp_path / "stranger", verify="chain", trusts="another job")) as stranger,
    ):
        sender.send_checkpoint([], 1, STATE, TIMEOUT)
        assert torch.equal(receiver.fetch(sender.metadata(), 1).state["layer"], STATE["layer"])
        assert isinstance(refusal(stranger, sender.metadata()), PeerAuthenticationError)
    # Else a server by name needs that name.
    with transport(issue(tmp_path / "named", "localhost")) as sender, transport(issue(tmp_path / "peer")) as receiver:
        sender.send_checkpoint([], 1, STATE, TIMEOUT)
        by_name = sender.metadata().replace(HOST, "localhost")
        assert torch.equal(receiver.fetch(by_name, 1).state["layer"], STATE["layer"])
        assert "IP address mismatch" in refusal(receiver, sender.metadata()).message


def test_a_receiver_without_a_certificate_is_refused(source: HTTPTransport[Any], issued: Issued) -> None:
    context = ssl.create_default_context(cafile=issued.files.authority)
    with closing(HTTPSConnection(HOST, port_of(source), timeout=20, context=context)) as http:
        http.request("GET", "/status")
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
            http.getresponse()


def test_a_receiver_that_is_refused_while_it_sends_still_hears_why(source: HTTPTransport[Any], issued: Issued) -> None:
    """In TLS 1.3 it is refused after its own handshake. A reset would take away what it has not read yet."""
    context = ssl.create_default_context(cafile=issued.files.authority)
    connected = socket.create_connection((HOST, port_of(source)), timeout=20)
    with connected, context.wrap_socket(connected, server_hostname=HOST) as encrypted:
        for _ in range(20):
            encrypted.sendall(bytes(1 << 16))
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
            encrypted.recv(1)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_plain_receiver_is_refused(source: HTTPTransport[Any], is_told: bool) -> None:
    """By the address, or by the server's own first bytes."""
    address = source.metadata() if is_told else source.metadata().replace("https:", "http:")
    with transport(None) as receiver:
        error = refusal(receiver, address)
    assert isinstance(error, PeerAuthenticationError)
    assert CERTIFICATE_VARIABLE in error.message


def test_a_server_with_tls_answers_no_plain_request(source: HTTPTransport[Any]) -> None:
    with socket.create_connection((HOST, port_of(source)), timeout=20) as connected:
        connected.sendall(b"GET /checkpoint/1/full HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b"".join(iter(lambda: connected.recv(4096), b""))
    assert len(answer) == 7, "an alert and nothing else"
    assert answer[0] == 0x15


@pytest.mark.parametrize("is_told", [True, False])
def test_a_receiver_with_tls_takes_nothing_in_the_clear(issued: Issued, is_told: bool) -> None:
    with transport(None) as sender, transport(issued) as receiver:
        sender.send_checkpoint([], 1, STATE, TIMEOUT)
        address = sender.metadata()
        error = refusal(receiver, address if is_told else address.replace("http:", "https:"))
    assert isinstance(error, PeerAuthenticationError)
    assert ("https://" if is_told else "expected TLS, but the peer speaks plain HTTP") in error.message


def test_an_older_version_is_refused_on_both_sides(source: HTTPTransport[Any], issued: Issued) -> None:
    old = client_context(issued)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that is what it is about
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    connected = socket.create_connection((HOST, port_of(source)), timeout=20)
    with connected, pytest.raises(ssl.SSLError, match="ALERT_PROTOCOL_VERSION"):
        old.wrap_socket(connected, server_hostname=HOST)


def test_tls_1_2_is_spoken_where_a_peer_has_nothing_newer(issued: Issued) -> None:
    context = client_context(issued)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with serving(tls=issued.files) as served:
        snapshot = served.put(5, DATA)
        with closing(HTTPSConnection(HOST, served.server.port, timeout=20, context=context)) as http:
            for _ in range(2):
                http.request("GET", "/checkpoint/5/full")
                assert http.getresponse().read() == snapshot.content


def test_renewed_files_serve_new_connections_and_running_ones_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "_CHECK_EVERY_S", 0.0)
    theirs, ours = issue(tmp_path / "server"), issue(tmp_path / "receiver")
    with transport(theirs) as sender, transport(ours) as receiver:
        sender.send_checkpoint([], 1, STATE, TIMEOUT)
        with closing(HTTPSConnection(HOST, port_of(sender), timeout=20, context=client_context(ours))) as before:
            before.request("GET", "/status")
            assert before.getresponse().read()
            for each in (theirs, ours):
                each.renew(signed_by="the next authority", trusts="the next authority")
            assert torch.equal(receiver.fetch(sender.metadata(), 1).state["layer"], STATE["layer"])
            before.request("GET", "/status")
            assert before.getresponse().status == 200
        theirs.renew()
        assert isinstance(refusal(receiver, sender.metadata()), PeerAuthenticationError)


# -------------------------------------------------------------------------------------------------- peers that stall


def let_newcomers_wait(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(connection_slots, "NEWCOMER_S", seconds)
    monkeypatch.setattr(listener, "_SWEEP_S", 0.05)


def test_handshakes_that_stall_hold_up_nobody_and_end(issued: Issued, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_protocol, "_HANDSHAKE_TIMEOUT_S", 0.3)
    let_newcomers_wait(monkeypatch, 0.5)
    with serving(tls=issued.files) as served, contextlib.ExitStack() as stack:
        served.put(5, DATA)
        stalled = [
            stack.enter_context(socket.create_connection((HOST, served.server.port), timeout=20)) for _ in range(20)
        ]
        for each in stalled[::2]:
            each.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        with closing(connection(served.server.port, issued)) as http:
            http.request("GET", "/status")
            assert http.getresponse().status == 200
        assert [each.recv(1) for each in stalled[1::2]] == [b""] * 10
        for each in stalled[::2]:
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b""


def test_no_crowd_of_handshakes_keeps_a_peer_out(issued: Issued, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_protocol, "_MAX_OUTSIDE", 4)
    let_newcomers_wait(monkeypatch, 0.5)
    with serving(tls=issued.files) as served, contextlib.ExitStack() as stack:
        crowd = [
            stack.enter_context(socket.create_connection((HOST, served.server.port), timeout=20)) for _ in range(30)
        ]
        with closing(connection(served.server.port, issued)) as http:
            http.request("GET", "/status")
            assert http.getresponse().status == 200
        for each in crowd[:20]:
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b""


def test_a_server_that_never_shakes_hands_is_given_up_in_time(issued: Issued) -> None:
    with socket.create_server((HOST, 0)) as silent, transport(issued) as receiver:
        started_s = time.monotonic()
        with pytest.raises((DeadlineExceededError, PeerUnreachableError, FetchFailedError)):
            receiver.fetch(f"https://{HOST}:{silent.getsockname()[1]}/", 1, timeout=timedelta(seconds=0.5))
        assert time.monotonic() - started_s < 5


def test_a_receiver_that_reads_nothing_is_cut_off(issued: Issued) -> None:
    with serving(tls=issued.files, stall_timeout_s=0.3) as served:
        served.put(5, WEIGHTS * 1_000_000)
        with closing(connection(served.server.port, issued)) as http:
            http.request("GET", "/checkpoint/5/full")
            until(lambda: served.cache.num_readers() == 1)
            until(lambda: served.cache.num_readers() == 0)
            response = http.getresponse()
            with pytest.raises((OSError, IncompleteRead)):
                response.read()


def test_a_shutdown_in_the_middle_of_a_body_leaves_nothing(issued: Issued) -> None:
    with serving(tls=issued.files) as served:
        served.put(5, WEIGHTS * 1_000_000)
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                http = stack.enter_context(closing(connection(served.server.port, issued)))
                http.request("GET", "/checkpoint/5/full")
            stack.enter_context(socket.create_connection((HOST, served.server.port), timeout=20))
            until(lambda: served.cache.num_readers() == 4)
            served.server.close(wait=True)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("ft-transport")]


@pytest.mark.slow
def test_no_forked_child_is_left_a_socket(issued: Issued, monkeypatch: pytest.MonkeyPatch) -> None:
    files = issued.files
    monkeypatch.setenv(CERTIFICATE_VARIABLE, str(files.certificate))
    monkeypatch.setenv(KEY_VARIABLE, str(files.key))
    monkeypatch.setenv(AUTHORITY_VARIABLE, str(files.authority))
    worker = Path(__file__).parents[2] / "workers" / "forking_process.py"
    command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", str(worker), "20"]
    done = run(command, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("0\n", "")
