"""Paths, parameters and headers of the HTTP protocol, spelled once for both sides.

GET, HEAD /checkpoint/{step}/full       the safetensors file; one byte range may be requested
GET       /checkpoint/{step}/metadata   its JSON header alone
POST      /checkpoint/{step}/slices     the parts of tensors that the body lists, see ``wire.slices``
GET       /checkpoint/{step}/digests    the digests, in the same form, if the header says "later" instead of them
GET       /checkpoint/{step}/memory     a ticket for the snapshot's memory, for receivers on this host
GET       /checkpoint/{step}/delta      the delta from this step to a later one, if it is cached: see ``wire.delta``
GET       /relay/{content}              chunks that a receiver has, or will have, as they land: see `CHUNK_HEADER`
GET       /status                       JSON: the served snapshots, and their numbers of readers
GET       /state                        JSON: the state of this process, see ``telemetry.process_state``
GET       /metrics                      the metrics of this process, as Prometheus reads them
GET       /                             a page for people, which shows ``/state`` as it changes
GET       /challenge                    begins a session of peers that know the job token: see ``wire.signing``

``step`` is a number or ``latest``. ``?snapshot=ID`` binds a request to one snapshot (409 once it was replaced), and
``?wait=SECONDS`` bounds how long the request may wait for the step. The answer to a request for ``latest`` that ended
without a snapshot (503) has a number in ``FT-After``, which the next request repeats in ``?after=``: any snapshot begun
since the first request is then new enough, however long it takes. ``FT-Exchange-Digest``, in every answer, identifies
the request as the server read it: see `exchange_digest`.
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
"""The routes for people and their tools, which a watch token opens: see ``http.server.request_guard``."""

SNAPSHOT_PARAMETER: Final = "snapshot"
WAIT_PARAMETER: Final = "wait"
AFTER_PARAMETER: Final = "after"
RANGES_PARAMETER: Final = "ranges"
FOLLOW_PARAMETER: Final = "follow"
"""Longest pause, in seconds, of a relay that sends the chunks it has, and the rest as it lands. A longer pause closes
the connection."""
AFTER_HEADER: Final = "FT-After"
MANIFEST_DIGEST_HEADER: Final = "FT-Manifest-Digest"
REPLICA_HEADER: Final = "FT-Replica"
"""The receiver's replica name, used for the audit alone."""
SAME_HOST_HEADER: Final = "FT-Same-Host"
"""Names the socket where a receiver on the same host gets the snapshot's memory: see `MemoryTicket`."""
SERVED_STEPS_HEADER: Final = "FT-Served-Steps"

_MAX_STEP_DIGITS: Final = 18


def parse_step(text: str) -> StepSelector | None:
    """Return the step of a path, or ``None`` without one."""
    if text == LATEST:
        return "latest"
    if text.isascii() and text.isdigit() and len(text) <= _MAX_STEP_DIGITS:
        return int(text)
    return None


def metadata_path(step: StepSelector, *, wait_s: float, after: int | None = None) -> str:
    """Return path and query of a request for the manifest, which may wait ``wait_s`` seconds for the step."""
    query = {WAIT_PARAMETER: f"{wait_s:.3f}"}
    if after is not None:
        query[AFTER_PARAMETER] = str(after)
    return f"{METADATA_ROUTE.format(step=step)}?{urlencode(query)}"


def relay_path(content: ContentId, ranges: str, *, wait_s: float, follow_s: float) -> str:
    """Return path and query of a request for chunks, and the longest waits for the first and each other one."""
    query = {RANGES_PARAMETER: ranges, WAIT_PARAMETER: f"{wait_s:.3f}", FOLLOW_PARAMETER: f"{follow_s:.3f}"}
    return f"{RELAY_ROUTE.format(content=content)}?{urlencode(query, safe=',')}"


def parse_after(text: str | None) -> int | None:
    """Return the number in an ``FT-After`` header or an ``after`` parameter; ``None`` without one."""
    number = parse_step(text) if text is not None else None
    return number if isinstance(number, int) else None


def bound_path(route: str, step: int, snapshot_id: SnapshotId) -> str:
    """Return path and query of a route, bound to one snapshot."""
    return f"{route.format(step=step)}?{urlencode({SNAPSHOT_PARAMETER: snapshot_id})}"


def parse_served_steps(text: str | None) -> tuple[int, ...]:
    """Return the steps of a ``FT-Served-Steps`` header; anything but numbers is left out."""
    if not text:
        return ()
    steps = (parse_step(item.strip()) for item in text[:4096].split(","))
    return tuple(step for step in steps if isinstance(step, int))


CHUNK_HEADER: Final = struct.Struct(">QI")
"""Precedes each chunk of a relay's answer: its position in the data, and a number of chunks, both big-endian.

A request to another receiver names half-open ranges of the data's bytes, each of whole chunks:
``?ranges=4194304-8388608,0-1048576``. The answer has all these chunks as they land there, beginning with the first of
those that have landed. The number is how many chunks the furthest receiver known to the sender has received, without
those it had before (see ``wire.ring``). The answer is as long as all chunks together, and ends early if the rest does
not land in time.
"""
MAX_RANGES: Final = 64
"""Maximum ranges in one request."""
_MAX_POSITION_DIGITS: Final = 18


