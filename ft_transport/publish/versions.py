"""The versions that a publisher stores on disk: makes their `Delivery`, and deletes old ones.

A `PullingEngine` fetches versions from the publisher's transport. Before the first of these engines fetches a version,
the publisher makes the transport serve it, together with the delta from the version that the engines have.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ft_transport.checkpoint.directory import NumberedDirectory
from ft_transport.errors import SnapshotError, SnapshotLimitError
from ft_transport.publish.adapter import CONFIG_NAME
from ft_transport.publish.deltas import delta_between
from ft_transport.publish.engines.engine import Delivery
from ft_transport.transport import HTTPTransport

logger = logging.getLogger(__name__)

_STAGING_TIMEOUT: Final = timedelta(minutes=10)
_NUM_KEPT: Final = 2
"""Number of newest versions that are never deleted: pulling engines get the delta between the newest two."""


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version on disk.

    Attributes:
        number: The number of the version.
        is_adapter: Whether the version is an adapter. An engine may read the files of an adapter at any time during a
            request: vLLM up to 0.32 reloads an adapter that was replaced in place at each step, and any vLLM reloads an
            adapter that it evicted from memory. Engines read the files of weights only once.
        written_s: Time at which the version was completed, in seconds since the epoch, by the clock of the file system.
    """

    number: int
    is_adapter: bool
    written_s: float


def expired(versions: Sequence[StoredVersion], used: Set[int], *, keep_for_s: float) -> list[int]:
    """Return the numbers of the versions that the publisher may delete. It never deletes the newest two.

    Args:
        versions: All versions on disk, oldest first.
        used: Numbers of versions that engines use, or may be about to load.
        keep_for_s: How long an adapter is kept after the next version was written, in seconds.
    """
    numbers = []
    for version, following in pairwise(versions[: max(0, len(versions) - _NUM_KEPT + 1)]):
        # The modification time of the newest version serves as the current time, on the file system's clock.
        age_s = versions[-1].written_s - following.written_s
        if version.number not in used and not (version.is_adapter and age_s < keep_for_s):
            numbers.append(version.number)
    return numbers


class StoredVersions:
    """The versions in a publisher's directory, on rank 0. Thread-safe.

    Args:
        directory: The directory of the versions.
        transport: Serves versions to pulling engines; ``None`` if there are no pulling engines.
        keep_for_s: How long an adapter is kept after the next version was written, in seconds.
    """

    def __init__(
        self, directory: NumberedDirectory, transport: HTTPTransport[Any] | None, *, keep_for_s: float
    ) -> None:
        self._directory = directory
        self._transport = transport
        self._keep_for_s = keep_for_s
        self._newest_served: int | None = None

    def newest(self) -> Delivery | None:
        """Return the newest version as a `Delivery`; ``None`` if there is no version."""
        numbers = self._directory.numbers()
        found = self._directory.find(numbers[-1]) if numbers else None
        return self.delivery(numbers[-1], found) if found is not None else None

    def delivery(self, version: int, directory: Path) -> Delivery:
        """Return a version as a `Delivery`."""
        address = self._serving(self._transport, version, directory) if self._transport is not None else None
        return Delivery(version, "adapter" if _is_adapter(directory) else "weights", directory, address)

    def delete_expired(self, used: Set[int]) -> None:
        """Delete all expired versions. Log a failure instead of raising it.

        Args:
            used: Numbers of versions that engines use, or may be about to load.
        """
        try:
            stored = [
                StoredVersion(number, _is_adapter(found), found.stat().st_mtime)
                for number in self._directory.numbers()
                if (found := self._directory.find(number))
            ]
            for older in expired(stored, used, keep_for_s=self._keep_for_s):
                self._directory.delete(self._directory.retire(older))
                logger.debug("deleted version %d, which no engine uses any more", older)
        except OSError as error:
            logger.warning("old versions could not be deleted: %s", error)

    def _serving(self, transport: HTTPTransport[Any], version: int, directory: Path) -> Callable[[], Awaitable[str]]:
        """Return a function that makes the transport serve a version if necessary, and returns the transport's URL."""
        staging: asyncio.Task[None] | None = None

        async def address() -> str:
            nonlocal staging
            if staging is None or (staging.done() and not _is_served(transport, version)):
                staging = asyncio.get_running_loop().create_task(self._stage(transport, version, directory))
            # Shielded: an engine whose deadline expires must not cancel the staging for the other engines.
            await asyncio.shield(staging)
            return transport.metadata()

        return address

    async def _stage(self, transport: HTTPTransport[Any], version: int, directory: Path) -> None:
        weights = await asyncio.to_thread(self._prepare, transport, version, directory)
        deadline_s = time.monotonic() + _STAGING_TIMEOUT.total_seconds()
        while True:
            try:
                await asyncio.to_thread(transport.send_checkpoint, [], version, {"weights": weights}, _STAGING_TIMEOUT)
                break
            except SnapshotLimitError:
                # Slow engines still read earlier versions. Waiting in a thread would block threads of other engines.
                if time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(0.1)
        self._newest_served = max(version, self._newest_served or 0)

    def _prepare(self, transport: HTTPTransport[Any], version: int, directory: Path) -> dict[str, torch.Tensor]:
        """Load a version. If the version that engines have is on disk, give the transport a delta from it."""
        weights = weights_in(directory)
        try:
            # Engines have the newest version that the transport served, which need not be the newest one on disk.
            older = [each for each in self._directory.numbers() if each < version]
            base = self._newest_served if self._newest_served is not None else max(older, default=None)
            found = self._directory.find(base) if base in older and base is not None else None
            if base is not None and found is not None:
                delta = delta_between(version, weights, base, weights_in(found))
                if delta is not None:
                    transport.keep_delta(base, delta)
                    logger.debug("version %d: the delta from version %d has %d bytes", version, base, len(delta))
        except (OSError, SafetensorError) as error:
            logger.warning("version %d: no delta could be made: %s", version, error)
        return weights


def _is_adapter(directory: Path) -> bool:
    return (directory / CONFIG_NAME).exists()


def _is_served(transport: HTTPTransport[Any], version: int) -> bool:
    try:
        transport.server.lease(version).release()
    except SnapshotError:
        return False
    return True


def weights_in(directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a version by name. Their memory is mapped from the version's files."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
