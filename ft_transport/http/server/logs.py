"""Reports of a server about its peers: a log of failures, a log of uploads, and the transport's part of ``/state``."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from ft_transport.errors import escape_peer_text
from ft_transport.http.server.connection_slots import Slot
from ft_transport.http.server.snapshot_cache import SnapshotCache
from ft_transport.telemetry.metrics import MetricValues
from ft_transport.telemetry.process_state import SnapshotStatus, TransferStatus, TransportStatus
from ft_transport.telemetry.process_status import LastErrors, Rates
from ft_transport.telemetry.record import KINDS
from ft_transport.telemetry.recorder import Recorder

_PERIOD_S: Final = 60.0
_MAX_ADDRESSES: Final = 256
_MAX_FRAMES: Final = 3


@dataclass(slots=True)
class _LastLine:
    at_s: float
    num_suppressed: int = 0


class PeerLog:
    """Logs failures of peers, at most one line per peer and minute. Used only by one thread.

    Args:
        logger: The logger to which the lines are written.
        clock: Returns monotonic seconds.
        errors: Records warnings and errors for ``/state``; ``None`` without monitoring.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float], *, errors: LastErrors | None = None) -> None:
        self._errors = errors
        self._logger = logger
        self._clock = clock
        self._last_lines: dict[str, _LastLine] = {}
        self._num_suppressed_elsewhere = 0

    def note(self, level: int, about: str, what: str) -> None:
        """Log one line, unless the log has one about this peer, or lines about too many others, from the last minute.

        Args:
            level: A level of ``logging``.
            about: The peer's address as the system reports it, or a name chosen by this server.
            what: Description of the failure, without any text from the peer.
        """
        if not self._logger.isEnabledFor(level):
            return
        now_s = self._clock()
        last = self._last_lines.get(about)
        if last is not None and now_s - last.at_s < _PERIOD_S:
            last.num_suppressed += 1
            return
        if last is None and len(self._last_lines) >= _MAX_ADDRESSES and not self._forget_past(now_s):
            self._num_suppressed_elsewhere += 1
            return
        suppressed = last.num_suppressed if last is not None else 0
        more = f"; {suppressed} more of the kind since the last line about it" if suppressed else ""
        if self._num_suppressed_elsewhere:
            more += f"; {self._num_suppressed_elsewhere} about other addresses"
            self._num_suppressed_elsewhere = 0
        self._last_lines[about] = _LastLine(now_s)
        self._logger.log(level, "%s: %s%s", about, what, more)
        if self._errors is not None and level >= logging.WARNING:
            self._errors.note(about, what)

    def _forget_past(self, now_s: float) -> bool:
        past = [about for about, last in self._last_lines.items() if now_s - last.at_s >= _PERIOD_S]
        for about in past:
            del self._last_lines[about]
        return bool(past)


def describe_failure(error: BaseException | None) -> str:
    """Return the type of an error and where it was raised, without the message, which may quote a peer's bytes."""
    if error is None:
        return "no error"
    frames = traceback.extract_tb(error.__traceback__)[-_MAX_FRAMES:]
    where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    return f"{type(error).__name__} at {where}" if where else type(error).__name__


logger = logging.getLogger("ft_transport.audit")

_MAX_UPLOADS: Final = 1024
_MAX_SHOWN: Final = 64
_SHOWN_S: Final = 10.0
"""How long ``/state`` shows an upload after its last request."""
_MAX_NAME_CHARACTERS: Final = 64


class Progress(Protocol):
    """The progress of a body: bytes ``[position, end)`` have yet to be sent."""

    position: int
    end: int


class FetchKey(NamedTuple):
    """Key of a fetch: all requests with the same key belong to the same fetch."""

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
    slots: set[Slot] = field(default_factory=set)
    running: dict[Progress, int] = field(default_factory=dict)
    is_over: bool = False

    def bytes_so_far(self) -> int:
        return self.num_bytes + sum(body.position - start for body, start in self.running.items())


