"""Paths, parameters and headers of the HTTP protocol, defined once for clients and servers.

GET, HEAD /checkpoint/{step}/full       the safetensors file of a snapshot, or one byte range of the file
GET       /checkpoint/{step}/metadata   the JSON header of that file
POST      /checkpoint/{step}/slices     the parts of tensors that the body lists, see ``wire.slices``
GET       /checkpoint/{step}/digests    the digests of chunks, if the header has "later" in their place
GET       /checkpoint/{step}/memory     a ticket for the snapshot's memory, for receivers on this host
GET       /checkpoint/{step}/delta      the delta from this step to a later step, if it is cached: see ``wire.delta``
GET       /relay/{content}              chunks that this receiver has, or will have, as they land: see `CHUNK_HEADER`
GET       /status                       JSON: the served snapshots, and the number of readers of each
GET       /state                        JSON: the state of this process, see ``telemetry.process_state``
GET       /metrics                      the metrics of this process, in the format of Prometheus
GET       /                             a web page that shows ``/state`` as it changes
GET       /challenge                    begins a session of peers that know the job token: see ``wire.signing``

``step`` is a number or ``latest``. With ``?snapshot=ID`` a request is valid for one snapshot only; after the snapshot
was replaced, the status is 409. ``?wait=SECONDS`` is the longest time that the server may wait for the step.

If a request for ``latest`` ends without a snapshot (503), the response has a number in ``FT-After``. The client sends
the number in ``?after=`` of its next request. The server then accepts any snapshot begun since the first request.
``FT-Exchange-Digest`` in every response identifies the request as the server read it: see `exchange_digest`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeAlias
from urllib.parse import urlencode

import msgspec
from msgspec import Meta, Struct

from ft_transport.errors import PeerProtocolError
from ft_transport.runtime.decoding import DECODE_ERRORS
from ft_transport.wire.chunks import DIGEST_HEX_DIGITS, ChunkTable, digest, runs_of
from ft_transport.wire.manifest import ContentId, SnapshotId
from ft_transport.wire.signing import Headers

LATEST: Final = "latest"
StepSelector: TypeAlias = int | Literal["latest"]

FULL_ROUTE: Final = "/checkpoint/{step}/full"
METADATA_ROUTE: Final = "/checkpoint/{step}/metadata"
DIGESTS_ROUTE: Final = "/checkpoint/{step}/digests"
MEMORY_ROUTE: Final = "/checkpoint/{step}/memory"
SLICES_ROUTE: Final = "/checkpoint/{step}/slices"
DELTA_ROUTE: Final = "/checkpoint/{step}/delta"
RELAY_ROUTE: Final = "/relay/{content}"
STATUS_ROUTE: Final = "/status"
CHALLENGE_ROUTE: Final = "/challenge"
STATE_ROUTE: Final = "/state"
METRICS_ROUTE: Final = "/metrics"
PAGE_ROUTE: Final = "/"
WATCH_ROUTES: Final = frozenset({STATE_ROUTE, METRICS_ROUTE, PAGE_ROUTE})
"""The routes for browsers and monitoring, which also accept a watch token: see ``http.server.request_guard``."""

SNAPSHOT_PARAMETER: Final = "snapshot"
WAIT_PARAMETER: Final = "wait"
AFTER_PARAMETER: Final = "after"
RANGES_PARAMETER: Final = "ranges"
FOLLOW_PARAMETER: Final = "follow"
"""Longest time in seconds that a relay waits for the next chunk to land. Then the relay closes the connection."""
AFTER_HEADER: Final = "FT-After"
MANIFEST_DIGEST_HEADER: Final = "FT-Manifest-Digest"
REPLICA_HEADER: Final = "FT-Replica"
"""The name of the receiver's replica, which the server uses for its audit log only."""
SAME_HOST_HEADER: Final = "FT-Same-Host"
"""Name of the socket from which a receiver on the same host gets the snapshot's memory: see `MemoryTicket`."""
SERVED_STEPS_HEADER: Final = "FT-Served-Steps"

_MAX_STEP_DIGITS: Final = 18


def parse_step(text: str) -> StepSelector | None:
    """Parse the step in a path; return ``None`` if it is neither a number nor ``latest``."""
    if text == LATEST:
        return "latest"
    if text.isascii() and text.isdigit() and len(text) <= _MAX_STEP_DIGITS:
        return int(text)
    return None


