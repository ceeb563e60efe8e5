"""Decides from which addresses a receiver may fetch versions.

The receiver connects to exactly the IP address that it has checked.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ft_transport.errors import ConfigurationError, PeerUnreachableError, TransportError
from ft_transport.http.peer_address import PeerAddress, look_up

IPAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


class SourceRefusedError(TransportError):
    """The receiver may not fetch versions from this address."""


class AllowedSources:
    """Decides from which addresses versions may be fetched. Thread-safe.

    Args:
        sources: The allowed networks (``10.0.0.0/8``), addresses and host names; ``None`` for all.
        loopback_only: Whether only addresses of the loopback are allowed, even if ``sources`` has other entries.

    Raises:
        ConfigurationError: An entry is neither a network, nor an address, nor a host name.
    """

    def __init__(self, sources: Sequence[str] | None, *, loopback_only: bool) -> None:
        if isinstance(sources, str) or not all(isinstance(each, str) for each in sources or ()):
            raise ConfigurationError(f"expected a sequence of networks, addresses and names as sources, got {sources}")
        self._loopback_only = loopback_only
        self._networks: list[_Network] | None = None
        self._names: list[str] = []
        if sources is None:
            return
        self._networks = []
        for source in sources:
            try:
                self._networks.append(ipaddress.ip_network(source, strict=False))
            except ValueError:
                if not source or "/" in source or not source.isprintable() or " " in source:
                    raise ConfigurationError(
                        f"expected a network, an address or a host name as one of the sources, got {source!r}"
                    ) from None
                self._names.append(source)

    def choose(self, url: str, *, is_given_up: Callable[[], bool]) -> PeerAddress:
        """Resolve a server's name, and return one of its allowed addresses that accepts connections.

        The caller connects to the returned address, so a later look-up of the name cannot lead to another host. Blocks
        for a few seconds at most.

        Args:
            url: URL of the server.
            is_given_up: Returns whether the caller no longer needs the result.

        Raises:
            ConfigurationError: The URL is not that of a transport.
            SourceRefusedError: No address of the server is allowed.
            PeerUnreachableError: No allowed address accepts a connection, or the name cannot be resolved.
        """
        peer = PeerAddress.from_url(url)
        found = _addresses_of(peer, is_given_up)
        by_name = {
            address
            for name in self._names
            for address in addresses_or_none(PeerAddress(host=name, port=peer.port), is_given_up)
        }
        allowed = [each for each in found if self._allows(each, by_name)]
        if not allowed:
            limits = "the loopback" if self._loopback_only else f"{[*map(str, self._networks or ()), *self._names]}"
            raise SourceRefusedError(
                f"expected a source within {limits}, got {[str(each) for each in found]}", peer=str(peer)
            )
        if peer.is_tls:
            # With TLS the name is needed, and the certificate proves the host of a later look-up.
            return peer
        addresses = [PeerAddress(host=str(each), port=peer.port) for each in allowed]
        return addresses[0] if len(addresses) == 1 else _first_that_answers(addresses, peer)

    def _allows(self, address: IPAddress, by_name: set[IPAddress]) -> bool:
        if self._loopback_only and not address.is_loopback:
            return False
        if self._networks is None:
            return True
        return address in by_name or any(address in network for network in self._networks)


def addresses_or_none(peer: PeerAddress, is_given_up: Callable[[], bool] = lambda: False) -> list[IPAddress]:
    """Return the addresses of a host; empty if the name cannot be resolved within a few seconds."""
    with contextlib.suppress(PeerUnreachableError):
        return _addresses_of(peer, is_given_up)
    return []


def _addresses_of(peer: PeerAddress, is_given_up: Callable[[], bool]) -> list[IPAddress]:
    try:
        found = look_up(peer, timeout_s=5.0, is_given_up=is_given_up)
    except PeerUnreachableError:
        raise
    except OSError as error:
        raise PeerUnreachableError(f"could not look up {peer.host!r}: {error}", peer=str(peer)) from error
    addresses: dict[IPAddress, None] = {}
    for *_, (host, *_rest) in found:
        address = ipaddress.ip_address(str(host))
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        addresses[mapped or address] = None
    return list(addresses)[:8]


def _first_that_answers(addresses: Sequence[PeerAddress], peer: PeerAddress) -> PeerAddress:
    failures = []
    for address in addresses:
        started_s = time.monotonic()
        try:
            with socket.create_connection((address.host, address.port), timeout=3.0):
                return address
        except OSError as error:
            failures.append(f"{address}: {type(error).__name__} after {time.monotonic() - started_s:.1f} s")
    raise PeerUnreachableError(f"no address accepts a connection: {'; '.join(failures)}", peer=str(peer))
