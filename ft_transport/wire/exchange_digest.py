"""A digest of a request and of the head of its answer, which shows whether the server answered the intended request.

The data of a fetch has digests of its own. Its requests have none: a damaged path is a 404, a damaged header a 400, and
a damaged number in a request for slices brings bytes of another place, with the right digest. So each answer carries,
as `EXCHANGE_DIGEST_HEADER`, the digest of the request as the server has read it and of the status and headers of the
answer. The client compares: if they differ, or the answer has none, the request or the answer was damaged on its way,
and a retry may help; if they are equal, a refusal is genuine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from ft_transport.wire.chunks import DIGEST_HEX_DIGITS, digest
from ft_transport.wire.routes import AFTER_HEADER, MANIFEST_DIGEST_HEADER, SERVED_STEPS_HEADER

EXCHANGE_DIGEST_HEADER: Final = "FT-Exchange-Digest"

_REQUEST_HEADERS: Final = ("Range", "Authorization")
"""Headers that change what the server does. A proxy may add or change others."""
_ANSWER_HEADERS: Final = ("Content-Range", MANIFEST_DIGEST_HEADER, SERVED_STEPS_HEADER, AFTER_HEADER)


class HeadersOf(Protocol):
    """Headers, found by their names in upper or lower case."""

    def get(self, name: str, default: str, /) -> str:
        """Returns the value of a header; ``default`` without one."""


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
    headers: HeadersOf
    body: bytes | None


def exchange_digest(request: RequestRead, status: int, answered: HeadersOf) -> str:
    """Return the value of the header.

    Args:
        request: The request.
        status: Status of the answer.
        answered: The answer's headers.
    """
    values = [
        request.method,
        request.target,
        *(request.headers.get(name, "") for name in _REQUEST_HEADERS),
        str(status),
        *(answered.get(name, "") for name in _ANSWER_HEADERS),
    ]
    # No line contains a line end, so no two requests have the same text.
    text = "\n".join(values).encode("utf-8", "surrogateescape")
    read = text if request.body is None else b"%b|%b" % (text, request.body)
    return f"{digest(read):0{DIGEST_HEX_DIGITS}x}"
