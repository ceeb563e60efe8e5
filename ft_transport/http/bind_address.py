"""Chooses the address on which a server listens, and the address that it advertises to peers.

The server logs its advertised address once, and warns if the address seems to lead to another host.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import functools
import ipaddress
import logging
import os
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from ft_transport.errors import ConfigurationError
from ft_transport.http.peer_address import PeerAddress, is_address
from ft_transport.runtime.children import making_socket

logger = logging.getLogger(__name__)

IPAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
_SIOCGIFCONF: Final = 0x8912  # linux/sockios.h
_MAX_INTERFACES: Final = 512
_IFREQ: Final = struct.Struct("16s4x4s16x" if struct.calcsize("P") == 8 else "16s4x4s8x")
"""``struct ifreq`` with an IPv4 address (man 7 netdevice)."""
ADVERTISE_VARIABLE: Final = "FT_TRANSPORT_ADVERTISE"
"""Environment variable: the host name, address or network interface that a server advertises to peers."""
LISTEN_BACKLOG: Final = 4096
"""Connections that the kernel queues until the server accepts them. If the queue is full, a client retries after a
second, which is worse than the negligible cost of a queued connection.
"""
_LOOPBACKS: Final = ("127.0.0.1", "::1")
_REMEDY: Final = "set FT_TRANSPORT_TOKEN to the same secret on every host"
_OPEN_REMEDY: Final = "or allow any client with TransportSettings.allow_anyone=True or FT_TRANSPORT_ALLOW_ANYONE=1"


def bound_host(host: str | None, *, is_guarded: bool, allow_anyone: bool | None) -> str | None:
    """Return the address on which to listen: only the loopback if the server does not authenticate its peers.

    Args:
        host: The configured address; ``None`` for all addresses.
        is_guarded: Whether the server authenticates its peers.
        allow_anyone: Whether the server may listen beyond the loopback without authentication; ``None`` means no, and
            that users of this server have no such setting.

    Returns:
        The address; ``None`` for all addresses.

    Raises:
        ConfigurationError: Clients on other hosts could connect to ``host`` without authentication.
    """
    if is_guarded or allow_anyone:
        return host
    remedy = f"{_REMEDY}, {_OPEN_REMEDY}" if allow_anyone is not None else _REMEDY
    if host is None:
        _warn_of_loopback(remedy)
        return next((each for each in _LOOPBACKS if can_bind(each)), _LOOPBACKS[0])
    if not is_loopback(host):
        raise ConfigurationError(
            f"expected a loopback address to listen on, because there is no job token, got {host!r}; {remedy}"
        )
    return host


def is_loopback(host: str) -> bool:
    """Whether ``host`` resolves only to loopback addresses."""
    found = addresses_of(host)
    return bool(found) and all(each.is_loopback for each in found)


def addresses_of(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the IP addresses of a host name, or the IP address itself; ``[]`` if the name does not resolve.

    Args:
        host: A host name, or an IP address with or without brackets.
    """
    with contextlib.suppress(ValueError):
        return [ipaddress.ip_address(host.strip("[]"))]
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(ipaddress.ip_address(str(info[4][0])) for info in infos))


@functools.cache
def _warn_of_loopback(remedy: str) -> None:
    """Warn once per process that the server listens only on the loopback."""
    logger.warning(
        "there is no job token, so this process listens only on the loopback; for peers on other hosts, %s", remedy
    )


def can_bind(address: str) -> bool:
    """Whether ``address`` is an address of this host."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def listen(host: str | None, port: int) -> socket.socket:
    """Return a TCP socket that listens on an address.

    Args:
        host: The address; ``None`` for all addresses, IPv4 and IPv6 (IPv4 alone on hosts without IPv6).
        port: The port; 0 for any free port.

    Raises:
        ConfigurationError: The process cannot listen on this address and port.
    """
    if not 0 <= port <= 65535:
        raise ConfigurationError(f"expected a port from 0 to 65535, got port {port}")
    try:
        if host is None:
            if socket.has_dualstack_ipv6():
                try:
                    return socket.create_server(
                        ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=LISTEN_BACKLOG
                    )
                except OSError:
                    # Python supports IPv6, but this host has it disabled (ipv6.disable=1, containers).
                    pass
            return socket.create_server(("0.0.0.0", port), backlog=LISTEN_BACKLOG)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=LISTEN_BACKLOG)
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(f"cannot listen on {host or '*'} port {port}: {error}") from error


def advertised_host(setting: str | None, *, bound: str | None = None) -> str:
    """Return the host to advertise to peers, as written in a URL (IPv6 in brackets).

    Args:
        setting: A host name, an address or a network interface. Default: the value of the environment variable
            ``FT_TRANSPORT_ADVERTISE``; or else ``bound``; or else this host's name if it resolves; or else 127.0.0.1.
        bound: The address on which the server listens; ``None`` or a wildcard for all addresses.

    Raises:
        ConfigurationError: The setting is neither an address, nor a name that resolves, nor a network interface with an
            address.
    """
    chosen = setting or os.environ.get(ADVERTISE_VARIABLE) or (None if _is_wildcard(bound) else bound)
    if not chosen:
        name = socket.gethostname()
        return name if addresses_of(name) else "127.0.0.1"
    if chosen in {name for _, name in socket.if_nameindex()}:
        return interface_address(chosen)
    try:
        address = ipaddress.ip_address(chosen.strip("[]"))
    except ValueError:
        if addresses_of(chosen):
            return chosen
        raise ConfigurationError(
            f"expected a host, an address or one of the interfaces {sorted(name for _, name in socket.if_nameindex())} "
            f"to advertise, got {chosen!r}, which does not resolve"
        ) from None
    return f"[{address}]" if address.version == 6 else str(address)


def interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface, or its first global IPv6 address in brackets.

    Raises:
        ConfigurationError: The interface has no address, or the platform does not report its addresses.
    """
    found = [
        each
        for each, interface in interfaces().items()
        if interface == name and (each.version == 4 or not each.is_link_local)
    ]
    for address in sorted(found, key=lambda each: each.version):
        return f"[{address}]" if address.version == 6 else str(address)
    raise ConfigurationError(f"expected the network interface {name!r} to have an address to advertise, found none")