def relayed_bytes(table: ChunkTable, chunks: Iterable[int]) -> int:
    """Return the length of an answer with these chunks."""
    return sum(CHUNK_HEADER.size + table.length_of(chunk) for chunk in chunks)


def format_ranges(table: ChunkTable, chunks: Sequence[int]) -> str:
    """Return the value of the parameter that requests chunks, in their order."""
    ranges = (table.range_of(run.start, run.stop) for run in runs_of(chunks))
    return ",".join(f"{start}-{end}" for start, end in ranges)


def parse_ranges(text: str) -> Sequence[tuple[int, int]] | None:
    """Return the ranges of a parameter, or ``None`` if it names none, or some byte twice."""
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
    """Return the chunks that make up ranges of bytes, or ``None`` if a range holds parts of chunks, or other bytes."""
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
    """A ticket for the memory of a snapshot on the same host, valid once and for a moment.

    The answer with the manifest names a socket of the source (``FT-Same-Host``). A receiver that reaches it is on the
    same host, whatever the names of both. It asks the source for a ticket, by HTTP, so that this request is
    authenticated like any other, and sends the ticket through the socket; with `LENT` comes a descriptor of the
    snapshot's memory, which is copied once and crosses no network. The source leaves that memory unchanged while the
    socket is open, or until a newer snapshot has waited for it for long enough. After `DONE` it sends `HELD` if the
    memory is unchanged up to now.

    Attributes:
        ticket: Hexadecimal digits, drawn at random.
        data_start: Where in the memory the data of the snapshot begins.
        data_bytes: Its length.
    """

    ticket: Annotated[str, Meta(pattern=f"^[0-9a-f]{{{TICKET_CHARACTERS}}}$")]
    data_start: Annotated[int, Meta(ge=0, lt=2**62)]
    data_bytes: Annotated[int, Meta(ge=0, lt=2**62)]


_ticket_decoder: Final = msgspec.json.Decoder(MemoryTicket)


def encode_ticket(ticket: MemoryTicket) -> bytes:
    """Encode a ticket as the body of an answer."""
    return msgspec.json.encode(ticket)


def decode_ticket(body: bytes | bytearray, *, peer: str) -> MemoryTicket:
    """Decode a body of `encode_ticket`.

    Raises:
        PeerProtocolError: The body is no ticket.
    """
    try:
        return _ticket_decoder.decode(body)
    except DECODE_ERRORS as error:
        raise PeerProtocolError(f"expected a ticket for memory: {error}", peer=peer) from error


def socket_name(name: str) -> bytes | None:
    """Return the abstract address of the socket that a server calls ``name``; ``None`` for an invalid name.

    Each network namespace has its own abstract addresses (``man 7 unix``), so other hosts cannot reach it.
    """
    return b"\0ft-transport/" + name.encode() if _NAME.fullmatch(name) else None


EXCHANGE_DIGEST_HEADER: Final = "FT-Exchange-Digest"

_IDENTIFIED_REQUEST_HEADERS: Final = ("Range", "Authorization")
"""Headers that change what the server does. A proxy may add or change others."""
_IDENTIFIED_ANSWER_HEADERS: Final = ("Content-Range", MANIFEST_DIGEST_HEADER, SERVED_STEPS_HEADER, AFTER_HEADER)


@dataclass(frozen=True, slots=True)
class RequestRead:
    """A request, as it was sent or as it was read.

    Attributes:
        method: Its method.
        target: Path and query, as they were sent.
        headers: All headers, or those that count.
        body: The body that was sent, or read; ``None`` without a body, which differs from an empty one.
    """

    method: str
    target: str
    headers: Headers
    body: bytes | None


def exchange_digest(request: RequestRead, status: int, answered: Headers) -> str:
    """Return the value of `EXCHANGE_DIGEST_HEADER`, which shows whether the server answered the intended request.

    The data of a fetch has digests of its own. Its requests have none: a damaged path is a 404, a damaged header a 400,
    and a damaged number in a request for slices brings bytes of another place, with the right digest. So each answer
    carries the digest of the request as the server has read it and of the status and headers of the answer. The client
    compares: if they differ, or the answer has none, the request or the answer was damaged on its way, and a retry may
    help; if they are equal, a refusal is genuine.

    Args:
        request: The request.
        status: Status of the answer.
        answered: The answer's headers.
    """
    values = [
        request.method,
        request.target,
        *(request.headers.get(name, "") for name in _IDENTIFIED_REQUEST_HEADERS),
        str(status),
        *(answered.get(name, "") for name in _IDENTIFIED_ANSWER_HEADERS),
    ]
    # No line contains a line end, so no two requests have the same text.
    text = "\n".join(values).encode("utf-8", "surrogateescape")
    read = text if request.body is None else b"%b|%b" % (text, request.body)
    return f"{digest(read):0{DIGEST_HEX_DIGITS}x}"
