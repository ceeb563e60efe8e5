"""What replicas serve, in files of their own, for a comparison."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final

from ft_transport.cli.differences import UnequalChunks
from ft_transport.errors import DeadlineExceededError, SnapshotReplacedError, StepNotServedError
from ft_transport.http.fetch_pool import FetchSettings
from ft_transport.http.peer_address import PeerAddress
from ft_transport.settings import FetchProgress, TransportSettings
from ft_transport.telemetry.recorder import Recorder
from ft_transport.transfer.file_client import FetchedFile, FilePlan, fetch_to_file
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.routes import StepSelector

_WHOLE: Final = timedelta(days=30)
"""Longer than any file takes; what comes too slowly ends by the time without progress."""
_UNREACHABLE: Final = timedelta(seconds=5)
_NUM_CONNECTIONS: Final = 4
_MAX_TRIES: Final = 3
_SAME_STEP_S: Final = 10.0
"""How long a replica is waited for that has not come to the step of the other one."""


def settings_for_files(
    progress_timeout_s: float, on_progress: Callable[[FetchProgress], None] | None = None
) -> FetchSettings:
    """How the command fetches to files, with the job's token and certificates from the environment.

    Args:
        progress_timeout_s: How long nothing may come.
        on_progress: Called after each chunk.

    Raises:
        ConfigurationError: The token or the certificates cannot be used.
    """
    settings = TransportSettings(on_progress=on_progress)
    return FetchSettings.of(
        settings,
        keys=settings.keys(),
        certificates=settings.certificates(),
        num_connections=_NUM_CONNECTIONS,
        timeout=_WHOLE,
        unreachable_timeout=_UNREACHABLE,
        progress_timeout=timedelta(seconds=progress_timeout_s),
    )


@dataclass(slots=True)
class SnapshotFiles:
    """Fetches snapshots into a directory.

    Attributes:
        directory: That.
        timeout_s: How long nothing may come.
        paths: The newest file of each URL.
        num_bytes: That came in all.
    """

    directory: Path
    timeout_s: float
    paths: dict[str, Path] = field(default_factory=dict)
    num_bytes: int = 0
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def fetch(
        self,
        url: str,
        step: StepSelector,
        wanted: Callable[[Manifest], Collection[int]] | None,
        *,
        timeout_s: float | None = None,
    ) -> FetchedFile:
        """Fetches the wanted chunks of a snapshot; all without that.

        Raises:
            TransportError: The replica cannot be asked, or the file not be written.
        """
        path = self.paths[url] = self.directory / f"{next(self._numbers)}.safetensors"
        fetched = fetch_to_file(
            [PeerAddress.from_url(url)],
            step,
            path,
            settings=settings_for_files(self.timeout_s if timeout_s is None else timeout_s),
            recorder=Recorder(),
            on_plan=_ignore,
            wanted=wanted,
        )
        self.num_bytes += sum(transfer.num_bytes for transfer in fetched.record.transfers)
        return fetched

    def fetch_both(
        self, one: str, other: str, step: StepSelector, *, is_chosen: bool
    ) -> tuple[FetchedFile, FetchedFile]:
        """What differs, of both; all of both where their layouts do.

        Args:
            one: A URL.
            other: Another one.
            step: Of the snapshot of the first; the second is asked for the same one first.
            is_chosen: Whether it has to be the same.

        Raises:
            TransportError: As for `fetch`.
        """
        for _ in range(_MAX_TRIES):
            asked = self.fetch(one, step, lambda _manifest: ())
            try:
                second = self.fetch(
                    other,
                    asked.manifest.step,
                    differing_from(asked.manifest),
                    timeout_s=self.timeout_s if is_chosen else min(_SAME_STEP_S, self.timeout_s),
                )
            except (StepNotServedError, DeadlineExceededError):
                if is_chosen:
                    raise
                second = self.fetch(other, step, differing_from(asked.manifest))
            first = self.fetch(one, asked.manifest.step, differing_from(second.manifest))
            if first.manifest.digests == asked.manifest.digests and first.manifest.tensors == asked.manifest.tensors:
                return first, second
        raise SnapshotReplacedError(
            "expected a snapshot that stays until it is compared, a newer one took its place each time; fetch both to "
            "files, and compare those",
            peer=one,
        )


def _ignore(_plan: FilePlan) -> None:
    pass


def differing_from(known: Manifest | None) -> Callable[[Manifest], Collection[int]] | None:
    """The chunks that are wanted of a manifest besides a known one."""
    if known is None:
        return None

    def wanted(manifest: Manifest) -> Collection[int]:
        if UnequalChunks.are_comparable(known, manifest):
            return UnequalChunks(known, manifest).numbers
        return range(manifest.chunks.num_chunks)

    return wanted
