"""The state of one replica: what belongs to it, which step it shows, and who may touch it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import timedelta
from itertools import chain
from operator import index
from typing import Any, Literal

from torch.optim import Optimizer

from manager.errors import ManagerError, RegistryError, StateTornError
from manager.state.hyperparameters import ConfiguredHyperparameters
from manager.state.lock import StateLock
from manager.state.optimizer_guard import OptimizerAttachment, attach_optimizers
from manager.state.overflows import Scalers
from manager.state.parameter_order import (
    MANAGER_KEY,
    NAMES_KEY,
    USER_KEY,
    Groups,
    names_in,
    own_part,
    take_over_order,
)
from manager.state.registry import StateRegistry
from manager.state.step_ledger import StepLedger
from manager.state.step_log import StepLog


class StateObserver:
    """What is told of changes of a `ReplicaState`, on the thread that makes them. Each method does nothing here."""

    def before_change(self, is_optimizer_step: bool) -> None:
        """Called inside every write section, before anything is changed."""

    def replaced(self) -> None:
        """Called before another state is loaded."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Called before an attached optimizer takes the lock; may raise to refuse the step."""

    def step_failed(self, optimizer: Optimizer, error: BaseException) -> None:
        """Called when a step failed that may have changed something."""

    def other_gradients(self, optimizer: Optimizer) -> None:
        """Called after a step whose closure changed the gradients."""


