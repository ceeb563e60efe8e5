"""The existing checkpoints, on which a group of ranks agrees: list, find, verify and delete them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from ft_transport.checkpoint.claim import RootClaim
from ft_transport.checkpoint.dcp_format import DCP_METADATA_NAME, DCPCheckpoint
from ft_transport.checkpoint.directory import NumberedDirectory, wait_until_visible
from ft_transport.checkpoint.manifest import MANIFEST_NAME, Trust
from ft_transport.checkpoint.settings import (
    CheckpointSelector,
    Existing,
    checked_selector,
    compare_settings,
)
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
from ft_transport.runtime.regular_files import NotRegularFileError, is_regular, open_regular
from ft_transport.settings import check_number

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_GONE: Final = 10
"""Number of checkpoints that may disappear during a search for a good one."""
_CLAIM_S: Final = 10.0
"""How long to wait for a process that still holds the root and is about to exit."""
_MAX_SHOWN: Final = 5


class FoundCheckpoint(Struct, frozen=True, array_like=True, kw_only=True):
    """A complete checkpoint, as the first rank has found it; the same on all ranks.

    Attributes:
        step: Its step.
        path: Its directory.
        identity: Distinguishes it from another checkpoint that takes its name.
    """

    step: int
    path: str
    identity: tuple[int, int]

    @property
    def directory(self) -> Path:
        """The checkpoint's directory."""
        return Path(self.path)


_found_decoder: Final = msgspec.msgpack.Decoder(FoundCheckpoint)
_steps_decoder: Final = msgspec.msgpack.Decoder(list[int])
_of_dcp_decoder: Final = msgspec.msgpack.Decoder(tuple[int, str] | None)
_flag_decoder: Final = msgspec.msgpack.Decoder(bool)
_damaged_decoder: Final = msgspec.msgpack.Decoder(list[str])


