"""The state of a transport for ``/state``; see ``telemetry.process_state``."""

from __future__ import annotations

import time
from collections.abc import Iterable

from ft_transport.http.snapshot_cache import SnapshotCache
from ft_transport.http.upload_log import UploadLog
from ft_transport.telemetry.process_state import SnapshotStatus, TransferStatus, TransportStatus
from ft_transport.telemetry.process_status import Rates
from ft_transport.telemetry.record import KINDS
from ft_transport.telemetry.recorder import Recorder

_RECEIVING = frozenset(KINDS) - {"save", "load", "publish"}


class TransportTelling:
    """Collects that state on request. Thread-safe.

    Args:
        cache: The snapshots that the transport serves.
        uploads: The log of sent data.
        recorder: The records of received data.
        server: As in `TransportStatus`.
        replica: As in `TransportStatus`.
        address: As in `TransportStatus`.
    """

    def __init__(
        self, cache: SnapshotCache, uploads: UploadLog, recorder: Recorder, *, server: str, replica: str, address: str
    ) -> None:
        self._cache = cache
        self._uploads = uploads
        self._recorder = recorder
        self._server = server
        self._replica = replica
        self._address = address
        self._rates = Rates()

    def told(self) -> TransportStatus:
        """Return the current state."""
        return TransportStatus(
            server=self._server,
            replica=self._replica,
            address=self._address,
            snapshots=tuple(
                SnapshotStatus(step=step, num_bytes=num_bytes, num_readers=num_readers)
                for step, num_bytes, num_readers in self._cache.alive()
            ),
            sends=self._uploads.told(),
            receives=tuple(self._receives()),
        )

    def _receives(self) -> Iterable[TransferStatus]:
        now_s = time.monotonic()
        for running in self._recorder.running():
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
