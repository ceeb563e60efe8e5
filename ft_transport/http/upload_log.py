"""The log of uploads: which receiver fetched what. ``/state`` shows it, and each fetch ends with a log line.

The logger is ``ft_transport.audit``, its level INFO. A fetch is many requests over several connections. They count as
one while they come from one address (and replica, if the receiver names it), are for one snapshot, and one of the
connections is open. A delta is a separate fetch, without a snapshot, from the step to which it applies.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from ft_transport.errors import escape_peer_text
from ft_transport.http.admission import Place
from ft_transport.telemetry.process_state import TransferStatus
from ft_transport.telemetry.process_status import Rates

logger = logging.getLogger("ft_transport.audit")

_MAX_UPLOADS: Final = 1024
_MAX_SHOWN: Final = 64
_SHOWN_S: Final = 10.0
"""How long ``/state`` shows an upload after its last request."""
_MAX_NAME_CHARACTERS: Final = 64


class Positioned(Protocol):
    """A body that is being sent."""

    @property
    def position(self) -> int:
        """Bytes sent so far."""


class FetchKey(NamedTuple):
    """Key of a fetch; requests with the same key are of one fetch."""

    address: str
    replica: str
    step: int
    snapshot_id: str


@dataclass(slots=True, eq=False)
class _Upload:
    role: str
    began_s: float
    ended_s: float
    outcome: str = ""
    num_requests: int = 0
    num_bytes: int = 0
    routes: dict[str, None] = field(default_factory=dict)
    places: set[Place] = field(default_factory=set)
    running: dict[Positioned, int] = field(default_factory=dict)
    is_over: bool = False

    def bytes_so_far(self) -> int:
        return self.num_bytes + sum(content.position - start for content, start in self.running.items())


class UploadLog:
    """Sums up the requests of each fetch. The event loop writes it; any thread may read it.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._mutex = threading.Lock()
        self._uploads: dict[FetchKey, _Upload] = {}
        self._rates = Rates()

    def begun(self, place: Place, key: FetchKey, content: Positioned, *, role: str) -> None:
        """Note that the server begins to answer a request with ``content``."""
        with self._mutex:
            self._upload(place, key, self._clock(), role).running[content] = content.position

    def ended(
        self,
        place: Place,
        key: FetchKey,
        *,
        route: str,
        num_bytes: int,
        began_s: float,
        outcome: str,
        content: Positioned | None,
        role: str,
    ) -> None:
        """Note the end of a response, complete or not.

        Args:
            place: The slot of its connection.
            key: The fetch.
            route: The requested part of the snapshot.
            num_bytes: Bytes of the body that the system took.
            began_s: When the response began, by the clock.
            outcome: How the response ended.
            content: The argument of `begun`; ``None`` for a request without that call.
            role: See `TransferStatus`.
        """
        with self._mutex:
            upload = self._upload(place, key, began_s, role)
            if content is not None:
                upload.running.pop(content, None)
            upload.ended_s = self._clock()
            upload.outcome = outcome
            upload.num_requests += 1
            upload.num_bytes += num_bytes
            upload.routes[route] = None
            _end_if_left(key, upload)

    def left(self, place: Place) -> None:
        """Note that a connection has ended."""
        with self._mutex:
            for key, upload in self._uploads.items():
                if place in upload.places:
                    _end_if_left(key, upload)

    def close(self) -> None:
        """Log all fetches that have not ended."""
        with self._mutex:
            for key, upload in self._uploads.items():
                _end(key, upload)

    def told(self) -> tuple[TransferStatus, ...]:
        """Return the running uploads and those that just ended; the newest at the end."""
        now_s = self._clock()
        with self._mutex:
            recent = [
                (key, upload)
                for key, upload in self._uploads.items()
                if upload.running or now_s - upload.ended_s <= _SHOWN_S
            ]
            return tuple(self._flow(key, upload, now_s) for key, upload in recent[-_MAX_SHOWN:])

    def _flow(self, key: FetchKey, upload: _Upload, now_s: float) -> TransferStatus:
        num_bytes, length_s = upload.bytes_so_far(), upload.ended_s - upload.began_s
        bytes_per_s = num_bytes / max(length_s, 1e-6)
        if upload.running:
            length_s = now_s - upload.began_s
            bytes_per_s = self._rates.of((key, upload.began_s), num_bytes, began_s=upload.began_s, now_s=now_s)
        return TransferStatus(
            peer=key.address,
            replica=key.replica,
            role=upload.role,
            step=key.step,
            num_bytes=num_bytes,
            length_s=length_s,
            bytes_per_s=bytes_per_s,
            is_running=bool(upload.running),
        )

    def _upload(self, place: Place, key: FetchKey, began_s: float, role: str) -> _Upload:
        upload = self._uploads.get(key)
        if upload is None or upload.is_over:
            self._uploads.pop(key, None)
            if len(self._uploads) >= _MAX_UPLOADS:
                self._make_room(began_s)
            upload = self._uploads[key] = _Upload(role, began_s, began_s)
        upload.places.add(place)
        return upload

    def _make_room(self, now_s: float) -> None:
        for key, upload in tuple(self._uploads.items()):
            if upload.is_over and now_s - upload.ended_s > _SHOWN_S:
                del self._uploads[key]
        while len(self._uploads) >= _MAX_UPLOADS:
            oldest = next(iter(self._uploads))
            _end(oldest, self._uploads.pop(oldest))


def _end_if_left(key: FetchKey, upload: _Upload) -> None:
    """End a fetch whose last connection has ended; a response that is still running ends it later."""
    upload.places = {place for place in upload.places if not place.has_left}
    if not upload.places and not upload.running:
        _end(key, upload)


def _end(key: FetchKey, upload: _Upload) -> None:
    if upload.is_over:
        return
    upload.is_over = True
    logger.info(
        "fetch peer=%s replica=%s step=%d snapshot=%s routes=%s requests=%d bytes=%d seconds=%.3f end=%s",
        key.address,
        escape_peer_text(key.replica, max_characters=_MAX_NAME_CHARACTERS) or "-",
        key.step,
        key.snapshot_id,
        ",".join(upload.routes),
        upload.num_requests,
        upload.num_bytes,
        upload.ended_s - upload.began_s,
        upload.outcome,
    )