class Inventory:
    """The content of the directory. Only the first rank reads it; the training threads of all ranks make equal calls.

    Only the first rank's saving thread calls `retire_old` and `delete_retired`.

    Args:
        agreement: The group's agreement, for the training thread.
        directory: Used on the first rank only.
        keep: Number of checkpoints that remain after a save; ``None`` keeps all.
        retry_s: How long reads that may succeed later are retried.
        trust: Decides which checkpoints are trusted.

    Attributes:
        directory: See the argument.
    """

    def __init__(
        self, agreement: Agreement, directory: NumberedDirectory, keep: int | None, *, retry_s: float, trust: Trust
    ) -> None:
        self._agreement = agreement
        self.directory = directory
        self._keep = keep
        self._retry_s = retry_s
        self._trust = trust
        # Both the training thread and the store's own list and rename directories.
        self._mutex = threading.Lock()
        self._retired: list[Path] = []

    def open_root(self, claim: RootClaim, owner: str, existing: Existing) -> None:
        """Claim the root for this group, and delete the leftovers of an interrupted run.

        Args:
            claim: Taken on the first rank.
            owner: The group that claims the root, for other processes to read.
            existing: How to treat existing checkpoints.

        Raises:
            CheckpointInUseError: Another group saves there.
            CheckpointExistsError: Checkpoints exist, and ``existing`` refuses them.
        """
        directory = self.directory

        def set_up() -> None:
            claim.take(owner, _CLAIM_S)
            directory.recover()
            foreign = directory.foreign()
            if existing == "clear" and foreign:
                raise CheckpointExistsError(
                    f"expected only checkpoints of this package to clear in {directory.root}, another program wrote "
                    f"{_named(foreign)}; nothing was cleared: move those directories away, or use another root"
                )
            if existing == "clear":
                directory.clear()
            # Each foreign directory causes a warning.
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
        """Return the newest checkpoint that DCP wrote for another program, if no own one has a later step.

        Raises:
            CheckpointUntrustedError: With a job token, unsigned checkpoints are not accepted.
            CheckpointError: The checkpoint cannot be read.
        """
        directory = self.directory

        def find() -> tuple[int, str] | None:
            own = directory.numbers()
            of_dcp = [item for item in directory.foreign().items() if is_regular(item[1] / DCP_METADATA_NAME)]
            step, path = of_dcp[-1] if of_dcp else (-1, Path())
            return (step, str(path)) if step > (own[-1] if own else -1) else None

        self._agreement.step = None
        found = self._on_directory("look for checkpoints of DCP", find, _of_dcp_decoder)
        if found is None:
            return None
        step, path = found
        if self._trust.keys is not None and not self._trust.accepts_unsigned:
            raise CheckpointUntrustedError(
                f"expected a checkpoint that is signed with the job token, another program wrote {path}; load it with "
                "accept_unsigned=True if you trust that program, or move it away",
                step=step,
            )
        retries = ReadRetries(self._retry_s)
        return self._agreement.run("read DCP's metadata", lambda: retries.call(lambda: DCPCheckpoint(Path(path), step)))

    def refuse_newer_of_dcp(self) -> None:
        """Refuse to treat an own checkpoint as the newest if DCP wrote a later one for another program.

        Raises:
            CheckpointError: DCP wrote a later checkpoint.
        """
        newer = self.newer_of_dcp()
        if newer is not None:
            raise CheckpointError(
                f"expected the newest checkpoint in {self.directory.root} to be this package's own, "
                f"torch.distributed.checkpoint wrote {newer.path} for another program; load that with dcp.load or with "
                "a manager's resume(), or move it away",
                step=newer.step,
            )

    def agree_on_step(self, step: CheckpointSelector) -> CheckpointSelector:
        """Check the step that a caller requests.

        Raises:
            ConfigurationError: The argument is no step, or the ranks request different ones; the same on all ranks.
        """
        self._agreement.step = None
        compare_settings(self._agreement, "compare the arguments", lambda: {"step": checked_selector(step)})
        return checked_selector(step)

    def find(self, step: CheckpointSelector) -> FoundCheckpoint:
        """Find a checkpoint. From then on, errors of the agreement name its step.

        Raises:
            CheckpointNotFoundError: No such checkpoint exists.
        """
        self._agreement.step = step
        found = self._on_directory("choose a checkpoint", lambda: self._found(step), _found_decoder)
        self._agreement.step = found.step
        return found

    @contextmanager
    def reading(self, found: FoundCheckpoint) -> Iterator[None]:
        """Let errors raised inside name the checkpoint; a deleted checkpoint is not reported as damaged.

        Raises:
            CheckpointNotFoundError: Files differ from their digests because another process deleted or replaced the
                checkpoint.
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
                retired = [path for step in removed for path in self.directory.retire(step)]
            self.directory.delete(retired)

        self._agreement.step = None
        self._agreement.on_first("prune", remove)
        return removed

    def retire_old(self, saved: int) -> None:
        """Retire older checkpoints, since the saved one is good. Newer ones are from a past that a run has left."""
        if self._keep is None:
            return
        try:
            with self._mutex:
                older = [step for step in self.directory.numbers() if step < saved]
                for step in older[: max(0, len(older) - (self._keep - 1))]:
                    self._retired += self.directory.retire(step)
        except Exception as error:
            # The saved checkpoint is safe.
            logger.warning("old checkpoints in %s could not be deleted: %s", self.directory.root, error)

    def delete_retired(self) -> None:
        """Free the disk space of retired checkpoints; a large checkpoint may take long."""
        retired, self._retired = self._retired, []
        try:
            self.directory.delete(retired)
        except Exception as error:
            # The store's thread goes on; the next start deletes the leftovers.
            logger.warning("old checkpoints in %s could not be deleted: %s", self.directory.root, error)

    def _found(self, step: CheckpointSelector) -> FoundCheckpoint:
        if step == "latest":
            steps = self.directory.numbers()
            if not steps:
                raise CheckpointNotFoundError(f"expected a checkpoint in {self.directory.root}, there is none")
            step = steps[-1]
        path = self.directory.find(step)
        if path is None:
            raise CheckpointNotFoundError(
                f"expected a checkpoint in {self.directory.root}, there are {self.directory.numbers() or 'none'}",
                step=step,
            )
        identity = _identity(path)
        if identity is None:
            raise CheckpointNotFoundError(f"expected a checkpoint in {path}, it was just deleted", step=step)
        return FoundCheckpoint(step=step, path=str(path), identity=identity)

    def _is_gone(self, found: FoundCheckpoint) -> bool:
        """Return whether the name no longer exists, or belongs to another checkpoint."""
        retries = ReadRetries(self._retry_s)
        try:
            return self._agreement.value_of_first(
                "look whether it is still there",
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
                # Complete files may have impossible content.
                decode_rank_files(read_rank_files(found.directory, manifest, retries), manifest)
            return damaged

        with self.reading(found):
            damaged = [text for each in agreement.values_of_all("verify", find, _damaged_decoder) for text in each]
            if damaged:
                raise CheckpointDamagedError(
                    "; ".join(damaged), files=tuple(text.split(":")[0] for text in damaged), step=found.step
                )

    def _is_good(self, step: int) -> bool:
        try:
            self._verify(self.find(step))
        except (CheckpointDamagedError, CheckpointUntrustedError, CheckpointNotFoundError) as error:
            logger.warning("step %d: the checkpoint is damaged, not trusted or gone: %s", step, error)
            return False
        return True

    def _on_directory(self, phase: str, action: Callable[[], T], decoder: msgspec.msgpack.Decoder[T]) -> T:
        retries = ReadRetries(self._retry_s)

        def run() -> T:
            with self._mutex:
                return action()

        return self._agreement.value_of_first(phase, lambda: retries.call(run), decoder)


def _named(foreign: Mapping[int, Path]) -> str:
    names = [path.name for path in foreign.values()]
    return ", ".join(names[:_MAX_SHOWN]) + (f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else "")


def _identity(directory: Path) -> tuple[int, int] | None:
    """Return the identity of the list of files, which is written once; ``None`` if the list does not exist.

    Raises:
        OSError: The system does not tell whether the list exists.
    """
    try:
        # Opened, because a network file system may cache the file that a name stood for.
        descriptor = open_regular(directory / MANIFEST_NAME)
    except (FileNotFoundError, NotADirectoryError, NotRegularFileError):
        return None
    try:
        status = os.fstat(descriptor)
        return status.st_ino, status.st_mtime_ns
    finally:
        os.close(descriptor)


def load_newest_good(list_steps: Callable[[], Sequence[int]], load: Callable[[int], T]) -> T | None:
    """Try checkpoints from the newest to the oldest.

    Args:
        list_steps: Returns the existing steps, ascending. Called before each attempt: during the read of one
            checkpoint, another process may save newer ones and delete it.
        load: Loads the checkpoint of a step.

    Returns:
        The result of ``load``; ``None`` if no checkpoint exists.

    Raises:
        CheckpointDamagedError: All existing checkpoints are damaged.
        CheckpointNotFoundError: Checkpoints disappear faster than they are read, or the last one did during the read.
    """
    damaged: dict[int, CheckpointDamagedError] = {}
    gone: list[CheckpointNotFoundError] = []
    while len(gone) < MAX_GONE and (left := [step for step in list_steps() if step not in damaged]):
        step = left[-1]
        try:
            return load(step)
        except CheckpointDamagedError as error:
            logger.warning("step %d: the checkpoint is damaged, an older one is tried: %s", step, error)
            damaged[step] = error
        except CheckpointNotFoundError as error:
            logger.warning("step %d: the checkpoint is gone, another one is tried: %s", step, error)
            gone.append(error)
    failures = [*damaged.values(), *gone]
    is_touched = any(error.destination_touched for error in failures)
    if damaged or is_touched or len(gone) == MAX_GONE:
        failures[0].destination_touched = is_touched
        raise failures[0]
    return None
