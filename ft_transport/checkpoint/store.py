"""``CheckpointStore``: saves, loads, lists, verifies and deletes durable checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Final, cast

import torch.distributed as dist

from ft_transport.checkpoint.dcp_checkpoint import DCPCheckpoint
from ft_transport.checkpoint.found import load_newest_good
from ft_transport.checkpoint.inventory import Inventory
from ft_transport.checkpoint.load import Destination, LoadedCheckpoint, load
from ft_transport.checkpoint.manifest import Trust
from ft_transport.checkpoint.retention import Retention
from ft_transport.checkpoint.roots import root_at
from ft_transport.checkpoint.saver import BackgroundSaver, SaveHandle, StoreHealth
from ft_transport.checkpoint.settings import (
    CheckpointSelector,
    Existing,
    StoreSettings,
    check_place,
    checked_directory_number,
    checked_root,
    checked_store_arguments,
    compare_settings,
)
from ft_transport.checkpoint.staging import Lease, StagedState, State, StateStager
from ft_transport.checkpoint.uploading import Upload
from ft_transport.coordination.agreement import Agreement
from ft_transport.coordination.ranks import RankGroup
from ft_transport.errors import CheckpointError, ConfigurationError, TransportError
from ft_transport.runtime.signal_safe import SafeEnd
from ft_transport.state.matching import Incoming
from ft_transport.state.resharding import LikeFunction
from ft_transport.telemetry.recorder import Recorder, Recording, phase


class CheckpointStore:
    """The durable checkpoints of a group of ranks, in a directory or a bucket that all these ranks can use.

    All ranks call every method except `close`, in the same order, on the training thread. The first rank decides which
    checkpoints exist, which is replaced and which is loaded. If one rank fails, all ranks raise the same error. No
    collective of ``process_group`` runs.

    Args:
        root: The directory, or the URL of a bucket and a prefix in it, such as ``s3://bucket/run-7``. Only one group at
            a time saves there. Buckets need the extra ``bucket``; credentials come from the environment.
        process_group: All ranks that have a part of the state: for HSDP or data parallelism the whole mesh, so that
            only one rank writes each byte. By default all ranks of ``torch.distributed``, or this process alone.
        rank_local: Top-level keys of the state whose values are rank-local, such as random generators or the position
            of a data loader. Under all other keys, the ranks have equal values, or shards of one DTensor.
        existing: How to treat existing checkpoints: ``keep`` them, ``clear`` them, or ``refuse`` to start. A
            ``step-N`` that another program wrote is never cleared or replaced.
        keep: Number of checkpoints that remain after a save: the new one and the newest of earlier steps. ``None``
            keeps all. Checkpoints of later steps, which a resumed run may find, are neither counted nor deleted.
        consolidate: Path of a part of the state (keys joined by dots), such as ``model``. The tensors of this part are
            also written whole, to safetensors files with the index that ``transformers`` reads.
        upload: Also copies complete checkpoints to a bucket, from which loads may take them. `steps`, `prune` and
            ``keep`` apply to the directory.
        read_only: Whether the store only loads. Such a store neither claims the root nor starts writer processes.
        settings: Timeouts, policies, file modes and the job token; by default, the defaults of `StoreSettings`.
        recorder: Records saves and loads (``ft_transport.telemetry``); a new one by default.

    Attributes:
        root: The absolute path of the directory, or the URL.

    Raises:
        CheckpointInUseError: Another group saves to this root.
        CheckpointExistsError: The root has checkpoints, and ``existing`` is ``refuse``; or it is ``clear``, and another
            program wrote some of them.
        TransportError: A rank failed; the same error on all ranks.
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
        upload: Upload | None = None,
        read_only: bool = False,
        settings: StoreSettings | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._settings = settings if settings is not None else StoreSettings()
        if not isinstance(self._settings, StoreSettings):
            raise ConfigurationError(f"expected StoreSettings as settings, got {type(settings).__name__}")
        if upload is not None and not isinstance(upload, Upload):
            raise ConfigurationError(f"expected an Upload as upload, got {type(upload).__name__}")
        self.recorder = recorder if recorder is not None else Recorder()
        trouble: ConfigurationError | None = None
        try:
            self._trust = self._settings.trust()
        except ConfigurationError as error:
            # `check` below reports the error to the other ranks.
            self._trust, trouble = Trust(None, "", accepts_unsigned=False), error
        self._is_read_only = read_only
        self.root: Final = checked_root(root)
        group = RankGroup.of(process_group, keys=self._trust.keys)
        self._root = root_at(self.root, "step", is_private=self._settings.private)
        self._agreement = Agreement(group, "foreground", self._settings.timeout)
        retry_s = self._settings.retry_s
        uploaded = root_at(upload.url, "step") if upload is not None else None
        self._inventory = Inventory(self._agreement, self._root, uploaded=uploaded, retry_s=retry_s, trust=self._trust)
        self._stager = StateStager()
        retention = Retention(self._root, self._inventory.mutex, keep, upload)
        self._background = BackgroundSaver(
            group, self._inventory, consolidate, self._settings, trust=self._trust, retention=retention
        )
        self._end = SafeEnd()
        self._is_closed = False

        def check() -> Mapping[str, object]:
            if trouble is not None:
                raise trouble
            common = checked_store_arguments(rank_local, existing, keep, consolidate, self._settings)
            check_place(self._root.name, consolidate, upload, self._settings)
            self._stager.rank_local = cast(tuple[str, ...], common["rank_local"])
            token = "none" if self._trust.keys is None else "one"
            return {**common, "upload": upload, "read_only": bool(read_only), "token": token}

        try:
            compare_settings(self._agreement, "compare the settings", check)
            if not read_only:
                owner = f"ranks {list(group.global_ranks)[:16]} of a group of {group.size}"
                self._inventory.open_root(owner, existing)
                self._background.start(self._agreement)
        except BaseException:
            self.close()
            raise

    def prefault(self, state: Mapping[str, object]) -> None:
        """Allocate memory pages for copies as large as ``state``, in the background, so that the first save is fast.

        Raises:
            SnapshotError: The state cannot be captured.
        """
        self._check_open()
        self._stager.prefault(state)

    def save(
        self, step: int, state: State, *, local: State | None = None, wait: bool = False, overwrite: bool = False
    ) -> SaveHandle:
        """Copy the state, and write the copy to disk while training continues.

        The state may change as soon as this method returns. If the state can never be saved, this method raises the
        error on all ranks. The returned handle raises all other errors, on all ranks.

        Args:
            step: The committed step.
            state: Nested dicts of tensors, DTensors and plain values, as for ``torch.distributed.checkpoint``; or a
                function that returns them, which is called at once. The state must not change during the call.
            local: Rank-local values by top-level key, in addition to the keys in ``rank_local``.
            wait: Whether to return only when the checkpoint is complete.
            overwrite: Whether the save may replace a checkpoint of this step.

        Raises:
            UnsupportedLeafError: The state of a rank contains a value that cannot be saved; ``path`` names the value.
            CheckpointError: The state of a rank is not a dict.
            CheckpointExistsError: The directory of this step exists, and another program wrote it.
            SaveInProgressError: An earlier save is still running, and ``StoreSettings.busy`` is ``error``.
            TransportError: Too many saves in a row have failed; or, with ``wait``, this save failed.
        """
        handle = self._save(step, lambda: self._stager.stage(step, state, local), overwrite=overwrite)
        if wait:
            handle.result()
        return handle

    def save_leased(
        self, step: int, lease: Lease, *, local: State | None = None, overwrite: bool = False
    ) -> SaveHandle:
        """Write a snapshot that a transport serves, without copying it. Raises the errors of `save` without ``wait``.

        ``lease`` returns the snapshot, and may wait for it; the store's own thread calls it once. The other arguments
        are those of `save`; ``local`` is copied at once.
        """
        return self._save(step, lambda: self._stager.stage(step, None, local, lease), overwrite=overwrite)

    def run_on_all_ranks(self, phase: str, action: Callable[[], None], *, timeout: timedelta) -> None:
        """Run ``action`` on every rank. If the action fails on one rank, all ranks raise an error.

        The action may take ``timeout``; meanwhile, this rank sends heartbeats. Errors name the action by ``phase``.

        Raises:
            TransportError: The action failed on a rank; the same error on all ranks.
            Exception: The action failed on this rank with another error, which only this rank raises.
        """
        self._check_open()
        own_errors: list[Exception] = []

        def act() -> None:
            try:
                self._agreement.showing_life(action, timeout.total_seconds())
            except Exception as error:
                own_errors.append(error)
                raise

        try:
            self._agreement.run_on_all_ranks(phase, act)
        except TransportError:
            if own_errors and not isinstance(own_errors[0], TransportError):
                raise own_errors[0] from None
            raise

    def check_health(self) -> StoreHealth:
        """Return the health of the writer processes and saves of all ranks, as of the previous call. Waits for no rank.

        Raises:
            TransportError: More saves in a row have failed than ``StoreSettings.max_failed_saves`` allows.
            RankGoneError: A rank did not take part in time.
        """
        self._check_open()
        return self._background.check_health()

    def wait(self) -> None:
        """Wait until no save is running. Only the handle of a save raises the error of that save."""
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
        """Load a checkpoint into the layout of this group of ranks. The saved layout may be another one.

        Args:
            step: The step to load, or ``latest`` for the newest complete checkpoint.
            into: This rank's own state, whose tensors are loaded in place. Top-level keys that ``into`` lacks are not
                loaded. For keys that ``into`` lacks at deeper levels, the result has new tensors. Without ``into`` and
                ``like``, the result has all tensors whole.
            like: Decides how new tensors are sharded; see ``HTTPTransport.fetch_sharded``.
            check: Called with a description of the checkpoint before any data is read; its error ends the load on all
                ranks. If ``check`` is omitted, the checkpoint must have all tensors of ``into``, with the same shapes
                and dtypes; and if ``into`` has rank-local state, the same number of ranks must have saved it. With
                ``check``, rank-local state that another number of ranks saved is not loaded.
            is_comparable: Whether to prepare `LoadedCheckpoint.differences`, which takes a second pass over the data.

        Raises:
            CheckpointNotFoundError: No such checkpoint exists, or another process deleted it during the read.
            CheckpointDamagedError: A file differs from its digests; ``files`` names it. Tensors of ``into`` that
                already had new data were overwritten with NaN patterns.
            ConfigurationError: Ranks request different steps.
            TransportError: The checkpoint does not match ``into``, or a rank failed; the same error on all ranks.
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
        """Load the newest checkpoint that is not damaged. The arguments are those of `load`.

        Returns:
            The loaded checkpoint; ``None`` if no checkpoint exists.

        Raises:
            CheckpointDamagedError: All existing checkpoints are damaged.
            CheckpointError: Another program wrote the newest checkpoint, with ``torch.distributed.checkpoint``.
            CheckpointNotFoundError: Another process deletes checkpoints faster than this call reads them.
            TransportError: The checkpoint does not match ``into``, or a rank failed; the same error on all ranks.
        """
        destination = Destination(into=into, like=like, check=check, is_comparable=is_comparable)
        with self.recorder.begin("load", phase="find") as recording:
            self._inventory.refuse_newer_of_dcp()
            self._await_saves()
            return load_newest_good(
                self._inventory.candidates,
                lambda candidate: self._load(candidate.step, destination, recording, is_own=candidate.is_own),
            )

    def newer_of_dcp(self) -> DCPCheckpoint | None:
        """Return the newest checkpoint if another program wrote it through ``torch.distributed.checkpoint``.

        Raises:
            CheckpointUntrustedError: A job token is set, and ``StoreSettings.accept_unsigned`` is ``False``.
            CheckpointError: The checkpoint cannot be read.
        """
        self._await_saves()
        return self._inventory.newer_of_dcp()

    @property
    def is_read_only(self) -> bool:
        """Whether the store only loads."""
        return self._is_read_only

    def steps(self) -> tuple[int, ...]:
        """Return the steps of all complete checkpoints, ascending."""
        self._await_saves()
        return self._inventory.steps()

    def latest(self) -> int | None:
        """Return the step of the newest complete checkpoint; ``None`` if no checkpoint exists."""
        return max(self.steps(), default=None)

    def verify(self, step: CheckpointSelector = "latest") -> None:
        """Read every file of a checkpoint, and compare it with its digests. Each file is read by one rank.

        Raises:
            CheckpointNotFoundError: No such checkpoint exists, or another process deleted it during the read.
            CheckpointDamagedError: Files are missing or differ from their digests; ``files`` names them.
            ConfigurationError: Ranks request different steps.
        """
        self._await_saves()
        self._inventory.verify(step)

    def prune(self, keep: int) -> tuple[int, ...]:
        """Delete all but the newest ``keep`` checkpoints; return the steps of the deleted ones.

        Before that, the call verifies the ``keep`` newest checkpoints until one is good. If all of them are damaged, it
        also keeps older checkpoints, up to the first good one.

        Raises:
            ConfigurationError: ``keep`` differs between ranks.
        """
        self._check_saving()
        self.wait()
        return self._inventory.prune(keep)

    def close(self) -> None:
        """Finish running saves, end the thread and the writer process, and release the root. Idempotent."""
        self._is_closed = True
        self._end(self._close)

    def _close(self) -> None:
        self._background.close()
        self._agreement.close()
        self._stager.close()
        self._root.release()

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def _save(self, step: int, stage: Callable[[], StagedState], *, overwrite: bool) -> SaveHandle:
        step = checked_directory_number("step", step)
        self._check_saving(step)
        if not self._background.admits(step):
            return SaveHandle(step, is_skipped=True)
        recording = self.recorder.begin("save", phase="clone")
        recording.describe(step=step)
        try:
            staged = stage()

            def check() -> None:
                staged.check()
                if self._agreement.is_first:
                    self._root.refuse_foreign(step)

            try:
                self._agreement.step = step
                recording.phase("agree")
                # A state that no attempt could save raises before training continues.
                self._agreement.run_on_all_ranks("copy the state", check)
                recording.phase("write")
            except BaseException:
                # Without this, a cycle through the exception of a signal handler could keep the copy alive.
                staged.release()
                raise
            handle = self._background.submit(step, staged, overwrite=overwrite)
        except BaseException as error:
            recording.end("failed", error=error)
            raise
        recording.leave()

        def end(saved: Future[None]) -> None:
            # Called on the store's thread when all ranks know the outcome.
            error = saved.exception()
            recording.end("ok" if error is None else "failed", error=error or "")

        handle.future.add_done_callback(end)
        return handle

    def _load(
        self,
        step: CheckpointSelector,
        destination: Destination,
        recording: Recording,
        *,
        is_own: bool | None = None,
    ) -> LoadedCheckpoint[Any]:
        phase("find")
        found = self._inventory.find(step, is_own=is_own)
        phase("read")
        with self._inventory.reading(found):
            loaded = load(found, destination, self._settings, self._trust, self._agreement)
        # Each rank records only the bytes that it has read from disk.
        recording.describe(step=loaded.step, num_bytes=loaded.num_bytes_read)
        return loaded

    def _await_saves(self) -> None:
        self._check_open()
        self.wait()

    def _check_open(self, step: int | None = None) -> None:
        if self._is_closed:
            # Another group may have claimed the root by now.
            raise CheckpointError("expected an open store, this one has been closed", step=step)

    def _check_saving(self, step: int | None = None) -> None:
        self._check_open(step)
        if self._is_read_only:
            raise CheckpointError("expected a store that saves, this one has read_only=True", step=step)
