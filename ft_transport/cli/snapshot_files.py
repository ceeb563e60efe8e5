"""Fetches snapshots of replicas into files. To compare two replicas, it fetches only the chunks that differ."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final

from ft_transport.errors import DeadlineExceededError, SnapshotReplacedError, StepNotServedError
from ft_transport.http.client.connection import Connection
from ft_transport.http.client.fetch_settings import FetchSettings, FetchTimeout
from ft_transport.http.client.manifests import fetch_manifest, with_digests
from ft_transport.http.peer_address import PeerAddress
from ft_transport.settings import FetchProgress, TransportSettings
from ft_transport.telemetry.recorder import Recorder
from ft_transport.transfer.files import FetchedFile, fetch_to_file
from ft_transport.transfer.sources import asking
from ft_transport.wire.manifest import Manifest, TensorEntry
from ft_transport.wire.routes import LATEST, StepSelector

_WHOLE: Final = timedelta(days=30)
"""Deadline of a fetch, longer than any fetch takes: only missing progress ends a fetch."""
_MAX_TRIES: Final = 3
_LEAST_WAIT_S: Final = 10.0
"""Minimum time to wait for a future step, in seconds."""
_WAIT_FACTOR: Final = 4.0
"""The time to wait for a future step, divided by the time until the newest snapshots were served."""
_LARGEST_LEAD: Final = 1 << 16
"""Largest number of steps to request ahead of the newest step."""

Manifests = tuple[Manifest, Manifest]
Peers = tuple[PeerAddress, PeerAddress]
_Ask = Callable[[StepSelector, float], Manifests]
_ITEM: Final = 16
"""Length of the longest element of any dtype, in bytes."""


def settings_for_files(
    progress_timeout_s: float, on_progress: Callable[[FetchProgress], None] | None = None
) -> FetchSettings:
    """Return the settings for fetches into files, with the job token and certificates from the environment.

    Args:
        progress_timeout_s: Longest time without data, in seconds.
        on_progress: Function that is called after each chunk.

    Raises:
        ConfigurationError: The token or the certificates are invalid.
    """
    settings = TransportSettings(on_progress=on_progress)
    return FetchSettings.of(
        settings,
        keys=settings.keys(),
        certificates=settings.certificates(),
        num_connections=4,
        timeout=FetchTimeout(
            total=_WHOLE, unreachable=timedelta(seconds=5), progress=timedelta(seconds=progress_timeout_s)
        ),
    )


@dataclass(slots=True)
class SnapshotFiles:
    """Fetches snapshots into files of a directory.

    Attributes:
        directory: The directory.
        timeout_s: Longest time without data, in seconds.
        paths: Path of the last file that was fetched from each URL.
        num_bytes: Total number of fetched bytes.
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
        """Fetch a snapshot into a new file.

        Args:
            url: URL of the replica.
            step: The step of the snapshot.
            wanted: Function that is called with the manifest, and returns the indices of the chunks to fetch. ``None``
                for all chunks.

        Raises:
            TransportError: The replica is unreachable, or the file cannot be written.
        """
        path = self.paths[url] = self.directory / f"{next(self._numbers)}.safetensors"
        fetched = fetch_to_file(
            [PeerAddress.from_url(url)],
            step,
            path,
            settings=settings_for_files(self.timeout_s),
            recorder=Recorder(),
            on_plan=lambda _plan: None,
            wanted=wanted,
        )
        self.num_bytes += sum(transfer.num_bytes for transfer in fetched.record.transfers)
        return fetched

    def fetch_both(self, one: str, other: str, step: int | None) -> tuple[FetchedFile, FetchedFile]:
        """Fetch from both replicas the chunks that differ between them, or all chunks if the layouts differ.

        Args:
            one: URL of the first replica.
            other: URL of the second replica.
            step: The required step; ``None`` for a common step if the replicas reach one, otherwise their newest steps.

        Raises:
            TransportError: A replica is unreachable or does not serve ``step``, or a file cannot be written.
        """
        peers = (PeerAddress.from_url(one), PeerAddress.from_url(other))
        for _ in range(_MAX_TRIES):
            with asked_for_one_step(peers, step, timeout_s=self.timeout_s) as (first_asked, second_asked):
                try:
                    second = self.fetch(other, second_asked.step, differing_from(first_asked))
                    first = self.fetch(one, first_asked.step, differing_from(second_asked))
                except StepNotServedError:
                    if step is not None:
                        raise
                    continue  # A newer snapshot has replaced the requested one.
            if _are_the_same(first.manifest, first_asked) and _are_the_same(second.manifest, second_asked):
                return first, second
        raise SnapshotReplacedError(
            f"newer snapshots replaced the compared ones in each of {_MAX_TRIES} attempts; fetch both into files with "
            "ft-transport fetch, and compare the files",
            peer=one,
        )


def _are_the_same(one: Manifest, other: Manifest) -> bool:
    return (one.digests, one.tensors) == (other.digests, other.tensors)


