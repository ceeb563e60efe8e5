"""Checks that the advertised address leads to this host, as far as the host can tell, and logs the result once."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import logging
import os
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeAlias

from ft_transport.errors import ConfigurationError
from ft_transport.http.fork_safety import making_socket
from ft_transport.http.own_address import ADVERTISE_VARIABLE, addresses_of, advertised_host, can_bind, is_loopback
from ft_transport.http.peer_address import PeerAddress

logger = logging.getLogger(__name__)

IPAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

_SIOCGIFCONF: Final = 0x8912  # linux/sockios.h
_MAX_INTERFACES: Final = 512
_IFREQ: Final = struct.Struct("16s4x4s16x" if struct.calcsize("P") == 8 else "16s4x4s8x")
"""``struct ifreq`` with an IPv4 address (man 7 netdevice)."""


def advertised_url(
    setting: str | None,
    *,
    bound: str | None,
    port: int,
    is_guarded: bool,
    reached_at: Sequence[str],
    is_encrypted: bool = False,
) -> str:
    """Return the URL that peers should use; log where it leads.

    Args:
        setting: See ``advertised_host``.
        bound: The address that the server listens on; ``None`` for all.
        port: Its port.
        is_guarded: Whether peers have to prove the job token; then they reject a server at an address that the server
            does not know as its own.
        reached_at: ``host:port`` of translated addresses.
        is_encrypted: Whether the server speaks TLS.

    Raises:
        ConfigurationError: The address cannot lead to this server.
    """
    url = f"{'https' if is_encrypted else 'http'}://{advertised_host(setting, bound=bound)}:{port}"
    peer = PeerAddress.from_url(url)
    found = addresses_of(peer.host)
    remedy = f"set TransportSettings.advertise or {ADVERTISE_VARIABLE} to a host, an address or a network interface"
    is_listening_locally = bound is not None and is_loopback(bound)
    is_local = bool(found) and all(each.is_loopback for each in found)
    if is_listening_locally and not is_local and not reached_at:
        raise ConfigurationError(
            f"expected a loopback address to advertise, because the server listens on {bound} alone, got "
            f"{peer.host!r}; "
            "where a proxy passes connections on, name its address in TransportSettings.reached_at"
        )
    by_address = interfaces()
    own = [each for each in found if is_own(each)]
    if found and not own and str(peer) not in reached_at:
        if is_guarded and _is_literal(peer.host):
            raise ConfigurationError(
                f"expected to advertise an address of this host, got {peer.host}, which is none of "
                f"{sorted({str(each) for each in by_address})}; where it is translated on the way, name {peer} in "
                f"TransportSettings.reached_at as well, else {remedy}"
            )
        logger.warning(
            "peers are told %s, which stands for %s here, no address of this host; where it is translated on the way, "
            "name it in TransportSettings.reached_at, else %s",
            peer,
            [str(each) for each in found],
            remedy,
        )
    is_chosen = bool(setting or os.environ.get(ADVERTISE_VARIABLE))
    others = sorted({name for address, name in by_address.items() if not address.is_loopback})
    if is_local and not is_listening_locally and not is_chosen and others:
        logger.warning(
            "peers are told %s, which stands for %s here: those on other hosts will ask themselves instead; %s, one of "
            "%s",
            peer,
            [str(each) for each in found],
            remedy,
            others,
        )
    logger.info("peers are told %s: %s", url, ", ".join(_described(each, by_address) for each in found) or "unknown")
    return url


def is_own(address: IPAddress) -> bool:
    """Whether ``address`` is an address of this host."""
    return address.is_loopback or can_bind(str(address))


def interfaces() -> dict[IPAddress, str]:
    """Return the addresses of this host's network interfaces that the platform reports, with their names."""
    found: dict[IPAddress, str] = {}
    if sys.platform != "linux":
        return found
    buffer = array.array("B", bytes(_MAX_INTERFACES * _IFREQ.size))
    address, length = buffer.buffer_info()
    # Each fetch calls this, so a fork would sometimes find the socket open.
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


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
