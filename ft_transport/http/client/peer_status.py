"""Requests a peer's status and state, and measures the throughput of each of the peer's addresses."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Final

import msgspec

from ft_transport.credentials import Certificates, Keys
from ft_transport.errors import PeerProtocolError, TransportError, escape_peer_text
from ft_transport.http.bind_address import interface_of, interfaces
from ft_transport.http.client.connection import Connection
from ft_transport.http.client.fetch_settings import Timeouts
from ft_transport.http.peer_address import PeerAddress
from ft_transport.runtime.decoding import DECODE_ERRORS
from ft_transport.telemetry.process_state import ProcessState, decode_state
from ft_transport.wire.manifest import SnapshotId
from ft_transport.wire.nodes import Count
from ft_transport.wire.routes import FULL_ROUTE, STATE_ROUTE, STATUS_ROUTE, bound_path

_MAX_STATUS_BYTES: Final = 1 << 20
_MAX_STATE_BYTES: Final = 512 << 10
_PIECE_BYTES: Final = 256 << 10
_MAX_BYTES: Final = 256 << 20
_MAX_ADDRESSES: Final = 16
_MAX_NAME: Final = 64

Connect = Callable[[PeerAddress, float], Connection]
"""Returns a connection to a peer; the second argument is the timeout of all its requests together, in seconds."""


@dataclass(frozen=True, slots=True)
class PeerInterface:
    """An address of a peer, and the peer's name for the network interface with that address."""

    interface: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus:
    """The status of a server of this package (``GET /status``).

    Attributes:
        server: Random id of the server, new at each start.
        replica: Name of the server's replica.
        step: Step of the newest snapshot; ``None`` without a snapshot.
        snapshot: Id of the newest snapshot; ``None`` without a snapshot.
        snapshot_bytes: Size of the newest snapshot.
        clients: Number of receivers that are fetching now.
        unix_s: Unix time by the peer's clock, from the ``Date`` header, in whole seconds; 0 if unknown.
        interfaces: Addresses of the server, without the loopback; empty if the server listens on only one address.
    """

    server: str
    replica: str = ""
    step: Count | None = None
    snapshot: str | None = None
    snapshot_bytes: Count = 0
    clients: Count = 0
    unix_s: float = 0.0
    interfaces: tuple[PeerInterface, ...] = ()


_status_decoder: Final = msgspec.json.Decoder(PeerStatus)


def fetch_status(connection: Connection) -> PeerStatus:
    """Request a server's status.

    Raises:
        PeerError: The server cannot be reached, refuses the request, or is not a server of this package.
        DeadlineExceededError: The server did not respond in time.
    """
    response = connection.get(STATUS_ROUTE, headers={}, expected_status=200, answer_within_s=0.0)
    date = response.headers.get("Date", "")
    body = connection.read_body(response, max_bytes=_MAX_STATUS_BYTES)
    try:
        return replace(_status_decoder.decode(body), unix_s=_unix_s(date))
    except DECODE_ERRORS as error:
        raise PeerProtocolError(f"expected the status of a server: {error}", peer=str(connection.peer)) from error


def _unix_s(date: str) -> float:
    try:
        return parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedRate:
    """The measured throughput of one address of a peer.

    Attributes:
        peer: The measured address.
        peer_interface: The peer's name for the interface with that address; empty if unknown.
        local_address: Local address of the connection.
        interface: Interface of this host with ``local_address``; empty if unknown.
        num_bytes: Bytes received.
        bytes_per_s: Throughput.
        error: Why no bytes were received; empty if bytes were received.
    """

    peer: PeerAddress
    peer_interface: str = ""
    local_address: str = ""
    interface: str = ""
    num_bytes: int = 0
    bytes_per_s: float = 0.0
    error: str = ""


def connecting(keys: Keys | None, certificates: Certificates | None) -> Connect:
    """Return a function that makes connections with these keys and certificates, for commands that query a peer."""

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
    """Request a server's status over a new connection, within ``within_s`` seconds.

    Raises:
        TransportError: The server cannot be reached, refuses the request, or is not a server of this package.
    """
    with connect(peer, within_s) as connection:
        return fetch_status(connection)


def ask_state(address: str, connect: Connect, within_s: float) -> ProcessState:
    """Request a process's state (``GET /state``) over a new connection, within ``within_s`` seconds.

    Args:
        address: URL of the process's server.
        connect: Makes the connection.
        within_s: Timeout of the connection and the request together, in seconds.

    Raises:
        TransportError: The server does not respond in time, refuses the request, or is not a server of this package.
    """
    with connect(PeerAddress.from_url(address), within_s) as connection:
        response = connection.get(STATE_ROUTE, headers={}, expected_status=200, answer_within_s=0.0)
        return decode_state(connection.read_body(response, max_bytes=_MAX_STATE_BYTES))


def probe_rates(peer: PeerAddress, status: PeerStatus, connect: Connect, *, seconds_each: float) -> list[ProbedRate]:
    """Measure the throughput of each address of a peer: first ``peer``, then the addresses of the peer's interfaces.

    Each measurement fetches a part of the peer's newest snapshot over one connection.

    Args:
        peer: An address of the peer, which is measured first.
        status: The peer's status.
        connect: Makes connections.
        seconds_each: Longest time of each measurement, in seconds; connecting may take as long again.
    """
    rates = [_probe(peer, "", status, connect, seconds_each)]
    for each in _other_addresses(peer, status.interfaces):
        address = PeerAddress(host=each.address, port=peer.port, is_tls=peer.is_tls)
        name = escape_peer_text(each.interface, max_characters=_MAX_NAME)
        rates.append(_probe(address, name, status, connect, seconds_each))
    return rates


def _other_addresses(peer: PeerAddress, advertised: Sequence[PeerInterface]) -> list[PeerInterface]:
    """Return the valid advertised addresses, except loopback and link-local ones and that of ``peer``."""
    others = []
    for each in advertised[:_MAX_ADDRESSES]:
        try:
            address = ipaddress.ip_address(each.address)
        except ValueError:
            continue
        if not (address.is_loopback or address.is_link_local or address.is_unspecified or str(address) == peer.host):
            others.append(each)
    return others


def _probe(peer: PeerAddress, peer_interface: str, status: PeerStatus, connect: Connect, seconds: float) -> ProbedRate:
    if status.step is None or status.snapshot is None:
        return ProbedRate(peer=peer, peer_interface=peer_interface, error="it has no snapshot to fetch")
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
    return ProbedRate(
        peer=peer,
        peer_interface=peer_interface,
        local_address=local_address,
        interface=interface_of(local_address, interfaces()),
        num_bytes=num_bytes,
        bytes_per_s=num_bytes / took_s if num_bytes else 0.0,
        error=error,
    )