class ReplicaState:
    """A replica's state behind its lock, and the step that it shows. Knows nothing of snapshots, disks or replicas.

    Any thread may use the lock; the rest belongs to the training thread.

    Args:
        timeout: Deadline of every wait for the lock.

    Attributes:
        timeout: See above.
        lock: The lock around the state.
        registry: The functions that give and take its parts.
        ledger: Counts the optimizers' steps since the last commit.
        scalers: The gradient scalers.
        steps: The last ones, for who watches.
        step: The committed step that the state shows.
        batches_committed: How many batches went into it, over all replicas.
        lineage: Digest of the process groups that it was averaged in.
        is_past_step: Whether an attached optimizer has stepped since ``step`` began.
        training_thread: Identifies the thread that steps; ``None`` before the first boundary.
        partial: Why the state is not that of any one step; ``None`` if it is.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self.lock = StateLock(timeout=timeout, before_change=self.before_change)
        self.registry = StateRegistry()
        self.ledger = StepLedger()
        self.scalers = Scalers(self.registry)
        self.steps = StepLog()
        self.step = 0
        self.batches_committed = 0
        self.lineage = ""
        self.is_past_step = False
        self.training_thread: int | None = None
        self.partial: StateTornError | None = None
        self._configured = ConfiguredHyperparameters()
        self._attachments: list[OptimizerAttachment] = []
        self._observers: list[StateObserver] = []

    def add_observer(self, observer: StateObserver) -> None:
        """Have ``observer`` told of every change from here on."""
        self._observers.append(observer)

    # ---------------------------------------------------------------------------------------------------- optimizers

    def attach(self, optimizers: tuple[Optimizer, ...], *, every_commit: bool) -> OptimizerAttachment:
        """See `StateManager.attach`."""
        attachment = attach_optimizers(
            self.lock,
            optimizers,
            before_step=self._before_step,
            on_step_end=self._note_step,
            on_step_failed=self._note_failed_step,
            on_other_gradients=self._note_other_gradients,
        )
        if not every_commit:
            self.ledger.let_step_freely(optimizers)
        # What is shared as something that no optimizer's step changes, may be theirs.
        self.before_change(is_optimizer_step=False)
        self._attachments = [*(earlier for earlier in self._attachments if earlier.optimizers), attachment]
        return attachment

    def optimizers(self) -> list[Optimizer]:
        """Return the attached optimizers, in the order of attachment."""
        return [optimizer for attachment in self._attachments for optimizer in attachment.optimizers]

    # ------------------------------------------------------------------------------------------------- what is shown

    def begin_step(self, step: int) -> None:
        """Note that the state shows the committed ``step``, on the training thread.

        Raises:
            StateTornError: It shows no whole step.
        """
        self.refuse_partial()
        self.note_training_thread()
        self.step = step
        self.is_past_step = False

    def note_training_thread(self) -> None:
        """Note that the calling thread is the one that steps."""
        self.training_thread = threading.get_ident()

    def assume_training_thread(self) -> None:
        """Take the calling thread for the one that steps, unless a boundary has shown which it is."""
        if self.training_thread is None:
            self.note_training_thread()

    def content(self) -> dict[str, object]:
        """Return the replicated state, live tensors included; the caller holds the lock.

        Raises:
            ManagerError: A state function that asked for the training thread would run on another one.
            RegistryError: A state function failed.
        """
        self.require_training_thread()
        user = self.registry.state_dict("replicated")
        return {USER_KEY: user, MANAGER_KEY: own_part(self.counters(), self.registry)}

    def content_like(self, received: Mapping[str, Any]) -> dict[str, object]:
        """Return `content` to be compared with a received state, without the names of parameters and keys of one alone.

        The order of parameters is the same since the state was loaded; the sender may have named more of them, or none.
        """
        names = {key: value for key, value in received[MANAGER_KEY].items() if key == NAMES_KEY}
        own: Any = self.content()[USER_KEY]
        user = {key: own.get(key, value) for key, value in received[USER_KEY].items()}
        return {USER_KEY: user, MANAGER_KEY: {**self.counters(), **names}}

    def counters(self) -> dict[str, int | str]:
        """Return ``step``, ``batches_committed`` and ``lineage``."""
        return {"step": self.step, "batches_committed": self.batches_committed, "lineage": self.lineage}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Set what `counters` returned; ``step`` alone will do.

        Raises:
            ManagerError: ``step`` is no whole number from 0.
        """
        self.step = checked_step(counters["step"])
        self.batches_committed = int(counters.get("batches_committed", 0))
        self.lineage = str(counters.get("lineage", ""))
        self.is_past_step = False

    def load(self, state: object, *, only_shared: bool = False) -> None:
        """Apply a whole state; the caller holds the write lock.

        Args:
            state: What `content` of a replica returned.
            only_shared: See ``StateRegistry.load_state_dict``.

        Raises:
            RegistryError: It does not fit what is registered. If a load function failed midway, the state is partial.
        """
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
        self.take_over_order(names_in(parts[MANAGER_KEY]))
        self.note_configured()
        before = self.partial
        self.mark_partial(step, "loading it was interrupted")
        self.ledger.replaced()
        for observer in self._observers:
            observer.replaced()
        try:
            self.registry.load_state_dict(parts[USER_KEY], optimizers=self.optimizers(), only_shared=only_shared)
        except RegistryError as error:
            self.partial = StateTornError(step=step, reason=str(error)) if error.__cause__ is not None else before
            raise
        self.load_counters(parts[MANAGER_KEY])
        self.partial = None
        self._configured.warn_of_replaced(self.registry, self.optimizers(), step)

    def note_configured(self) -> None:
        """Note the hyperparameters that this process was started with, before a state is received in place."""
        self._configured.note(self.registry, self.optimizers(), has_trained=self.steps.num_committed > 0)

    def take_over_order(self, names: Mapping[str, Groups]) -> bool:
        """Arrange optimizers' parameters as in a state that is about to be loaded; the caller holds the write lock.

        Args:
            names: The sender's names of the parameters, by key.

        Returns:
            Whether the state of this replica has other places now.

        Raises:
            RegistryError: An order differs, and cannot be taken over.
        """
        if not take_over_order(self.registry, names):
            return False
        # What was noted of the boundary before has positions of the order before.
        for observer in self._observers:
            observer.replaced()
        return True

    def forget_gradients(self) -> None:
        """Let what is left of gradients count for nothing: they belong to a state that has been replaced.

        They are set to zero where they are, as a training loop may be about to reduce them.
        """
        attached = (
            parameter
            for optimizer in self.optimizers()
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        for parameter in chain(self.registry.parameters(), attached):
            if parameter.grad is not None:
                parameter.grad.detach().zero_()

    # ---------------------------------------------------------------------------------------------- what is refused

    def mark_partial(self, step: int | Literal["latest"], reason: str) -> None:
        """Refuse every step until a whole state is loaded.

        Args:
            step: The step that was to be shown.
            reason: Why it is not.
        """
        self.partial = StateTornError(step=step, reason=reason)

    def refuse_partial(self) -> None:
        """Make sure that the state shows one whole step.

        Raises:
            StateTornError: It does not.
        """
        partial = self.partial
        if partial is not None:
            # A new one each time: an exception keeps every traceback, and the frames in it, of where it was raised.
            raise StateTornError(step=partial.step, reason=partial.reason)

    def require_training_thread(self) -> None:
        """Make sure that state functions may be called here.

        Raises:
            ManagerError: One of them asked for the training thread, and this is another one.
        """
        if self.training_thread in (None, threading.get_ident()):
            return
        keys = [entry.key for entry in self.registry.entries("replicated") if entry.on_training_thread]
        if keys:
            raise ManagerError(f"expected the training thread to call the state functions of {keys}, got another one")

    # ----------------------------------------------------------------------------------------------------- observers

    def before_change(self, is_optimizer_step: bool) -> None:
        """Tell the observers that the state is about to change. The lock calls this in every write section."""
        for observer in self._observers:
            observer.before_change(is_optimizer_step)

    def _before_step(self, optimizer: Optimizer) -> None:
        self.refuse_partial()
        for observer in self._observers:
            observer.before_step(optimizer)

    def _note_step(self, optimizer: Optimizer) -> None:
        """Called inside the write section of a step that succeeded."""
        if not self.registry.is_calling():
            self.is_past_step = True
            self.ledger.stepped(optimizer)

    def _note_other_gradients(self, optimizer: Optimizer) -> None:
        for observer in self._observers:
            observer.other_gradients(optimizer)

    def _note_failed_step(self, optimizer: Optimizer, error: BaseException) -> None:
        for observer in self._observers:
            observer.step_failed(optimizer, error)


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
