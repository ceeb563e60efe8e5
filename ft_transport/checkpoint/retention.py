"""Uploads each checkpoint that has become complete, and deletes old ones. Used on the first rank only."""

from __future__ import annotations

import logging
import threading
from collections.abc import Set

from ft_transport.checkpoint.roots import CheckpointRoot
from ft_transport.checkpoint.uploading import Upload, Uploader

logger = logging.getLogger(__name__)


class Retention:
    """Decides how long checkpoints stay. For the store's thread only, except `num_failed_uploads`.

    An error causes only a warning, because the save itself has succeeded.

    Args:
        root: The root of the checkpoints.
        mutex: Held while checkpoints are retired.
        keep: Number of checkpoints that remain after a save; ``None`` keeps all.
        upload: Copies complete checkpoints to a bucket; ``None`` for no uploads.
    """

    def __init__(self, root: CheckpointRoot, mutex: threading.Lock, keep: int | None, upload: Upload | None) -> None:
        self._root = root
        self._mutex = mutex
        self._keep = keep
        self._uploader = Uploader(upload) if upload is not None else None
        self._retired: list[str] = []

    @property
    def num_failed_uploads(self) -> int:
        """Number of uploads that failed since the last one that succeeded."""
        return self._uploader.num_failed if self._uploader is not None else 0

    def completed(self, step: int) -> None:
        """Upload a checkpoint that has just become complete. Retire the oldest ones of steps before it.

        ``keep`` checkpoints and those that are being uploaded remain listed.
        """
        try:
            spared = self._upload(step)
            if self._keep is not None:
                with self._mutex:
                    older = [number for number in self._root.numbers() if number < step]
                    for number in set(older[: max(0, len(older) - (self._keep - 1))]) - spared:
                        self._retired += self._root.retire(number)
        except Exception as error:
            logger.warning("old checkpoints in %s could not be deleted: %s", self._root.name, error)

    def delete_retired(self) -> None:
        """Delete the checkpoints that `completed` has retired. This may take long."""
        retired, self._retired = self._retired, []
        try:
            self._root.delete(retired)
        except Exception as error:
            # The next start of a store deletes what is left.
            logger.warning("old checkpoints in %s could not be deleted: %s", self._root.name, error)

    def close(self, timeout_s: float) -> None:
        """Wait until the newest checkpoint is uploaded, at most ``timeout_s`` seconds."""
        if self._uploader is not None:
            self._uploader.close(timeout_s)

    def _upload(self, step: int) -> Set[int]:
        """Begin an upload. Return the steps of the checkpoints that are being uploaded."""
        uploader = self._uploader
        if uploader is None:
            return frozenset()
        try:
            if (location := self._root.find(step)) is not None:
                uploader.request(step, location)
            return uploader.pending()
        except Exception as error:
            logger.warning("step %d could not be uploaded: %s", step, error)
            return frozenset({step})
