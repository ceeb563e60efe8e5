"""The checkpoints that there are, as a group of ranks agrees on them: listed, found, verified and deleted."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from ft_transport.checkpoint.compare_settings import CheckpointSelector, checked_selector, compare_settings
from ft_transport.checkpoint.directory import MANIFEST_NAME, CheckpointDirectory
from ft_transport.checkpoint.verify import find_damage, read_manifest
from ft_transport.coordination.consensus import Agreement
from ft_transport.errors import CheckpointDamagedError, CheckpointNotFoundError, TransportError
from ft_transport.settings import check_number

logger = logging.getLogger(__name__)


class FoundCheckpoint(Struct, frozen=True, array_like=True, kw_only=True):
    """A complete checkpoint, as the first rank has found it; the same on all ranks.

    Attributes:
        step: Its step.
        path: Its directory.
        identity: Tells it from another one that takes its name.
    """

    step: int
    path: str
    identity: tuple[int, int]

    @property
    def directory(self) -> Path:
        """Its directory."""
        return Path(self.path)


class Inventory:
    """What is in the directory. Only the first rank looks; the training threads of all ranks call the methods alike.

    `retire_old` and `delete_retired` belong to the first rank's thread that saves.

    Args:
        agreement: Of the group, for the training thread.
        directory: Used on the first rank alone.
        keep: How many checkpoints stay after a save; ``None`` keeps all.
    """

    def __init__(self, agreement: Agreement, directory: CheckpointDirectory, keep: int | None) -> None:
        self._agreement = agreement
        self._directory = directory
        self._keep = keep
        # The training thread and the store's own both look, and rename.
        self._mutex = threading.Lock()
        self._retired: list[Path] = []

    def steps(self) -> tuple[int, ...]:
        """The steps of all complete checkpoints, ascending."""
        self._agreement.step = None
        encoded = self._on_directory("list the checkpoints", lambda: msgspec.msgpack.encode(self._directory.steps()))
        return tuple(msgspec.msgpack.decode(encoded, type=list[int]))

    def agree_on_step(self, step: CheckpointSelector) -> CheckpointSelector:
        """Checks the step that a caller has asked for.

        Raises:
            ConfigurationError: It is none, or the ranks were asked for different ones; the same on all ranks.
        """
        self._agreement.step = None
        compare_settings(self._agreement, "compare the arguments", lambda: {"step": checked_selector(step)})
        return checked_selector(step)

    def find(self, step: CheckpointSelector) -> FoundCheckpoint:
        """Finds a checkpoint. Errors of the agreement name its step from now on.

        Raises:
            CheckpointNotFoundError: There is none.
        """
        self._agreement.step = step
        encoded = self._on_directory("choose a checkpoint", lambda: msgspec.msgpack.encode(self._found(step)))
        found = msgspec.msgpack.decode(encoded, type=FoundCheckpoint)
        self._agreement.step = found.step
        return found

    @contextmanager
    def reading(self, found: FoundCheckpoint) -> Iterator[None]:
        """Errors raised inside name the checkpoint; one that another process has deleted is not called damaged.

        Raises:
            CheckpointNotFoundError: Files differ from what was written because the checkpoint was deleted or replaced.
        """
        try:
            yield
        except TransportError as error:
            if isinstance(error, CheckpointDamagedError) and self._is_gone(found):
                gone = CheckpointNotFoundError(
                    f"expected a checkpoint that stays while it is read, {found.path} was deleted or replaced",
                    step=found.step,
                )
                gone.destination_touched = error.destination_touched
                raise gone from error
            error.message = f"{error.message}; the checkpoint is {found.path}"
            raise

    def verify(self, step: CheckpointSelector) -> None:
        """See ``CheckpointStore.verify``."""
        self._verify(self.find(self.agree_on_step(step)))

    def prune(self, keep: int) -> tuple[int, ...]:
        """See ``CheckpointStore.prune``."""
        self._agreement.step = None
        compare_settings(
            self._agreement, "compare the arguments", lambda: {"keep": check_number("keep", keep, at_least=1)}
        )
        steps = self.steps()
        num_kept = min(keep, len(steps))
        is_good = any(self._is_good(step) for step in reversed(steps[len(steps) - num_kept :]))
        while not is_good and num_kept < len(steps):
            num_kept += 1
            is_good = self._is_good(steps[-num_kept])
        removed = steps[: len(steps) - num_kept]

        def remove() -> None:
            with self._mutex:
                retired = [path for step in removed for path in self._directory.retire(step)]
            self._directory.delete(retired)

        self._agreement.step = None
        self._agreement.on_first("prune", remove)
        return removed

    def retire_old(self, saved: int) -> None:
        """What was just written is good; so older ones may go. Newer ones are of a past that was left."""
        if self._keep is None:
            return
        try:
            with self._mutex:
                older = [step for step in self._directory.steps() if step < saved]
                for step in older[: max(0, len(older) - (self._keep - 1))]:
                    self._retired += self._directory.retire(step)
        except Exception as error:
            # What was saved is safe.
            logger.warning("old checkpoints in %s could not be deleted: %s", self._directory.root, error)

    def delete_retired(self) -> None:
        """Gives the room of what `retire_old` has taken away back; a large checkpoint may take long."""
        retired, self._retired = self._retired, []
        try:
            self._directory.delete(retired)
        except Exception as error:
            # The store's thread goes on; the next start clears what is left.
            logger.warning("old checkpoints in %s could not be deleted: %s", self._directory.root, error)

    def _found(self, step: CheckpointSelector) -> FoundCheckpoint:
        if step == "latest":
            steps = self._directory.steps()
            if not steps:
                raise CheckpointNotFoundError(f"expected a checkpoint in {self._directory.root}, there is none")
            step = steps[-1]
        path = self._directory.path_of(step)
        identity = _identity(path)
        if identity is None:
            raise CheckpointNotFoundError(f"expected a checkpoint in {path}, it was just deleted", step=step)
        return FoundCheckpoint(step=step, path=str(path), identity=identity)

    def _is_gone(self, found: FoundCheckpoint) -> bool:
        """Whether the name is nobody's any more, or another checkpoint's."""
        try:
            answer = self._agreement.on_first(
                "look whether it is still there",
                lambda: b"" if _identity(found.directory) == found.identity else b"gone",
            )
        except TransportError:
            return False
        return bool(answer)

    def _verify(self, found: FoundCheckpoint) -> None:
        agreement = self._agreement

        def find() -> bytes:
            manifest = read_manifest(found.directory)
            by_size = sorted(manifest.files, key=lambda entry: -entry.num_bytes)
            own = by_size[agreement.rank :: agreement.size]
            return msgspec.msgpack.encode(find_damage(found.directory, own, agreement.check_others))

        with self.reading(found):
            damaged = [
                text
                for each in agreement.run_on_all_ranks("verify", find)
                for text in msgspec.msgpack.decode(each, type=list[str])
            ]
            if damaged:
                raise CheckpointDamagedError(
                    "; ".join(damaged), files=tuple(text.split(":")[0] for text in damaged), step=found.step
                )

    def _is_good(self, step: int) -> bool:
        try:
            self._verify(self.find(step))
        except CheckpointDamagedError as error:
            logger.warning("step %d: the checkpoint is damaged: %s", step, error)
            return False
        except CheckpointNotFoundError as error:
            logger.warning("step %d: the checkpoint is gone: %s", step, error)
            return False
        return True

    def _on_directory(self, phase: str, action: Callable[[], bytes | None]) -> bytes:
        def run() -> bytes | None:
            with self._mutex:
                return action()

        return self._agreement.on_first(phase, run)


def _identity(directory: Path) -> tuple[int, int] | None:
    """Of the list of files, which is written once; ``None`` if it is not there."""
    try:
        # Opened, because a network file system may remember what a name alone has stood for.
        descriptor = os.open(directory / MANIFEST_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        return status.st_ino, status.st_mtime_ns
    finally:
        os.close(descriptor)
