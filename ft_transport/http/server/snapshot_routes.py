"""The server's routes for snapshots, slices, deltas, relayed chunks and ``/status`` (``wire.routes``)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
from aiohttp import web

from ft_transport.credentials import Keys
from ft_transport.errors import ConfigurationError, PeerAuthenticationError, PeerNotReadyError, StepNotServedError
from ft_transport.http.bind_address import interfaces
from ft_transport.http.relays import Relays
from ft_transport.http.server.app_server import slot_of
from ft_transport.http.server.bodies import Buffer, FileRange, RelayedChunks, Slices
from ft_transport.http.server.body_sender import Body, RateLimiter, send
from ft_transport.http.server.connection_slots import ConnectionSlots
from ft_transport.http.server.logs import FetchKey, UploadLog
from ft_transport.http.server.same_host import SameHostServer
from ft_transport.http.server.snapshot_cache import Reading, SnapshotCache
from ft_transport.http.server.snapshot_requests import (
    DeltaCache,
    SnapshotRequests,
    requested_pause_s,
    requested_ranges,
    requested_wait_s,
)
from ft_transport.wire.manifest import parse_content_id
from ft_transport.wire.routes import (
    DELTA_ROUTE,
    DIGESTS_ROUTE,
    FULL_ROUTE,
    MANIFEST_DIGEST_HEADER,
    MEMORY_ROUTE,
    METADATA_ROUTE,
    RELAY_ROUTE,
    REPLICA_HEADER,
    SAME_HOST_HEADER,
    SLICES_ROUTE,
    STATUS_ROUTE,
    encode_ticket,
)
from ft_transport.wire.signing import (
    CONTENT_DIGEST_HEADER,
    MANIFEST_PURPOSE,
    MANIFEST_SIGNATURE_HEADER,
    Bytes,
    content_digest,
)
from ft_transport.wire.slices import decode_request
from ft_transport.wire.snapshot import MemoryFile

BODY: Final = web.RequestKey("body", bytes)
"""Key under which a request stores its body."""
_MAX_REPLICA_CHARACTERS: Final = 65
_LONGEST_RELAY_WAIT_S: Final = 15.0
_LONGEST_RELAY_PAUSE_S: Final = 3.0
"""Longest wait for the next chunk within a response. Meanwhile the response occupies a thread and a slot."""
_KEPT_S: Final = 1.0
"""How long a receiver keeps its slot without a request. The next request usually arrives within milliseconds."""
_RETRY_AFTER_S: Final = 1.0


class ClientLimit:
    """Limits the number of receivers to which the server sends data. Used only on the server's event loop.

    A receiver is identified by its address and its replica name. So all connections of a replica's ranks on one host
    count as one receiver.

    Args:
        max_clients: Maximum number of receivers; ``None`` for any number.
        clock: Returns monotonic seconds.
    """

    def __init__(self, max_clients: int | None, clock: Callable[[], float]) -> None:
        self._max_clients = max_clients
        self._clock = clock
        self._num_responses: dict[tuple[str, str], int] = {}
        self._idle_since_s: dict[tuple[str, str], float] = {}

    @contextlib.contextmanager
    def serving(self, client: tuple[str, str]) -> Iterator[None]:
        """Reserve a slot for the receiver while a response is sent, and for a moment after its last response.

        Raises:
            PeerNotReadyError: Other receivers occupy all slots.
        """
        if self._max_clients is None:
            yield
            return
        self._check_room(client, self._max_clients)
        self._idle_since_s.pop(client, None)
        self._num_responses[client] = self._num_responses.get(client, 0) + 1
        try:
            yield
        finally:
            self._num_responses[client] -= 1
            if not self._num_responses[client]:
                del self._num_responses[client]
                self._idle_since_s[client] = self._clock()

    def _check_room(self, client: tuple[str, str], max_clients: int) -> None:
        if client in self._num_responses or client in self._idle_since_s:
            return
        before_s = self._clock() - _KEPT_S
        self._idle_since_s = {each: since_s for each, since_s in self._idle_since_s.items() if since_s > before_s}
        if len(self._num_responses) + len(self._idle_since_s) >= max_clients:
            raise PeerNotReadyError(
                f"the server already sends to {max_clients} receivers, the limit (max_clients); try again later",
                retry_after_s=_RETRY_AFTER_S,
            )


@dataclass(slots=True, kw_only=True, eq=False)
class SnapshotRoutes:
    """The handlers of the routes for snapshots. Used only on the server's event loop.

    Attributes:
        cache: The cache of served snapshots.
        requests: Finds the snapshot that a request names.
        deltas: The cache of served deltas.
        relays: The relays of data that this process is receiving.
        slots: The connection slots.
        uploads: The log of sent data.
        keys: The job's keys, with which the server signs manifests; ``None`` without a job token.
        names: Names of the replica and the server for ``/status``.
        is_on_all_addresses: Whether the server listens on all addresses of the host, so that ``/status`` lists them.
        stall_timeout_s: How long a receiver may take to read 4 MiB before the server cuts it off, in seconds.
        same_host: Lends memory to receivers on this host; ``None`` if disabled.
        limiter: Rate limit of all bodies together; ``None`` for no limit.
        clients: Limits the number of receivers to which the server sends data.
    """

    cache: SnapshotCache
    requests: SnapshotRequests
    deltas: DeltaCache
    relays: Relays
    slots: ConnectionSlots
    uploads: UploadLog
    keys: Keys | None
    names: dict[str, str]
    is_on_all_addresses: bool
    stall_timeout_s: float
    same_host: SameHostServer | None
    limiter: RateLimiter | None
    clients: ClientLimit

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add all routes."""
        router.add_get(METADATA_ROUTE, self._metadata, allow_head=True)
        router.add_get(FULL_ROUTE, self._full, allow_head=True)
        router.add_get(DIGESTS_ROUTE, self._digests)
        router.add_get(MEMORY_ROUTE, self._memory)
        router.add_post(SLICES_ROUTE, self._slices)
        router.add_get(DELTA_ROUTE, self._delta)
        router.add_get(RELAY_ROUTE, self._relay)
        router.add_get(STATUS_ROUTE, self._status, allow_head=True)

    async def _status(self, _request: web.Request) -> web.StreamResponse:
        newest = self.cache.newest()
        body = {
            "state": "serving" if newest is not None else "empty",
            **self.names,
            "step": newest.step if newest is not None else None,
            "steps": self.cache.steps(),
            "snapshot": newest.snapshot_id if newest is not None else None,
            "snapshot_bytes": newest.total_bytes if newest is not None else 0,
            "clients": self.cache.num_readers(),
            "interfaces": _own_interfaces() if self.is_on_all_addresses else [],
        }
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    async def _metadata(self, request: web.Request) -> web.StreamResponse:
        reading = await self.requests.read(request)
        with reading as snapshot:
            headers = {
                "Content-Type": "application/json",
                "ETag": f'"{snapshot.snapshot_id}"',
                MANIFEST_DIGEST_HEADER: f"{reading.manifest_digest:016x}",
            }
            if self.same_host is not None and self.same_host.can_lend(snapshot):
                headers[SAME_HOST_HEADER] = self.same_host.name
            if self.keys is not None:
                header = memoryview(snapshot.header)[8:]
                signing = asyncio.get_running_loop().run_in_executor(None, self.keys.sign, MANIFEST_PURPOSE, header)
                headers[MANIFEST_SIGNATURE_HEADER] = await signing
            # The file's whole header without the preceding length.
            body = FileRange(snapshot.memory, 8, len(snapshot.header))
            return await self._send_data(request, reading, headers, body, is_limited=False)

    async def _full(self, request: web.Request) -> web.StreamResponse:
        reading = await self.requests.read(request)
        with reading as snapshot:
            total = snapshot.total_bytes
            etag = f'"{snapshot.snapshot_id}"'
            headers = {
                "Content-Type": "application/octet-stream",
                "Content-Disposition": f'attachment; filename="step-{snapshot.step}.safetensors"',
                "Accept-Ranges": "bytes",
                "ETag": etag,
            }
            asked = _requested_range(request, total, etag)
            if asked is None:
                return await self._send_data(request, reading, headers, FileRange(snapshot.memory, 0, total))
            start, end = asked
            if start >= end:
                raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{total}"})
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{total}"
            return await self._send_data(request, reading, headers, FileRange(snapshot.memory, start, end), status=206)

    async def _digests(self, request: web.Request) -> web.StreamResponse:
        reading = await self.requests.read(request)
        with reading as snapshot:
            memory = snapshot.memory
            if isinstance(memory, MemoryFile):
                raise StepNotServedError("expected no request for digests, because they are in the manifest")
            # On a thread, because the digests of data that was not sent yet have to be computed.
            computing = asyncio.get_running_loop().run_in_executor(None, memory.encoded_digests)
            return web.Response(text=await computing)

    async def _memory(self, request: web.Request) -> web.StreamResponse:
        reading = await self.requests.read(request)
        with reading as snapshot:
            ticket = self.same_host.ticket_for(snapshot) if self.same_host is not None else None
            if ticket is None:
                raise StepNotServedError("the memory of this snapshot cannot be lent; fetch it over HTTP")
            key = _key_of(request, snapshot.step, snapshot.snapshot_id)
            self.uploads.lent(slot_of(request), key, route=_route_name(request), num_bytes=ticket.data_bytes)
            return web.Response(body=encode_ticket(ticket), content_type="application/json")

    async def _slices(self, request: web.Request) -> web.StreamResponse:
        # Reads the body before it finds the snapshot, so that a client without a body keeps no snapshot in memory.
        try:
            with self.slots.waiting(slot_of(request)):
                body = await asyncio.wait_for(request.read(), self.stall_timeout_s)
        except (asyncio.TimeoutError, ConnectionError, web.RequestPayloadError):
            raise web.HTTPRequestTimeout(
                text=f"expected the body within {self.stall_timeout_s:g} s", headers={"Connection": "close"}
            ) from None
        request[BODY] = body
        if self.keys is not None and request.headers.get(CONTENT_DIGEST_HEADER) != await _digested(body):
            raise PeerAuthenticationError("expected a body with the digest that the request names, got a changed body")
        reading = await self.requests.read(request)
        with reading as snapshot:
            frames = decode_request(body, data_bytes=snapshot.total_bytes - len(snapshot.header))
            headers = {"Content-Type": "application/octet-stream"}
            return await self._send_data(request, reading, headers, Slices(snapshot, frames))

    async def _delta(self, request: web.Request) -> web.StreamResponse:
        delta = self.deltas.leading_from(request.match_info["step"])
        headers = {"Content-Type": "application/octet-stream"}
        if self.keys is not None:
            headers[CONTENT_DIGEST_HEADER] = await _digested(delta)
        # A delta belongs to no snapshot; in the log, its step is the step to which the delta applies.
        return await self._send(request, _key_of(request, int(request.match_info["step"]), "-"), headers, Buffer(delta))

    async def _relay(self, request: web.Request) -> web.StreamResponse:
        content_id = parse_content_id(request.match_info["content"])
        if content_id is None:
            raise ConfigurationError("expected a content id of 32 hexadecimal digits in the path")
        ranges = requested_ranges(request)
        pause_s = requested_pause_s(request, _LONGEST_RELAY_PAUSE_S)
        with self.slots.waiting(slot_of(request)):
            follower = await self.relays.follow(
                content_id, ranges, wait_s=requested_wait_s(request, _LONGEST_RELAY_WAIT_S)
            )
        with contextlib.closing(follower):
            headers = {"Content-Type": "application/octet-stream"}
            key = _key_of(request, follower.relay.step, follower.relay.content)
            return await self._send(request, key, headers, RelayedChunks(follower, pause_s=pause_s), role="relay")

    async def _send_data(
        self,
        request: web.Request,
        reading: Reading,
        headers: dict[str, str],
        body: Body,
        *,
        status: int = 200,
        is_limited: bool = True,
    ) -> web.StreamResponse:
        """Send bytes of a snapshot. If ``is_limited``, the limit on the number of receivers applies."""
        is_head = request.method == "HEAD"
        client = slot_of(request).address, _replica_of(request)
        # If `serving` refuses the receiver, the receiver gets no lease.
        reading.is_leasing = False
        with self.clients.serving(client) if is_limited and not is_head else contextlib.nullcontext():
            reading.is_leasing = not is_head
            # After sendfile, the kernel uses the pages of the memory file until the receiver has read them.
            reading.unread_s = self.stall_timeout_s
            key = _key_of(request, reading.snapshot.step, reading.snapshot.snapshot_id)
            return await self._send(request, key, headers, body, status=status)

    async def _send(
        self,
        request: web.Request,
        key: FetchKey,
        headers: dict[str, str],
        body: Body,
        *,
        status: int = 200,
        role: str = "source",
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers={**headers, "Cache-Control": "no-store"})
        route, is_head = _route_name(request), request.method == "HEAD"
        with self.uploads.sending(slot_of(request), key, body, route=route, role=role, is_head=is_head):
            return await send(request, response, body, stall_timeout_s=self.stall_timeout_s, limiter=self.limiter)


