"""A server that lies costs the receiver neither its memory nor its time (promise 5)."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from faulty_transports import transport
from scripted_peer import Peer, Script, answering, scripted

from ft_transport import (
    DeadlineExceededError,
    IntegrityError,
    ManifestError,
    PeerProtocolError,
    RestoreError,
    StepNotServedError,
    TransportError,
)
from ft_transport.wire.chunks import ChunkTable, digest
from ft_transport.wire.manifest import SnapshotId, TensorEntry, encode_header
from ft_transport.wire.nodes import MappingNode, Node, TensorNode

MIB = 1 << 20
EXTRA_BYTES = 96 * MIB  # of which most is what a fetch takes anyway: threads, their stacks, modules loaded late


def manifest(num_items: int, *, step: int = 1, tree: Node = None, chunk_bytes: int = 1 << 40) -> bytes:
    """A header that promises ``num_items`` bytes."""
    chunks = ChunkTable(data_bytes=num_items, chunk_bytes=chunk_bytes)
    encoded = encode_header(
        step=step,
        snapshot_id=SnapshotId("ab" * 16),
        tensors=[TensorEntry("w", "U8", (num_items,), 0, num_items)],
        tree=tree if tree is not None else MappingNode("dict", ["w", TensorNode(0)]),
        chunks=chunks,
        digests=[0] * chunks.num_chunks,
        align_bytes=64,
    )
    return encoded[8:]


def answer(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"FT-Manifest-Digest: {digest(body):016x}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def endless(head: bytes, piece: bytes) -> Script:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(head)
        while not peer.stopping.is_set():
            peer.send(piece)

    return script


def memory(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


@contextmanager
def bounded_memory() -> Iterator[None]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = memory("VmRSS")
    yield
    assert memory("VmHWM") - before < EXTRA_BYTES


def fetch(port: int, *, timeout_s: float = 2.0, step: Any = 1, **settings: Any) -> None:
    with transport(2, max_failures=2, **settings) as receiver:
        receiver.fetch(f"http://127.0.0.1:{port}/checkpoint/", step, timeout=timedelta(seconds=timeout_s))


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (endless(b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999999\r\n\r\n", bytes(MIB)), ManifestError),
        (endless(b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", bytes(MIB)), ManifestError),
        (endless(b"HTTP/1.1 200 OK\r\n\r\n", bytes(MIB)), ManifestError),
        (endless(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"100000\r\n" + bytes(MIB)), ManifestError),
        (answering(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"), ManifestError),
        (endless(b"HTTP/1.1 200 OK\r\nX: ", b"y" * MIB), PeerProtocolError),
        (endless(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 1000), PeerProtocolError),
        (endless(b"", b"z" * MIB), PeerProtocolError),
        (endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000), TransportError),
        (endless(b"HTTP/1.1 503 Busy\r\n\r\n", bytes(MIB)), DeadlineExceededError),
        (endless(b"HTTP/1.1 404 Gone\r\nFT-Served-Steps: " + b"9," * 30_000 + b"\r\n\r\n", b"no"), StepNotServedError),
        (answering(answer(b"{}", "Content-Length: 2")), ManifestError),
        (answering(answer(b"[" * 100_000, "Content-Length: 100000")), ManifestError),
        (answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"), PeerProtocolError),
        (answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nFT-Manifest-Digest: 1\r\n\r\n{}"), IntegrityError),
        (answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nFT-Manifest-Digest: -0x1\r\n\r\n{}"), TransportError),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_manifest_that_is_none_is_a_typed_error(script: Script, expected: type[TransportError]) -> None:
    started_s = time.monotonic()
    with scripted(script) as port, bounded_memory(), pytest.raises(expected) as caught:
        fetch(port, timeout_s=1.0)
    assert time.monotonic() - started_s < 5
    assert len(str(caught.value)) < 5000


def test_a_manifest_of_the_largest_size_that_never_comes_takes_no_memory() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n")
        peer.hold()

    with scripted(script) as port, bounded_memory(), pytest.raises(DeadlineExceededError):
        fetch(port, timeout_s=0.5)


def test_the_manifest_of_another_step_is_refused() -> None:
    body = manifest(100, step=2)
    script = answering(answer(body, f"Content-Length: {len(body)}"))
    with scripted(script) as port, pytest.raises(PeerProtocolError, match="step 1, got step 2"):
        fetch(port, step=1)


def test_a_snapshot_larger_than_allowed_is_refused_before_it_is_given_memory() -> None:
    body = manifest(1 << 50)
    script = answering(answer(body, f"Content-Length: {len(body)}"))
    with scripted(script) as port, bounded_memory(), pytest.raises(RestoreError, match="the memory of this machine"):
        fetch(port)


def test_promised_data_that_does_not_come_takes_no_memory() -> None:
    body = manifest(512 * MIB, chunk_bytes=MIB)

    def script(peer: Peer) -> None:
        while head := peer.request():
            if "/metadata" in head:
                peer.send(answer(body, f"Content-Length: {len(body)}"))
            else:
                peer.hold()

    with scripted(script) as port, bounded_memory(), pytest.raises(DeadlineExceededError):
        fetch(port, timeout_s=0.5)