class UploadLog:
    """Logs one line for each fetch of a peer, with the totals of its requests.

    The event loop adds requests; any thread may call `status`.

    Args:
        clock: Returns monotonic seconds.

    Attributes:
        sent: Metric of the bytes sent so far, by route.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.sent = MetricValues("server")
        self._clock = clock
        self._mutex = threading.Lock()
        self._uploads: dict[FetchKey, _Upload] = {}
        self._rates = Rates()

    @contextlib.contextmanager
    def sending(
        self, slot: Slot, key: FetchKey, body: Progress, *, route: str, role: str, is_head: bool = False
    ) -> Iterator[None]:
        """Count a response, which is sent during the ``with`` block, in the totals of its fetch.

        Args:
            slot: The slot of the connection.
            key: The fetch to which the response belongs.
            body: The body of the response.
            route: Name of the requested route.
            role: The role of this process, as in `TransferStatus`.
            is_head: Whether the method of the request is HEAD, so that the response has no body.
        """
        began_s, start, outcome = self._clock(), body.position, "interrupted"
        with self._mutex:
            self._upload(slot, key, began_s, role).running[body] = start
        try:
            yield
            outcome = "done" if is_head or body.position == body.end else "cut short"
        finally:
            with self._mutex:
                upload = self._upload(slot, key, began_s, role)
                upload.running.pop(body, None)
                self._ended(key, upload, route, body.position - start, outcome)

    def lent(self, slot: Slot, key: FetchKey, *, route: str, num_bytes: int) -> None:
        """Count ``num_bytes`` of memory, lent to a receiver on this host, in the totals of its fetch."""
        with self._mutex:
            self._ended(key, self._upload(slot, key, self._clock(), "same_host"), route, num_bytes, "lent")

    def _ended(self, key: FetchKey, upload: _Upload, route: str, num_bytes: int, outcome: str) -> None:
        self.sent.add("sent_bytes_total", route, by=num_bytes)
        upload.ended_s = self._clock()
        upload.outcome = outcome
        upload.num_requests += 1
        upload.num_bytes += num_bytes
        upload.routes[route] = None
        _end_if_closed(key, upload)

    def connection_closed(self, slot: Slot) -> None:
        """Log the fetches whose last open connection was the one in ``slot``."""
        with self._mutex:
            for key, upload in self._uploads.items():
                if slot in upload.slots:
                    _end_if_closed(key, upload)

    def close(self) -> None:
        """Log all fetches that have not been logged yet."""
        with self._mutex:
            for key, upload in self._uploads.items():
                _end(key, upload)

    def status(self) -> tuple[TransferStatus, ...]:
        """Return the status of each running or recently ended upload, the newest last."""
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

    def _upload(self, slot: Slot, key: FetchKey, began_s: float, role: str) -> _Upload:
        upload = self._uploads.get(key)
        if upload is None or upload.is_over:
            self._uploads.pop(key, None)
            if len(self._uploads) >= _MAX_UPLOADS:
                self._make_room(began_s)
            upload = self._uploads[key] = _Upload(role, began_s, began_s)
        upload.slots.add(slot)
        return upload

    def _make_room(self, now_s: float) -> None:
        for key, upload in tuple(self._uploads.items()):
            if upload.is_over and now_s - upload.ended_s > _SHOWN_S:
                del self._uploads[key]
        while len(self._uploads) >= _MAX_UPLOADS:
            oldest = next(iter(self._uploads))
            _end(oldest, self._uploads.pop(oldest))


def _end_if_closed(key: FetchKey, upload: _Upload) -> None:
    """Log a fetch if all of its connections and responses have ended."""
    upload.slots = {slot for slot in upload.slots if not slot.has_left}
    if not upload.slots and not upload.running:
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


_RECEIVING = frozenset(KINDS) - {"save", "load", "publish"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReport:
    """Collects the transport's part of ``/state``. Thread-safe.

    Attributes:
        cache: The cache of served snapshots.
        uploads: The log of sent data.
        recorder: The recorder of received data.
        server: Id of the server.
        replica: Name of the replica.
        address: The advertised URL of the server.
    """

    cache: SnapshotCache
    uploads: UploadLog
    recorder: Recorder
    server: str
    replica: str
    address: str
    _rates: Rates = field(default_factory=Rates, init=False)

    def status(self) -> TransportStatus:
        """Return the current status of the transport."""
        return TransportStatus(
            server=self.server,
            replica=self.replica,
            address=self.address,
            snapshots=tuple(
                SnapshotStatus(step=step, num_bytes=num_bytes, num_readers=num_readers)
                for step, num_bytes, num_readers in self.cache.alive()
            ),
            sends=self.uploads.status(),
            receives=tuple(self._receives()),
        )

    def _receives(self) -> Iterable[TransferStatus]:
        now_s = time.monotonic()
        for running in self.recorder.running():
            if running.kind not in _RECEIVING:
                continue
            for transfer in running.transfers:
                key = (running.begun_unix_s, transfer.peer, transfer.role)
                yield TransferStatus(
                    peer=transfer.peer,
                    role=transfer.role,
                    step=running.step,
                    num_bytes=transfer.num_bytes,
                    length_s=transfer.length_s,
                    bytes_per_s=self._rates.of(key, transfer.num_bytes, began_s=now_s - transfer.length_s, now_s=now_s),
                    is_running=running.phases[-1].name == "transfer",
                )