def differing_from(known: Manifest | None) -> Callable[[Manifest], Collection[int]] | None:
    """Return a function that selects the chunks of a manifest that differ from ``known``, if that is not ``None``."""
    if known is None:
        return None

    def wanted(manifest: Manifest) -> Collection[int]:
        unequal = UnequalChunks.of(known, manifest)
        return unequal.numbers if unequal is not None else range(manifest.chunks.num_chunks)

    return wanted


@dataclass(frozen=True, slots=True)
class UnequalChunks:
    """The chunks with different digests in two snapshots of one layout.

    Attributes:
        numbers: Indices of the chunks.
        tensors: Layout of each tensor, the same in both snapshots, by name.
        chunk_bytes: Length of a chunk.
    """

    numbers: frozenset[int]
    tensors: Mapping[str, TensorEntry]
    chunk_bytes: int

    @classmethod
    def of(cls, one: Manifest, other: Manifest) -> UnequalChunks | None:
        """Compare the digests of two manifests. Return ``None`` if their layouts differ or digests are missing."""
        if one.digests is None or other.digests is None:
            return None
        if (one.digester, one.tensors, one.chunks) != (other.digester, other.tensors, other.chunks):
            return None
        pairs = zip(one.digests, other.digests, strict=True)
        numbers = frozenset(number for number, (first, second) in enumerate(pairs) if first != second)
        return cls(numbers, {entry.name: entry for entry in one.tensors}, one.chunks.chunk_bytes)

    def ranges_of(self, name: str) -> Sequence[tuple[int, int]]:
        """Return the byte ranges of a tensor that lie in the unequal chunks, extended to whole elements."""
        entry = self.tensors[name]
        size, step = entry.end - entry.start, self.chunk_bytes
        if not size:
            return []
        ranges: list[tuple[int, int]] = []
        for number in range(entry.start // step, -(-entry.end // step)):
            if number not in self.numbers:
                continue
            start, end = max(0, number * step - entry.start), min(size, (number + 1) * step - entry.start)
            start, end = start // _ITEM * _ITEM, min(size, -(-end // _ITEM) * _ITEM)
            if ranges and ranges[-1][1] >= start:
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((start, end))
        return ranges


@contextmanager
def asked_for_one_step(peers: Peers, step: int | None, *, timeout_s: float) -> Iterator[Manifests]:
    """Yield the manifests of two replicas, with digests, for a common step if possible, otherwise for the newest steps.

    Until the end of the block, the replicas do not replace these snapshots, unless a lease ends earlier.

    Args:
        peers: The replicas.
        step: The required step; ``None`` for any.
        timeout_s: Longest time without data, in seconds.

    Raises:
        TransportError: A replica is unreachable, or does not serve ``step``.
    """
    with ExitStack() as connected:
        ask = partial(_ask_both, connected, peers)
        if step is not None:
            yield ask(step, timeout_s)
            return
        began_s = time.monotonic()
        manifests = ask(LATEST, timeout_s)
        if manifests[0].step != manifests[1].step:
            took_s = time.monotonic() - began_s
            wait_s = min(timeout_s, max(_LEAST_WAIT_S, _WAIT_FACTOR * took_s))
            steps = [manifest.step for manifest in manifests]
            manifests = (
                _of_the_one_behind(ask, steps) or _of_a_step_to_come(ask, steps, wait_s) or ask(LATEST, timeout_s)
            )
        yield manifests


def _of_the_one_behind(ask: _Ask, steps: list[int]) -> Manifests | None:
    """Return both manifests of the lower step, if the replica with the higher step still serves the lower one."""
    try:
        return ask(min(steps), _LEAST_WAIT_S)
    except (StepNotServedError, DeadlineExceededError):
        return None


def _of_a_step_to_come(ask: _Ask, steps: list[int], wait_s: float) -> Manifests | None:
    """Return both manifests of a future step; ``None`` if the replicas do not reach it in time.

    If a replica has already passed the requested step, request a step that is further ahead.
    """
    newest, until_s, lead = max(steps), time.monotonic() + wait_s, 1
    while lead <= _LARGEST_LEAD and (left_s := until_s - time.monotonic()) > 0:
        try:
            return ask(newest + lead, left_s)
        except DeadlineExceededError:
            return None
        except StepNotServedError as error:
            # A replica that has passed the step reports which steps it serves now.
            newest, lead = max(newest, *error.served, 0), 2 * lead
    return None


def _ask_both(connected: ExitStack, peers: Peers, step: StepSelector, timeout_s: float) -> Manifests:
    """Request both manifests at once, over new connections. An error of one request cancels the other one."""
    # Close earlier connections, so that the replicas can drop the snapshots that these requested.
    connected.close()
    settings = settings_for_files(timeout_s)
    connections = [connected.enter_context(Connection.of(peer, settings)) for peer in peers]

    def ask(connection: Connection) -> Manifest:
        manifest = fetch_manifest(connection, step, settings)
        return with_digests(connection, manifest, max_failures=settings.max_failures)

    with asking(connections, ask, at_once=2) as (asked, answered):
        for _ in asked:
            answered.get().result()
    return asked[0].result(), asked[1].result()
