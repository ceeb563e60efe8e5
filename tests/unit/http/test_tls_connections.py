"""A tap on the wire sees nothing of what TLS carries, in any route; in the clear the same tap sees it all."""

from __future__ import annotations

import contextlib
from contextlib import closing

import numpy as np
import pytest
import torch
from certificates import HOST, Issued
from encrypted_transports import TIMEOUT, connection, port_of, tapped, transport
from lent_memory import lent
from served_memory import serving

from ft_transport import FetchTimeout, TransportSettings
from ft_transport.credentials import Certificates
from ft_transport.http.client.fetch_settings import FetchSettings
from ft_transport.http.client.manifests import fetch_deltas
from ft_transport.http.peer_address import PeerAddress
from ft_transport.http.relays import Relay
from ft_transport.wire.chunks import ChunkTable
from ft_transport.wire.delta import TensorPair, encode_delta
from ft_transport.wire.manifest import ContentId
from ft_transport.wire.slices import Slice, encode_request

WEIGHTS = b"these are weights in the clear. "
DATA = WEIGHTS * 40_000
CONTENT = ContentId("c" * 32)
STATE = {"layer": torch.frombuffer(bytearray(WEIGHTS * 20_000), dtype=torch.uint8)}


SLICES = encode_request(
    [(Slice(0, 1 << 20),), (Slice(3, 5000), Slice(9000, 1)), (Slice(len(DATA) - 100_000, 100_000),)]
)
ROUTES: dict[str, tuple[str, str, dict[str, str], bytes | None, bytes]] = {
    "full": ("GET", "/checkpoint/5/full", {}, None, WEIGHTS),
    "a range": ("GET", "/checkpoint/5/full", {"Range": "bytes=2000-900000"}, None, WEIGHTS),
    "a range inside the header": ("GET", "/checkpoint/5/full", {"Range": "bytes=8-80"}, None, b"Content-Range"),
    "slices": ("POST", "/checkpoint/5/slices", {}, SLICES, WEIGHTS),
    "metadata": ("GET", "/checkpoint/5/metadata", {}, None, b"data_offsets"),
    "digests": ("GET", "/checkpoint/5/digests", {}, None, b"Content-Length"),
    "delta": ("GET", "/checkpoint/4/delta", {}, None, WEIGHTS),
    "relay": ("GET", f"/relay/{CONTENT}?ranges=0-{len(DATA)}", {}, None, WEIGHTS),
    "status": ("GET", "/status", {}, None, b"replica-7"),
}


@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.parametrize(
    ("route", "is_lent"),
    # The digests of a file are in its metadata.
    [(route, is_lent) for route in ROUTES for is_lent in (False, True) if is_lent or route != "digests"],
)
def test_the_wire_shows_nothing_in_any_route(issued: Issued, route: str, is_encrypted: bool, is_lent: bool) -> None:
    """In the clear the same tap sees it all; and both ways the same comes."""
    method, path, headers, body, content = ROUTES[route]
    with serving(tls=issued.files if is_encrypted else None) as served, contextlib.ExitStack() as stack:
        if is_lent:
            stack.enter_context(lent(served, DATA))
        else:
            served.put(5, DATA)
        served.server.deltas.keep(4, DATA)
        relayed = bytearray(DATA)
        chunks = ChunkTable(data_bytes=len(DATA), chunk_bytes=1 << 18)
        served.server.relays.open(
            Relay(CONTENT, step=5, chunks=chunks, views=lambda start, end: [memoryview(relayed)[start:end]], missing=())
        )
        answers = []
        with tapped(served.server.port) as tap:
            for port in (served.server.port, tap.proxy.port):
                with closing(connection(port, issued if is_encrypted else None)) as http:
                    # Twice: what is left of one answer would spoil the next one on the connection.
                    for _ in range(2):
                        http.request(method, path, body=body, headers=headers)
                        response = http.getresponse()
                        answers.append((response.status, response.read()))
        assert {status for status, _ in answers} <= {200, 206}
        assert len(set(answers)) == 1
        assert len(tap.content) > 2 * len(answers[0][1])
        assert (content in tap.content) == (not is_encrypted)


@pytest.mark.parametrize("how", ["fetch", "fetch_sharded", "fetch_deltas", "known", "with a token"])
@pytest.mark.parametrize("is_encrypted", [False, True])
def test_what_is_received_is_what_was_sent_and_nobody_on_the_way_sees_it(
    issued: Issued, how: str, is_encrypted: bool
) -> None:
    own = issued if is_encrypted else None
    token = "correct-horse" if how == "with a token" else None
    with tapped(0) as tap:
        reached_at = [f"{HOST}:{tap.proxy.port}"]
        with transport(own, token=token, reached_at=reached_at) as sender, transport(own, token=token) as receiver:
            tap.proxy.target_port = port_of(sender)
            sender.send_checkpoint([], 1, STATE, TIMEOUT)
            address = tap.address(sender)
            assert address.startswith("https://" if is_encrypted else "http://")
            match how:
                case "fetch" | "with a token":
                    got = receiver.fetch(address, 1).state["layer"]
                case "fetch_sharded":
                    got = receiver.fetch_sharded([address], 1).state["layer"]
                case "known":
                    own_layer = STATE["layer"].clone()
                    own_layer[100] += 1
                    got = receiver.fetch(address, 1, into={"layer": own_layer}, known="into").state["layer"]
                case _:
                    got = STATE["layer"]
                    sender.keep_delta(1, _delta())
                    settings = FetchSettings.of(
                        TransportSettings(),
                        keys=None,
                        certificates=Certificates(own.files) if own is not None else None,
                        num_connections=1,
                        timeout=FetchTimeout(total=TIMEOUT),
                    )
                    deltas = fetch_deltas(PeerAddress.from_url(address), 1, 2, max_bytes=1 << 24, settings=settings)
                    assert [(each.base, each.version) for each in deltas] == [(1, 2)]
            assert torch.equal(got, STATE["layer"])
            expected = b"w.secret" if how == "fetch_deltas" else WEIGHTS
            assert (expected in tap.content) == (not is_encrypted)


def _delta() -> bytes:
    old = np.zeros(1000, np.uint8)
    new = old.copy()
    new[7] = 3
    encoded = encode_delta(2, 1, [TensorPair("w.secret", 1, old, new)])
    assert encoded is not None
    return encoded
