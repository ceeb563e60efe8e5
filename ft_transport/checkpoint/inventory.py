"""Lists, finds, verifies and deletes the checkpoints of a root, with the same result on all ranks of a group."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from ft_transport.checkpoint.dcp_checkpoint import DCPCheckpoint
from ft_transport.checkpoint.dcp_metadata import DCP_METADATA_NAME
from ft_transport.checkpoint.directory import wait_until_visible
from ft_transport.checkpoint.files import is_url
from ft_transport.checkpoint.found import Candidate, FoundCheckpoint
from ft_transport.checkpoint.manifest import Trust
from ft_transport.checkpoint.plan import shown_names
from ft_transport.checkpoint.roots import CheckpointRoot
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
from ft_transport.runtime.regular_files import is_regular
from ft_transport.settings import check_number

T = TypeVar("T")

logger = logging.getLogger(__name__)

_SET_UP_S: Final = 300.0
_CLAIM_S: Final = 10.0
"""How long to wait for another process to release the lock of the root."""


_candidates_decoder: Final = msgspec.msgpack.Decoder(list[tuple[int, bool]])
_found_decoder: Final = msgspec.msgpack.Decoder(FoundCheckpoint)
_steps_decoder: Final = msgspec.msgpack.Decoder(list[int])
_of_dcp_decoder: Final = msgspec.msgpack.Decoder(tuple[int, str] | None)
_flag_decoder: Final = msgspec.msgpack.Decoder(bool)
_damaged_decoder: Final = msgspec.msgpack.Decoder(list[str])


class Inventory:
    """The checkpoints of one root. Only the first rank lists them, and sends the result to the other ranks.

    The training threads of all ranks call the methods, in the same order. The exception is `take_damage`, which only
    the store's own thread calls.

    Args:
        agreement: The group's agreement for the training thread.
        root: The root of the checkpoints; listed only on the first rank.
        uploaded: The root of uploaded copies; ``None`` if nothing is uploaded.
        retry_s: How long a failed read is retried, in seconds.
        trust: Verifies the signatures of checkpoints.

    Attributes:
        root: The root of the checkpoints.
        mutex: Held while the training thread or the store's thread lists or retires checkpoints.
    """

    def __init__(
        self,
        agreement: Agreement,
        root: CheckpointRoot,
        *,
        uploaded: CheckpointRoot | None = None,
        retry_s: float,
        trust: Trust,
    ) -> None:
        self._agreement = agreement
        self.root = root
        self._uploaded = uploaded
        self._retry_s = retry_s
        self._trust = trust
        self.mutex: Final = threading.Lock()
        self._found_damage = False

    def open_root(self, owner: str, existing: Existing) -> None:
        """Claim the root for this group, and delete the leftovers of an interrupted run.

        Args:
            owner: Description of this group, for the errors of other groups.
            existing: Whether to ``keep`` or ``clear`` existing checkpoints, or to ``refuse`` a root that has any.

        Raises:
            CheckpointInUseError: Another group saves to this root.
            CheckpointExistsError: The root has checkpoints, and ``existing`` is ``refuse``; or it is ``clear``, and
                another program wrote some of them.
        """
        root = self.root

        def set_up() -> None:
            root.claim(owner, _CLAIM_S)
            root.recover()
            foreign = root.foreign()
            if existing == "clear" and foreign:
                names = shown_names([path.name for path in foreign.values()])
                raise CheckpointExistsError(
                    f"expected to clear only checkpoints of this package in {root.name}, but another program "
                    f"wrote {names}; nothing was cleared: move those directories away, or use another root"
                )
            uploads = self._uploaded.numbers() if self._uploaded is not None and existing != "keep" else []
            if self._uploaded is not None and uploads:
                raise CheckpointExistsError(
                    f"expected no uploads in {self._uploaded.name} with existing={existing!r}, there are {uploads}; "
                    "use another prefix, because uploads are never cleared"
                )
            if existing == "clear":
                root.clear()
            # `numbers` also logs a warning for each foreign directory, so it is called in any case.
            if (steps := sorted({*root.numbers(), *foreign})) and existing == "refuse":
                raise CheckpointExistsError(f"expected no checkpoints in {root.name}, there are {steps}")

        def find() -> None:
            if not is_url(root.name):
                wait_until_visible(Path(root.name), self._agreement.check_others)

        # The owner of a bucket may have to be silent for a while.
        self._agreement.on_first("set up the root", lambda: self._agreement.showing_life(set_up, _SET_UP_S))
        self._agreement.run_on_all_ranks("find the root", find)

    def steps(self) -> tuple[int, ...]:
        """Return the steps of all complete checkpoints, ascending, without those that exist only as uploaded copies."""
        self._agreement.step = None
        steps = self._on_root("list the checkpoints", self.root.numbers, _steps_decoder)
        return tuple(steps)

    def candidates(self) -> list[Candidate]:
        """Return all complete checkpoints in the order in which a load prefers them, the best one last."""

        def find() -> list[tuple[int, bool]]:
            own = self.root.numbers()
            copies = [(step, False) for step in self._uploaded_numbers(own)]
            return sorted([*((step, True) for step in own), *copies])

        self._agreement.step = None
        found = self._on_root("list the checkpoints", find, _candidates_decoder)
        return [Candidate(step, is_own=is_own) for step, is_own in found]

    def newer_of_dcp(self) -> DCPCheckpoint | None:
        """Return the newest checkpoint if another program wrote it with DCP; ``None`` if this package wrote it.

        Raises:
            CheckpointUntrustedError: A job token is set, and ``StoreSettings.accept_unsigned`` is ``False``.
            CheckpointError: The checkpoint cannot be read.
        """
        root = self.root

        def find() -> tuple[int, str] | None:
            own = root.numbers()
            of_dcp = [item for item in root.foreign().items() if is_regular(item[1] / DCP_METADATA_NAME)]
            step, path = of_dcp[-1] if of_dcp else (-1, Path())
            return (step, str(path)) if step > (own[-1] if own else -1) else None

        self._agreement.step = None
        if (found := self._on_root("look for checkpoints of DCP", find, _of_dcp_decoder)) is None:
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
                f"expected the newest checkpoint in {self.root.name} to be this package's own, but another "
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

    def find(self, step: CheckpointSelector, *, is_own: bool | None = None) -> FoundCheckpoint:
        """Find a checkpoint by its step. If a later phase of this operation fails, the error names the step.

        Args:
            step: The step, or ``latest``.
            is_own: Whether to look only in the root, or only for an uploaded copy. ``None`` prefers the root.

        Raises:
            CheckpointNotFoundError: No such checkpoint exists.
        """
        self._agreement.step = step
        found = self._on_root("choose a checkpoint", lambda: self._found(step, is_own), _found_decoder)
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
                    f"expected the checkpoint to remain during the read, but {found.location} was deleted or replaced",
                    step=found.step,
                )
                gone.destination_touched = error.destination_touched
                raise gone from error
            self._found_damage |= isinstance(error, CheckpointDamagedError)
            error.message = f"{error.message}; the checkpoint is {found.location}"
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
            with self.mutex:
                retired = [path for step in removed for path in self.root.retire(step)]
            self.root.delete(retired)

        self._agreement.step = None
        self._agreement.on_first("prune", remove)
        return removed

    def _found(self, step: CheckpointSelector, is_own: bool | None) -> FoundCheckpoint:
        own = self.root.numbers()
        copies: list[int] = []
        if is_own is False or (is_own is None and (step == "latest" or step not in own)):
            copies = self._uploaded_numbers(own)
        newest = max([*own, *copies], default=None)
        chosen = newest if isinstance(step, str) else step
        if chosen is None:
            raise CheckpointNotFoundError(f"expected a checkpoint in {self.root.name}, there is none")
        root = self.root
        if self._uploaded is not None and (is_own is False or chosen not in own) and chosen in copies:
            root = self._uploaded
        location = root.find(chosen)
        if location is None:
            raise CheckpointNotFoundError(
                f"expected a checkpoint of this step in {root.name}, there are {sorted({*own, *copies}) or 'none'}",
                step=chosen,
            )
        if (identity := root.identity(location)) is None:
            raise CheckpointNotFoundError(f"expected a checkpoint in {location}, but it was just deleted", step=chosen)
        return FoundCheckpoint(step=chosen, location=location, identity=identity)

    def _uploaded_numbers(self, own: list[int]) -> list[int]:
        """Return the numbers of uploaded copies. If the bucket cannot be read, the root's checkpoints are enough."""
        if self._uploaded is None:
            return []
        try:
            return self._uploaded.numbers()
        except OSError as error:
            if not own:
                raise
            logger.warning("%s cannot be read, so its copies are not considered: %s", self._uploaded.name, error)
            return []

    def _is_gone(self, found: FoundCheckpoint) -> bool:
        """Return whether the checkpoint was deleted, or replaced by another one of the same name."""
        retries = ReadRetries(self._retry_s)
        try:
            return self._agreement.value_of_first(
                "look whether the checkpoint still exists",
                lambda: retries.call(lambda: self._root_of(found).identity(found.location)) != found.identity,
                _flag_decoder,
            )
        except TransportError:
            return False

    def _root_of(self, found: FoundCheckpoint) -> CheckpointRoot:
        # With uploads, the root is a directory.
        return self._uploaded if self._uploaded is not None and is_url(found.location) else self.root

    def _verify(self, found: FoundCheckpoint) -> None:
        agreement = self._agreement
        retries = ReadRetries(self._retry_s)

        files = found.files

        def find() -> list[str]:
            manifest = read_manifest(files, found.step, self._trust, retries)
            by_size = sorted(manifest.files, key=lambda entry: -entry.num_bytes)
            own = by_size[agreement.rank :: agreement.size]
            damaged = find_damage(files, own, manifest.hash, retries, agreement.check_others)
            if agreement.is_first and not damaged:
                # A forger can give invalid descriptions correct digests.
                decode_rank_files(read_rank_files(files, manifest, retries), manifest)
            return damaged

        with self.reading(found):
            texts = [text for each in agreement.values_of_all("verify", find, _damaged_decoder) for text in each]
            if texts:
                names = tuple(text.split(":")[0] for text in texts)
                raise CheckpointDamagedError("; ".join(texts), files=names, step=found.step)

    def _is_good(self, step: int) -> bool:
        try:
            self._verify(self.find(step, is_own=True))
        except (CheckpointDamagedError, CheckpointUntrustedError, CheckpointNotFoundError) as error:
            logger.warning("step %d: the checkpoint is damaged or not trusted, or was deleted: %s", step, error)
            return False
        return True

    def _on_root(self, phase: str, action: Callable[[], T], decoder: msgspec.msgpack.Decoder[T]) -> T:
        def run() -> T:
            with self.mutex:
                return action()

        return self._agreement.value_of_first(phase, lambda: ReadRetries(self._retry_s).call(run), decoder)
