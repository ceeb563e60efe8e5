"""The versions of one publisher on disk: their deliveries to engines, and which of them are deleted."""

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
        is_adapter: Whether it is an adapter. A request may read it for as long as it runs: vLLM up to 0.32 loads an
            adapter that was replaced in place afresh at each step, and any vLLM once it has dropped it from memory.
            Weights are read while they are loaded, and never again.
        written_s: When it was complete, in seconds since the epoch, by the clock of the file system.
    """

    number: int
    is_adapter: bool
    written_s: float


@dataclass(frozen=True, slots=True)
class Retention:
    """How long versions are kept that no engine is known to use.

    Attributes:
        keep: So many of the newest, whatever they are.
        keep_for_s: An adapter is kept for so long after the next version was written.
    """

    keep: int
    keep_for_s: float

    def expired(self, versions: Sequence[StoredVersion], used: Set[int]) -> list[int]:
        """The numbers of those that may be deleted.

        Args:
            versions: What there is, oldest first.
            used: Numbers of those that engines use, or may be about to load.
        """
        expired = []
        # Never the newest, by which the next is known to be newer.
        for version, following in pairwise(versions[: max(0, len(versions) - self.keep + 1)]):
            # The clock is that of the file system, and stands still between versions.
            age_s = versions[-1].written_s - following.written_s
            if version.number not in used and not (version.is_adapter and age_s < self.keep_for_s):
                expired.append(version.number)
        return expired


class StoredVersions:
    """Belongs to rank 0. Any thread may call it.

    Args:
        directory: Where they are.
        retention: How long those are kept that no engine is known to use.
        server: Serves them to engines that pull; ``None`` where no engine does.
    """

    def __init__(self, directory: NumberedDirectory, retention: Retention, server: VersionServer | None) -> None:
        self._directory = directory
        self._retention = retention
        self._server = server

    def newest(self) -> Delivery | None:
        """What engines are told of the newest version; ``None`` if there is none."""
        numbers = self._directory.numbers()
        found = self._directory.find(numbers[-1]) if numbers else None
        return self.delivery(numbers[-1], found) if found is not None else None

    def delivery(self, version: int, directory: Path) -> Delivery:
        """What engines are told of a version."""
        address = self._server.serving(version, directory) if self._server is not None else None
        return Delivery(version, "adapter" if _is_adapter(directory) else "weights", directory, address)

    def delete_expired(self, used: Set[int]) -> None:
        """Deletes what need not be kept any more; a failure is logged.

        Args:
            used: Numbers of those that engines use, or may be about to load.
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
