"""Parses the addresses of peers in URLs and sockets, and resolves their host names."""

from __future__ import annotations

import functools
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from ft_transport.errors import ConfigurationError, PeerUnreachableError, UnknownHostError
from ft_transport.runtime.signal_safe import SafeFuture, SafeThread, ThreadRefusedError

_TICK_S: Final = 0.1
_UNKNOWN: Final = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})
"""The resolver's errors for a name that does not exist; after other errors, a later query may succeed."""
_IPV6_SITE_BITS: Final = 64
"""Prefix length of the IPv6 network of one host (RFC 7421); all its addresses count as one."""
AddressInfo: TypeAlias = tuple[Any, ...]
"""One result of ``socket.getaddrinfo``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """Host and port of a server, and whether the server uses TLS. ``str()`` gives ``host:port``."""

    host: str
    port: int
    is_tls: bool = False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def from_url(cls, url: str) -> PeerAddress:
        """Return the address of the server in a URL.

        Raises:
            ConfigurationError: ``url`` does not have the form ``http://host:port`` or ``https://host:port``.
        """
        if not isinstance(url, str):
            raise ConfigurationError(f"expected the URL of a peer, got {url!r}")
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigurationError(f"expected the URL of a peer, got {url[:200]!r}: {error}") from error
        is_tls = parts.scheme == "https"
        is_web = is_tls or parts.scheme == "http"
        if not is_web or not host or parts.username is not None or not host.isprintable() or " " in host:
            raise ConfigurationError(f"expected a URL like http(s)://host:port/checkpoint/, got {url[:200]!r}")
        default_port = 443 if is_tls else 80
        return cls(host=host, port=port if port is not None else default_port, is_tls=is_tls)


def peer_addresses(urls: Sequence[str]) -> list[PeerAddress]:
    """Return the addresses of the servers in one or more URLs.

    Raises:
        ConfigurationError: ``urls`` is empty, or contains a malformed URL.
    """
    if not isinstance(urls, Sequence):
        raise ConfigurationError(f"expected the URL of a peer, got {urls!r}")
    if isinstance(urls, str) or not urls:
        raise ConfigurationError(f"expected the URLs of one or more sources, got {urls!r}")
    return [PeerAddress.from_url(url) for url in urls]


def socket_address(address: Any) -> str:
    """Return a socket's address in canonical form: ``host:port``, without a zone or an IPv6 mapping."""
    host, port = address[:2]
    parsed = ipaddress.ip_address(str(host).partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(PeerAddress(host=str(mapped or parsed), port=int(port)))


@functools.lru_cache(maxsize=1024)
def client_of(host: str) -> str:
    """Return the key under which limits count a peer: its IPv4 address, or the /64 network of its IPv6 address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    if address.is_link_local or address.is_loopback:
        return str(address)
    return str(ipaddress.ip_network((address, _IPV6_SITE_BITS), strict=False))


_lock = threading.Lock()
_under_way: dict[PeerAddress, SafeFuture[list[AddressInfo]]] = {}


def look_up(peer: PeerAddress, *, timeout_s: float, is_given_up: Callable[[], bool]) -> list[AddressInfo]:
    """Resolve a peer's host name within a deadline.

    The look-up runs on a thread of its own, because the system's function has no deadline.

    Args:
        peer: The peer whose host name to resolve.
        timeout_s: Longest wait for the resolver, in seconds.
        is_given_up: Returns whether the caller no longer needs the result. Called ten times a second.

    Raises:
        PeerUnreachableError: The resolver did not answer in time, the caller gave up, the name is malformed, or the
            process could not start a thread.
        UnknownHostError: The name does not exist.
        OSError: The resolver failed.
    """
    if is_address(peer.host):
        return _resolve(peer)
    found = _look_up_on_thread(peer)
    give_up_s = time.monotonic() + timeout_s
    while not found.done():
        if is_given_up():
            raise PeerUnreachableError("the request was given up", peer=str(peer))
        remaining_s = give_up_s - time.monotonic()
        if remaining_s <= 0:
            raise PeerUnreachableError(
                f"the host name {peer.host!r} did not resolve within {timeout_s:.3g} s", peer=str(peer)
            )
        found.wait(min(_TICK_S, remaining_s))
    return found.result()


def _resolve(peer: PeerAddress) -> list[AddressInfo]:
    try:
        # As bytes, because for a str Python imports a codec: 1 to 2 ms of a process's first fetch.
        host = peer.host.encode() if is_address(peer.host) else peer.host
        return list(socket.getaddrinfo(host, peer.port, type=socket.SOCK_STREAM))
    except socket.gaierror as error:
        if error.errno not in _UNKNOWN:
            raise
        raise UnknownHostError(
            f"expected a host name that resolves, got {peer.host!r}: {error.strerror}", peer=str(peer)
        ) from error
    except UnicodeError as error:
        raise PeerUnreachableError(f"expected a valid host name, got {peer.host!r}: {error}", peer=str(peer)) from error


def _look_up_on_thread(peer: PeerAddress) -> SafeFuture[list[AddressInfo]]:
    """Return the running look-up of this peer, or start one. So look-ups that hang do not accumulate."""
    with _lock:
        under_way = _under_way.get(peer)
        if under_way is not None:
            return under_way
        found: SafeFuture[list[AddressInfo]] = SafeFuture()

        def run() -> None:
            try:
                addresses = _resolve(peer)
            except BaseException as error:
                outcome = functools.partial(found.set_exception, error)
            else:
                outcome = functools.partial(found.set_result, addresses)
            with _lock:
                _under_way.pop(peer, None)
            outcome()

        try:
            SafeThread(target=run, name="ft-transport-look-up", daemon=True).start()
        except ThreadRefusedError as error:
            raise PeerUnreachableError(
                f"cannot start a thread to look up {peer.host!r}: {error}", peer=str(peer)
            ) from error
        _under_way[peer] = found
        return found


def is_address(host: str) -> bool:
    """Whether ``host`` is an IP address, with or without an IPv6 zone."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
