"""Files that hold the served states of replicas, for a comparison."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final

from ft_transport.cli.differences import UnequalChunks
from ft_transport.cli.same_step import asked_for_one_step
from ft_transport.errors import SnapshotReplacedError, StepNotServedError
from ft_transport.http.client.fetch_settings import FetchSettings, FetchTimeout
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
        timeout=FetchTimeout(total=_WHOLE, unreachable=_UNREACHABLE, progress=timedelta(seconds=progress_timeout_s)),
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
            settings=settings_for_files(self.timeout_s),
            recorder=Recorder(),
            on_plan=_ignore,
            wanted=wanted,
        )
        self.num_bytes += sum(transfer.num_bytes for transfer in fetched.record.transfers)
        return fetched

    def fetch_both(self, one: str, other: str, step: int | None) -> tuple[FetchedFile, FetchedFile]:
        """Fetch the differing chunks of both replicas; all of both if their layouts differ.

        They are of one step if the replicas come to one, see `asked_for_one_step`.

        Args:
            one: A URL.
            other: Another one.
            step: The only one that will do; without it any.

        Raises:
            TransportError: As for `fetch`.
        """
        peers = (PeerAddress.from_url(one), PeerAddress.from_url(other))
        for _ in range(_MAX_TRIES):
            with asked_for_one_step(peers, step, settings_for=settings_for_files, timeout_s=self.timeout_s) as (
                first_asked,
                second_asked,
            ):
                try:
                    second = self.fetch(other, second_asked.step, differing_from(first_asked))
                    first = self.fetch(one, first_asked.step, differing_from(second_asked))
                except StepNotServedError:
                    if step is not None:
                        raise
                    continue  # A newer one took its place.
            if _are_the_same(first.manifest, first_asked) and _are_the_same(second.manifest, second_asked):
                return first, second
        raise SnapshotReplacedError(
            "expected a snapshot that stays until it is compared, a newer one took its place each time; fetch both to "
            "files, and compare those",
            peer=one,
        )


def _are_the_same(one: Manifest, other: Manifest) -> bool:
    return (one.digests, one.tensors) == (other.digests, other.tensors)


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
