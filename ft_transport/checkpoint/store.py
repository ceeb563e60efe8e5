"""Durable checkpoints: the facade of ``ft_transport.checkpoint``."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

import torch.distributed as dist

from ft_transport.checkpoint.background_saver import BackgroundSaver, SaveJob
from ft_transport.checkpoint.claim import RootClaim
from ft_transport.checkpoint.compare_settings import (
    CheckpointSelector,
    check_path,
    checked_keys,
    checked_root,
    compare_settings,
)
from ft_transport.checkpoint.copies import Copies
from ft_transport.checkpoint.directory import CheckpointDirectory
from ft_transport.checkpoint.handles import SaveHandle, StoreHealth
from ft_transport.checkpoint.health import Health
from ft_transport.checkpoint.inventory import Inventory
from ft_transport.checkpoint.load import LoadedCheckpoint, LoadRequest, load
from ft_transport.checkpoint.newest_good import load_newest_good
from ft_transport.checkpoint.save import Saver, SaveRequest
from ft_transport.checkpoint.settings import StoreSettings
from ft_transport.checkpoint.writer_process import WriterProcess
from ft_transport.coordination.consensus import Agreement, RankGroup
from ft_transport.coordination.exchange import Exchange
from ft_transport.errors import CheckpointError, CheckpointExistsError, ConfigurationError
from ft_transport.settings import check_number
from ft_transport.state.matching import Incoming
from ft_transport.state.resharding import LikeFunction
from ft_transport.state.stager import Stager
from ft_transport.transfer.server import SnapshotLease
from ft_transport.wire.chunks import CHUNK_BYTES

_LOOK_S: Final = 0.02
_COMMON_SETTINGS: Final = ("max_attempts", "max_failed_saves", "busy", "read")
"""What ranks do not do alike, they do past each other."""


class CheckpointStore:
    """The durable checkpoints of a group of ranks, in one directory that all of them see.

    The ranks act as one: what exists, what is replaced and which step is loaded is decided by the first of them, and a
    failure on one rank is the same error on all. Every method but `close` is called by all ranks, in the same order, by
    the training thread. No collective of ``process_group`` runs.

    Args:
        root: The directory. One group at a time saves there.
        process_group: All ranks that together hold the state, once or several times: of HSDP or data parallelism the
            whole mesh, so that each byte is written by one of its holders. By default all of ``torch.distributed``, or
            this process alone where that is not initialised.
        rank_local: Top-level keys of the state whose values each rank has for itself (random generators, the position
            of a data loader). Of all else, ranks hold the same, or shards of the same.
        existing: What happens to checkpoints that are there: ``keep`` them, ``clear`` them, or ``refuse`` to start.
        keep: After each save, keep so many checkpoints, it and those before it, and delete older ones; ``None`` keeps
            all. Those of later steps, which a run that was set back has left, stay.
        consolidate: Path of a part of the state, keys joined by dots, such as ``model``: its tensors are also written
            whole, to safetensors files with the index that ``transformers`` reads.
        read_only: Only load; the root is not claimed, and there is no writer process.
        start_writers: Start the writer processes now, so that whatever is wrong with them shows before training.
        settings: Everything else.

    Raises:
        CheckpointInUseError: Another group saves to this root.
        CheckpointExistsError: There are checkpoints, and there must not be.
        TransportError: A rank failed; the same error on all of them.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        process_group: dist.ProcessGroup | None = None,
        *,
        rank_local: Sequence[str] = (),
        existing: Literal["keep", "clear", "refuse"] = "keep",
        keep: int | None = None,
        consolidate: str | None = None,
        read_only: bool = False,
        start_writers: bool = True,
        settings: StoreSettings | None = None,
    ) -> None:
        self._settings = settings if settings is not None else StoreSettings()
        if not isinstance(self._settings, StoreSettings):
            raise ConfigurationError(f"expected StoreSettings as settings, got {type(settings).__name__}")
        self._rank_local: tuple[str, ...] = ()
        self._is_read_only = read_only
        self._root = checked_root(root)
        group = RankGroup.of(process_group)
        timeout = self._settings.timeout
        self._directory = CheckpointDirectory(self._root)
        self._claim = RootClaim(self._root)
        self._agreement = Agreement(group, "foreground", timeout)
        self._exchange = Exchange(group, "foreground", timeout)
        self._inventory = Inventory(self._agreement, self._directory, keep)
        self._writer = WriterProcess()
        self._save_exchange = Exchange(group, "background", timeout)
        self._saver = Saver(
            agreement=Agreement(group, "background", timeout),
            exchange=self._save_exchange,
            directory=self._directory,
            writer=self._writer,
            timeout_s=timeout.total_seconds(),
            visible_s=self._settings.visible_timeout.total_seconds(),
            max_attempts=self._settings.max_attempts,
            after_commit=self._inventory.retire_old,
            consolidated=consolidate,
        )
        self._stager, self._local_taker = self._make_taker(), self._make_taker()
        self._background = BackgroundSaver(
            self._saver,
            self._writer,
            after_save=self._inventory.delete_retired,
            max_failed_saves=self._settings.max_failed_saves,
        )
        self._health = Health(self._agreement, Exchange(group, "health", timeout), self._background)
        self._closing = threading.Lock()
        self._is_closed = False

        def check() -> Mapping[str, object]:
            self._rank_local = checked_keys(rank_local)
            if keep is not None:
                check_number("keep", keep, at_least=1)
            if existing not in ("keep", "clear", "refuse"):
                raise ConfigurationError(f"expected keep, clear or refuse as existing, got {existing!r}")
            check_path(consolidate, self._rank_local)
            return {
                "rank_local": self._rank_local,
                "existing": existing,
                "keep": keep,
                "consolidate": consolidate,
                "read_only": bool(read_only),
                "start_writers": bool(start_writers),
                **{name: getattr(self._settings, name) for name in _COMMON_SETTINGS},
            }

        try:
            compare_settings(self._agreement, "compare the settings", check)
            owner = f"ranks {list(group.global_ranks)[:16]} of a group of {group.size}"
            self._agreement.on_first("set up the root", lambda: self._set_up_root(owner, existing))
            self._agreement.run_on_all_ranks("find the root", self._find_root)
            if start_writers and not read_only:
                self._agreement.run_on_all_ranks("start the writer", self._saver.start_writer)
                self._health.connect()
                self._background.start()
        except BaseException:
            self.close()
            raise

    @property
    def root(self) -> Path:
        """The directory."""
        return self._root

    # --------------------------------------------------------------------------------------------------------- saving

    def prefault(self, state: Mapping[str, object]) -> None:
        """Makes the memory for a snapshot of ``state`` ready in the background, so that the first save is not slow.

        Args:
            state: Of the same size as what will be saved; nothing of it is copied.

        Raises:
            SnapshotError: It cannot be captured.
        """
        self._check_open()
        self._stager.prefault(self._split(state)[0])

    def save(
        self,
        step: int,
        state: Mapping[str, object] | Callable[[], Mapping[str, object]],
        *,
        local: Mapping[str, object] | Callable[[], Mapping[str, object]] | None = None,
        wait: bool = False,
        overwrite: bool = False,
    ) -> SaveHandle:
        """Takes a snapshot of the state, and writes it behind the training.

        When this returns, the state may be changed. The call refuses a state that can never be saved, on all ranks.
        What else goes wrong on one rank, also while the state is copied, is told to all and raised by the handle.

        Args:
            step: The committed step.
            state: Nested dicts, as for ``torch.distributed.checkpoint``, of tensors, DTensors and plain values; or a
                function that returns them, which is called at once. Nothing may change it before this returns.
            local: More top-level keys, whose values this rank has for itself, beside those named in ``rank_local``.
            wait: Whether to return only when the checkpoint is complete.
            overwrite: Whether a checkpoint of this step may be replaced.

        Raises:
            UnsupportedLeafError: The state of a rank has something in it that cannot be saved; the path names it.
            CheckpointError: The state of a rank is no dict.
            SaveInProgressError: The save before is not finished, and the policy is to refuse.
            TransportError: With ``wait``, what `SaveHandle.result` raises; or more saves in a row have failed than are
                allowed.
        """
        step = check_number("step", step, at_least=0)
        if not self._admit(step):
            return SaveHandle(step, is_skipped=True)
        copies = Copies()
        with copies.noting_failure():
            shared, own = self._split(_called(state))
            own.update(_called(local) if local is not None else {})
            copies.add(self._stager, step, shared)
            copies.add_local(self._local_taker, step, own)
        return self._submit(step, copies, wait=wait, overwrite=overwrite)

    def save_leased(
        self,
        step: int,
        lease: Callable[[], SnapshotLease],
        *,
        local: Mapping[str, object] | Callable[[], Mapping[str, object]] | None = None,
        wait: bool = False,
        overwrite: bool = False,
    ) -> SaveHandle:
        """Writes a snapshot that a transport serves, without another copy of it.

        Args:
            step: The committed step.
            lease: Returns the snapshot, and may wait for it; called once, on a thread of the store's own.
            local: What this rank has for itself, by further top-level keys; it is copied now.
            wait: As for `save`, as are the rest and what is raised.
            overwrite: See `save`.
        """
        step = check_number("step", step, at_least=0)
        if not self._admit(step):
            return SaveHandle(step, is_skipped=True)
        copies = Copies()
        copies.add_lease(lease)
        with copies.noting_failure():
            copies.add_local(self._local_taker, step, _called(local) if local is not None else {})
        return self._submit(step, copies, wait=wait, overwrite=overwrite)

    def run_on_all_ranks(self, phase: str, action: Callable[[], None], *, timeout: timedelta) -> None:
        """Runs something on every rank; if it fails on one, all raise the same.

        Args:
            phase: What it is, for errors.
            action: This rank's part.
            timeout: How long it may take; for so long the other ranks are shown that this one is alive.

        Raises:
            TransportError: It failed on a rank.
        """
        self._check_open()
        agreement = self._agreement
        agreement.run_on_all_ranks(phase, lambda: agreement.showing_life(action, timeout.total_seconds()))

    def check_health(self) -> StoreHealth:
        """What is wrong with the writers of all ranks; called every step, and nearly free.

        What one rank finds at one call, all of them return at the next: the ranks' states travel meanwhile.

        Raises:
            TransportError: More saves in a row have failed than are allowed; the last one's error.
            RankGoneError: A rank did not take part in time.
        """
        self._check_open()
        return self._health.check()

    def wait(self) -> None:
        """Waits until nothing is being saved any more; whether it went well is the handle's to say."""
        self._background.wait()

    # -------------------------------------------------------------------------------------------------------- loading

    def load(
        self,
        step: CheckpointSelector = "latest",
        *,
        into: object = None,
        like: LikeFunction | None = None,
        check: Callable[[Incoming], None] | None = None,
        is_comparable: bool = False,
    ) -> LoadedCheckpoint[Any]:
        """Loads a checkpoint, in whatever layout this group of ranks has.

        Args:
            step: A step, or the newest complete checkpoint.
            into: This rank's own state, whose tensors are loaded into in place. Top-level keys that it does not have
                are not read; what it lacks below them comes as new tensors. Without one, and without ``like``, all
                tensors come whole.
            like: See ``HTTPTransport.fetch_sharded``.
            check: Called with what will come, before any of it does; what it raises ends the load on all ranks. Without
                one, a tensor of ``into`` that the checkpoint does not have, or has in another shape or dtype, does.
            is_comparable: Whether `LoadedCheckpoint.differences` will be called. It costs another look at every byte.

        Raises:
            CheckpointNotFoundError: There is none, or another process has deleted it while it was read.
            CheckpointDamagedError: A file is not what was written; it is named. What had landed in ``into`` was
                overwritten with NaN patterns.
            ConfigurationError: Ranks ask for different steps.
            TransportError: It does not fit, or a rank failed; the same error on all.
        """
        self._check_open()
        self.wait()
        step = self._inventory.agree_on_step(step)
        return self._load(step, into=into, like=like, check=check, is_comparable=is_comparable)

    def load_newest_good(
        self,
        *,
        into: object = None,
        like: LikeFunction | None = None,
        check: Callable[[Incoming], None] | None = None,
        is_comparable: bool = False,
    ) -> LoadedCheckpoint[Any] | None:
        """Loads the newest checkpoint that is what was written; arguments as for `load`.

        Returns:
            It; ``None`` if there is no checkpoint at all.

        Raises:
            CheckpointDamagedError: There are some, and all are damaged.
            CheckpointNotFoundError: Another process deletes them faster than they are read.
            TransportError: As for `load`.
        """

        def load_step(step: int) -> LoadedCheckpoint[Any]:
            return self._load(step, into=into, like=like, check=check, is_comparable=is_comparable)

        return load_newest_good(self.steps, load_step)

    def steps(self) -> tuple[int, ...]:
        """The steps of all complete checkpoints, ascending."""
        self._check_open()
        self.wait()
        return self._inventory.steps()

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint, ``None`` if there is none."""
        steps = self.steps()
        return steps[-1] if steps else None

    def verify(self, step: CheckpointSelector = "latest") -> None:
        """Reads every file of a checkpoint, each on one rank, and compares it with what was written.

        Raises:
            CheckpointNotFoundError: There is none, or another process has deleted it while it was read.
            CheckpointDamagedError: ``files`` names the damaged ones.
            ConfigurationError: Ranks ask for different steps.
        """
        self._check_open()
        self.wait()
        self._inventory.verify(step)

    def prune(self, keep: int) -> tuple[int, ...]:
        """Deletes all but the newest ``keep`` checkpoints, and never the last good one.

        If none of those that are kept is what was written (the files are read until one is), older ones are kept as
        well, up to the first good one.

        Returns:
            The steps that were deleted.

        Raises:
            ConfigurationError: Ranks want to keep different numbers.
        """
        self._check_open()
        if self._is_read_only:
            raise CheckpointError("expected a store that saves, this one is read-only")
        self.wait()
        return self._inventory.prune(keep)

    # ------------------------------------------------------------------------------------------------------ the end

    def close(self) -> None:
        """Finishes what is being saved, and ends the thread, the writer and the claim. May be called twice."""
        self._is_closed = True
        with self._closing:
            self._background.close()
            self._health.close()
            for exchange in (self._exchange, self._save_exchange):
                exchange.close()
            self._writer.close()
            self._stager.close()
            self._local_taker.close()
            self._claim.release()

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    # --------------------------------------------------------------------------------------------------------- inside

    def _make_taker(self) -> Stager:
        return Stager(
            max_snapshots=1,
            num_threads=self._settings.num_copy_threads,
            chunk_bytes=CHUNK_BYTES,
            is_digested=False,
        )

    def _set_up_root(self, owner: str, existing: str) -> None:
        if self._is_read_only:
            return
        self._claim.take(owner, self._settings.claim_timeout.total_seconds())
        self._directory.recover()
        if existing == "clear":
            self._directory.clear()
        steps = self._directory.steps()
        if existing == "refuse" and steps:
            raise CheckpointExistsError(f"expected no checkpoints in {self._root}, there are {steps}")

    def _find_root(self) -> None:
        if self._is_read_only:
            return
        deadline_s = time.monotonic() + self._settings.visible_timeout.total_seconds()
        while not self._root.is_dir():
            if time.monotonic() > deadline_s:
                raise FileNotFoundError(
                    errno.ENOENT,
                    "this directory, which rank 0 has made, is not visible here; a store needs a file system that all "
                    "ranks share",
                    str(self._root),
                )
            self._agreement.check_others()
            time.sleep(_LOOK_S)

    def _load(
        self,
        step: CheckpointSelector,
        *,
        into: object,
        like: LikeFunction | None,
        check: Callable[[Incoming], None] | None,
        is_comparable: bool,
    ) -> LoadedCheckpoint[Any]:
        found = self._inventory.find(step)
        request = LoadRequest(
            directory=found.directory,
            into=into,
            like=like,
            check=check,
            meshes=self._settings.meshes,
            max_bytes=self._settings.max_load_bytes,
            is_read_once=self._settings.read == "once",
            is_comparable=is_comparable,
        )
        with self._inventory.reading(found):
            return load(request, self._agreement, self._exchange)

    def _submit(self, step: int, copies: Copies, *, wait: bool, overwrite: bool) -> SaveHandle:
        def check() -> None:
            if copies.refusal is not None:
                raise copies.refusal

        self._agreement.step = step
        try:
            self._agreement.run_on_all_ranks("copy the state", check)
        except BaseException:
            copies.release()
            raise
        request = SaveRequest(step=step, snapshots=[], local_keys=copies.local_keys, overwrite=overwrite)
        handle = self._background.submit(SaveJob(request, copies.finish, copies.release))
        if wait:
            handle.result()
        return handle

    def _split(self, state: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
        """What all ranks share, and what each has for itself."""
        shared = {key: value for key, value in state.items() if key not in self._rank_local}
        return shared, {key: state[key] for key in self._rank_local if key in state}

    def _check_open(self, step: int | None = None) -> None:
        if self._is_closed:
            # Another one may have claimed the root by now.
            raise CheckpointError("expected a store that is open, this one is closed", step=step)

    def _admit(self, step: int) -> bool:
        """Whether a save may begin; the same on all ranks."""
        self._check_open(step)
        if self._is_read_only:
            raise CheckpointError("expected a store that saves, this one is read-only", step=step)
        return self._health.admits(step, self._settings.busy)


def _called(state: Mapping[str, object] | Callable[[], Mapping[str, object]]) -> Mapping[str, object]:
    value = state() if callable(state) else state
    if not isinstance(value, Mapping):
        raise CheckpointError(f"expected a dict as state, got {type(value).__name__}")
    return value
