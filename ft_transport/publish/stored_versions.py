"""The versions of one publisher on disk: what engines are told of each, and which are deleted."""

from __future__ import annotations

import logging
from collections.abc import Set
from pathlib import Path

from ft_transport.checkpoint.directory import NumberedDirectory
from ft_transport.publish.engines.engine import Delivery
from ft_transport.publish.peft_config import CONFIG_NAME
from ft_transport.publish.retention import Retention, StoredVersion
from ft_transport.publish.serving import VersionServer

logger = logging.getLogger(__name__)


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
