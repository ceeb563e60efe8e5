"""Durable checkpoints: the facade of ``ft_transport.checkpoint``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Final, cast

import torch.distributed as dist

from ft_transport.checkpoint.claim import RootClaim
from ft_transport.checkpoint.dcp_format import DCPCheckpoint
from ft_transport.checkpoint.directory import NumberedDirectory
from ft_transport.checkpoint.inventory import Inventory, load_newest_good
from ft_transport.checkpoint.load import Destination, LoadedCheckpoint, load
from ft_transport.checkpoint.manifest import MANIFEST_NAME, Trust
from ft_transport.checkpoint.save_job import Lease, StagedState, State, StateStager
from ft_transport.checkpoint.saver import BackgroundSaver, SaveHandle, StoreHealth
from ft_transport.checkpoint.settings import (
    CheckpointSelector,
    Existing,
    StoreSettings,
    checked_directory_number,
    checked_root,
    checked_store_arguments,
    compare_settings,
)
from ft_transport.coordination.agreement import Agreement
from ft_transport.coordination.ranks import RankGroup
from ft_transport.errors import CheckpointError, ConfigurationError
from ft_transport.runtime.signal_safe import SafeEnd
from ft_transport.state.matching import Incoming
from ft_transport.state.resharding import LikeFunction
from ft_transport.telemetry.recorder import Recorder, Recording, phase


class CheckpointStore:
    """The durable checkpoints of a group of ranks, in one directory that all of them see.

    The ranks act as one: the first rank decides what exists, what is replaced and which step is loaded, and a failure
    on one rank is the same error on all. All ranks call every method except `close`, in the same order, on the training
    thread. No collective of ``process_group`` runs.

    Args:
        root: The directory. Only one group at a time saves there.
        process_group: All ranks that together hold the state, once or several times: for HSDP or data parallelism the
            whole mesh, so that one holder of each byte writes it. By default all of ``torch.distributed``, or this
            process alone where that is not initialised.
        rank_local: Top-level keys of the state whose values are rank-local (random generators, the position of a data
            loader). Of all other values, ranks hold the same, or shards of the same.
        existing: How to treat existing checkpoints: ``keep`` them, ``clear`` them, or ``refuse`` to start. A
            ``step-N`` that another program wrote is never cleared or replaced.
        keep: Number of checkpoints to keep after each save: the new one and those before it; older ones are deleted.
            ``None`` keeps all. Checkpoints of later steps, which a run that was set back has left, stay.
        consolidate: Path of a part of the state, keys joined by dots, such as ``model``: its tensors are also written
            whole, to safetensors files with the index that ``transformers`` reads.
        read_only: Only load; the root is not claimed, and no writer process is started.
        start_writers: Start the writer processes now, so that their errors show before training.
        settings: Everything else.
        recorder: Records saves and loads (``ft_transport.telemetry``); a new one by default.

    Attributes:
        root: The directory.
        recorder: See the argument.

    Raises:
        CheckpointInUseError: Another group saves to this root.
        CheckpointExistsError: Checkpoints exist, and ``existing`` refuses them.
        TransportError: A rank failed; the same error on all of them.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        process_group: dist.ProcessGroup | None = None,
        *,
        rank_local: Sequence[str] = (),
        existing: Existing = "keep",
        keep: int | None = None,
        consolidate: str | None = None,
        read_only: bool = False,
        start_writers: bool = True,
        settings: StoreSettings | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._settings = settings if settings is not None else StoreSettings()
        if not isinstance(self._settings, StoreSettings):
            raise ConfigurationError(f"expected StoreSettings as settings, got {type(settings).__name__}")
        self.recorder = recorder if recorder is not None else Recorder()
        trouble: ConfigurationError | None = None
        try:
            self._trust = self._settings.trust()
        except ConfigurationError as error:
            # The error is reported to the other ranks below.
            self._trust, trouble = Trust(None, "", accepts_unsigned=False), error
        self._is_read_only = read_only
        self.root: Final = checked_root(root)
        group = RankGroup.of(process_group, keys=self._trust.keys)
        is_private, retry_s = self._settings.private, self._settings.retry_s
        self._directory = NumberedDirectory(self.root, "step", MANIFEST_NAME, is_private=is_private)
        self._claim = RootClaim(self.root, is_private=is_private)
        self._agreement = Agreement(group, "foreground", self._settings.timeout)
        self._inventory = Inventory(self._agreement, self._directory, keep, retry_s=retry_s, trust=self._trust)
        self._stager = StateStager()
        self._background = BackgroundSaver(group, self._inventory, consolidate, self._settings, trust=self._trust)
        self._end = SafeEnd()
        self._is_closed = False

        def check() -> Mapping[str, object]:
            if trouble is not None:
                raise trouble
            common = checked_store_arguments(rank_local, existing, keep, consolidate, self._settings)
            self._stager.rank_local = cast(tuple[str, ...], common["rank_local"])
            return {
                **common,
                "read_only": bool(read_only),
                "start_writers": bool(start_writers),
                "token": "none" if self._trust.keys is None else "one",
            }

        try:
            compare_settings(self._agreement, "compare the settings", check)
            if not read_only:
                owner = f"ranks {list(group.global_ranks)[:16]} of a group of {group.size}"
                self._inventory.open_root(self._claim, owner, existing)
                if start_writers:
                    self._background.start(self._agreement)
        except BaseException:
            self.close()
            raise

    def prefault(self, state: Mapping[str, object]) -> None:
        """Prefault the memory for a snapshot of ``state`` in the background, so that the first save is not slow.

        Args:
            state: A state of the same size as later saves; nothing of it is copied.

        Raises:
            SnapshotError: The state cannot be captured.
        """
        self._check_open()
        self._stager.prefault(state)

    def save(
        self,
        step: int,
        state: State,
        *,
        local: State | None = None,
        wait: bool = False,
        overwrite: bool = False,
    ) -> SaveHandle:
        """Take a snapshot of the state, and write it in the background of training.

        The state may change once this returns. The call refuses a state that can never be saved, on all ranks. Any
        other error on one rank, also while the state is copied, is reported to all ranks, and the handle raises it.

        Args:
            step: The committed step.
            state: Nested dicts, as for ``torch.distributed.checkpoint``, of tensors, DTensors and plain values; or a
                function that returns them, which is called at once. It must not change before this returns.
            local: More top-level keys with rank-local values, beside those named in ``rank_local``.
            wait: Whether to return only when the checkpoint is complete.
            overwrite: Whether the save may replace a checkpoint of this step.

        Raises:
            UnsupportedLeafError: The state of a rank contains a value that cannot be saved; the path names it.
            CheckpointError: The state of a rank is no dict.
            CheckpointExistsError: Another program wrote the directory with the name of this step.
            SaveInProgressError: The save before is not finished, and the policy is to refuse.
            TransportError: With ``wait``, the error of `SaveHandle.result`; or more saves in a row have failed than are
                allowed.
        """
        return self._save(step, lambda: self._stager.stage(step, state, local), wait=wait, overwrite=overwrite)

    def save_leased(
        self,
        step: int,
        lease: Lease,
        *,
        local: State | None = None,
        wait: bool = False,
        overwrite: bool = False,
    ) -> SaveHandle:
        """Write a snapshot that a transport serves, without another copy of it.

        Args:
            step: As for `save`, as are ``wait``, ``overwrite`` and the errors.
            lease: Returns the snapshot, and may wait for it; called once, on the store's own thread.
            local: Rank-local values, by further top-level keys; copied now.
            wait: See `save`.
            overwrite: See `save`.
        """
        return self._save(step, lambda: self._stager.stage(step, None, local, lease), wait=wait, overwrite=overwrite)

    def run_on_all_ranks(self, phase: str, action: Callable[[], None], *, timeout: timedelta) -> None:
        """Run ``action`` on every rank; if it fails on one, all raise the same error.

        Args:
            phase: Name of the phase, for errors.
            action: This rank's part.
            timeout: How long it may take; this rank shows heartbeats meanwhile.

        Raises:
            TransportError: The action failed on a rank.
        """
        self._check_open()
        agreement = self._agreement
        agreement.run_on_all_ranks(phase, lambda: agreement.showing_life(action, timeout.total_seconds()))

    def check_health(self) -> StoreHealth:
        """Return the health of the writers of all ranks; called every step, and nearly free.

        A fault that one rank finds at one call is in the result of all ranks at the next call: the ranks' states travel
        in the meantime.

        Raises:
            TransportError: More saves in a row have failed than are allowed; this is the last one's error.
            RankGoneError: A rank did not take part in time.
        """
        self._check_open()
        return self._background.check_health()

    def wait(self) -> None:
        """Wait for pending saves; check their handles for errors."""
        self._background.wait()

    def load(
        self,
        step: CheckpointSelector = "latest",
        *,
        into: object = None,
        like: LikeFunction | None = None,
        check: Callable[[Incoming], None] | None = None,
        is_comparable: bool = False,
    ) -> LoadedCheckpoint[Any]:
        """Load a checkpoint into the layout of this group of ranks, even if another layout saved it.

        Args:
            step: A step, or the newest complete checkpoint.
            into: This rank's own state, whose tensors are loaded in place. Top-level keys that it lacks are not read;
                keys that it lacks below them come as new tensors. Without ``into`` and without ``like``, all tensors
                come whole.
            like: See ``HTTPTransport.fetch_sharded``.
            check: Called with a description of the content before any of it arrives; an error that it raises ends the
                load on all ranks. Without ``check``, the load fails for a tensor of ``into`` that the checkpoint lacks
                or has in another shape or dtype, and for rank-local state of another number of ranks, which is not
                loaded otherwise.
            is_comparable: Whether `LoadedCheckpoint.differences` will be called. It costs another pass over every byte.

        Raises:
            CheckpointNotFoundError: No such checkpoint exists, or another process deleted it during the read.
            CheckpointDamagedError: A file differs from its digests; the error names it. Tensors of ``into`` that
                already had new data were overwritten with NaN patterns.
            ConfigurationError: Ranks request different steps.
            TransportError: The checkpoint does not fit, or a rank failed; the same error on all.
        """
        self._await_saves()
        destination = Destination(into=into, like=like, check=check, is_comparable=is_comparable)
        with self.recorder.begin("load", phase="find") as recording:
            agreed = self._inventory.agree_on_step(step)
            if agreed == "latest":
                self._inventory.refuse_newer_of_dcp()
            return self._load(agreed, destination, recording)

    def load_newest_good(
        self,
        *,
        into: object = None,
        like: LikeFunction | None = None,
        check: Callable[[Incoming], None] | None = None,
        is_comparable: bool = False,
    ) -> LoadedCheckpoint[Any] | None:
        """Load the newest checkpoint that is not damaged; arguments as for `load`.

        Returns:
            The loaded checkpoint; ``None`` if no checkpoint exists.

        Raises:
            CheckpointDamagedError: All existing checkpoints are damaged.
            CheckpointError: ``torch.distributed.checkpoint`` wrote the newest one for another program.
            CheckpointNotFoundError: Another process deletes checkpoints faster than they are read.
            TransportError: As for `load`.
        """
        destination = Destination(into=into, like=like, check=check, is_comparable=is_comparable)
        with self.recorder.begin("load", phase="find") as recording:
            self._inventory.refuse_newer_of_dcp()
            return load_newest_good(self.steps, lambda step: self._load(step, destination, recording))

    def newer_of_dcp(self) -> DCPCheckpoint | None:
        """Return the checkpoint that ``torch.distributed.checkpoint`` wrote for another program, if it is newest.

        Raises:
            CheckpointUntrustedError: A job token is set, and unsigned checkpoints are not accepted.
            CheckpointError: The checkpoint cannot be read.
        """
        self._await_saves()
        return self._inventory.newer_of_dcp()

    def steps(self) -> tuple[int, ...]:
        """Return the steps of all complete checkpoints, ascending."""
        self._await_saves()
        return self._inventory.steps()

    def latest(self) -> int | None:
        """Return the step of the newest complete checkpoint, ``None`` if none exists."""
        return max(self.steps(), default=None)

    def verify(self, step: CheckpointSelector = "latest") -> None:
        """Read every file of a checkpoint, each on one rank, and compare it with its digests.

        Raises:
            CheckpointNotFoundError: No such checkpoint exists, or another process deleted it during the read.
            CheckpointDamagedError: ``files`` names the damaged ones.
            ConfigurationError: Ranks request different steps.
        """
        self._await_saves()
        self._inventory.verify(step)

    def prune(self, keep: int) -> tuple[int, ...]:
        """Delete all but the newest ``keep`` checkpoints, and never the last good one.

        If all of those are damaged (the files are read until one is good), older checkpoints are kept as well, up to
        the first good one.

        Returns:
            The deleted steps.

        Raises:
            ConfigurationError: Ranks want to keep different numbers.
        """
        self._check_saving()
        self.wait()
        return self._inventory.prune(keep)

    def close(self) -> None:
        """Finish pending saves, end the thread and the writer, and release the claim. Idempotent."""
        self._is_closed = True
        self._end(self._close)

    def _close(self) -> None:
        self._background.close()
        self._agreement.close()
        self._stager.close()
        self._claim.release()

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def _save(self, step: int, stage: Callable[[], StagedState], *, wait: bool, overwrite: bool) -> SaveHandle:
        step = checked_directory_number("step", step)
        self._check_saving(step)
        if not self._background.admits(step):
            return SaveHandle(step, is_skipped=True)
        recording = self.recorder.begin("save", phase="clone")
        recording.describe(step=step)
        try:
            staged = stage()
            self._agreement.step = step
            recording.phase("agree")

            def check() -> None:
                staged.check()
                if self._agreement.is_first:
                    self._directory.refuse_foreign(step)

            try:
                # A state that no attempt could save is refused before training goes on.
                self._agreement.run_on_all_ranks("copy the state", check)
            except BaseException:
                staged.release()
                raise
            recording.phase("write")
            handle = self._background.submit(step, staged, overwrite=overwrite)
        except BaseException as error:
            recording.end("failed", error=error)
            raise
        recording.leave()

        def end(saved: Future[None]) -> None:
            # On the thread of the saves, when all ranks know the outcome.
            error = saved.exception()
            recording.end("ok" if error is None else "failed", error=error or "")

        handle.future.add_done_callback(end)
        if wait:
            handle.result()
        return handle

    def _load(self, step: CheckpointSelector, destination: Destination, recording: Recording) -> LoadedCheckpoint[Any]:
        phase("find")
        found = self._inventory.find(step)
        phase("read")
        with self._inventory.reading(found):
            loaded = load(found, destination, self._settings, self._trust, self._agreement)
        # Each rank records the bytes that it has read itself.
        recording.describe(step=loaded.step, num_bytes=loaded.num_bytes_read)
        return loaded

    def _await_saves(self) -> None:
        self._check_open()
        self.wait()

    def _check_open(self, step: int | None = None) -> None:
        if self._is_closed:
            # Another group may have claimed the root by now.
            raise CheckpointError("expected a store that is open, this one is closed", step=step)

    def _check_saving(self, step: int | None = None) -> None:
        self._check_open(step)
        if self._is_read_only:
            raise CheckpointError("expected a store that saves, this one is read-only", step=step)
