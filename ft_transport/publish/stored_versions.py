"""The versions of one publisher on disk: their deliveries to engines, and their deletion."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ft_transport.checkpoint.directory import NumberedDirectory
from ft_transport.publish.engines.engine import Delivery
from ft_transport.publish.peft_config import CONFIG_NAME
from ft_transport.publish.serving import VersionServer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version on disk.

    Attributes:
        number: Its number.
        is_adapter: Whether the version is an adapter. A request may read an adapter for as long as it runs: vLLM up to
            0.32 reloads an adapter that was replaced in place at each step, and any vLLM reloads one that it evicted
            from memory. Weights are read while they are loaded, and never again.
        written_s: When the version was complete, in seconds since the epoch, by the clock of the file system.
    """

    number: int
    is_adapter: bool
    written_s: float


@dataclass(frozen=True, slots=True)
class Retention:
    """How long to keep versions that no engine is known to use.

    Attributes:
        keep: Number of the newest versions that are always kept.
        keep_for_s: How long an adapter is kept after the next version was written, in seconds.
    """

    keep: int
    keep_for_s: float

    def expired(self, versions: Sequence[StoredVersion], used: Set[int]) -> list[int]:
        """Return the numbers of the versions that may be deleted.

        Args:
            versions: All versions on disk, oldest first.
            used: Numbers of versions that engines use, or may be about to load.
        """
        expired = []
        # Never the newest: the next version must be greater.
        for version, following in pairwise(versions[: max(0, len(versions) - self.keep + 1)]):
            # The newest version's time stands for now, on the file system's clock.
            age_s = versions[-1].written_s - following.written_s
            if version.number not in used and not (version.is_adapter and age_s < self.keep_for_s):
                expired.append(version.number)
        return expired


class StoredVersions:
    """The versions in a publisher's directory, on rank 0. Thread-safe.

    Args:
        directory: The directory of the versions.
        retention: How long to keep versions that no engine is known to use.
        server: Serves versions to engines that pull; ``None`` if no engine does.
    """

    def __init__(self, directory: NumberedDirectory, retention: Retention, server: VersionServer | None) -> None:
        self._directory = directory
        self._retention = retention
        self._server = server

    def newest(self) -> Delivery | None:
        """Return the delivery of the newest version; ``None`` if there is none."""
        numbers = self._directory.numbers()
        found = self._directory.find(numbers[-1]) if numbers else None
        return self.delivery(numbers[-1], found) if found is not None else None

    def delivery(self, version: int, directory: Path) -> Delivery:
        """Return the delivery of a version."""
        address = self._server.serving(version, directory) if self._server is not None else None
        return Delivery(version, "adapter" if _is_adapter(directory) else "weights", directory, address)

    def delete_expired(self, used: Set[int]) -> None:
        """Delete the versions that need not be kept; log a failure.

        Args:
            used: Numbers of versions that engines use, or may be about to load.
        """
        try:
            stored = [
                StoredVersion(number, _is_adapter(found), found.stat().st_mtime)
                for number in self._directory.numbers()
                if (found := self._directory.find(number))
            ]
            for older in self._retention.expired(stored, used):
                self._directory.delete(self._directory.retire(older))
                logger.debug("version %d is not used any more and was deleted", older)
        except OSError as error:
            logger.warning("old versions could not be deleted: %s", error)


def _is_adapter(directory: Path) -> bool:
    return (directory / CONFIG_NAME).exists()
