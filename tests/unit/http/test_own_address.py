"""Where the server listens, and what it tells others."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any

import pytest

from ft_transport import ConfigurationError, HTTPTransport, TransportSettings
from ft_transport.http.bind_address import ADVERTISE_VARIABLE, advertised_host, interface_address, listen


@pytest.fixture(autouse=True)
def _no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADVERTISE_VARIABLE, raising=False)


def has_ipv6_loopback() -> bool:
    try:
        with closing(socket.socket(socket.AF_INET6)) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@contextmanager
def listening(host: str | None) -> Iterator[socket.socket]:
    with closing(listen(host, 0)) as sock:
        yield sock


def can_connect(address: str, sock: socket.socket) -> bool:
    try:
        with closing(socket.create_connection((address, sock.getsockname()[1]), timeout=5)):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no IPv6")
def test_one_port_serves_both_families() -> None:
    with listening(None) as sock:
        assert can_connect("127.0.0.1", sock)
        assert can_connect("::1", sock)


def refuse_ipv6(address: tuple[Any, ...], *, family: int = socket.AF_INET, **options: Any) -> socket.socket:
    if family == socket.AF_INET6:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
    return _real_create_server(address, family=family, **options)


_real_create_server = socket.create_server


@pytest.mark.parametrize("how", ["not compiled in", "switched off"])
def test_without_ipv6_it_serves_ipv4(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "not compiled in":
        monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    else:
        monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: True)
        monkeypatch.setattr(socket, "create_server", refuse_ipv6)
    with listening(None) as sock:
        assert sock.family == socket.AF_INET
        assert can_connect("127.0.0.1", sock)


def test_one_address_serves_that_one_only() -> None:
    with listening("127.0.0.1") as sock:
        assert can_connect("127.0.0.1", sock)
        assert not can_connect("127.0.0.2", sock)


@pytest.mark.parametrize(
    ("host", "port"), [("192.0.2.1", 0), ("no.such.host.invalid", 0), ("127.0.0.1", 70000), ("a" * 300, 0)]
)
def test_what_cannot_be_bound_is_a_wrong_setting(host: str, port: int) -> None:
    with pytest.raises(ConfigurationError, match=f"port {port}"):
        listen(host, port)


def test_a_taken_port_is_named() -> None:
    with listening("127.0.0.1") as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"127\.0\.0\.1 port {port}.*in use"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("lo", "127.0.0.1"),
        ("10.1.2.3", "10.1.2.3"),
        ("fe80::1", "[fe80::1]"),
        ("[2001:db8::1]", "[2001:db8::1]"),
        ("localhost", "localhost"),
    ],
)
def test_a_setting_is_an_address_a_name_or_an_interface(
    monkeypatch: pytest.MonkeyPatch, setting: str, told: str
) -> None:
    assert advertised_host(setting) == told
    monkeypatch.setenv(ADVERTISE_VARIABLE, setting)
    assert advertised_host(None) == told
    assert advertised_host("192.0.2.7") == "192.0.2.7"  # the setting goes first
    assert advertised_host(None, bound="192.0.2.7") == told


@pytest.mark.parametrize("unknown", ["no-such-interface0", "no.such.host.invalid", "a" * 300, "300.1.1.1"])
def test_an_unknown_one_is_refused_with_what_there_is(unknown: str) -> None:
    with pytest.raises(ConfigurationError, match=r"'lo'"):
        advertised_host(unknown)


def test_an_interface_without_an_address_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'none0'"):
        interface_address("none0")


@pytest.mark.parametrize(
    ("bound", "told"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("0.0.0.0", None), ("::", None), (None, None)]
)
def test_by_default_it_is_the_address_bound_unless_that_stands_for_all(
    monkeypatch: pytest.MonkeyPatch, bound: str | None, told: str | None
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert advertised_host(None, bound=bound) == (told or "localhost")


def test_a_host_name_that_does_not_resolve_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no.such.host.invalid")
    assert advertised_host(None) == "127.0.0.1"


def test_peers_reach_the_transport_where_it_says() -> None:
    sender: HTTPTransport[object] = HTTPTransport(settings=TransportSettings(advertise="lo"))
    try:
        assert sender.metadata().startswith("http://127.0.0.1:")
        sender.send_checkpoint([], 1, {"a": 1}, timedelta(seconds=10))
        assert sender.fetch(sender.metadata(), 1).state == {"a": 1}
    finally:
        sender.shutdown()


def test_a_wrong_setting_leaves_no_thread_and_no_socket() -> None:
    with pytest.raises(ConfigurationError):
        HTTPTransport(settings=TransportSettings(advertise="no-such-interface0"))
    with listening("127.0.0.1") as sock, pytest.raises(ConfigurationError):
        HTTPTransport(settings=TransportSettings(host="127.0.0.1", port=sock.getsockname()[1]))