def _key_of(request: web.Request, step: int, snapshot: str) -> FetchKey:
    return FetchKey(slot_of(request).address, _replica_of(request), step, snapshot)


def _own_interfaces() -> list[dict[str, str]]:
    """Return this host's addresses and network interfaces, so that peers can choose the fastest one."""
    return [
        {"interface": name, "address": str(address)}
        for address, name in interfaces().items()
        if not (address.is_loopback or address.is_link_local)
    ]


def _replica_of(request: web.Request) -> str:
    """Return the replica name that the receiver has sent."""
    # Replaces undecodable bytes of the header (PEP 383), which JSON cannot contain.
    return request.headers.get(REPLICA_HEADER, "")[:_MAX_REPLICA_CHARACTERS].encode(errors="replace").decode()


def _route_name(request: web.Request) -> str:
    """Return the name of the route for logs and metrics: the last word of a path to a snapshot, else the first word."""
    words = request.path.split("/")
    return words[-1] if words[1] == "checkpoint" else words[1]


async def _digested(body: Bytes) -> str:
    """Compute the digest of a body on a thread other than the event loop's."""
    return await asyncio.get_running_loop().run_in_executor(None, content_digest, body)


def _requested_range(request: web.Request, total: int, etag: str) -> tuple[int, int] | None:
    """Return the requested half-open byte range, empty if it is outside the file; ``None`` for the whole file."""
    # RFC 9110: a range is defined for GET alone (14.2), and If-Range makes it conditional (13.1.5).
    if request.method != "GET" or request.headers.get("If-Range", etag) != etag:
        return None
    try:
        asked = request.http_range
    except ValueError:
        return None  # A server may ignore several ranges, and other units than bytes (14.2).
    if asked.start is None and asked.stop is None:
        return None
    if asked.start == 0 and asked.stop is None and "=-" in request.headers.get("Range", ""):
        return total, total  # The header requests the last 0 bytes.
    start, end, _ = asked.indices(total)
    return start, end
