"""Lists, finds, verifies and deletes the checkpoints of a root, with the same result on all ranks of a group."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from ft_transport.checkpoint.claim import RootClaim
from ft_transport.checkpoint.dcp_checkpoint import DCPCheckpoint
from ft_transport.checkpoint.dcp_metadata import DCP_METADATA_NAME
from ft_transport.checkpoint.directory import NumberedDirectory, wait_until_visible
from ft_transport.checkpoint.manifest import MANIFEST_NAME, Trust
from ft_transport.checkpoint.plan import shown_names
from ft_transport.checkpoint.settings import CheckpointSelector, Existing, checked_selector, compare_settings
from ft_transport.checkpoint.stored_files import (
    ReadRetries,
    decode_rank_files,
    find_damage,
    read_manifest,
    read_rank_files,
)
from ft_transport.coordination.agreement import Agreement
from ft_transport.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointUntrustedError,
    TransportError,
)
from ft_transport.runtime.regular_files import UnusableFileError, is_regular, open_regular
from ft_transport.settings import check_number

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_GONE: Final = 10
"""Number of checkpoints that other processes may delete during `load_newest_good` before it raises an error."""
_CLAIM_S: Final = 10.0
"""How long to wait for another process to release the lock of the root."""


class FoundCheckpoint(Struct, frozen=True, array_like=True, kw_only=True):
    """A complete checkpoint that the first rank has found; the same on all ranks.

    Attributes:
        step: The step of the checkpoint.
        path: The directory of the checkpoint.
        identity: Inode and modification time of ``manifest.json``, which differ after the checkpoint was replaced.
    """

    step: int
    path: str
    identity: tuple[int, int]

    @property
    def directory(self) -> Path:
        """The directory of the checkpoint, as a `Path`."""
        return Path(self.path)


_found_decoder: Final = msgspec.msgpack.Decoder(FoundCheckpoint)
_steps_decoder: Final = msgspec.msgpack.Decoder(list[int])
_of_dcp_decoder: Final = msgspec.msgpack.Decoder(tuple[int, str] | None)
_flag_decoder: Final = msgspec.msgpack.Decoder(bool)
_damaged_decoder: Final = msgspec.msgpack.Decoder(list[str])


class Inventory:
    """The checkpoints of one root. Only the first rank lists the directory, and sends the result to the other ranks.

    The training threads of all ranks call the methods, in the same order. The exceptions are `take_damage`, and on the
    first rank `retire_old` and `delete_retired`, which only the store's own thread calls.

    Args:
        agreement: The group's agreement for the training thread.
        directory: The ``step-N`` directories of the root; used only on the first rank.
        keep: Number of checkpoints that remain after a save; ``None`` keeps all.
        retry_s: How long a failed read is retried, in seconds.
        trust: Verifies the signatures of checkpoints.

    Attributes:
        directory: The ``step-N`` directories of the root.
    """

    def __init__(
        self, agreement: Agreement, directory: NumberedDirectory, keep: int | None, *, retry_s: float, trust: Trust
    ) -> None:
        self._agreement = agreement
        self.directory = directory
        self._keep = keep
        self._retry_s = retry_s
        self._trust = trust
        # Held while the training thread or the store's thread lists or renames directories.
        self._mutex = threading.Lock()
        self._retired: list[Path] = []
        self._found_damage = False

    def open_root(self, claim: RootClaim, owner: str, existing: Existing) -> None:
        """Lock the root for this group, and delete the leftovers of an interrupted run.

        Args:
            claim: The lock, which the first rank takes.
            owner: Description of this group, for the errors of other groups.
            existing: Whether to ``keep`` or ``clear`` existing checkpoints, or to ``refuse`` a root that has any.

        Raises:
            CheckpointInUseError: Another group saves to this root.
            CheckpointExistsError: The root has checkpoints, and ``existing`` is ``refuse``; or it is ``clear``, and
                another program wrote some of them.
        """
        directory = self.directory

        def set_up() -> None:
            claim.take(owner, _CLAIM_S)
            directory.recover()
            foreign = directory.foreign()
            if existing == "clear" and foreign:
                names = shown_names([path.name for path in foreign.values()])
                raise CheckpointExistsError(
                    f"expected to clear only checkpoints of this package in {directory.root}, but another program "
                    f"wrote {names}; nothing was cleared: move those directories away, or use another root"
                )
            if existing == "clear":
                directory.clear()
            # `numbers` also logs a warning for each foreign directory, so it is called in any case.
            if (steps := sorted({*directory.numbers(), *foreign})) and existing == "refuse":
                raise CheckpointExistsError(f"expected no checkpoints in {directory.root}, there are {steps}")

        def find() -> None:
            wait_until_visible(directory.root, self._agreement.check_others)

        self._agreement.on_first("set up the root", set_up)
        self._agreement.run_on_all_ranks("find the root", find)

    def steps(self) -> tuple[int, ...]:
        """Return the steps of all complete checkpoints, ascending."""
        self._agreement.step = None
        steps = self._on_directory("list the checkpoints", self.directory.numbers, _steps_decoder)
        return tuple(steps)

    def newer_of_dcp(self) -> DCPCheckpoint | None:
        """Return the newest checkpoint if another program wrote it with DCP; ``None`` if this package wrote it.

        Raises:
            CheckpointUntrustedError: A job token is set, and ``StoreSettings.accept_unsigned`` is ``False``.
            CheckpointError: The checkpoint cannot be read.
        """
        directory = self.directory

        def find() -> tuple[int, str] | None:
            own = directory.numbers()
            of_dcp = [item for item in directory.foreign().items() if is_regular(item[1] / DCP_METADATA_NAME)]
            step, path = of_dcp[-1] if of_dcp else (-1, Path())
            return (step, str(path)) if step > (own[-1] if own else -1) else None

        self._agreement.step = None
        if (found := self._on_directory("look for checkpoints of DCP", find, _of_dcp_decoder)) is None:
            return None
        step, path = found
        if self._trust.keys is not None and not self._trust.accepts_unsigned:
            raise CheckpointUntrustedError(
                f"expected a checkpoint that is signed with the job token, but another program wrote {path}; load it "
                "with accept_unsigned=True if you trust that program, or move it away",
                step=step,
            )
        retries = ReadRetries(self._retry_s)
        return self._agreement.run("read DCP's metadata", lambda: retries.call(lambda: DCPCheckpoint(Path(path), step)))

    def refuse_newer_of_dcp(self) -> None:
        """Raise an error if another program wrote the newest checkpoint with DCP, instead of loading an older one.

        Raises:
            CheckpointError: DCP wrote a later checkpoint than this package.
        """
        if (newer := self.newer_of_dcp()) is not None:
            raise CheckpointError(
                f"expected the newest checkpoint in {self.directory.root} to be this package's own, but another "
                f"program wrote {newer.path} with torch.distributed.checkpoint; load that with dcp.load or with "
                "a manager's resume(), or move it away",
                step=newer.step,
            )

    def agree_on_step(self, step: CheckpointSelector) -> CheckpointSelector:
        """Check that all ranks request the same step, and return it.

        Raises:
            ConfigurationError: The argument is not a step, or the ranks request different steps.
        """
        self._agreement.step = None
        compare_settings(self._agreement, "compare the arguments", lambda: {"step": checked_selector(step)})
        return checked_selector(step)

    def find(self, step: CheckpointSelector) -> FoundCheckpoint:
        """Find a checkpoint by its step. If a later phase of this operation fails, the error names the step.

        Raises:
            CheckpointNotFoundError: No such checkpoint exists.
        """
        self._agreement.step = step
        found = self._on_directory("choose a checkpoint", lambda: self._found(step), _found_decoder)
        self._agreement.step = found.step
        return found

    @contextmanager
    def reading(self, found: FoundCheckpoint) -> Iterator[None]:
        """Add the checkpoint's path to errors that the ``with`` block raises.

        Raises:
            CheckpointNotFoundError: Files seem damaged, because another process has deleted or replaced the checkpoint.
        """
        try:
            yield
        except TransportError as error:
            if isinstance(error, CheckpointDamagedError) and self._is_gone(found):
                gone = CheckpointNotFoundError(
                    f"expected the checkpoint to remain during the read, but {found.path} was deleted or replaced",
                    step=found.step,
                )
                gone.destination_touched = error.destination_touched
                raise gone from error
            self._found_damage |= isinstance(error, CheckpointDamagedError)
            error.message = f"{error.message}; the checkpoint is {found.path}"
            raise

    def take_damage(self) -> bool:
        """Return whether this process has read a damaged checkpoint since the last call."""
        found, self._found_damage = self._found_damage, False
        return found

    def verify(self, step: CheckpointSelector) -> None:
        """Compare every file of a checkpoint with its digests; see ``CheckpointStore.verify``."""
        self._verify(self.find(self.agree_on_step(step)))

    def prune(self, keep: int) -> tuple[int, ...]:
        """Delete all but the newest checkpoints, and return the deleted steps; see ``CheckpointStore.prune``."""
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
                retired = [path for step in removed for path in self.directory.retire(step)]
            self.directory.delete(retired)

        self._agreement.step = None
        self._agreement.on_first("prune", remove)
        return removed

    def retire_old(self, saved: int) -> None:
        """Rename the oldest checkpoints of steps before ``saved``, so that ``keep`` checkpoints remain in `steps`."""
        if self._keep is None:
            return
        try:
            with self._mutex:
                older = [step for step in self.directory.numbers() if step < saved]
                for step in older[: max(0, len(older) - (self._keep - 1))]:
                    self._retired += self.directory.retire(step)
        except Exception as error:
            # The save itself has succeeded, so this error only causes a warning.
            logger.warning("old checkpoints in %s could not be deleted: %s", self.directory.root, error)

    def delete_retired(self) -> None:
        """Delete the checkpoints that `retire_old` has renamed. This may take long."""
        retired, self._retired = self._retired, []
        try:
            self.directory.delete(retired)
        except Exception as error:
            # The next start of a store deletes what is left.
            logger.warning("old checkpoints in %s could not be deleted: %s", self.directory.root, error)

    def _found(self, step: CheckpointSelector) -> FoundCheckpoint:
        if step == "latest":
            if not (steps := self.directory.numbers()):
                raise CheckpointNotFoundError(f"expected a checkpoint in {self.directory.root}, there is none")
            step = steps[-1]
        path = self.directory.find(step)
        if path is None:
            raise CheckpointNotFoundError(
                f"expected a checkpoint of this step in {self.directory.root}, there are "
                f"{self.directory.numbers() or 'none'}",
                step=step,
            )
        if (identity := _identity(path)) is None:
            raise CheckpointNotFoundError(f"expected a checkpoint in {path}, but it was just deleted", step=step)
        return FoundCheckpoint(step=step, path=str(path), identity=identity)

    def _is_gone(self, found: FoundCheckpoint) -> bool:
        """Return whether the checkpoint was deleted, or replaced by another one of the same name."""
        retries = ReadRetries(self._retry_s)
        try:
            return self._agreement.value_of_first(
                "look whether the checkpoint still exists",
                lambda: retries.call(lambda: _identity(found.directory)) != found.identity,
                _flag_decoder,
            )
        except TransportError:
            return False

    def _verify(self, found: FoundCheckpoint) -> None:
        agreement = self._agreement
        retries = ReadRetries(self._retry_s)

        def find() -> list[str]:
            manifest = read_manifest(found.directory, found.step, self._trust, retries)
            by_size = sorted(manifest.files, key=lambda entry: -entry.num_bytes)
            own = by_size[agreement.rank :: agreement.size]
            damaged = find_damage(found.directory, own, manifest.hash, retries, agreement.check_others)
            if agreement.is_first and not damaged:
                # A forger can give invalid descriptions correct digests.
                decode_rank_files(read_rank_files(found.directory, manifest, retries), manifest)
            return damaged

        with self.reading(found):
            texts = [text for each in agreement.values_of_all("verify", find, _damaged_decoder) for text in each]
            if texts:
                names = tuple(text.split(":")[0] for text in texts)
                raise CheckpointDamagedError("; ".join(texts), files=names, step=found.step)

    def _is_good(self, step: int) -> bool:
        try:
            self._verify(self.find(step))
        except (CheckpointDamagedError, CheckpointUntrustedError, CheckpointNotFoundError) as error:
            logger.warning("step %d: the checkpoint is damaged or not trusted, or was deleted: %s", step, error)
            return False
        return True

    def _on_directory(self, phase: str, action: Callable[[], T], decoder: msgspec.msgpack.Decoder[T]) -> T:
        def run() -> T:
            with self._mutex:
                return action()

        return self._agreement.value_of_first(phase, lambda: ReadRetries(self._retry_s).call(run), decoder)


def _identity(directory: Path) -> tuple[int, int] | None:
    """Return inode and modification time of a checkpoint's list of files; ``None`` if the list does not exist.

    Raises:
        OSError: The list exists, or may exist, and cannot be opened.
    """
    try:
        # A network file system may answer stat from its cache, but not open.
        with os.fdopen(open_regular(directory / MANIFEST_NAME), "rb") as file:
            status = os.fstat(file.fileno())
    except (FileNotFoundError, NotADirectoryError, UnusableFileError):
        return None
    return status.st_ino, status.st_mtime_ns


def load_newest_good(list_steps: Callable[[], Sequence[int]], load: Callable[[int], T]) -> T | None:
    """Load the newest checkpoint that is not damaged.

    Args:
        list_steps: Returns the existing steps, ascending. Called before each attempt, because another process may
            save and delete checkpoints during an attempt.
        load: Loads the checkpoint of a step.

    Returns:
        The result of ``load``; ``None`` if no checkpoint exists.

    Raises:
        CheckpointDamagedError: All existing checkpoints are damaged.
        CheckpointNotFoundError: Other processes deleted `MAX_GONE` checkpoints during the call.
    """
    damaged: dict[int, CheckpointDamagedError] = {}
    gone: list[CheckpointNotFoundError] = []
    while len(gone) < MAX_GONE and (left := [step for step in list_steps() if step not in damaged]):
        step = left[-1]
        try:
            return load(step)
        except CheckpointDamagedError as error:
            logger.warning("step %d: the checkpoint is damaged, trying an older one: %s", step, error)
            damaged[step] = error
        except CheckpointNotFoundError as error:
            logger.warning("step %d: another process deleted the checkpoint, trying another one: %s", step, error)
            gone.append(error)
    failures = [*damaged.values(), *gone]
    is_touched = any(error.destination_touched for error in failures)
    if damaged or is_touched or len(gone) == MAX_GONE:
        failures[0].destination_touched = is_touched
        raise failures[0]
    return None
