"""Versions on a transport, for engines that pull them. The first engine's request stages a version, with a delta."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ft_transport.checkpoint.directory import NumberedDirectory
from ft_transport.errors import SnapshotError, SnapshotLimitError
from ft_transport.publish.deltas import delta_between
from ft_transport.transport import HTTPTransport

logger = logging.getLogger(__name__)

_STAGING_PAUSE_S: Final = 0.1
_STAGING_TIMEOUT: Final = timedelta(minutes=10)


class VersionServer:
    """Serves versions of one publisher. Used on the loop that notifies engines.

    Args:
        transport: The transport.
        directory: The directory of the versions.
        deltas: Whether to make a delta to each version.
    """

    def __init__(self, transport: HTTPTransport[Any], directory: NumberedDirectory, *, deltas: bool) -> None:
        self._transport = transport
        self._makes_deltas = deltas
        self._directory = directory
        self._newest: int | None = None

    def serving(self, version: int, directory: Path) -> Callable[[], Awaitable[str]]:
        """Return a function that returns a version's address, and stages the version unless the transport serves it."""
        staging: asyncio.Task[None] | None = None

        async def address() -> str:
            nonlocal staging
            if staging is None or (staging.done() and not self._is_served(version)):
                staging = asyncio.get_running_loop().create_task(self._stage(version, directory))
            # An engine whose deadline expires ends only its own wait.
            await asyncio.shield(staging)
            return self._transport.metadata()

        return address

    def _is_served(self, version: int) -> bool:
        try:
            self._transport.server.lease(version).release()
        except SnapshotError:
            return False
        return True

    async def _stage(self, version: int, directory: Path) -> None:
        weights = await asyncio.to_thread(self._prepare, version, directory)
        deadline_s = time.monotonic() + _STAGING_TIMEOUT.total_seconds()
        while True:
            try:
                await asyncio.to_thread(
                    self._transport.send_checkpoint, [], version, {"weights": weights}, _STAGING_TIMEOUT
                )
                break
            except SnapshotLimitError:
                # Slow engines still read earlier versions. The wait must not hold a thread: other engines need them.
                if time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(_STAGING_PAUSE_S)
        self._newest = max(version, self._newest or 0)

    def _prepare(self, version: int, directory: Path) -> dict[str, torch.Tensor]:
        weights = weights_in(directory)
        if self._makes_deltas:
            self._keep_delta(version, weights)
        return weights

    def _keep_delta(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        """Make the delta from the version that engines have, if that is still on disk."""
        try:
            # Engines have no version that was published but not served.
            older = [each for each in self._directory.numbers() if each < version]
            base = self._newest if self._newest is not None else max(older, default=None)
            found = self._directory.find(base) if base in older and base is not None else None
            if base is None or found is None:
                return
            delta = delta_between(version, weights, base, weights_in(found))
        except (OSError, SafetensorError) as error:
            logger.warning("version %d: no delta could be made: %s", version, error)
            return
        if delta is not None:
            self._transport.keep_delta(base, delta)
            logger.debug("version %d: %d bytes lead there from version %d", version, len(delta), base)


def weights_in(directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a version, in memory that is mapped from its files."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
