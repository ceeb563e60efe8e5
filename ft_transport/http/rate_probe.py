"""How fast a peer's data comes over each address at which it can be reached: a short part of a real fetch each."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from typing import Final

import msgspec

from ft_transport.errors import PeerProtocolError, TransportError, escape_peer_text
from ft_transport.http.connection import Connection
from ft_transport.http.fetch_timeouts import Timeouts
from ft_transport.http.peer_address import PeerAddress
from ft_transport.http.reachability import interfaces
from ft_transport.http.transfer_log import interface_of
from ft_transport.keys import Keys
from ft_transport.runtime.decode_errors import DECODE_ERRORS
from ft_transport.telemetry.told import ToldState, decode_state
from ft_transport.tls import Certificates
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
"""Makes a connection to a peer, all of whose requests end within so many seconds."""


@dataclass(frozen=True, slots=True)
class PeerInterface:
    """An address of a peer, and what the peer calls the interface that has it."""

    interface: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus:
    """What a server of this package says of itself (``GET /status``).

    Attributes:
        replica: How it calls itself.
        server: Drawn at random when it started.
        step: Of its newest snapshot; ``None`` without one.
        snapshot: Its name.
        snapshot_bytes: Its size.
        clients: How many receive it now.
        unix_s: The peer's clock (RFC 9110, section 6.6.1), in whole seconds; 0 if it does not tell.
        interfaces: Where else it can be reached, besides the loopback; none where it listens at one address.
    """

    replica: str = ""
    server: str = ""
    step: Count | None = None
    snapshot: str | None = None
    snapshot_bytes: Count = 0
    clients: Count = 0
    unix_s: float = 0.0
    interfaces: tuple[PeerInterface, ...] = field(default=())


_status_decoder: Final = msgspec.json.Decoder(PeerStatus)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedRate:
    """What came over one way.

    Attributes:
        peer: The address that was asked.
        peer_interface: What the peer calls its interface; empty if it does not tell.
        local_address: This end of the connection.
        interface: The interface here.
        num_bytes: That came.
        bytes_per_s: How fast.
        error: Why nothing did; empty if something did.
    """

    peer: PeerAddress
    peer_interface: str = ""
    local_address: str = ""
    interface: str = ""
    num_bytes: int = 0
    bytes_per_s: float = 0.0
    error: str = ""


def connecting(keys: Keys | None, certificates: Certificates | None) -> Connect:
    """Connections that prove what this side has to prove."""

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
    """What a server says of itself.

    Raises:
        TransportError: It cannot be reached, refuses, or is no server of this package.
    """
    with connect(peer, within_s) as connection:
        response = connection.get(STATUS_ROUTE, headers={}, expected_status=200, answer_within_s=0.0)
        date = response.headers.get("Date", "")
        body = connection.read_body(response, max_bytes=_MAX_STATUS_BYTES)
    try:
        return replace(_status_decoder.decode(body), unix_s=_unix_s(date))
    except DECODE_ERRORS as error:
        raise PeerProtocolError(f"expected the status of a server: {error}", peer=str(peer)) from error


def ask_state(address: str, connect: Connect, within_s: float) -> ToldState:
    """Asks a process for its state (``/state``).

    Args:
        address: The URL of its server.
        connect: Connects to it.
        within_s: For all of it, in seconds.

    Raises:
        TransportError: It does not answer in time, refuses, or is no server of this package.
    """
    with connect(PeerAddress.from_url(address), within_s) as connection:
        response = connection.get(STATE_ROUTE, headers={}, expected_status=200, answer_within_s=0.0)
        return decode_state(connection.read_body(response, max_bytes=_MAX_STATE_BYTES))


def _unix_s(date: str) -> float:
    try:
        return parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def probe_rates(peer: PeerAddress, status: PeerStatus, connect: Connect, *, seconds_each: float) -> list[ProbedRate]:
    """Measure each way to a peer, one after the other, over one connection each: how it was named, and its interfaces.

    Args:
        peer: As it was named.
        status: What it said.
        connect: Makes connections.
        seconds_each: For how long each way is measured, with as much again for the connection.
    """
    rates = [_probe(peer, "", status, connect, seconds_each)]
    for each in _other_ways(peer, status.interfaces):
        way = PeerAddress(host=each.address, port=peer.port, is_tls=peer.is_tls)
        name = escape_peer_text(each.interface, max_characters=_MAX_NAME)
        rates.append(_probe(way, name, status, connect, seconds_each))
    return rates


def _other_ways(peer: PeerAddress, told: Sequence[PeerInterface]) -> list[PeerInterface]:
    """Those that are addresses, are on no loopback, and are not the one that was named."""
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
