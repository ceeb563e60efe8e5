"""The protocol of one server connection: aiohttp's, with its own error responses and log lines.

aiohttp logs a malformed request verbatim with a traceback, and quotes it in the response. Here neither the log nor the
response contains a byte of it.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web

from ft_transport.http.admission import Admission, Place
from ft_transport.http.trouble_log import TroubleLog, describe_failure
from ft_transport.http.upload_log import UploadLog

_MAX_LINE_BYTES: Final = 8190
_MAX_HEADERS: Final = 32
"""Maximum number of header fields of a request. This package's client sends fewer than ten short lines."""
_LINGERING_S: Final = 1.0
"""How long the rest of an unwanted body is read, so that its sender sees the response."""


class PeerProtocol(web.RequestHandler):
    """Reads requests and sends responses.

    Args:
        server: Hands requests to the application.
        loop: The server's event loop.
        keep_alive_s: How long the connection may be idle between two requests, in seconds.
        admission: Gets the slot back.
        uploads: Notified when the connection ends; ``None`` for a server that sends no snapshots.
        place: The connection's slot.
        trouble: Logs malformed requests and failures of handlers.
    """

    __slots__ = ("_admission", "_trouble", "_uploads", "place")

    def __init__(
        self,
        server: web.Server,
        *,
        loop: asyncio.AbstractEventLoop,
        keep_alive_s: float,
        admission: Admission,
        place: Place,
        trouble: TroubleLog,
        uploads: UploadLog | None = None,
    ) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=keep_alive_s,
            access_log=None,  # type: ignore[arg-type]
            max_line_size=_MAX_LINE_BYTES,
            max_field_size=_MAX_LINE_BYTES,
            max_headers=_MAX_HEADERS,
            lingering_time=_LINGERING_S,
            # No client of this package sends compressed bodies; a few bytes could inflate to gigabytes.
            auto_decompress=False,
        )
        self._admission = admission
        self._uploads = uploads
        self._trouble = trouble
        self.place = place

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        assert isinstance(transport, asyncio.Transport)
        self.place.end = transport.abort
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """See ``asyncio.Protocol``."""
        self._admission.leave(self.place)
        if self._uploads is not None:
            self._uploads.left(self.place)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - aiohttp's, which quotes the request
    ) -> web.StreamResponse:
        """Answer a request that could not be read or handled, and close the connection."""
        if status == HTTPStatus.BAD_REQUEST:
            self._trouble.note(logging.INFO, self.place.address, f"a malformed request ({type(exc).__name__})")
        else:
            self._trouble.note(logging.ERROR, self.place.address, f"a request failed: {describe_failure(exc)}")
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun, and no other one can be sent")
        response = web.Response(status=status, text=f"{status} {HTTPStatus(status).phrase}\n")
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:  # noqa: ARG002 - what they quote
        """Log in one line what aiohttp would log in many."""
        error = kw.get("exc_info")
        failure = describe_failure(error if isinstance(error, BaseException) else None)
        self._trouble.note(logging.ERROR, self.place.address, f"a connection failed: {failure}")

    def log_debug(self, *args: Any, **kw: Any) -> None:
        """Do nothing: a client that disconnects is no event to log."""


def place_of(request: web.Request) -> Place:
    """Return the slot of the request's connection."""
    protocol = request.protocol
    assert isinstance(protocol, PeerProtocol)
    return protocol.place
