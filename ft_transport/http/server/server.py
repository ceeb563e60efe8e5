"""The HTTP server of a transport: aiohttp on its own thread and event loop.

The kernel sends bodies directly from a memory file (``sendfile``) or from shared memory, without work of the training
thread. The server never waits for a lock of the trainer, and never copies device memory.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import secrets
import socket
import time
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from ft_transport.credentials import Certificates, Keys
from ft_transport.http.bind_address import advertised_url, bound_host, is_loopback, listen
from ft_transport.http.relays import Relays
from ft_transport.http.server.app_server import AppServer
from ft_transport.http.server.body_sender import RateLimiter
from ft_transport.http.server.connection_slots import ConnectionSlots
from ft_transport.http.server.listener import max_connections
from ft_transport.http.server.logs import PeerLog, StatusReport, UploadLog
from ft_transport.http.server.request_guard import HostCheck, RequestGuard
from ft_transport.http.server.same_host import SameHostServer
from ft_transport.http.server.snapshot_cache import SnapshotCache
from ft_transport.http.server.snapshot_requests import DeltaCache, SnapshotRequests
from ft_transport.http.server.snapshot_routes import ClientLimit, SnapshotRoutes
from ft_transport.http.server.watch_routes import WatchRoutes
from ft_transport.runtime.children import close_in_children
from ft_transport.settings import TransportSettings
from ft_transport.telemetry.process_status import ProcessStatus
from ft_transport.wire.slices import MAX_REQUEST_BODY_BYTES

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S: Final = 75.0
"""How long an authenticated connection may be idle, in seconds; aiohttp's default is an hour."""


class SnapshotServer:
    """Serves the snapshots of a cache until ``close``.

    Args:
        cache: The cache of snapshots to serve.
        settings: The address on which to listen, and limits on what the server sends.
        keys: The job's keys, with which clients of every route have to authenticate themselves; ``None`` without a job
            token.
        certificates: The certificates of this process. With them, the server uses only TLS, and requires a certificate
            from its peers.
        max_wait_s: Longest time for which a request waits for its step, in seconds.
        process_status: Status and metrics of this process.

    Attributes:
        server_id: Random id of this server, by which peers recognize it.
        port: The port on which the server listens.
        address: The URL that the server advertises, without a path.
        requests: Finds the snapshots that requests name; its ``fresh_snapshot`` may be replaced at any time.
        deltas: The cache of served deltas. Thread-safe.
        relays: The relays of data that this process is receiving.
    """

    def __init__(
        self,
        cache: SnapshotCache,
        settings: TransportSettings,
        *,
        keys: Keys | None,
        certificates: Certificates | None,
        max_wait_s: float,
        process_status: ProcessStatus,
    ) -> None:
        stall_timeout_s = settings.limits.stall_timeout.total_seconds()
        self.server_id = secrets.token_hex(8)
        self.deltas = DeltaCache()
        is_guarded = keys is not None or certificates is not None
        host = bound_host(settings.host, is_guarded=is_guarded, allow_anyone=settings.allow_anyone)
        self._socket = listen(host, settings.port)
        self._same_host: SameHostServer | None = None
        try:
            # With a rate limit, no memory is lent, because receivers would read lent memory without that limit.
            if settings.same_host and settings.limits.max_send_bytes_per_s is None:
                with contextlib.suppress(OSError):  # The system has no abstract unix sockets, or no free descriptor.
                    self._same_host = SameHostServer(cache, name=self.server_id, stall_timeout_s=stall_timeout_s)
            self.port: int = self._socket.getsockname()[1]
            self.address = advertised_url(
                settings.advertise,
                bound=host,
                port=self.port,
                is_guarded=keys is not None,
                is_encrypted=certificates is not None,
                reached_at=settings.reached_at,
            )
            # Checks the Host header only on the loopback: elsewhere, clients may use names that this host cannot know.
            local = host if host is not None and not is_guarded and is_loopback(host) else None
            names = (
                HostCheck([local, urlsplit(self.address).netloc, *settings.reached_at]) if local is not None else None
            )
            self.requests = SnapshotRequests(cache, max_wait_s=max_wait_s)
            self._slots = ConnectionSlots(max_connections(), time.monotonic)
            peer_log = PeerLog(logger, time.monotonic, errors=process_status.errors)
            self._guard = RequestGuard(
                cache=cache,
                keys=keys,
                reached_at=settings.reached_at,
                is_encrypted=certificates is not None,
                names=names,
                slots=self._slots,
                peer_log=peer_log,
            )
            self._uploads = UploadLog(time.monotonic)
            self._server = AppServer(
                listening=self._socket,
                name="ft-transport-server",
                keep_alive_s=_KEEP_ALIVE_S,
                slots=self._slots,
                uploads=self._uploads,
                peer_log=peer_log,
                claims=self._guard.claims,
                make_app=self._make_app,
                end=self._end,
                certificates=certificates,
            )
            self.relays = Relays(self._server.loop)
            rate = settings.limits.max_send_bytes_per_s
            limiter = RateLimiter(rate) if rate is not None else None
            self._routes = SnapshotRoutes(
                cache=cache,
                requests=self.requests,
                deltas=self.deltas,
                relays=self.relays,
                slots=self._slots,
                uploads=self._uploads,
                keys=keys,
                names={"replica": settings.replica, "server": self.server_id},
                is_on_all_addresses=ipaddress.ip_address(self._socket.getsockname()[0]).is_unspecified,
                stall_timeout_s=stall_timeout_s,
                same_host=self._same_host,
                limiter=limiter,
                clients=ClientLimit(settings.limits.max_clients, time.monotonic),
            )
            report = StatusReport(
                cache=cache,
                uploads=self._uploads,
                recorder=process_status.recorder,
                server=self.server_id,
                replica=settings.replica,
                address=self.address,
            )
            process_status.set_part("transport", report.status)
            self._watch_routes = WatchRoutes(process_status)
            process_status.metrics.collect(self._uploads.sent.readings)
            self._server.start()
        except BaseException:
            self._socket.close()
            if self._same_host is not None:
                self._same_host.close()
            raise
        close_in_children(self)

    def wake(self) -> None:
        """Let waiting requests check the cache again, after a new snapshot or a final failure. Any thread may call."""
        with contextlib.suppress(RuntimeError):  # A shutdown closed the loop at the same moment.
            self._server.loop.call_soon_threadsafe(self.requests.wake)

    def is_mine(self, candidate: socket.socket) -> bool:
        """Whether ``candidate`` is a socket of this server; forked children close these sockets (``runtime.children``).

        Sockets that the server has accepted have the port of its listener.
        """
        if self._server.loop.is_closed() or candidate.family == socket.AF_UNIX:
            return False
        return bool(candidate.getsockname()[1] == self.port)

    def close(self, *, wait: bool) -> None:
        """Stop the server, and cut off running transfers. May be called twice.

        Args:
            wait: Whether to return only after the server's thread has ended.
        """
        self.relays.close_all()
        self._server.stop()
        if wait:
            self._server.join()

    def _make_app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_REQUEST_BODY_BYTES)
        self._routes.add_to(app.router)
        self._watch_routes.add_to(app.router)
        self._guard.add_to(app)
        if self._same_host is not None:
            self._same_host.start()
        return app

    async def _end(self) -> None:
        if self._same_host is not None:
            self._same_host.stop()
        await self._guard.cancel_handlers()
