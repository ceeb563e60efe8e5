"""What copies of the state have cost: those that make a snapshot, and those of shared memory that was to change."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

from ft_transport.telemetry.readings import PREFIX, Counts, Metric, Reading

CopyKind: TypeAlias = Literal["clone", "copy_on_write"]

_KNOWN: Final = (("clone",), ("copy_on_write",))
_BYTES: Final = Metric(
    name=f"{PREFIX}snapshot_copy_bytes_total",
    kind="counter",
    help="Bytes of the state that were copied for snapshots: at a boundary, or because shared memory was to change.",
    labels=("kind",),
)
_SECONDS: Final = Metric(
    name=f"{PREFIX}snapshot_copy_seconds_total",
    kind="counter",
    help="How long that took, the wait for readers of the shared memory included.",
    labels=("kind",),
)


class CopyCosts:
    """Adds them up. Any thread may use it."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()  # a signal handler may take a snapshot while one is being added
        self._bytes = Counts(_BYTES, known=_KNOWN)
        self._seconds = Counts(_SECONDS, known=_KNOWN)

    def add(self, kind: CopyKind, num_bytes: int, length_s: float) -> None:
        """Adds one copy."""
        with self._mutex:
            self._bytes.add(kind, by=num_bytes)
            self._seconds.add(kind, by=length_s)

    def readings(self) -> Iterator[Reading]:
        """See ``telemetry.readings.Source``."""
        yield from self._bytes.readings()
        yield from self._seconds.readings()
