"""The state of one replica on disk: saved at step boundaries, and loaded when nobody alive has it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import ft_transport
from ft_transport import TransportError
from manager.errors import ConfigError, ManagerError, RegistryError, StateTornError
from manager.state.compatibility import check_fit
from manager.state.locked_state import LockedState

if TYPE_CHECKING:
    from ft_transport import CheckpointStore, Incoming, LoadedCheckpoint, SaveHandle, SnapshotLease

logger = logging.getLogger(__name__)

LOCAL_KEY: Final = "local"
"""Under this key a checkpoint has what is registered with ``scope="local"``, for each rank its own."""
_MAX_SHOWN: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What `Manager.recover` or `Manager.resume` did.

    Attributes:
        step: The committed step that this replica shows now.
        source: Where it came from: an address, or a directory.
    """

    step: int
    source: str


class CheckpointedState(LockedState):
    """A replica's state, and the durable checkpoints of it. Knows nothing of other replicas.

    With a store, `save`, `resume` and the step boundary are for all ranks of the store's group together.
    """

    def __init__(
        self,
        load_state_dict: Callable[[Any], object] | None,
        state_dict: Callable[[], object] | None,
        *,
        timeout: timedelta,
        checkpoint_store: CheckpointStore | None,
        save_every: int | None,
    ) -> None:
        """Make an empty one.

        Args:
            load_state_dict: See `LockedState`.
            state_dict: See `LockedState`.
            timeout: See `LockedState`.
            checkpoint_store: Where checkpoints go; of all ranks of this replica. The manager closes it.
            save_every: Save at the beginning of every step whose number this divides.

        Raises:
            ConfigError: ``save_every`` without a store, or no positive number.
        """
        super().__init__(load_state_dict, state_dict, timeout=timeout)
        if save_every is not None and (isinstance(save_every, bool) or not isinstance(save_every, int)):
            raise ConfigError(f"expected a whole number as save_every, got {type(save_every).__name__} {save_every!r}")
        if save_every is not None and (save_every < 1 or checkpoint_store is None):
            raise ConfigError(
                f"expected a checkpoint_store and a positive number with save_every, got {save_every} and "
                f"{checkpoint_store}"
            )
        if checkpoint_store is not None and not isinstance(checkpoint_store, ft_transport.CheckpointStore):
            raise TypeError(f"expected a CheckpointStore of ft_transport, got {type(checkpoint_store).__name__}")
        self._store = checkpoint_store
        self._save_every = save_every
        self._saved_step: int | None = None

    # --------------------------------------------------------------------------------------------------------- saving

    def save(self, *, wait: bool = False, overwrite: bool = False) -> SaveHandle:
        """Save a durable checkpoint of the present step, behind the training; all ranks call this.

        Call it right after the step boundary, before data is drawn: then the data loader's position in the checkpoint
        is that of the model. The snapshot is the one that other replicas are served, where there is a transport; what
        is registered with ``scope="local"`` is saved beside it, for each rank its own.

        Args:
            wait: Whether to return only when the checkpoint is complete.
            overwrite: Whether a checkpoint of this step may be replaced.

        Raises:
            ManagerError: There is no store, or an optimizer has stepped since the boundary.
            StateTornError: This replica holds part of a state.
            TransportError: As for ``CheckpointStore.save``.
        """
        store = self._checkpoints()
        if self._training_thread is None:
            self._training_thread = threading.get_ident()
        step = self._saved_step = self._step
        with ExitStack() as held:

            def local() -> dict[str, object]:
                self._refuse_to_save()
                return self._local_part()

            def state() -> dict[str, object]:
                held.enter_context(self._lock.read(f"copying step {step} for a checkpoint"))
                return self.replica_state()

            try:
                # What is refused here is told to the other ranks, who wait for no checkpoint that does not come.
                self._refuse_to_save()
                lease = self._snapshot_lease()
            except ManagerError as error:
                store.save(step, partial(_raise, error))
                raise
            if lease is not None:
                handle = store.save_leased(step, lease, local=local, overwrite=overwrite)
            else:
                handle = store.save(step, state, local=local, overwrite=overwrite)
        if wait:
            handle.result()
        return handle

    def resume(self) -> Recovery | None:
        """Load the newest durable checkpoint that is what was written; all ranks call this, before the first step.

        Returns:
            What was loaded; ``None`` if there is no checkpoint.

        Raises:
            ManagerError: There is no store.
            RegistryError: The checkpoint does not fit what is registered here, or a load function failed.
            StateTornError: After loading, the state is not the one that was saved.
            TransportError: All checkpoints are damaged, or loading failed; the same on all ranks.
        """
        store = self._checkpoints()
        into: dict[str, object] = {}
        own_errors: list[Exception] = []
        with ExitStack() as held:

            def prepare() -> None:
                self._require_training_thread()
                held.enter_context(self._lock.write("loading a checkpoint"))
                into.update({**self.replica_state(), **self._local_part()})

            def check(incoming: Incoming) -> None:
                note = f"it is the checkpoint of step {incoming.step} in {store.root}"
                _noted(own_errors, partial(check_fit, incoming, self._registry, into, note=note))

            try:
                preparing = partial(_noted, own_errors, prepare)
                store.run_on_all_ranks("prepare to load a checkpoint", preparing, timeout=self._timeout)
                earlier, self._torn = self._torn, StateTornError(step="latest", reason="loading it was interrupted")
                try:
                    loaded = store.load_newest_good(
                        into=into, like=self._registry.parameter_finder(), check=check, is_comparable=True
                    )
                except TransportError as error:
                    is_touched = error.destination_touched
                    self._torn = StateTornError(step="latest", reason=str(error)) if is_touched else earlier
                    raise
                if loaded is None:
                    self._torn = earlier
                    return None
                self._torn = StateTornError(step=loaded.step, reason="loading it was interrupted")
                # Where another rank could not load it, this one must not step with it either.
                applying = partial(_noted, own_errors, partial(self._apply, loaded))
                store.run_on_all_ranks("load the checkpoint", applying, timeout=self._timeout)
                self._torn = None
            except TransportError as error:
                # One's own error is as it would be without other ranks.
                raise own_errors[0] if own_errors else error from None
        self._saved_step = loaded.step
        logger.info("resumed step %d from %s", loaded.step, store.root)
        return Recovery(step=loaded.step, source=f"{store.root}, step {loaded.step}")

    # --------------------------------------------------------------------------------------------------------- inside

    def _checkpoints(self) -> CheckpointStore:
        if self._store is None:
            raise ManagerError("expected a checkpoint_store to save to and to load from, and there is none")
        return self._store

    def _local_part(self) -> dict[str, object]:
        local = self._registry.state_dict("local")
        return {LOCAL_KEY: local} if local else {}

    def _snapshot_lease(self) -> Callable[[], SnapshotLease] | None:
        """Begin a snapshot of the present step, and return what waits for it; ``None`` without a transport."""
        return None

    def _at_boundary(self) -> None:
        """Look after the writers, and save if it is time to."""
        if self._store is None:
            return
        health = self._store.check_health()
        if health.dead_writers:
            logger.warning("the writer processes of ranks %s are dead, and are being replaced", health.dead_writers)
        is_due = self._save_every is not None and self._step > 0 and self._step % self._save_every == 0
        if is_due and self._saved_step != self._step:
            self.save(overwrite=True)

    def _refuse_to_save(self) -> None:
        self._refuse_torn_state()
        if self._is_past_step:
            raise ManagerError(
                f"expected a step boundary to save at: an optimizer has stepped since step {self._step} began; call "
                "save right after start_step or start_quorum"
            )

    def _apply(self, loaded: LoadedCheckpoint[Any]) -> None:
        """Give the parts of a loaded state to the load functions."""
        state = loaded.state
        try:
            self._load(state)
            self._torn = StateTornError(step=loaded.step, reason="comparing it was interrupted")
            differences = loaded.differences(self.replica_state())
            self._registry.load_state_dict(state.get(LOCAL_KEY, {}), "local")
        except RegistryError as error:
            self._torn = StateTornError(step=loaded.step, reason=str(error))
            raise
        if differences:
            shown = "; ".join(differences[:_MAX_SHOWN]) + ("; …" if len(differences) > _MAX_SHOWN else "")
            self._torn = StateTornError(
                step=loaded.step,
                reason="after loading, the state is not the one that was saved; a load function has changed it: "
                + shown,
            )
            self._refuse_torn_state()

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()


def _raise(error: Exception) -> Mapping[str, object]:
    raise error


def _noted(errors: list[Exception], action: Callable[[], None]) -> None:
    """Run a rank's own part; what goes wrong in it is kept as it was raised."""
    try:
        action()
    except Exception as error:
        errors.append(error)
        raise
