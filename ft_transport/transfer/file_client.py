"""Receives a snapshot into a file, or only compares it with its digests; needs no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ft_transport.errors import FileWriteError, TransportError
from ft_transport.http.client.chunks import fetch_data
from ft_transport.http.client.fetch_settings import FetchSettings
from ft_transport.http.peer_address import PeerAddress
from ft_transport.telemetry.record import Record
from ft_transport.telemetry.recorder import Recorder, current, phase
from ft_transport.transfer.part_file import PartFile, ThreadBuffers, check_chunk_size
from ft_transport.transfer.sources import ask_sources, with_restarts
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.routes import LATEST, StepSelector


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """The plan of a fetch into a file.

    Attributes:
        step: Step of the snapshot.
        sources: The peers that serve it.
        data_bytes: Size of all chunks.
        kept_bytes: Size of the chunks that are already in the file.
    """

    step: int
    sources: tuple[PeerAddress, ...]
    data_bytes: int
    kept_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedFile:
    """The result of a fetch into a file.

    Attributes:
        manifest: Manifest of the snapshot, with digests.
        plan: The chunks that the file had before, and the sources of the rest.
        record: Record of the fetch.
    """

    manifest: Manifest
    plan: FilePlan
    record: Record


def fetch_to_file(
    sources: Sequence[PeerAddress],
    step: StepSelector,
    path: Path,
    *,
    settings: FetchSettings,
    recorder: Recorder,
    on_plan: Callable[[FilePlan], None],
    wanted: Callable[[Manifest], Collection[int]] | None = None,
) -> FetchedFile:
    """Receive a snapshot into a safetensors file, which gets its name only once it is whole, verified and durable.

    If this fails, the received data stays in ``PATH.part``, and another call resumes from it, from any source.

    Args:
        sources: One or several peers that serve the same state.
        step: A step, or ``latest``.
        path: Path of the file.
        settings: How to fetch; chunks are always verified.
        recorder: Records the fetch.
        on_plan: Called before the first byte; again if a newer snapshot replaces the one being fetched.
        wanted: Selects the chunks to fetch from a manifest with digests; the file has holes for the others.

    Raises:
        ConfigurationError: The file cannot be written to, or has no room.
        FileWriteError: The disk failed, or is full.
        TransportError: See ``HTTPTransport.fetch``.
    """
    with PartFile(path) as part:
        with recorder.begin("fetch", replica=settings.replica, phase="manifest"):
            try:
                manifest, plan = with_restarts(
                    settings,
                    lambda: _receive(sources, step, part, settings, on_plan=on_plan, wanted=wanted),
                )
                phase("load")
                part.finish(manifest)
            except (OSError, TransportError) as error:
                failed = part.error if isinstance(error, TransportError) else error
                if failed is None:
                    raise
                raise FileWriteError(
                    f"expected to write what is received, {failed.strerror or failed}; mend that, and what has come is "
                    "still there",
                    path=str(part.part),
                ) from error
        record = recorder.recent()[-1]
    return FetchedFile(manifest=manifest, plan=plan, record=record)


def check_data(peer: PeerAddress, settings: FetchSettings) -> Manifest:
    """Receive each chunk of a peer's newest snapshot, and compare it with its digest.

    Args:
        peer: The peer; it takes a snapshot if it has none.
        settings: How to fetch.

    Returns:
        Manifest of the snapshot.

    Raises:
        FetchFailedError: Chunks differ from their digests each time.
        TransportError: See ``HTTPTransport.fetch``.
    """
    with Recorder().begin("fetch", replica=settings.replica, phase="manifest"):
        return with_restarts(settings, lambda: _check(peer, settings))


def _receive(
    sources: Sequence[PeerAddress],
    step: StepSelector,
    part: PartFile,
    settings: FetchSettings,
    *,
    on_plan: Callable[[FilePlan], None],
    wanted: Callable[[Manifest], Collection[int]] | None,
) -> tuple[Manifest, FilePlan]:
    phase("manifest")
    with contextlib.ExitStack() as held:
        agreed = ask_sources(sources, step, settings, held)
        manifest = agreed.manifest
        recording = current()
        assert recording is not None, "the caller has begun it"
        recording.describe(step=manifest.step, num_bytes=manifest.data_bytes)
        phase("plan")
        table = manifest.chunks
        missing = list(range(table.num_chunks))
        if wanted is not None or not part.is_empty:
            manifest = agreed.manifest_with_digests(settings)
            part.begin(manifest)
            missing = part.missing(manifest, all_written=False)
            if wanted is not None:
                chosen = wanted(manifest)
                missing = [chunk for chunk in missing if chunk in chosen]
            settings.timeouts.note_progress()
        else:
            part.begin(manifest)
        plan = FilePlan(
            step=manifest.step,
            sources=tuple(file.peer for file in agreed.files),
            data_bytes=table.data_bytes,
            kept_bytes=table.data_bytes - sum(map(table.length_of, missing)),
        )
        on_plan(plan)
        phase("transfer")
        fetch_data(agreed.files, manifest, part, settings, chunks=missing, on_landed=part.write)
        if manifest.digests is None:
            phase("verify")
            manifest = agreed.manifest_with_digests(settings)
            damaged = part.missing(manifest, all_written=True)
            settings.timeouts.note_progress()
            fetch_data(agreed.files, manifest, part, settings, chunks=damaged, on_landed=part.write)
        return manifest, plan


def _check(peer: PeerAddress, settings: FetchSettings) -> Manifest:
    with contextlib.ExitStack() as held:
        agreed = ask_sources([peer], LATEST, settings, held)
        check_chunk_size(agreed.manifest)
        manifest = agreed.manifest_with_digests(settings)
        fetch_data(agreed.files, manifest, ThreadBuffers(), settings)
        return manifest
