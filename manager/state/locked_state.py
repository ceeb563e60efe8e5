"""The state of one replica: what belongs to it, who may change it, and who may read it meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from operator import index
from typing import Any, TypeVar

from torch.optim import Optimizer

from manager.errors import ManagerError, RegistryError, StateTornError
from manager.state.compatibility import MANAGER_KEY, USER_KEY
from manager.state.lock import StateLock
from manager.state.optimizer_guard import OptimizerAttachment, attach_optimizers
from manager.state.registry import Scope, StateRegistry
from manager.state.step_ledger import StepLedger

T = TypeVar("T")

logger = logging.getLogger(__name__)


class LockedState:
    """A replica's state behind its lock, and the step that it shows. Knows nothing of other replicas.

    Locking methods may be called from any thread; the others belong to the training thread.
    """

    def __init__(
        self,
        load_state_dict: Callable[[Any], object] | None,
        state_dict: Callable[[], object] | None,
        *,
        timeout: timedelta,
    ) -> None:
        """Make an empty one.

        Args:
            load_state_dict: With ``state_dict``, registered under the key ``default`` (as in torchft).
            state_dict: See ``load_state_dict``.
            timeout: Deadline of every wait for the lock.

        Raises:
            ValueError: Only one of the two functions was given.
        """
        self._timeout = timeout
        self._lock = StateLock(timeout=timeout, before_change=self._before_change)
        self._registry = StateRegistry()
        self._attachments: list[OptimizerAttachment] = []
        self._ledger = StepLedger()
        self._step = 0
        self._batches_committed = 0
        self._lineage = ""
        self._is_past_step = False
        self._training_thread: int | None = None
        self._torn: StateTornError | None = None
        if (load_state_dict is None) != (state_dict is None):
            raise ValueError("expected both load_state_dict and state_dict, or neither")
        if load_state_dict is not None and state_dict is not None:
            self.register_state_dict_fn("default", load_state_dict, state_dict)

    # ------------------------------------------------------------------------------------------------------- the lock

    def allow_state_dict_read(self) -> None:
        """Let readers in again; as torchft's method. Idempotent, from any thread."""
        self._lock.allow()

    def disallow_state_dict_read(self) -> None:
        """Keep readers out until `allow_state_dict_read`; as torchft's method. Idempotent, from any thread.

        For the step of an optimizer; what is registered as stable changes inside `writing` sections alone.

        Raises:
            LockTimeoutError: Readers held the lock until the deadline; nothing has changed then.
        """
        self._lock.disallow()

    def writing(
        self, what: str = "changing the state", timeout: timedelta | None = None
    ) -> AbstractContextManager[Any]:
        """Return a context manager inside which this thread may change the state. Nests.

        Raises:
            LockTimeoutError: Others held the lock until the deadline.
        """
        return self._lock.write(what, timeout)

    def reading(self, what: str = "reading the state", timeout: timedelta | None = None) -> AbstractContextManager[Any]:
        """Return a context manager inside which no optimizer steps. Hold it for a copy, never across a network.

        Raises:
            LockTimeoutError: A writer held the lock until the deadline.
        """
        return self._lock.read(what, timeout)

    def read_lock(self, timeout: timedelta) -> AbstractContextManager[Any]:
        """Return what an ``HTTPTransport`` takes as ``read_lock``."""
        return self._lock.read("taking a snapshot", timeout)

    # ---------------------------------------------------------------------------------------------- what the state is

    def register_state_dict_fn(
        self,
        key: str,
        load_state_dict: Callable[[T], object],
        state_dict: Callable[[], T],
        *,
        scope: Scope = "replicated",
        on_training_thread: bool = False,
        is_stable: bool = False,
    ) -> None:
        """Register the two functions of one part of the state; as torchft's method.

        Args:
            key: Names the part; the same on every replica.
            load_state_dict: Takes a received part. Called inside the write lock.
            state_dict: Returns the part, live tensors as they are. Called afresh for every snapshot.
            scope: ``replicated`` state is equal on every replica and is served to others; ``local`` state is not.
            on_training_thread: The functions may only be called on the training thread.
            is_stable: Its tensors change only inside `writing` sections, but for those that are parameters or states of
                attached optimizers: frozen weights, or copies that are kept between rare synchronisations. What no
                attached optimizer changes is then served from where it lies, and copied only if a `writing` section
                comes while it is being read.

        Raises:
            RegistryError: The key is taken.
        """
        self._registry.register(
            key,
            load_state_dict,
            state_dict,
            scope=scope,
            on_training_thread=on_training_thread,
            is_stable=is_stable,
        )

    def set_state_dict_fns(self, load_state_dict: Callable[[T], object], state_dict: Callable[[], T]) -> None:
        """Register under the key ``set_state_dict_fns``; torchft's older name for `register_state_dict_fn`.

        Raises:
            RegistryError: They have been set already.
        """
        logger.warning("set_state_dict_fns is torchft's older name; call register_state_dict_fn")
        self.register_state_dict_fn("set_state_dict_fns", load_state_dict, state_dict)

    def register(
        self,
        key: str,
        obj: object,
        *,
        scope: Scope = "replicated",
        on_training_thread: bool = False,
        is_stable: bool = False,
    ) -> None:
        """Register anything with ``state_dict`` and ``load_state_dict``: a module, optimizer, scheduler, loader.

        Arguments as for `register_state_dict_fn`.

        Raises:
            RegistryError: The key is taken.
            TypeError: The object lacks one of the methods.
        """
        self._registry.register_object(
            key, obj, scope=scope, on_training_thread=on_training_thread, is_stable=is_stable
        )

    def replace_state_dict_fn(self, key: str, state_dict: Callable[[], object], *, is_stable: bool) -> None:
        """Give what is registered under ``key`` another state function; its load function stays.

        Raises:
            RegistryError: Nothing is registered under the key.
        """
        self._registry.replace(key, state_dict, is_stable=is_stable)

    def attach(self, *optimizers: Optimizer, every_commit: bool = True) -> OptimizerAttachment:
        """Make every ``step()`` of the optimizers a write section, so that nobody copies a state in the middle of one.

        Their parameters and states are then cloned in the background when a snapshot is taken, from the step boundary
        until the pre-step hook at the latest. Nothing else may change those tensors meanwhile outside a `writing`
        section; where something does, leave the optimizer unattached, and its state is copied at the boundary
        instead. torchft's LocalSGD and DiLoCo need ``guard_local_sgd`` and ``guard_diloco``.

        Args:
            *optimizers: Registered as well, under keys of their own.
            every_commit: Whether each optimizer steps once for each commit of a quorum; a replica in which one does not
                is healed. Turn it off where steps and commits do not go together (local updates between rare
                synchronisations of one's own, optimizers by turns). torchft's LocalSGD and DiLoCo are recognised.

        Returns:
            A handle that detaches them; also a context manager.
        """
        attachment = attach_optimizers(
            self._lock,
            optimizers,
            before_step=self._before_step,
            on_step_end=self._note_step,
            on_step_failed=self._note_failed_step,
        )
        if not every_commit:
            self._ledger.let_step_freely(optimizers)
        # What is shared as something that no optimizer's step changes, may be theirs.
        self._before_change(False)
        self._attachments = [*(earlier for earlier in self._attachments if earlier.optimizers), attachment]
        return attachment

    def replica_state(self) -> dict[str, object]:
        """Return the replicated state of this replica, live tensors included; the caller holds the lock.

        Raises:
            ManagerError: A state function that asked for the training thread would run on another one.
            RegistryError: A state function failed.
        """
        self._require_training_thread()
        return {USER_KEY: self._registry.state_dict("replicated"), MANAGER_KEY: self.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Apply a received state inside the write lock.

        Args:
            state: What `replica_state` of a peer returned.

        Raises:
            RegistryError: It does not fit what is registered here. If a load function failed midway, this replica
                refuses to step until another load succeeds.
            ManagerError: A load function asked for the training thread.
        """
        self._require_training_thread()
        with self._lock.write("loading a received state"):
            self._load(state)

    def state_dict(self) -> dict[str, int | str]:
        """Return the manager's own counters, for a checkpoint: ``step``, ``batches_committed`` and ``lineage``."""
        return {"step": self._step, "batches_committed": self._batches_committed, "lineage": self._lineage}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the manager's own counters.

        Args:
            state_dict: What `state_dict` returned. ``step`` alone, as in older checkpoints and torchft's, will do if
                all replicas load the same.

        Raises:
            ManagerError: ``step`` is no whole number from 0.
        """
        self._step = checked_step(state_dict["step"])
        self._batches_committed = int(state_dict.get("batches_committed", 0))
        self._lineage = str(state_dict.get("lineage", ""))
        self._is_past_step = False

    def current_step(self) -> int:
        """The committed step that the state shows; the last one that `start_step` was given."""
        return self._step

    # --------------------------------------------------------------------------------------------------------- inside

    def _load(self, state: object) -> None:
        parts = state if isinstance(state, Mapping) else {}
        for key in (USER_KEY, MANAGER_KEY):
            if not isinstance(parts.get(key), Mapping):
                raise RegistryError(
                    f"expected a replica's state with the part {key!r}, which is missing; nothing was loaded",
                    keys=(key,),
                )
        step = parts[MANAGER_KEY].get("step")
        if not isinstance(step, int):
            raise RegistryError(
                f"expected a step number in the part {MANAGER_KEY!r} of a replica's state, got {step!r}; nothing was "
                "loaded",
                keys=(MANAGER_KEY,),
            )
        before, self._torn = self._torn, StateTornError(step=step, reason="loading it was interrupted")
        self._ledger.replaced()
        self._note_replaced()
        try:
            self._registry.load_state_dict(parts[USER_KEY], "replicated")
        except RegistryError as error:
            self._torn = StateTornError(step=step, reason=str(error)) if error.__cause__ is not None else before
            raise
        self.load_state_dict(parts[MANAGER_KEY])
        self._torn = None

    def _require_training_thread(self) -> None:
        if self._training_thread in (None, threading.get_ident()):
            return
        keys = [entry.key for entry in self._registry.entries("replicated") if entry.on_training_thread]
        if keys:
            raise ManagerError(f"expected the training thread to call the state functions of {keys}, got another one")

    def _before_step(self, optimizer: Optimizer) -> None:
        """Called before an attached optimizer takes the lock; may refuse the step."""
        del optimizer
        self._refuse_torn_state()

    def _note_step(self, optimizer: Optimizer) -> None:
        """Called inside the write section of a step that succeeded."""
        if not self._registry.is_calling():
            self._is_past_step = True
            self._ledger.stepped(optimizer)

    def _note_failed_step(self, optimizer: Optimizer, error: BaseException) -> None:
        """Called when a step failed that may have changed something. Without a quorum nobody relies on it."""

    def _before_change(self, is_optimizer_step: bool) -> None:
        """Called inside every write section, before anything is changed."""

    def _note_replaced(self) -> None:
        """Called before another state is loaded."""

    def _refuse_torn_state(self) -> None:
        torn = self._torn
        if torn is not None:
            # A new one each time: an exception keeps every traceback, and the frames in it, of where it was raised.
            raise StateTornError(step=torn.step, reason=torn.reason)

    def _attached_optimizers(self) -> list[Optimizer]:
        return [optimizer for attachment in self._attachments for optimizer in attachment.optimizers]


def checked_step(step: object) -> int:
    """Return the number of committed steps.

    Raises:
        ManagerError: It is no whole number from 0.
    """
    try:
        number = index(step) if not isinstance(step, bool) else -1  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise ManagerError(f"expected the number of committed steps, got {type(step).__name__} {step!r}")
    return number
