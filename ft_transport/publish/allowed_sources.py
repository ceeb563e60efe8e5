"""From where a receiver may fetch: looked at by address, and the address that was looked at is the one that is used."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from ft_transport.errors import ConfigurationError, PeerUnreachableError, TransportError
from ft_transport.http.peer_address import PeerAddress, look_up

_MAX_ADDRESSES: Final = 8
_LOOK_UP_S: Final = 5.0
_CONNECT_S: Final = 3.0

IPAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


class SourceRefusedError(TransportError):
    """The receiver may not fetch from there."""


class AllowedSources:
    """Decides from which addresses may be fetched. Thread-safe.

    Args:
        sources: Networks (``10.0.0.0/8``), addresses and host names; ``None`` for all.
        loopback_only: Whether none but the loopback is allowed.

    Raises:
        ConfigurationError: One of them is neither.
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

    def choose(self, url: str, *, is_given_up: Callable[[], bool] = lambda: False) -> PeerAddress:
        """An address of this server that is allowed and answers, so that no later look-up can lead elsewhere.

        Blocks for seconds at most.

        Raises:
            ConfigurationError: It is no URL of a transport.
            SourceRefusedError: None of its addresses is allowed.
            PeerUnreachableError: None of them answers, or its name cannot be found.
        """
        peer = PeerAddress.from_url(url)
        found = _addresses_of(peer, is_given_up)
        by_name = {
            address
            for name in self._names
            for address in _addresses_or_none(PeerAddress(host=name, port=peer.port), is_given_up)
        }
        allowed = [each for each in found if self._allows(each, by_name)]
        if not allowed:
            limits = "the loopback" if self._loopback_only else f"{[*map(str, self._networks or ()), *self._names]}"
            raise SourceRefusedError(
                f"expected a source within {limits}, got {[str(each) for each in found]}", peer=str(peer)
            )
        if peer.is_tls:
            # Its certificate carries the name, and shows that no later look-up has led elsewhere.
            return peer
        addresses = [PeerAddress(host=str(each), port=peer.port) for each in allowed]
        return addresses[0] if len(addresses) == 1 else _first_that_answers(addresses, peer)

    def _allows(self, address: IPAddress, by_name: set[IPAddress]) -> bool:
        if self._loopback_only and not address.is_loopback:
            return False
        if self._networks is None:
            return True
        return address in by_name or any(address in network for network in self._networks)


def addresses_of_name(host: str, port: int) -> set[IPAddress]:
    """What a name stands for here; empty if that cannot be found within seconds."""
    return set(_addresses_or_none(PeerAddress(host=host, port=port), lambda: False))


def _addresses_or_none(peer: PeerAddress, is_given_up: Callable[[], bool]) -> list[IPAddress]:
    with contextlib.suppress(PeerUnreachableError):
        return _addresses_of(peer, is_given_up)
    return []


def _addresses_of(peer: PeerAddress, is_given_up: Callable[[], bool]) -> list[IPAddress]:
    try:
        found = look_up(peer, timeout_s=_LOOK_UP_S, is_given_up=is_given_up)
    except PeerUnreachableError:
        raise
    except OSError as error:
        raise PeerUnreachableError(f"nobody could be asked for {peer.host!r}: {error}", peer=str(peer)) from error
    addresses: dict[IPAddress, None] = {}
    for *_, (host, *_rest) in found:
        address = ipaddress.ip_address(str(host))
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        addresses[mapped or address] = None
    return list(addresses)[:_MAX_ADDRESSES]


def _first_that_answers(addresses: Sequence[PeerAddress], peer: PeerAddress) -> PeerAddress:
    failures = []
    for address in addresses:
        started_s = time.monotonic()
        try:
            with socket.create_connection((address.host, address.port), timeout=_CONNECT_S):
                return address
        except OSError as error:
            failures.append(f"{address}: {type(error).__name__} after {time.monotonic() - started_s:.1f} s")
    raise PeerUnreachableError(f"no address accepts a connection: {'; '.join(failures)}", peer=str(peer))
