"""An engine that pulls weights over HTTP from the publisher's own transport: no disk has to be shared.

The publisher tells it where a version is served (``POST /weights/{version}``, ``{"address": ...}``); the engine's
``WeightReceiver`` fetches what has changed and answers with the version that it uses then. ``GET /weights`` says which
one that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ft_transport.errors import EngineRefusedError
from ft_transport.http.token import JobToken
from ft_transport.publish.engines.engine import Answer, Delivery, EngineConnection, checked_url

ROUTE: Final = "/weights"


def _headers() -> Mapping[str, str]:
    token = JobToken.from_environment()
    return {"Authorization": token.header()} if token is not None else {}


@dataclass(frozen=True, slots=True)
class PullingEngine:
    """A process with a ``WeightReceiver``.

    Attributes:
        url: Base URL of the receiver.
        headers: Sent with each request; by default the job token of the environment (``FT_TRANSPORT_TOKEN``).
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=_headers, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", checked_url(self.url))

    async def deliver(self, connection: EngineConnection, delivery: Delivery) -> int:
        """See `Engine`."""
        if delivery.address is None:
            raise EngineRefusedError("expected a publisher that serves versions, pass it a transport", peer=self.url)
        address = await delivery.address()
        with connection.replacing(stays_paused=False):
            answer = await connection.post(f"{ROUTE}/{delivery.version}", {"address": address})
        version = _version(answer)
        if version is None:
            raise answer.refusal(f"expected version {delivery.version}")
        return version

    async def served_version(self, connection: EngineConnection, newest: Delivery) -> int | None:
        """See `PolledEngine`."""
        del newest
        return _version(await connection.get(ROUTE))


def _version(answer: Answer) -> int | None:
    fields = answer.json()
    version = fields.get("version") if isinstance(fields, dict) else None
    return version if isinstance(version, int) else None
