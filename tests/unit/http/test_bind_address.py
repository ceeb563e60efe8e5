"""Where a server listens, which address it advertises, and whether that address leads to the server."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from transport_settings import settings_of

from ft_transport import ConfigurationError, HTTPTransport, TransportSettings
from ft_transport.http import bind_address
from ft_transport.http.bind_address import ADVERTISE_VARIABLE, advertised_host, interface_address, interfaces, listen
from ft_transport.settings import ANYONE_VARIABLE

SOON = timedelta(seconds=20)
ELSEWHERE = "198.51.100.7"  # RFC 5737: nobody's


@pytest.fixture(autouse=True)
def _no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADVERTISE_VARIABLE, raising=False)
    monkeypatch.delenv(ANYONE_VARIABLE, raising=False)
    bind_address._warn_of_loopback.cache_clear()


@contextmanager
def serving(**settings: Any) -> Iterator[HTTPTransport[Any]]:
    made: HTTPTransport[Any] = HTTPTransport(SOON, settings=settings_of(**settings))
    try:
        made.send_checkpoint([], 1, {"a": 1}, SOON)
        yield made
    finally:
        made.shutdown()


def outer_addresses() -> list[str]:
    """Those at which other hosts would reach this one."""
    return [str(each) for each in interfaces() if not each.is_loopback and not each.is_link_local]


def has_ipv6_loopback() -> bool:
    return ipaddress.ip_address("::1") in interfaces()


needs_outer_address = pytest.mark.skipif(not outer_addresses(), reason="this machine has the loopback alone")
needs_ipv6 = pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no IPv6")


def accepts(host: str, served: int | HTTPTransport[Any]) -> bool:
    """Whether the port, or the transport, accepts a connection at this address."""
    port = served if isinstance(served, int) else urlsplit(served.metadata()).port or 0
    try:
        with closing(socket.create_connection((host, port), timeout=2)):
            return True
    except OSError:
        return False


class TestWithoutAToken:
    @needs_outer_address
    def test_nobody_comes_in_from_outside(self, caplog: pytest.LogCaptureFixture) -> None:
        with serving() as transport, serving() as other:
            assert accepts("127.0.0.1", transport)
            for address in outer_addresses():
                assert not accepts(address, transport)
            assert transport.metadata().startswith("http://127.0.0.1:")
            assert other.fetch(transport.metadata(), 1).state == {"a": 1}
        told = [each for each in caplog.records if each.levelno == logging.WARNING]
        assert len(told) == 1
        assert "FT_TRANSPORT_TOKEN" in told[0].getMessage()
        assert ANYONE_VARIABLE in told[0].getMessage()

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "", "no.such.host.invalid"])
    def test_an_address_that_others_reach_is_refused_with_the_remedies(self, host: str) -> None:
        with pytest.raises(
            ConfigurationError, match=r"FT_TRANSPORT_TOKEN.*allow_anyone=True.*FT_TRANSPORT_ALLOW_ANYONE=1"
        ):
            HTTPTransport(settings=TransportSettings(host=host))

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.5", "localhost"])
    def test_a_loopback_address_is_not_warned_of(self, host: str, caplog: pytest.LogCaptureFixture) -> None:
        with serving(host=host) as transport:
            assert transport.fetch(transport.metadata(), 1).state == {"a": 1}
        assert not [each for each in caplog.records if each.levelno >= logging.WARNING]

    @needs_outer_address
    @pytest.mark.parametrize("how", ["setting", "environment"])
    def test_anyone_is_let_in_if_told_so_in_words(self, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
        if how == "environment":
            monkeypatch.setenv(ANYONE_VARIABLE, "1")
        given: dict[str, Any] = {"allow_anyone": True} if how == "setting" else {}
        with serving(**given) as transport:
            assert all(accepts(address, transport) for address in outer_addresses())

    def test_the_words_have_to_be_the_right_ones(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(ANYONE_VARIABLE, "yes")
        with pytest.raises(ConfigurationError, match="expected 0 or 1 in FT_TRANSPORT_ALLOW_ANYONE, got 'yes'"):
            TransportSettings()
        with pytest.raises(ConfigurationError, match="allow_anyone"):
            TransportSettings(allow_anyone="1")  # type: ignore[arg-type]

    @pytest.mark.parametrize("how", ["setting", "environment"])
    def test_what_is_told_has_to_be_the_loopback(self, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
        if how == "environment":
            monkeypatch.setenv(ADVERTISE_VARIABLE, ELSEWHERE)
        given: dict[str, Any] = {"advertise": ELSEWHERE} if how == "setting" else {}
        with pytest.raises(ConfigurationError, match=rf"expected a loopback address to advertise.*{ELSEWHERE}"):
            HTTPTransport(settings=TransportSettings(**given))


class TestWithAToken:
    @needs_outer_address
    def test_all_addresses_are_bound(self) -> None:
        with serving(token="secret") as transport:
            assert all(accepts(address, transport) for address in ("127.0.0.1", *outer_addresses()))

    def test_an_address_of_another_host_is_refused_unless_it_is_a_translated_one(self) -> None:
        with pytest.raises(ConfigurationError, match=rf"one of .*, got {ELSEWHERE}.*reached_at"):
            HTTPTransport(settings=TransportSettings(token="secret", advertise=ELSEWHERE))
        with closing(socket.create_server(("127.0.0.1", 0))) as taken:
            port = taken.getsockname()[1]
        settings = {"token": "secret", "advertise": ELSEWHERE, "port": port, "reached_at": [f"{ELSEWHERE}:{port}"]}
        with serving(**settings) as transport:
            assert transport.metadata() == f"http://{ELSEWHERE}:{port}/checkpoint/"

    def test_a_name_of_another_host_is_warned_of(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        resolving(monkeypatch, ELSEWHERE)
        with serving(token="secret", advertise="trainer.test"):
            pass
        (told,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
        assert "trainer.test" in told
        assert ELSEWHERE in told
        assert "reached_at" in told

    @pytest.mark.parametrize("is_chosen", [False, True])
    def test_a_host_name_that_stands_for_the_loopback_is_warned_of(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_chosen: bool
    ) -> None:
        resolving(monkeypatch, "127.0.1.1")
        monkeypatch.setattr(socket, "gethostname", lambda: "trainer.test")
        real = interfaces()
        monkeypatch.setattr(bind_address, "interfaces", lambda: {**real, ipaddress.ip_address(ELSEWHERE): "fast0"})
        given = {"advertise": "trainer.test"} if is_chosen else {}
        with serving(token="secret", replica="a", **given) as transport:
            assert "//trainer.test:" in transport.metadata()
        told = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
        assert [("127.0.1.1" in each, "fast0" in each, ADVERTISE_VARIABLE in each) for each in told] == (
            [] if is_chosen else [(True, True, True)]
        )


class TestWhatIsLogged:
    def test_where_peers_are_led_is_said_once(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "ft_transport"), serving(host="127.0.0.1") as transport:
            url = transport.metadata().removesuffix("/checkpoint/")
        told = [each.getMessage() for each in caplog.records if url in each.getMessage()]
        assert told == [f"this server advertises {url}: 127.0.0.1 (IPv4, lo)"]

    @needs_ipv6
    def test_a_fetch_says_from_where_and_how_fast(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        resolving(monkeypatch, "::1", "127.0.0.1")
        with serving(host="127.0.0.1", reached_at=["trainer.test:1"]) as transport:
            url = transport.metadata().replace("127.0.0.1", "trainer.test")
            with caplog.at_level(logging.INFO, "ft_transport.transfer"):
                assert transport.fetch(url, 1, timeout=SOON).state == {"a": 1}
        peer = urlsplit(url).netloc
        (told,) = [each.getMessage() for each in caplog.records if "MB/s" in each.getMessage()]
        # The first of the name's addresses does not answer.
        assert told.startswith(f"received step 1 from {peer} at 127.0.0.1:{urlsplit(url).port}: 0 bytes in ")

    def test_so_does_a_fetch_from_several_ranks(self, caplog: pytest.LogCaptureFixture) -> None:
        with serving(host="127.0.0.1") as transport:
            transport.send_checkpoint([], 2, {"w": torch.ones(1 << 10)}, SOON)
            with caplog.at_level(logging.INFO, "ft_transport.http"):
                transport.fetch_sharded([transport.metadata()], 2, timeout=SOON)
        peer = urlsplit(transport.metadata()).netloc
        (told,) = [each.getMessage() for each in caplog.records if "MB/s" in each.getMessage()]
        assert told.startswith("step 2: 4096 bytes in ")
        assert told.endswith(f"MB/s, from {peer} at {peer}")


class TestFamilies:
    @needs_ipv6
    @pytest.mark.parametrize("token", [None, "secret"])
    def test_ipv6_alone(self, token: str | None) -> None:
        with serving(host="::1", token=token) as transport:
            assert transport.metadata().startswith("http://[::1]:")
            assert transport.fetch(transport.metadata(), 1).state == {"a": 1}
            transport.check_address(SOON)
            assert not accepts("127.0.0.1", transport)

    @needs_ipv6
    def test_one_port_for_both(self) -> None:
        with serving(token="secret", advertise="lo") as transport:
            port = urlsplit(transport.metadata()).port
            for host in ("127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "localhost"):
                assert transport.fetch(f"http://{host}:{port}/checkpoint/", 1).state == {"a": 1}

    @needs_outer_address
    def test_an_interface_is_told_by_name(self) -> None:
        name = next(name for address, name in interfaces().items() if str(address) == outer_addresses()[0])
        with serving(token="secret", advertise=name) as transport:
            host = ipaddress.ip_address((urlsplit(transport.metadata()).hostname or "").partition("%")[0])
            assert interfaces()[host] == name
            transport.check_address(SOON)


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """``trainer.test`` stands for these."""
    real = socket.getaddrinfo

    def resolve(host: Any, *args: Any, **options: Any) -> Any:
        if host != "trainer.test":
            return real(host, *args, **options)
        return [info for address in addresses for info in real(address, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


@contextmanager
def listening(host: str | None) -> Iterator[socket.socket]:
    with closing(listen(host, 0)) as sock:
        yield sock


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
        assert accepts("127.0.0.1", sock.getsockname()[1])


@pytest.mark.parametrize(
    ("host", "port"), [("192.0.2.1", 0), ("no.such.host.invalid", 0), ("127.0.0.1", 70000), ("a" * 300, 0)]
)
def test_what_cannot_be_bound_is_a_wrong_setting(host: str, port: int) -> None:
    with pytest.raises(ConfigurationError, match=f"port {port}"):
        listen(host, port)
    with listening("127.0.0.1") as sock:
        taken = sock.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"127\.0\.0\.1 port {taken}.*in use"):
            listen("127.0.0.1", taken)


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
    monkeypatch.setattr(socket, "gethostname", lambda: "no.such.host.invalid")
    assert advertised_host(None) == "127.0.0.1"


def test_a_wrong_setting_leaves_no_thread_and_no_socket() -> None:
    with pytest.raises(ConfigurationError):
        HTTPTransport(settings=TransportSettings(advertise="no-such-interface0"))
    with listening("127.0.0.1") as sock, pytest.raises(ConfigurationError):
        HTTPTransport(settings=TransportSettings(host="127.0.0.1", port=sock.getsockname()[1]))