def _is_wildcard(host: str | None) -> bool:
    """Return whether ``host`` is a wildcard such as 0.0.0.0: servers can listen on it, but peers cannot connect."""
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def advertised_url(
    setting: str | None,
    *,
    bound: str | None,
    port: int,
    is_guarded: bool,
    reached_at: Sequence[str],
    is_encrypted: bool = False,
) -> str:
    """Return the URL that a server advertises to peers, and log the addresses to which it resolves.

    Args:
        setting: The host to advertise; see ``advertised_host`` for the default.
        bound: The address on which the server listens; ``None`` for all addresses.
        port: The port on which the server listens.
        is_guarded: Whether peers and server prove the job token to each other. If so, the server must know each address
            at which peers reach it.
        reached_at: Each ``host:port`` at which peers reach the server through address translation.
        is_encrypted: Whether the server uses TLS.

    Raises:
        ConfigurationError: The URL cannot lead to this server.
    """
    url = f"{'https' if is_encrypted else 'http'}://{advertised_host(setting, bound=bound)}:{port}"
    peer = PeerAddress.from_url(url)
    found = addresses_of(peer.host)
    remedy = f"set TransportSettings.advertise or {ADVERTISE_VARIABLE} to a host, an address or a network interface"
    is_listening_locally = bound is not None and is_loopback(bound)
    is_local = bool(found) and all(each.is_loopback for each in found)
    if is_listening_locally and not is_local and not reached_at:
        raise ConfigurationError(
            f"expected a loopback address to advertise, because the server listens only on {bound}, got "
            f"{peer.host!r}; if a proxy forwards connections, add its address to TransportSettings.reached_at"
        )
    by_address = interfaces()
    own = [each for each in found if each.is_loopback or can_bind(str(each))]
    if found and not own and str(peer) not in reached_at:
        if is_guarded and is_address(peer.host):
            raise ConfigurationError(
                f"expected to advertise an address of this host, one of {sorted({str(each) for each in by_address})}, "
                f"got {peer.host}; if the network translates {peer.host} into an address of this host, add {peer} to "
                f"TransportSettings.reached_at, else {remedy}"
            )
        logger.warning(
            "this server advertises %s, which resolves to %s here, but this host has no such address; if the network "
            "translates the address into one of this host, add it to TransportSettings.reached_at, else %s",
            peer,
            [str(each) for each in found],
            remedy,
        )
    is_chosen = bool(setting or os.environ.get(ADVERTISE_VARIABLE))
    others = sorted({name for address, name in by_address.items() if not address.is_loopback})
    if is_local and not is_listening_locally and not is_chosen and others:
        logger.warning(
            "this server advertises %s, which resolves to %s here: peers on other hosts will connect to themselves "
            "instead; %s, one of %s",
            peer,
            [str(each) for each in found],
            remedy,
            others,
        )
    shown = ", ".join(_described(each, by_address) for each in found) or "unknown"
    logger.info("this server advertises %s: %s", url, shown)
    return url


def interface_of(address: str, by_address: Mapping[IPAddress, str]) -> str:
    """Return the name of this host's network interface that has ``address``; the loopback has all of 127.x.x.x.

    Args:
        address: The address; may be empty.
        by_address: Result of `interfaces`.

    Returns:
        The name; empty if no interface has the address.
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    return by_address.get(parsed, "lo" if parsed.is_loopback else "")


def interfaces() -> dict[IPAddress, str]:
    """Return the addresses of this host's network interfaces, each with the name of its interface."""
    found: dict[IPAddress, str] = {}
    if sys.platform != "linux":
        return found
    buffer = array.array("B", bytes(_MAX_INTERFACES * _IFREQ.size))
    address, length = buffer.buffer_info()
    # Each fetch calls this function. Without `making_socket`, a forked child could inherit the open socket.
    with making_socket, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, struct.pack("@iP", length, address))
            num_bytes, _ = struct.unpack("@iP", answer)
        except OSError:
            num_bytes = 0
    for name, digits in _IFREQ.iter_unpack(buffer.tobytes()[: num_bytes - num_bytes % _IFREQ.size]):
        found[ipaddress.IPv4Address(digits)] = name.partition(b"\0")[0].decode("utf-8", "replace").partition(":")[0]
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:  # IPv6 is switched off
        lines = []
    for line in lines:
        hexadecimal, *_, name = line.split()
        found[ipaddress.IPv6Address(int(hexadecimal, 16))] = name
    return found


def _described(address: IPAddress, by_address: dict[IPAddress, str]) -> str:
    plain = ipaddress.ip_address(str(address).partition("%")[0])
    name = by_address.get(plain) or ("loopback" if address.is_loopback else "no interface of this host")
    return f"{address} (IPv{address.version}, {name})"
