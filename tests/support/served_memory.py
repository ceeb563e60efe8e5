"""What the tests of the server put on its cache, and how they talk to it."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from http.client import HTTPConnection, HTTPMessage

from transport_settings import settings_of

from ft_transport.credentials import Certificates, Keys, TLSFiles
from ft_transport.errors import SnapshotLimitError
from ft_transport.http.client.connection import Connection
from ft_transport.http.client.fetch_settings import Timeouts
from ft_transport.http.peer_address import PeerAddress
from ft_transport.http.server.server import SnapshotServer
from ft_transport.http.server.snapshot_cache import SnapshotCache
from ft_transport.http.server.snapshot_requests import FreshSnapshot
from ft_transport.runtime.signal_safe import Place
from ft_transport.telemetry.process_status import ProcessStatus
from ft_transport.telemetry.recorder import Recorder
from ft_transport.wire.chunks import PLAIN, ChunkTable, Digester, digest
from ft_transport.wire.manifest import SnapshotId, TensorEntry, encode_header
from ft_transport.wire.nodes import MappingNode, TensorNode
from ft_transport.wire.snapshot import MemoryFile, ServedMemory

_numbers = itertools.count(1)
_HOLE_BYTES = 4096


@dataclass(eq=False)
class MemorySnapshot:
    """A snapshot of one uint8 tensor, in a memory file that begins with a hole."""

    step: int
    data: bytes
    header: bytes = b""
    snapshot_id: SnapshotId = field(init=False)
    memory: ServedMemory = field(init=False)
    closed: threading.Event = field(default_factory=threading.Event)
    digester: Digester = PLAIN

    def __post_init__(self) -> None:
        self.snapshot_id = SnapshotId(f"{next(_numbers):032x}")
        chunks = ChunkTable(data_bytes=len(self.data), chunk_bytes=1 << 16)
        ranges = [chunks.range_of(index, index + 1) for index in range(chunks.num_chunks)]
        self.header = encode_header(
            step=self.step,
            snapshot_id=self.snapshot_id,
            tensors=[TensorEntry("w", "U8", (len(self.data),), 0, len(self.data))],
            tree=MappingNode("dict", ["w", TensorNode(0)]),
            chunks=chunks,
            digests=[digest(self.data[start:end]) for start, end in ranges],
            align_bytes=64,
        )
        data_start = _HOLE_BYTES + len(self.header)
        self.memory = MemoryFile(os.memfd_create("test-snapshot"), _HOLE_BYTES, data_start, memoryview(self.data))
        os.pwrite(self.memory.descriptor, self.content, self.memory.start)

    @property
    def content(self) -> bytes:
        return self.header + self.data

    @property
    def total_bytes(self) -> int:
        return len(self.content)

    def close(self) -> None:
        assert not self.closed.is_set(), "closed twice"
        assert isinstance(self.memory, MemoryFile)
        os.close(self.memory.descriptor)
        self.closed.set()


@dataclass
class Answer:
    status: int
    headers: HTTPMessage
    body: bytes


@dataclass
class Serving:
    server: SnapshotServer
    cache: SnapshotCache
    keys: Keys | None = None

    def put(self, step: int, data: bytes = b"state") -> MemorySnapshot:
        places: list[Place] = []
        until(lambda: self._reserve(places))
        snapshot = MemorySnapshot(step, data)
        self.cache.put(snapshot, places[0])
        self.server.wake()
        return snapshot

    def _reserve(self, places: list[Place]) -> bool:
        try:
            places.append(self.cache.reserve())
        except SnapshotLimitError:  # The server has not yet seen that the last receiver closed its connection.
            return False
        return True

    def proved(self) -> Connection:
        """A connection of somebody who knows the token."""
        timeouts = Timeouts(
            deadline_s=time.monotonic() + 20, connect_timeout_s=20, stall_timeout_s=20, min_bytes_per_s=1
        )
        address = PeerAddress(host="127.0.0.1", port=self.server.port)
        return Connection(address, keys=self.keys, certificates=None, timeouts=timeouts)

    def ask_proved(self, path: str, *, expected_status: int = 200) -> bytes:
        """The body of an answer to somebody who knows the token."""
        with self.proved() as peer:
            response = peer.get(path, headers={}, expected_status=expected_status, answer_within_s=20)
            body = bytearray(response.length or 0)
            peer.read_into([memoryview(body)])
            return bytes(body)

    def connect(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.server.port, timeout=20)

    def ask(self, path: str, method: str = "GET", **headers: str) -> Answer:
        with closing(self.connect()) as http:
            http.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            response = http.getresponse()
            return Answer(response.status, response.headers, response.read())


@contextmanager
def serving(
    *,
    token: str | None = None,
    tls: TLSFiles | None = None,
    max_snapshots: int = 4,
    lease_s: float = 0.0,
    contended_bytes_per_s: float = 1.0,
    max_wait_s: float = 20.0,
    stall_timeout_s: float = 20.0,
    max_send_bytes_per_s: float | None = None,
    fresh_snapshot: FreshSnapshot | None = None,
    process_status: ProcessStatus | None = None,
    port: int = 0,
) -> Iterator[Serving]:
    cache = SnapshotCache(
        max_snapshots=max_snapshots,
        lease_s=lease_s,
        contended_bytes_per_s=contended_bytes_per_s,
        clock=time.monotonic,
    )
    keys = Keys.of(token) if token is not None else None
    server = SnapshotServer(
        cache,
        settings_of(
            host="127.0.0.1",
            port=port,
            replica="replica-7",
            stall_timeout=timedelta(seconds=stall_timeout_s),
            max_send_bytes_per_s=max_send_bytes_per_s,
            same_host=False,
        ),
        keys=keys,
        certificates=Certificates(tls) if tls is not None else None,
        max_wait_s=max_wait_s,
        process_status=process_status if process_status is not None else ProcessStatus(Recorder()),
    )
    server.requests.fresh_snapshot = fresh_snapshot
    try:
        yield Serving(server, cache, keys)
    finally:
        server.close(wait=True)
        cache.clear()


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Returns when another thread has made ``condition`` true; for what tells nobody that it changed."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come true in time"
        time.sleep(0.005)