def metadata_path(step: StepSelector, *, wait_s: float, after: int | None = None) -> str:
    """Return path and query of a request for the manifest; the server may wait ``wait_s`` seconds for the step."""
    query = {WAIT_PARAMETER: f"{wait_s:.3f}"}
    if after is not None:
        query[AFTER_PARAMETER] = str(after)
    return f"{METADATA_ROUTE.format(step=step)}?{urlencode(query)}"


def relay_path(content: ContentId, ranges: str, *, wait_s: float, follow_s: float) -> str:
    """Return path and query of a request to a relay.

    Args:
        content: Id of the content.
        ranges: The chunks, in the format of `format_ranges`.
        wait_s: Longest time that the relay may wait for the first chunk, in seconds.
        follow_s: Longest time that the relay may wait for each further chunk, in seconds.
    """
    query = {RANGES_PARAMETER: ranges, WAIT_PARAMETER: f"{wait_s:.3f}", FOLLOW_PARAMETER: f"{follow_s:.3f}"}
    return f"{RELAY_ROUTE.format(content=content)}?{urlencode(query, safe=',')}"


def parse_after(text: str | None) -> int | None:
    """Parse the number in an ``FT-After`` header or an ``after`` parameter; return ``None`` for any other text."""
    number = parse_step(text) if text is not None else None
    return number if isinstance(number, int) else None


def bound_path(route: str, step: int, snapshot_id: SnapshotId) -> str:
    """Return path and query of a request that is valid for one snapshot only."""
    return f"{route.format(step=step)}?{urlencode({SNAPSHOT_PARAMETER: snapshot_id})}"


def parse_served_steps(text: str | None) -> tuple[int, ...]:
    """Parse the steps in an ``FT-Served-Steps`` header; items that are not numbers are ignored."""
    if not text:
        return ()
    steps = (parse_step(item.strip()) for item in text[:4096].split(","))
    return tuple(step for step in steps if isinstance(step, int))


CHUNK_HEADER: Final = struct.Struct(">QI")
"""The header before each chunk in a relay's response: the chunk's position, and the progress of other receivers.

A request to a relay names half-open byte ranges of the data, each of whole chunks:
``?ranges=4194304-8388608,0-1048576``. The response has all these chunks as they land at the relay, beginning with those
that have landed. ``Content-Length`` is the length with all chunks. The response ends early if a chunk does not land in
time. The progress is the number of chunks that the furthest receiver known to the relay has received in this fetch (see
``wire.ring``). Both numbers are big-endian.
"""
MAX_RANGES: Final = 64
"""Maximum number of ranges in one request to a relay."""
_MAX_POSITION_DIGITS: Final = 18


def relayed_bytes(table: ChunkTable, chunks: Iterable[int]) -> int:
    """Return the length of a relay's response that contains these chunks."""
    return sum(CHUNK_HEADER.size + table.length_of(chunk) for chunk in chunks)


def format_ranges(table: ChunkTable, chunks: Sequence[int]) -> str:
    """Return the value of the ``ranges`` parameter of a request for chunks."""
    ranges = (table.range_of(run.start, run.stop) for run in runs_of(chunks))
    return ",".join(f"{start}-{end}" for start, end in ranges)


def parse_ranges(text: str) -> Sequence[tuple[int, int]] | None:
    """Parse a ``ranges`` parameter; return ``None`` if it is invalid, or if ranges overlap."""
    parts = text.split(",", MAX_RANGES)
    if len(parts) > MAX_RANGES:
        return None
    ranges: list[tuple[int, int]] = []
    for part in parts:
        start, _, end = part.partition("-")
        if not all(each.isascii() and each.isdigit() and len(each) <= _MAX_POSITION_DIGITS for each in (start, end)):
            return None
        ranges.append((int(start), int(end)))
    at = 0
    for first, last in sorted(ranges):
        if not at <= first < last:
            return None
        at = last
    return ranges


def chunks_of(table: ChunkTable, ranges: Sequence[tuple[int, int]]) -> Sequence[int] | None:
    """Return the chunks in byte ranges; ``None`` if a range does not consist of whole chunks of the table."""
    chunks: list[int] = []
    for start, end in ranges:
        first, last = start // table.chunk_bytes, -(-end // table.chunk_bytes)
        if not 0 <= first < last <= table.num_chunks or table.range_of(first, last) != (start, end):
            return None
        chunks += range(first, last)
    return chunks


