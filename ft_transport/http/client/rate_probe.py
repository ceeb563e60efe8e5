"""Measures a peer's throughput over each of its addresses, by a short part of a real fetch each."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ft_transport.errors import TransportError, escape_peer_text
from ft_transport.http.bind_address import interfaces
from ft_transport.http.client.connection import Connection
from ft_transport.http.client.connection_pool import interface_of
from ft_transport.http.client.fetch_settings import Timeouts
from ft_transport.http.client.manifests import PeerInterface, PeerStatus, fetch_status
from ft_transport.http.peer_address import PeerAddress
from ft_transport.keys import Keys
from ft_transport.telemetry.process_state import ProcessState, decode_state
from ft_transport.tls import Certificates
from ft_transport.wire.manifest import SnapshotId
from ft_transport.wire.routes import FULL_ROUTE, STATE_ROUTE, bound_path

_MAX_STATE_BYTES: Final = 512 << 10
_PIECE_BYTES: Final = 256 << 10
_MAX_BYTES: Final = 256 << 20
_MAX_ADDRESSES: Final = 16
_MAX_NAME: Final = 64

Connect = Callable[[PeerAddress, float], Connection]
"""Makes a connection to a peer; all its requests end within the given seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedRate:
    """The result of measuring one address.

    Attributes:
        peer: The measured address.
        peer_interface: The peer's name for its interface; empty if unknown.
        local_address: This end of the connection.
        interface: This host's interface.
        num_bytes: Bytes received.
        bytes_per_s: Throughput.
        error: Why no bytes came; empty if some did.
    """

    peer: PeerAddress
    peer_interface: str = ""
    local_address: str = ""
    interface: str = ""
    num_bytes: int = 0
    bytes_per_s: float = 0.0
    error: str = ""


def connecting(keys: Keys | None, certificates: Certificates | None) -> Connect:
    """Return a function that makes authenticated connections."""

    def connect(peer: PeerAddress, within_s: float) -> Connection:
        timeouts = Timeouts(
            deadline_s=time.monotonic() + within_s,
            connect_timeout_s=within_s,
            stall_timeout_s=within_s,
            min_bytes_per_s=1.0,
        )
        return Connection(peer, keys=keys, certificates=certificates, timeouts=timeouts, replica="ft-transport doctor")

    return connect


def ask_status(peer: PeerAddress, connect: Connect, *, within_s: float) -> PeerStatus:
    """Request a server's status.

    Raises:
        TransportError: The server cannot be reached, refuses, or is not of this package.
    """
    with connect(peer, within_s) as connection:
        return fetch_status(connection)


def ask_state(address: str, connect: Connect, within_s: float) -> ProcessState:
    """Request a process's state (``/state``).

    Args:
        address: The URL of its server.
        connect: Makes the connection.
        within_s: Timeout of the whole request, in seconds.

    Raises:
        TransportError: The server does not answer in time, refuses, or is not of this package.
    """
    with connect(PeerAddress.from_url(address), within_s) as connection:
        response = connection.get(STATE_ROUTE, headers={}, expected_status=200, answer_within_s=0.0)
        return decode_state(connection.read_body(response, max_bytes=_MAX_STATE_BYTES))


def probe_rates(peer: PeerAddress, status: PeerStatus, connect: Connect, *, seconds_each: float) -> list[ProbedRate]:
    """Measure each address of a peer in turn over one connection: the given address, then its interfaces.

    Args:
        peer: The given address.
        status: The peer's status.
        connect: Makes connections.
        seconds_each: Seconds of each measurement, with as much again for the connection.
    """
    rates = [_probe(peer, "", status, connect, seconds_each)]
    for each in _other_ways(peer, status.interfaces):
        way = PeerAddress(host=each.address, port=peer.port, is_tls=peer.is_tls)
        name = escape_peer_text(each.interface, max_characters=_MAX_NAME)
        rates.append(_probe(way, name, status, connect, seconds_each))
    return rates


def _other_ways(peer: PeerAddress, told: Sequence[PeerInterface]) -> list[PeerInterface]:
    """Return the valid addresses that are neither on the loopback nor the given address."""
    ways = []
    for each in told[:_MAX_ADDRESSES]:
        try:
            address = ipaddress.ip_address(each.address)
        except ValueError:
            continue
        if not (address.is_loopback or address.is_link_local or address.is_unspecified or str(address) == peer.host):
            ways.append(each)
    return ways


def _probe(peer: PeerAddress, peer_interface: str, status: PeerStatus, connect: Connect, seconds: float) -> ProbedRate:
    if status.step is None or status.snapshot is None:
        return ProbedRate(peer=peer, peer_interface=peer_interface, error="it has no snapshot that could be asked for")
    most = min(status.snapshot_bytes, _MAX_BYTES)
    piece = memoryview(bytearray(_PIECE_BYTES))
    num_bytes, began_s, error = 0, 0.0, ""
    with connect(peer, 2 * seconds) as connection:
        try:
            connection.get(
                bound_path(FULL_ROUTE, status.step, SnapshotId(status.snapshot)),
                headers={"Range": f"bytes=0-{most - 1}"},
                expected_status=206,
                answer_within_s=0.0,
            )
            began_s = time.monotonic()
            while num_bytes < most and time.monotonic() < began_s + seconds:
                length = min(_PIECE_BYTES, most - num_bytes)
                connection.read_into([piece[:length]])
                num_bytes += length
        except TransportError as raised:
            error = "" if num_bytes else str(raised)
        took_s = time.monotonic() - began_s
        local_address = connection.local_address
    by_address = {str(address): name for address, name in interfaces().items()}
    return ProbedRate(
        peer=peer,
        peer_interface=peer_interface,
        local_address=local_address,
        interface=interface_of(local_address, by_address),
        num_bytes=num_bytes,
        bytes_per_s=num_bytes / took_s if num_bytes else 0.0,
        error=error,
    )
