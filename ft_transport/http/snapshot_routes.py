"""The routes of a server, see ``wire.routes``: what of a snapshot is sent in answer to a request."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import msgspec
from aiohttp import web

from ft_transport.errors import PeerAuthenticationError, StepNotServedError
from ft_transport.http.admission import Admission
from ft_transport.http.audit import Audit, FetchKey
from ft_transport.http.body_sender import Content, FileRange, Slices, send
from ft_transport.http.kept_deltas import KeptDeltas
from ft_transport.http.peer_protocol import place_of
from ft_transport.http.snapshot_cache import Reading, SnapshotCache
from ft_transport.http.snapshot_requests import SnapshotRequests
from ft_transport.keys import Keys
from ft_transport.wire.authentication import (
    CONTENT_DIGEST_HEADER,
    MANIFEST_PURPOSE,
    MANIFEST_SIGNATURE_HEADER,
    content_digest,
)
from ft_transport.wire.chunks import CHUNK_BYTES
from ft_transport.wire.key import Bytes
from ft_transport.wire.routes import (
    DELTA_ROUTE,
    DIGESTS_ROUTE,
    FULL_ROUTE,
    MANIFEST_DIGEST_HEADER,
    METADATA_ROUTE,
    REPLICA_HEADER,
    SLICES_ROUTE,
    STATUS_ROUTE,
)
from ft_transport.wire.served import MemoryFile
from ft_transport.wire.slices import decode_request

BODY: Final = web.RequestKey("body", bytes)
"""Where a request keeps the body that was read of it."""
_MAX_REPLICA_CHARACTERS: Final = 65


class SnapshotRoutes:
    """Answers requests. Belongs to the server's event loop.

    Args:
        cache: What is served.
        requests: Finds what requests are for.
        deltas: Those that are served.
        admission: Has the places of connections.
        audit: Is told what was sent to whom.
        keys: Those of the job, if it has any: what is not digested chunk by chunk is signed then.
        names: What the server says of itself in ``/status``.
        stall_timeout_s: How long a receiver may take for 4 MiB before it is cut off, in seconds.
    """

    def __init__(
        self,
        cache: SnapshotCache,
        requests: SnapshotRequests,
        deltas: KeptDeltas,
        *,
        admission: Admission,
        audit: Audit,
        keys: Keys | None,
        names: dict[str, str],
        stall_timeout_s: float,
    ) -> None:
        self._cache = cache
        self._requests = requests
        self._deltas = deltas
        self._admission = admission
        self._audit = audit
        self._keys = keys
        self._names = names
        self._stall_timeout_s = stall_timeout_s

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Adds all routes."""
        router.add_get(METADATA_ROUTE, self._metadata, allow_head=True)
        router.add_get(FULL_ROUTE, self._full, allow_head=True)
        router.add_get(DIGESTS_ROUTE, self._digests)
        router.add_post(SLICES_ROUTE, self._slices)
        router.add_get(DELTA_ROUTE, self._delta)
        router.add_get(STATUS_ROUTE, self._status, allow_head=True)

    async def _status(self, _request: web.Request) -> web.StreamResponse:
        newest = self._cache.newest()
        body = {
            "state": "serving" if newest is not None else "empty",
            **self._names,
            "step": newest.step if newest is not None else None,
            "steps": self._cache.steps(),
            "snapshot": newest.snapshot_id if newest is not None else None,
            "snapshot_bytes": newest.total_bytes if newest is not None else 0,
            "clients": self._cache.num_readers(),
        }
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    async def _metadata(self, request: web.Request) -> web.StreamResponse:
        reading = await self._requests.read(request)
        with reading as snapshot:
            headers = {
                "Content-Type": "application/json",
                "ETag": f'"{snapshot.snapshot_id}"',
                MANIFEST_DIGEST_HEADER: f"{reading.manifest_digest:016x}",
            }
            if self._keys is not None:
                header = memoryview(snapshot.header)[8:]
                signing = asyncio.get_running_loop().run_in_executor(None, self._keys.sign, MANIFEST_PURPOSE, header)
                headers[MANIFEST_SIGNATURE_HEADER] = await signing
            # All of the file's header but the length before it.
            return await self._send(request, reading, headers, FileRange(snapshot.memory, 8, len(snapshot.header)))

    async def _full(self, request: web.Request) -> web.StreamResponse:
        reading = await self._requests.read(request)
        with reading as snapshot:
            total = snapshot.total_bytes
            etag = f'"{snapshot.snapshot_id}"'
            headers = {
                "Content-Type": "application/octet-stream",
                "Content-Disposition": f'attachment; filename="step-{snapshot.step}.safetensors"',
                "Accept-Ranges": "bytes",
                "ETag": etag,
            }
            asked = _asked_range(request, total, etag)
            if asked is None:
                return await self._send(request, reading, headers, FileRange(snapshot.memory, 0, total))
            start, end = asked
            if start >= end:
                raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{total}"})
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{total}"
            return await self._send(request, reading, headers, FileRange(snapshot.memory, start, end), status=206)

    async def _digests(self, request: web.Request) -> web.StreamResponse:
        reading = await self._requests.read(request)
        with reading as snapshot:
            memory = snapshot.memory
            if isinstance(memory, MemoryFile):
                raise StepNotServedError("expected a snapshot whose digests come later; they are in the metadata")
            # They are there already if all of the data was sent.
            computing = asyncio.get_running_loop().run_in_executor(None, memory.encoded_digests)
            return web.Response(text=await computing)

    async def _slices(self, request: web.Request) -> web.StreamResponse:
        # First, because no snapshot is to be kept for a body that does not come.
        try:
            with self._admission.waiting(place_of(request)):
                body = await asyncio.wait_for(request.read(), self._stall_timeout_s)
        except (asyncio.TimeoutError, ConnectionError, web.RequestPayloadError):
            raise web.HTTPRequestTimeout(text="the body did not come", headers={"Connection": "close"}) from None
        request[BODY] = body
        if self._keys is not None and request.headers.get(CONTENT_DIGEST_HEADER) != await _digested(body):
            raise PeerAuthenticationError("expected the body of a request as it was made, it was changed")
        reading = await self._requests.read(request)
        with reading as snapshot:
            frames = decode_request(body, data_bytes=snapshot.total_bytes - len(snapshot.header))
            headers = {"Content-Type": "application/octet-stream"}
            return await self._send(request, reading, headers, Slices(snapshot, frames))

    async def _delta(self, request: web.Request) -> web.StreamResponse:
        delta = self._deltas.leading_from(request.match_info["step"])
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream", "Cache-Control": "no-store"})
        response.content_length = len(delta)
        if self._keys is not None:
            response.headers[CONTENT_DIGEST_HEADER] = await _digested(delta)
        await response.prepare(request)
        for start in range(0, len(delta), CHUNK_BYTES):
            try:
                await asyncio.wait_for(response.write(delta[start : start + CHUNK_BYTES]), self._stall_timeout_s)
            except (asyncio.TimeoutError, ConnectionError):
                if request.transport is not None:
                    request.transport.abort()
                break
        return response

    async def _send(
        self, request: web.Request, reading: Reading, headers: dict[str, str], content: Content, *, status: int = 200
    ) -> web.StreamResponse:
        # Whoever only asks what there is keeps nothing of it.
        reading.is_leasing = request.method != "HEAD"
        response = web.StreamResponse(status=status, headers={**headers, "Cache-Control": "no-store"})
        start, began_s = content.position, time.monotonic()
        outcome = "interrupted"
        try:
            await send(request, reading, response, content, stall_timeout_s=self._stall_timeout_s)
            outcome = "done" if request.method == "HEAD" or content.position == content.end else "cut short"
            return response
        finally:
            snapshot, place = reading.snapshot, place_of(request)
            replica = request.headers.get(REPLICA_HEADER, "")
            self._audit.note(
                place,
                FetchKey(place.address, replica[:_MAX_REPLICA_CHARACTERS], snapshot.step, snapshot.snapshot_id),
                route=request.path.rpartition("/")[2],
                num_bytes=content.position - start,
                began_s=began_s,
                outcome=outcome,
            )


async def _digested(body: Bytes) -> str:
    """The digest of a body, computed beside the event loop."""
    return await asyncio.get_running_loop().run_in_executor(None, content_digest, body)


def _asked_range(request: web.Request, total: int, etag: str) -> tuple[int, int] | None:
    """The half-open range that a request asks for, empty if it lies outside; ``None`` for the whole file."""
    # RFC 9110: a range is defined for GET alone (14.2), and If-Range makes it conditional (13.1.5).
    if request.method != "GET" or request.headers.get("If-Range", etag) != etag:
        return None
    try:
        asked = request.http_range
    except ValueError:
        return None  # Several ranges, or another unit, which a server may ignore (14.2).
    if asked.start is None and asked.stop is None:
        return None
    if asked.start == 0 and asked.stop is None and "=-" in request.headers.get("Range", ""):
        return total, total  # The last zero bytes.
    start, end, _ = asked.indices(total)
    return start, end
