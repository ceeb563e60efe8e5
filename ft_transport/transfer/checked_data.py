"""Receives a snapshot to compare it with its digests, and keeps nothing of it; needs no torch, and serves nobody."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from ft_transport.http.chunk_client import fetch_data
from ft_transport.http.fetch_settings import FetchSettings
from ft_transport.http.peer_address import PeerAddress
from ft_transport.telemetry.recorder import Recorder
from ft_transport.transfer.part_file import check_chunk_size
from ft_transport.transfer.restarts import with_restarts
from ft_transport.transfer.sources import ask_sources
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.routes import LATEST


def check_data(peer: PeerAddress, settings: FetchSettings) -> Manifest:
    """Receives each chunk of a peer's newest snapshot, and compares it with its digest.

    Args:
        peer: It takes one now if it has none.
        settings: How to fetch.

    Returns:
        What it consists of.

    Raises:
        FetchFailedError: Chunks differ from their digests each time.
        TransportError: See ``HTTPTransport.fetch``.
    """
    with Recorder().begin("fetch", replica=settings.replica, phase="manifest"):
        return with_restarts(settings, lambda: _receive(peer, settings))


def _receive(peer: PeerAddress, settings: FetchSettings) -> Manifest:
    with contextlib.ExitStack() as held:
        agreed = ask_sources([peer], LATEST, settings, held)
        check_chunk_size(agreed.manifest)
        manifest = agreed.manifest_with_digests(settings)
        fetch_data(agreed.files, manifest, _Discarding(), settings)
        return manifest


class _Discarding:
    """One buffer for each thread, which the next chunk is received into as well."""

    def __init__(self) -> None:
        self._own = threading.local()

    def buffers(self, start: int, end: int) -> Sequence[memoryview]:
        """See ``wire.strided.Memory``."""
        buffer: memoryview | None = getattr(self._own, "buffer", None)
        if buffer is None or len(buffer) < end - start:
            buffer = self._own.buffer = memoryview(bytearray(end - start))
        return (buffer[: end - start],)
