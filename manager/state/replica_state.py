"""The training state of one replica: registered objects, the committed step that they show, and the lock."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from itertools import chain
from operator import index
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from torch.optim import Optimizer

from ft_transport.telemetry.metrics import Reading
from ft_transport.telemetry.process_state import HolderStatus, LockStatus, ManagerStatus
from manager.errors import ManagerError, RegistryError, StateTornError
from manager.state.compatibility import ConfiguredHyperparameters
from manager.state.lock import Change, StateLock
from manager.state.optimizer_guard import OptimizerAttachment, StateObserver, attach_optimizers
from manager.state.optimizer_states import parameters_of
from manager.state.parameter_order import (
    MANAGER_KEY,
    NAMES_KEY,
    USER_KEY,
    Groups,
    names_in,
    own_part,
    take_over_order,
)
from manager.state.registration_check import Scalers
from manager.state.registry import StateRegistry
from manager.state.step_log import StepLedger, StepLog

if TYPE_CHECKING:
    from ft_transport.state.copying import CopiesInFlight

T = TypeVar("T")
R = TypeVar("R")


_FOLLOWS: Final = "this replica follows the others, while it receives the state"


class ReplicaState(StateObserver):
    """The state of a replica, its lock, and the committed step that the state shows.

    Any thread may use the lock and call `status`. Only the training thread may use the rest.

    Args:
        timeout: Longest wait for the lock.

    Attributes:
        timeout: Longest wait for the lock.
        lock: The lock around the state.
        registry: The functions that return and load the parts of the state.
        ledger: Counts the optimizers' steps since the last commit.
        scalers: The gradient scalers.
        steps: A log of the last steps.
        step: The committed step that the state shows.
        batches_committed: Number of batches that all replicas have committed up to this step.
        lineage: Digest of the process groups that averaged the gradients of all committed steps.
        is_past_step: Whether an attached optimizer has stepped since ``step`` began.
        training_thread: Identifier of the training thread; ``None`` before the first boundary.
        partial: Error that says why the state mixes steps or is incomplete; ``None`` if it shows one whole step.
        follows: Whether this replica takes part in steps before it has the whole state of ``step``; see
            ``manager.quorum.following``. No snapshot may show such a state.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self.lock = StateLock(timeout=timeout, before_change=self.announce)
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
        self.follows = False
        self._configured = ConfiguredHyperparameters()
        self._attachments: list[OptimizerAttachment] = []
        self._observers: list[StateObserver] = []
        self._in_flight: list[CopiesInFlight] = []

    def add_observer(self, observer: StateObserver) -> None:
        """Call the methods of ``observer`` at every change from now on."""
        self._observers.append(observer)

    # ---------------------------------------------------------------------------------------------------- optimizers

    def attach(self, optimizers: tuple[Optimizer, ...], *, every_commit: bool) -> OptimizerAttachment:
        """Make the steps of these optimizers write sections of the lock (`StateManager.attach`)."""
        attachment = attach_optimizers(self.lock, optimizers, self)
        if not every_commit:
            self.ledger.let_step_freely(optimizers)
        # A snapshot may share tensors that optimizer steps are going to change from now on.
        self.announce("other")
        self._attachments = [*(earlier for earlier in self._attachments if earlier.optimizers), attachment]
        return attachment

    def optimizers(self) -> list[Optimizer]:
        """Return the attached optimizers, in the order of attachment."""
        return [optimizer for attachment in self._attachments for optimizer in attachment.optimizers]

    # ------------------------------------------------------------------------------------------------- what is shown

    def begin_step(self, step: int) -> None:
        """Record, on the training thread, that the state shows the committed ``step``.

        Raises:
            StateTornError: The state is partial.
        """
        self.refuse_partial()
        self.note_training_thread()
        self.step = step
        self.is_past_step = False

    def note_training_thread(self) -> None:
        """Record the calling thread as the training thread."""
        self.training_thread = threading.get_ident()

    def assume_training_thread(self) -> None:
        """Record the calling thread as the training thread, unless an earlier call has recorded one."""
        if self.training_thread is None:
            self.note_training_thread()

    def require_step(self, step: int | None) -> None:
        """Make sure that the state shows a committed step.

        Args:
            step: The step that the state shows, according to the caller; ``None`` for the step that began last.

        Raises:
            ManagerError: An optimizer has stepped since the last step began; or ``step`` is not a whole number from 0;
                or this replica `follows` others.
            StateTornError: The state is partial.
        """
        self.require_whole()
        self.assume_training_thread()
        if step is not None:
            self.step = checked_step(step)
            self.is_past_step = False
        if self.is_past_step:
            raise ManagerError(
                "expected the number of committed steps as an argument, because an optimizer has stepped since step "
                f"{self.step} began; call start_step first, or pass the step"
            )

    def content(self) -> dict[str, object]:
        """Return the replicated state, which contains live tensors. The caller holds the lock.

        Raises:
            ManagerError: A state function requires the training thread, and this is another thread.
            RegistryError: A state function failed.
        """
        self.require_training_thread()
        user = self.registry.state_dict("replicated")
        return {USER_KEY: user, MANAGER_KEY: own_part(self.counters(), self.registry)}

    def content_like(self, received: Mapping[str, Any]) -> dict[str, object]:
        """Return this replica's state in a form that equals ``received`` if that state was loaded exactly.

        Parameter names, and entries with keys that are not registered here, are taken from the received state.
        """
        names = {key: value for key, value in received[MANAGER_KEY].items() if key == NAMES_KEY}
        own: Any = self.content()[USER_KEY]
        user = {key: own.get(key, value) for key, value in received[USER_KEY].items()}
        return {USER_KEY: user, MANAGER_KEY: {**self.counters(), **names}}

    def counters(self) -> dict[str, int | str]:
        """Return ``step``, ``batches_committed`` and ``lineage``."""
        return {"step": self.step, "batches_committed": self.batches_committed, "lineage": self.lineage}

    def readings(self) -> Iterator[Reading]:
        """Yield the metrics of the state."""
        yield Reading("step", self.step)
        yield Reading("batches_committed", self.batches_committed)
        yield Reading("state_is_partial", int(self.partial is not None))

    def status(self) -> ManagerStatus:
        """Return the status of a manager without a quorum, for status pages. Any thread may call this."""
        partial, waits = self.partial, self.lock.contended
        is_training = self.training_thread is not None
        return ManagerStatus(
            activity="training" if is_training else "idle",
            activity_s=time.monotonic() - self.steps.began_s if is_training else 0.0,
            step=self.step,
            batches=self.batches_committed,
            partial=partial.reason if partial is not None else _FOLLOWS if self.follows else "",
            lock=LockStatus(
                holders=tuple(
                    HolderStatus(kind=holder.kind, what=holder.what, age_s=holder.age_s)
                    for holder in self.lock.holders()
                ),
                num_waits=waits.num,
                waited_s=waits.total_s,
                longest_wait_s=waits.longest_s,
            ),
            steps=self.steps.recent(),
            num_committed=self.steps.num_committed,
            num_refused=self.steps.num_refused,
        )

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Set the counters from a received state. Only ``step`` is required.

        Raises:
            ManagerError: ``step`` is not a whole number from 0.
        """
        self.step = checked_step(counters["step"])
        self.batches_committed = int(counters.get("batches_committed", 0))
        self.lineage = str(counters.get("lineage", ""))
        self.is_past_step = False

    def load(self, state: object, *, only_shared: bool = False) -> None:
        """Load a replica's state into the registered objects. The caller holds the write lock.

        Args:
            state: The result of `content` on a replica.
            only_shared: See ``StateRegistry.load_state_dict``.

        Raises:
            RegistryError: The state does not fit the registrations; or a load function failed. If a load function
                failed, the state is partial afterwards.
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
        self.note_replaced()
        try:
            self.registry.load_state_dict(parts[USER_KEY], optimizers=self.optimizers(), only_shared=only_shared)
        except RegistryError as error:
            self.partial = StateTornError(step=step, reason=str(error)) if error.__cause__ is not None else before
            raise
        self.load_counters(parts[MANAGER_KEY])
        self.partial = None
        self._configured.warn_of_replaced(self.registry, self.optimizers(), step)

    def note_replaced(self) -> None:
        """Tell the observers that a load is about to replace the state, or a part of it."""
        self.ledger.replaced()
        for observer in self._observers:
            observer.replaced()

    def note_configured(self) -> None:
        """Store the hyperparameters that this process was started with, before a received state replaces them."""
        self._configured.note(self.registry, self.optimizers(), has_trained=self.steps.num_committed > 0)

    def take_over_order(self, names: Mapping[str, Groups]) -> bool:
        """Put optimizers' parameters into the order of a state that is about to be loaded.

        The caller holds the write lock.

        Args:
            names: The sender's names of the parameters, by key of the optimizer.

        Returns:
            Whether any parameter has another position now.

        Raises:
            RegistryError: An optimizer cannot take over the sender's order.
        """
        if not take_over_order(self.registry, names):
            return False
        # Copies of the last boundary refer to positions in the old order.
        for observer in self._observers:
            observer.replaced()
        return True

    def forget_gradients(self) -> None:
        """Zero all gradients in place: they belong to a replaced state, and the training loop may reduce them next."""
        for parameter in chain(self.registry.parameters(), parameters_of(self.optimizers())):
            if parameter.grad is not None:
                parameter.grad.detach().zero_()

    # ---------------------------------------------------------------------------------------------- what is refused

    def mark_partial(self, step: int | Literal["latest"], reason: str) -> None:
        """Record that the state is partial: every step is refused until a whole state is loaded.

        Args:
            step: The step that the state should show.
            reason: Why the state does not show that step.
        """
        self.partial = StateTornError(step=step, reason=reason)

    def refuse_partial(self) -> None:
        """Raise ``StateTornError`` if the state is partial: incomplete, or a mix of steps."""
        partial = self.partial
        if partial is not None:
            # A new error each time: an exception object collects the frames of every place that raises it.
            raise StateTornError(step=partial.step, reason=partial.reason)

    def require_whole(self) -> None:
        """Make sure that the state shows one whole step.

        Raises:
            StateTornError: The state is partial.
            ManagerError: This replica follows others, and receives the state.
        """
        self.refuse_partial()
        if self.follows:
            raise ManagerError(
                "expected a whole state, but this replica follows the other replicas, and still receives the state; "
                "save and snapshot only if manager.is_participating()"
            )

    def require_training_thread(self) -> None:
        """Raise ``ManagerError`` if a state function requires the training thread, and this is another thread."""
        if self.training_thread in (None, threading.get_ident()):
            return
        keys = [entry.key for entry in self.registry.entries("replicated") if entry.on_training_thread]
        if keys:
            raise ManagerError(
                f"expected the training thread to call the state functions of {keys}, got thread "
                f"{threading.current_thread().name!r}"
            )

    # ----------------------------------------------------------------------------------------------------- observers

    def order_writes_after(self, copies: CopiesInFlight) -> None:
        """Order all writes to the state after these copies. Any thread may call this, under the read lock."""
        self._in_flight.append(copies)
        self._forget_copies(lambda each: each.is_complete)

    def _forget_copies(self, is_done: Callable[[CopiesInFlight], bool]) -> None:
        for copies in list(self._in_flight):
            if is_done(copies):
                with contextlib.suppress(ValueError):  # another thread has removed it
                    self._in_flight.remove(copies)

    def announce(self, change: Change) -> None:
        """Notify the observers that the state is about to change. The lock calls this in every write section.

        Raises:
            DeadlineExceededError: The device has not copied a snapshot within the lock's timeout.
        """
        if change == "step":
            # An optimizer's kernels run on the streams of this thread.
            self._forget_copies(lambda each: not each.before_write())
        else:
            for copies in list(self._in_flight):
                copies.wait(self.timeout)
            self._forget_copies(lambda each: each.is_complete)
        for observer in self._observers:
            observer.before_change(change != "other")

    def before_step(self, optimizer: Optimizer) -> None:
        """Refuse the step if the state is partial or an observer refuses it."""
        self.refuse_partial()
        for observer in self._observers:
            observer.before_step(optimizer)

    def stepped(self, optimizer: Optimizer) -> None:
        """Count a successful step. Called inside the step's write section."""
        if not self.registry.is_calling():
            self.is_past_step = True
            self.ledger.stepped(optimizer)
        for observer in self._observers:
            observer.stepped(optimizer)

    def other_gradients(self, optimizer: Optimizer) -> None:
        """Notify the observers that a closure has changed the gradients."""
        for observer in self._observers:
            observer.other_gradients(optimizer)

    def step_failed(self, optimizer: Optimizer, error: BaseException) -> None:
        """Notify the observers of a failed step."""
        for observer in self._observers:
            observer.step_failed(optimizer, error)


def status_report(owner: T, describe: Callable[[T], R]) -> Callable[[], R | None]:
    """Return a function that describes ``owner`` while ``owner`` exists. The function does not keep ``owner`` alive."""
    reference = weakref.ref(owner)

    def report() -> R | None:
        present = reference()
        return describe(present) if present is not None else None

    return report


def checked_step(step: object) -> int:
    """Return ``step`` as an int.

    Raises:
        ManagerError: ``step`` is not a whole number from 0.
    """
    try:
        number = index(step) if not isinstance(step, bool) else -1  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise ManagerError(f"expected the number of committed steps, from 0, got {type(step).__name__} {step!r}")
    return number
