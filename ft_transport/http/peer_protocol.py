"""One connection of the server, as aiohttp handles it but for what it says when something goes wrong.

aiohttp logs a malformed request with a traceback and as it came, and sends it back in the answer. Here neither the log
nor the answer has a byte of it.
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
"""So much at most is kept of a request's head. This package's client sends less than ten short lines."""
_LINGERING_S: Final = 1.0
"""How long the rest of a body that nobody wants is read, so that its sender sees the answer."""


class PeerProtocol(web.RequestHandler):
    """Reads requests and sends answers.

    Args:
        server: Hands requests to the application.
        loop: The server's.
        keep_alive_s: How long the connection may be silent between two requests.
        admission: Where it gives its place back.
        uploads: Learns when the connection ends; ``None`` for a server that sends no snapshots.
        place: Its own.
        trouble: Is told of malformed requests, and of handlers that failed.
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
            # A few bytes that inflate to gigabytes are no body that anybody here sends.
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
        """Answers a request that could not be read or handled, and closes the connection."""
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
        """Says in one line what aiohttp says in many."""
        error = kw.get("exc_info")
        failure = describe_failure(error if isinstance(error, BaseException) else None)
        self._trouble.note(logging.ERROR, self.place.address, f"a connection failed: {failure}")

    def log_debug(self, *args: Any, **kw: Any) -> None:
        """Says nothing: that a peer went away is its own affair."""


def place_of(request: web.Request) -> Place:
    """The place of the connection that a request came on."""
    protocol = request.protocol
    assert isinstance(protocol, PeerProtocol)
    return protocol.place