TICKET_CHARACTERS: Final = 32
LENT: Final = b"L"
GONE: Final = b"G"
DONE: Final = b"D"
HELD: Final = b"H"

_NAME: Final = re.compile("[0-9a-f]{16}", re.ASCII)


class MemoryTicket(Struct, frozen=True):
    """A ticket with which a receiver on the same host gets the memory of a snapshot. Valid once, for a short time.

    The response with the manifest names a Unix socket of the source (``FT-Same-Host``). A receiver that can connect to
    this socket is on the same host. The receiver requests a ticket by HTTP, with the usual authentication, and sends
    the ticket through the socket. The source answers `LENT` with a file descriptor of the snapshot's memory. The
    receiver copies the memory, and sends `DONE`. The source answers `HELD` if the memory has not changed, and `GONE`
    otherwise. The source does not change the memory while the socket is open, unless a newer snapshot has waited
    for the memory for too long.

    Attributes:
        ticket: Random hexadecimal digits.
        data_start: Position of the snapshot's data in the memory.
        data_bytes: Length of the data.
    """

    ticket: Annotated[str, Meta(pattern=f"^[0-9a-f]{{{TICKET_CHARACTERS}}}$")]
    data_start: Annotated[int, Meta(ge=0, lt=2**62)]
    data_bytes: Annotated[int, Meta(ge=0, lt=2**62)]


_ticket_decoder: Final = msgspec.json.Decoder(MemoryTicket)


def encode_ticket(ticket: MemoryTicket) -> bytes:
    """Encode a ticket as the body of a response."""
    return msgspec.json.encode(ticket)


def decode_ticket(body: bytes | bytearray, *, peer: str) -> MemoryTicket:
    """Decode the body of a response with a ticket.

    Raises:
        PeerProtocolError: The body is not a ticket.
    """
    try:
        return _ticket_decoder.decode(body)
    except DECODE_ERRORS as error:
        raise PeerProtocolError(f"expected a ticket for memory: {error}", peer=peer) from error


def socket_name(name: str) -> bytes | None:
    """Return the abstract address of a server's Unix socket; ``None`` if the name is invalid.

    Each network namespace has its own abstract addresses (``man 7 unix``), so other hosts cannot connect.
    """
    return b"\0ft-transport/" + name.encode() if _NAME.fullmatch(name) else None


EXCHANGE_DIGEST_HEADER: Final = "FT-Exchange-Digest"

_IDENTIFIED_REQUEST_HEADERS: Final = ("Range", "Authorization")
"""Request headers that change what the server does. Other headers may be added or changed by proxies."""
_IDENTIFIED_ANSWER_HEADERS: Final = ("Content-Range", MANIFEST_DIGEST_HEADER, SERVED_STEPS_HEADER, AFTER_HEADER)


@dataclass(frozen=True, slots=True)
class RequestRead:
    """A request as the client sent it, or as the server read it.

    Attributes:
        method: HTTP method.
        target: Path and query, exactly as sent.
        headers: The headers; at least those that change what the server does.
        body: The body; ``None`` if there is none, which is not the same as an empty body.
    """

    method: str
    target: str
    headers: Headers
    body: bytes | None


def exchange_digest(request: RequestRead, status: int, answered: Headers) -> str:
    """Return the value of `EXCHANGE_DIGEST_HEADER`, which shows whether the server answered the request that was sent.

    The data of a fetch has digests, but requests do not. A request that was damaged in transit may lead to a wrong
    error status, or to bytes that were not requested but match their digest. So each response has a digest of the
    request as the server read it, and of status and headers of the response. The client computes the same digest. If
    the two digests differ, or the response has no digest, the request or the response was damaged, and the client may
    retry. If they are equal, an error status is the server's real answer.

    Args:
        request: The request.
        status: HTTP status of the response.
        answered: Headers of the response.
    """
    values = [
        request.method,
        request.target,
        *(request.headers.get(name, "") for name in _IDENTIFIED_REQUEST_HEADERS),
        str(status),
        *(answered.get(name, "") for name in _IDENTIFIED_ANSWER_HEADERS),
    ]
    # The values contain no line breaks, so different requests have different texts.
    text = "\n".join(values).encode("utf-8", "surrogateescape")
    read = text if request.body is None else b"%b|%b" % (text, request.body)
    return f"{digest(read):0{DIGEST_HEX_DIGITS}x}"
