"""The checkpoints that there are, as a group of ranks agrees on them: listed, verified and deleted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from ft_transport.errors import CheckpointDamagedError, CheckpointNotFoundError
from ft_transport.storage.agreement import Agreement
from ft_transport.storage.directory import CheckpointDirectory
from ft_transport.storage.verifying import find_damage, read_manifest

logger = logging.getLogger(__name__)

CheckpointSelector: TypeAlias = int | Literal["latest"]


class Inventory:
    """What is in the directory. Only the first rank looks; all but `prune_after_save` is called by all ranks alike.

    Args:
        agreement: Of the group, for the training thread.
        directory: Used on the first rank alone.
        keep: How many checkpoints stay after a save; ``None`` keeps all.
    """

    def __init__(self, agreement: Agreement, directory: CheckpointDirectory, keep: int | None) -> None:
        self._agreement = agreement
        self._directory = directory
        self._keep = keep
        # The training thread and the store's own both look, and delete.
        self._mutex = threading.RLock()

    def steps(self) -> tuple[int, ...]:
        """The steps of all complete checkpoints, ascending."""
        self._agreement.step = None
        encoded = self._on_directory("list the checkpoints", lambda: msgspec.msgpack.encode(self._directory.steps()))
        return tuple(msgspec.msgpack.decode(encoded, type=list[int]))

    def path_of(self, step: CheckpointSelector) -> Path:
        """Where a checkpoint is. Called on the first rank.

        Raises:
            CheckpointNotFoundError: There is none.
        """
        with self._mutex:
            if step == "latest":
                steps = self._directory.steps()
                if not steps:
                    raise CheckpointNotFoundError(f"expected a checkpoint in {self._directory.root}, there is none")
                step = steps[-1]
            return self._directory.path_of(step)

    def verify(self, step: CheckpointSelector) -> None:
        """See ``CheckpointStore.verify``."""
        agreement = self._agreement
        agreement.step = step
        directory = Path(self._on_directory("choose a checkpoint", lambda: str(self.path_of(step)).encode()).decode())

        def find() -> bytes:
            manifest = read_manifest(directory)
            by_size = sorted(manifest.files, key=lambda entry: -entry.num_bytes)
            own = by_size[agreement.rank :: agreement.size]
            return msgspec.msgpack.encode(find_damage(directory, own, agreement.check_others))

        damaged = [
            text for each in agreement.together("verify", find) for text in msgspec.msgpack.decode(each, type=list[str])
        ]
        if damaged:
            raise CheckpointDamagedError(
                "; ".join(damaged), files=tuple(text.split(":")[0] for text in damaged), step=step
            )

    def prune(self, keep: int) -> tuple[int, ...]:
        """See ``CheckpointStore.prune``."""
        steps = self.steps()
        num_kept = min(keep, len(steps))
        is_good = any(self._is_good(step) for step in reversed(steps[len(steps) - num_kept :]))
        while not is_good and num_kept < len(steps):
            num_kept += 1
            is_good = self._is_good(steps[-num_kept])
        removed = steps[: len(steps) - num_kept]
        self._on_directory("prune", lambda: self._remove(removed))
        return removed

    def prune_after_save(self, saved: int) -> None:
        """What was just written is good; so older ones may go. Newer ones are of a past that was left."""
        if self._keep is None or not self._agreement.is_first:
            return
        try:
            with self._mutex:
                older = [step for step in self._directory.steps() if step < saved]
                self._remove(older[: max(0, len(older) - (self._keep - 1))])
        except Exception as error:
            # The store's thread goes on: what was saved is safe.
            logger.warning("old checkpoints could not be deleted: %s", error)

    def _is_good(self, step: int) -> bool:
        try:
            self.verify(step)
        except CheckpointDamagedError as error:
            logger.warning("step %d: the checkpoint is damaged: %s", step, error)
            return False
        return True

    def _remove(self, steps: Sequence[int]) -> None:
        for step in steps:
            self._directory.remove(step)

    def _on_directory(self, phase: str, action: Callable[[], bytes | None]) -> bytes:
        def run() -> bytes | None:
            with self._mutex:
                return action()

        return self._agreement.on_first(phase, run)
