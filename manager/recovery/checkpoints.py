"""Saves durable checkpoints of one replica at step boundaries, and loads them at the start or without a live peer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import ft_transport
from ft_transport import ConfigurationError, SnapshotLimitError, TransportError
from ft_transport.runtime.signal_safe import SafeFuture
from ft_transport.telemetry.metrics import MetricValues
from manager.errors import ManagerError, RegistryError
from manager.quorum.decision import next_lineage
from manager.recovery.local_state import LocalState
from manager.recovery.peers import Recovery
from manager.snapshots.scheduler import SnapshotScheduler
from manager.state.compatibility import check_fit
from manager.state.parameter_order import MANAGER_KEY, TAKEN_OVER, USER_KEY, OrderTakenOverError, incoming_names
from manager.state.registry import listed
from manager.state.replica_state import ReplicaState

if TYPE_CHECKING:
    from ft_transport import CheckpointStore, DCPCheckpoint, LoadedCheckpoint, SaveHandle
    from ft_transport.state.matching import Incoming
    from ft_transport.transfer.server import SnapshotLease

logger = logging.getLogger(__name__)

_LEAST_BYTES_PER_S: Final = 1 << 20
"""The rate of reading below which loading a checkpoint times out."""

ResumeKeys: TypeAlias = Literal["same", "shared"]
"""The argument ``keys`` of `StateManager.resume`: which keys of a checkpoint are loaded."""
_OTHER_KEYS: Final = (
    "to load the keys that both have, call resume(keys='shared') on all replicas (docs/changing-a-job.md)"
)


class Checkpoints:
    """Saves a replica's state to a store of checkpoints, and loads the state from the store.

    All ranks of the store's group must call each method, on the training thread.

    Args:
        state: The replica's state.
        store: The store of checkpoints.
        save_every: Interval of automatic saves, in steps.
        snapshots: Takes the snapshots that are saved and that peers receive; ``None`` without a transport.
        local: Saves and loads the replica's local state.

    Attributes:
        store: The store of checkpoints.
        counts: Metrics: the number of loaded checkpoints.
    """

    def __init__(
        self,
        state: ReplicaState,
        store: CheckpointStore,
        *,
        save_every: int | None,
        snapshots: SnapshotScheduler | None,
        local: LocalState,
    ) -> None:
        self._state = state
        self._local = local
        self.store = store
        self._save_every = save_every
        self._snapshots = snapshots
        self._saved_step: int | None = None
        self._resumed_step: int | None = None
        self.counts = MetricValues("checkpoints")

    def boundary(self) -> None:
        """Log writer processes that have died, and save the state if a save is due at this step boundary."""
        health = self.store.check_health()
        if health.dead_writers:
            logger.warning("the writer processes of ranks %s have died, new ones are starting", health.dead_writers)
        step = self._state.step
        is_due = self._save_every is not None and step > 0 and step % self._save_every == 0
        if is_due and self._saved_step != step:
            self.save(wait=False, overwrite=True)

    def save(self, *, wait: bool, overwrite: bool) -> SaveHandle:
        """Save a checkpoint of the present step; the arguments are those of `StateManager.save`."""
        state, store = self._state, self.store
        state.assume_training_thread()
        step = self._saved_step = state.step
        if step == self._resumed_step and not overwrite and not state.is_past_step:
            return ft_transport.SaveHandle(step, is_skipped=True)
        with ExitStack() as held:

            def local() -> dict[str, object]:
                self._refuse_to_save()
                return self._local.part()

            def replicated() -> dict[str, object]:
                held.enter_context(state.lock.read(f"copying step {step} for a checkpoint"))
                return state.content()

            try:
                # If this rank refuses, the other ranks receive the refusal, and do not wait for a checkpoint.
                self._refuse_to_save()
                lease = self._lease(self._snapshots) if self._snapshots is not None else None
            except ManagerError as error:
                store.save(step, partial(_raise, error))
                raise
            if lease is not None:
                handle = store.save_leased(step, lease, local=local, overwrite=overwrite)
            else:
                handle = store.save(step, replicated, local=local, overwrite=overwrite)
        if wait:
            handle.result()
        return handle

    def _lease(self, snapshots: SnapshotScheduler) -> Callable[[], SnapshotLease] | None:
        """Begin a snapshot of the present step, and return a function that waits for the snapshot and leases it.

        Return ``None`` if receivers are reading as many snapshots as the transport may have.
        """
        step, timeout_s = self._state.step, self._state.timeout.total_seconds()
        leased: SafeFuture[SnapshotLease] = SafeFuture()

        def await_lease() -> SnapshotLease:
            taken.result(timeout_s)
            return leased.result(timeout_s)

        try:
            taken = snapshots.take_leased(leased)
        except SnapshotLimitError as error:
            logger.debug("step %d: receivers are reading all snapshots; saving copies the state: %s", step, error)
            return None
        except TransportError as error:
            taken = SafeFuture()
            taken.set_exception(error)
        return await_lease

    def newest(self) -> int:
        """Return the step of the newest checkpoint, also of another program; 0 if there is none."""
        of_dcp: DCPCheckpoint | None = None
        with suppress(TransportError):  # `resume` raises the error, unless there is a kept state
            of_dcp = self.store.newer_of_dcp()
        return of_dcp.step if of_dcp is not None else self.store.latest() or 0

    def resume(self, keys: ResumeKeys = "same") -> Recovery | None:
        """Load the newest checkpoint; the argument is that of `StateManager.resume`."""
        if keys not in ("same", "shared"):
            raise ConfigurationError(f"expected keys='same' or 'shared', got {keys!r}")
        of_dcp = self.store.newer_of_dcp()
        resumed = self._resume_own(only_shared=keys == "shared") if of_dcp is None else self._resume_from_dcp(of_dcp)
        if resumed is not None:
            self._saved_step = self._resumed_step = resumed.step
            self.counts.add("resumes_total")
            logger.info("resumed step %d from %s", resumed.step, self.store.root)
        return resumed

    def _resume_own(self, *, only_shared: bool) -> Recovery | None:
        state, store = self._state, self.store
        own_errors: list[Exception] = []
        with ExitStack() as held:

            def prepare() -> None:
                state.require_training_thread()
                held.enter_context(state.lock.write("loading a checkpoint"))

            store.run_on_all_ranks("prepare to load a checkpoint", prepare, timeout=state.timeout)
            earlier = state.partial
            state.mark_partial("latest", "the load was interrupted")
            try:
                try:
                    loaded = self._load_newest(own_errors, only_shared)
                except TransportError as error:
                    # A rank has reordered its parameters, so that the plans of all ranks are outdated: load again.
                    if TAKEN_OVER not in str(error):
                        raise
                    own_errors.clear()
                    loaded = self._load_newest(own_errors, only_shared)
            except (ManagerError, TransportError) as error:
                if getattr(error, "destination_touched", False):
                    state.mark_partial("latest", str(error))
                else:
                    state.partial = earlier
                # The error of this rank itself is raised with its own type.
                raise own_errors[0] if own_errors else error from None
            if loaded is None:
                state.partial = earlier
                return None
            state.mark_partial(loaded.step, "the load was interrupted")
            # If another rank could not load the checkpoint, this rank must not step with it.
            store.run_on_all_ranks(
                "load the checkpoint", partial(self._apply, loaded, only_shared), timeout=state.timeout
            )
            state.partial = None
        return Recovery(step=loaded.step, source=f"{store.root}, step {loaded.step}")

    def _load_newest(self, own_errors: list[Exception], only_shared: bool) -> LoadedCheckpoint[Any] | None:
        """Load the newest intact checkpoint into this rank's own tensors. The caller must hold the write lock.

        If a checkpoint does not fit this rank, the error that says so is appended to ``own_errors``.

        Raises:
            TransportError: Loading failed on a rank; raised on all ranks. If the message contains `TAKEN_OVER`, a rank
                has reordered its parameters as in the checkpoint, and the caller must call this method again.
        """
        state, store = self._state, self.store
        into: dict[str, object] = {}

        def collect_own_state() -> None:
            state.note_configured()
            into.update(state.content())
            if self._local.is_known:
                into.update(self._local.part())

        def check(incoming: Incoming) -> None:
            try:
                fit(incoming)
            except Exception as error:
                own_errors.append(error)
                raise

        def fit(incoming: Incoming) -> None:
            if state.take_over_order(incoming_names(incoming, state.registry)):
                raise OrderTakenOverError(TAKEN_OVER)
            note = f"it is the checkpoint of step {incoming.step} in {store.root}"
            check_fit(incoming, state.registry, into, note=note, keys_note=_OTHER_KEYS, only_shared=only_shared)
            kept = [key for key in state.registry.registered_keys() if key not in (incoming.keys(USER_KEY) or ())]
            if kept and not self._local.is_known:
                raise ManagerError(
                    f"expected a replica_id, to find this replica's local state: the checkpoint lacks the keys {kept}"
                )

        store.run_on_all_ranks("collect the own state", collect_own_state, timeout=state.timeout)
        like = state.registry.parameter_finder()
        return store.load_newest_good(into=into, like=like, check=check, is_comparable=True)

    def _resume_from_dcp(self, checkpoint: DCPCheckpoint) -> Recovery:
        """Load a checkpoint that another program wrote with ``torch.distributed.checkpoint`` (DCP)."""
        from manager.recovery.dcp_loading import load_dcp  # noqa: PLC0415 # it imports DCP, which takes a second

        state, step = self._state, checkpoint.step

        def note_change() -> None:
            state.mark_partial(step, "the load was interrupted")

        def load() -> None:
            state.require_training_thread()
            with state.lock.write("loading a checkpoint"):
                parts = load_dcp(checkpoint, state.registry, note_change)
                state.load({USER_KEY: parts, MANAGER_KEY: {"step": step}})
                # If another rank could not load the checkpoint, this rank must not step with it.
                note_change()

        num_bytes = sum(dtype.itemsize * shape.numel() for dtype, shape in checkpoint.tensors.values())
        self.store.run_on_all_ranks(
            "load the checkpoint of DCP",
            load,
            timeout=state.timeout + timedelta(seconds=num_bytes / _LEAST_BYTES_PER_S),
        )
        state.partial = None
        if local := [entry.key for entry in state.registry.entries("local")]:
            logger.warning("step %d from %s: the local states %s are unchanged", step, checkpoint.path, local)
        logger.warning(
            "step %d from %s: another program wrote this checkpoint with torch.distributed.checkpoint, and no digest "
            "covers its files",
            step,
            checkpoint.path,
        )
        return Recovery(step=step, source=f"{checkpoint.path} of torch.distributed.checkpoint")

    def _refuse_to_save(self) -> None:
        self._state.require_whole()
        if self._state.is_past_step:
            raise ManagerError(
                f"expected a step boundary to save at: an optimizer has stepped since step {self._state.step} began; "
                "call save right after start_step or start_quorum"
            )

    def _apply(self, loaded: LoadedCheckpoint[Any], only_shared: bool) -> None:
        """Pass the parts of a loaded checkpoint to the load functions, and compare the result with the checkpoint."""
        state = self._state
        try:
            state.load(loaded.state, only_shared=only_shared)
            state.mark_partial(loaded.step, "the comparison after loading was interrupted")
            differences = loaded.differences(state.content_like(loaded.state))
            self._local.load(loaded.state, loaded.step, str(self.store.root), only_shared=only_shared)
        except RegistryError as error:
            state.mark_partial(loaded.step, str(error))
            raise
        if differences:
            state.mark_partial(
                loaded.step,
                "the loaded state differs from the saved state, because a load function has changed it: "
                + listed(differences, "; "),
            )
            state.refuse_partial()
        self._note_other_keys(loaded)

    def _note_other_keys(self, loaded: LoadedCheckpoint[Any]) -> None:
        """Log the keys that were not loaded.

        If a quorum is used and this replica has keys that the checkpoint lacks, change the lineage (the history of the
        state that replicas compare): then all replicas receive the state of one replica.
        """
        state, registry = self._state, self._state.registry
        saved, own = dict(loaded.state[USER_KEY]), registry.registered_keys()
        is_new = any(key not in saved for key in own)
        if (local := self._local.saved(loaded.state)) is not None:
            saved, own = {**saved, **local}, [*own, *registry.registered_keys("local")]
        kept, left_out = [key for key in own if key not in saved], [key for key in saved if key not in own]
        if not kept and not left_out:
            return
        if is_new and self._local.replica_name is not None:
            # Replicas have different values under these keys, so that their states need different lineages.
            state.lineage = next_lineage(state.lineage, f"{kept} of {self._local.replica_name}", state.step)
        stay = f"{kept} are unchanged, because the checkpoint lacks these keys" if kept else ""
        out = f"{left_out} are not loaded, because no state is registered under these keys" if left_out else ""
        logger.warning("step %d from %s: %s", loaded.step, self.store.root, "; ".join(filter(None, (stay, out))))


def check_store(store: CheckpointStore | None, save_every: int | None) -> None:
    """Check the arguments ``checkpoint_store`` and ``save_every`` of a manager.

    Raises:
        ConfigurationError: ``save_every`` was given without a store, or is not a positive whole number.
        TypeError: The store is not a ``CheckpointStore`` of ``ft_transport``.
    """
    check_interval("save_every", save_every, needs="checkpoint_store", given=store)
    if store is not None and not isinstance(store, ft_transport.CheckpointStore):
        raise TypeError(f"expected a CheckpointStore of ft_transport, got {type(store).__name__}")


def check_interval(name: str, interval: int | None, *, needs: str, given: object) -> None:
    """Check an interval of a manager, in steps.

    Args:
        name: Name of the argument.
        interval: Its value.
        needs: Name of the argument without which the interval has no effect.
        given: The value of that argument.

    Raises:
        ConfigurationError: The interval is not a positive whole number, or ``given`` is ``None``.
    """
    if interval is None:
        return
    if isinstance(interval, bool) or not isinstance(interval, int):
        raise ConfigurationError(f"expected a whole number as {name}, got {type(interval).__name__} {interval!r}")
    if interval < 1 or given is None:
        raise ConfigurationError(f"expected a positive {name} and a {needs}, got {name}={interval} and {needs}={given}")


def _raise(error: Exception) -> Mapping[str, object]:
    raise error
