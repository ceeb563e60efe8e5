"""The state of one replica: who may change it, who may read it, and when a snapshot shows a whole step."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from operator import index
from typing import Any, Final, Literal, TypeVar

from torch.optim import Optimizer

from ft_transport import HTTPTransport, Incoming, Received, TransportError
from manager.errors import ManagerError, RegistryError, StateTornError
from manager.fit import MANAGER_KEY, USER_KEY, check_fit
from manager.hooks import OptimizerAttachment, attach_optimizers
from manager.registry import Scope, StateRegistry
from manager.rwlock import StateLock
from manager.snapshots import Snapshotter

T = TypeVar("T")
logger = logging.getLogger(__name__)

_MAX_SHOWN: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What `Manager.recover` did.

    Attributes:
        step: The committed step that this replica shows now.
        source: The address that it came from.
    """

    step: int
    source: str


class StateManager:
    """Holds the lock over a replica's state, and connects the trainer with the transport.

    ``Manager`` adds the quorum; everything here works without one.

    A training loop looks like this::

        manager = Manager(checkpoint_transport=HTTPTransport())
        manager.register("model", model)
        manager.register("optimizer", optimizer)
        with manager.attach(optimizer):
            for step in range(num_steps):
                manager.start_step(step)
                loss(model).backward()
                optimizer.step()

    `start_step` is the step boundary: what is registered then shows the committed step, and a snapshot that somebody
    asked for begins there. The thread that calls it is the training thread. Locking methods may be called from any
    thread; registering, attaching, `start_step`, `snapshot`, `load` and `recover` belong to the training thread.
    """

    def __init__(
        self,
        load_state_dict: Callable[[Any], object] | None = None,
        state_dict: Callable[[], object] | None = None,
        *,
        checkpoint_transport: HTTPTransport[Any] | None = None,
        timeout: timedelta = timedelta(seconds=60),
        prepare_memory: bool = True,
    ) -> None:
        """Make a manager without state.

        Args:
            load_state_dict: With ``state_dict``, registered under the key ``default`` (as in torchft).
            state_dict: See ``load_state_dict``.
            checkpoint_transport: Serves this replica's snapshots and receives others'. The manager owns it and shuts
                it down.
            timeout: Deadline of every wait for the lock.
            prepare_memory: Whether host memory for as many snapshots as the transport may hold is made ready after
                the first step; otherwise the first ones wait for it, inside `start_step`. The state functions are
                called once for that.

        Raises:
            ValueError: Only one of the two functions was given.
            TypeError: The transport is none of ``ft_transport``.
            TransportError: The transport belongs to another manager.
        """
        self._timeout = timeout
        self._lock = StateLock(timeout=timeout, before_change=self._recall_lent)
        self._registry = StateRegistry()
        self._attachments: list[OptimizerAttachment] = []
        self._transport = checkpoint_transport
        self._step = 0
        self._batches_committed = 0
        self._lineage = ""
        self._is_past_step = False
        self._training_thread: int | None = None
        self._torn: StateTornError | None = None
        self._snapshotter: Snapshotter | None = None
        if (load_state_dict is None) != (state_dict is None):
            raise ValueError("expected both load_state_dict and state_dict, or neither")
        if load_state_dict is not None and state_dict is not None:
            self.register_state_dict_fn("default", load_state_dict, state_dict)
        if checkpoint_transport is not None:
            if not hasattr(checkpoint_transport, "serve_fresh"):
                raise TypeError(f"expected an HTTPTransport of ft_transport, got {type(checkpoint_transport).__name__}")
            self._snapshotter = Snapshotter(
                lock=self._lock,
                sink=checkpoint_transport,
                state=self.replica_state,
                stable_part=self._stable_part,
                prepare_memory=prepare_memory,
            )
            checkpoint_transport.serve_fresh(self._snapshotter.request)

    # ---------------------------------------------------------------------------------------------- the lock

    def allow_state_dict_read(self) -> None:
        """Let readers in again; as torchft's method. Idempotent, from any thread."""
        self._lock.allow()

    def disallow_state_dict_read(self) -> None:
        """Keep readers out until `allow_state_dict_read`; as torchft's method. Idempotent, from any thread.

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

    # ---------------------------------------------------------------------------------------- what the state is

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
            is_stable: Its tensors change only inside `writing` sections and steps of attached optimizers: frozen
                weights, or copies that are kept between rare synchronisations. What no attached optimizer changes is
                then served from where it lies, and copied only if a `writing` section comes while it is being read.

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

    def attach(self, *optimizers: Optimizer) -> OptimizerAttachment:
        """Make every ``step()`` of the optimizers a write section, so that nobody copies a state in the middle of one.

        Their parameters and states are then cloned in the background when a snapshot is taken, from the step boundary
        until the pre-step hook at the latest. Nothing else may change those tensors meanwhile outside a `writing`
        section; where something does, leave the optimizer unattached, and its state is copied at the boundary
        instead. torchft's LocalSGD and DiLoCo sync inside ``step()``, behind the pre-step hook, and so may be attached.

        Returns:
            A handle that detaches them; also a context manager.
        """
        attachment = attach_optimizers(
            self._lock,
            optimizers,
            before_step=self._refuse_torn_state,
            on_step_end=self._note_change,
            on_step_failed=self._note_failed_step,
        )
        # What is lent as something that no optimizer's step changes, may be theirs.
        self._recall_lent(False)
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

    def metadata(self) -> str:
        """Return the address that peers recover from.

        Raises:
            ManagerError: There is no transport.
        """
        if self._transport is None:
            raise ManagerError("expected a checkpoint_transport to serve this replica's state, and there is none")
        return self._transport.metadata()

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
        self._step = _checked(state_dict["step"])
        self._batches_committed = int(state_dict.get("batches_committed", 0))
        self._lineage = str(state_dict.get("lineage", ""))
        self._is_past_step = False

    def current_step(self) -> int:
        """The committed step that the state shows; the last one that `start_step` was given."""
        return self._step

    # ---------------------------------------------------------------------------------------------- snapshots

    def start_step(self, step: int, *, hold: bool = False) -> bool:
        """The step boundary. Call it at the top of every iteration, before data is drawn and ``forward`` runs.

        Args:
            step: How many steps are committed: the state shows exactly these.
            hold: Keep the state such that a snapshot of it can still be taken (`Snapshotter.settle`), if none was
                asked for yet.

        Returns:
            Whether a snapshot of this step is under way or can still be taken.

        Raises:
            StateTornError: This replica holds part of a state.
            ManagerError: The step is no whole number from 0.
        """
        self._refuse_torn_state()
        self._training_thread = threading.get_ident()
        self._step = _checked(step)
        self._is_past_step = False
        if self._snapshotter is None:
            return False
        return self._snapshotter.boundary(self._step, self._attached_optimizers(), hold=hold)

    def snapshot(self, step: int | None = None) -> Future[None]:
        """Take a snapshot now; the training thread calls this between two steps.

        Args:
            step: The committed step. By default the one that `start_step` was given, if no attached optimizer has
                stepped since.

        Returns:
            Done when the snapshot can be fetched.

        Raises:
            ManagerError: There is no transport, it has been shut down, or which step the state shows is not known.
            LockTimeoutError: The snapshot before was not finished, or another thread was writing, until the deadline.
            TransportError: The state cannot be captured.
        """
        self._refuse_torn_state()
        if self._snapshotter is None:
            raise ManagerError("expected a checkpoint_transport to serve the snapshot, and this manager has none")
        if self._training_thread is None:
            self._training_thread = threading.get_ident()
        if step is not None:
            self._step = _checked(step)
            self._is_past_step = False
        if self._is_past_step:
            raise ManagerError(
                f"expected the number of committed steps: an optimizer has stepped since step {self._step} began; call "
                "start_step first, or pass the step"
            )
        return self._snapshotter.take(self._step, self._attached_optimizers(), self._timeout)

    # ----------------------------------------------------------------------------------------------- recovery

    def recover(
        self,
        metadata: str,
        step: int | Literal["latest"] = "latest",
        timeout: timedelta | None = None,
        *,
        unreachable_timeout: timedelta | None = None,
        is_fresh: bool = False,
        verify: bool = True,
    ) -> Recovery:
        """Receive the state of a peer into this replica's own tensors, and load it.

        The lock is held for writing meanwhile: nobody is served what is only half there. If the transfer fails after
        bytes have landed, this replica refuses to step until a recovery succeeds.

        Args:
            metadata: What the peer's transport returned from ``metadata()``.
            step: The step to receive, or the peer's latest.
            timeout: For all of it.
            unreachable_timeout: How long the peer may be out of reach before the first byte; by default ``timeout``.
            is_fresh: Accept ``step`` only as the peer's present state, not as it was at an earlier attempt at it.
            verify: Whether the state is compared with the peer's once it is loaded, every bit of it. Turn it off where
                a load function changes what it takes on purpose.

        Raises:
            TransportError: The transfer failed.
            StateTornError: After loading, the state is not what was sent.
            RegistryError: What the peer has does not fit what is registered here (nothing is received then, if modules
                and optimizers show it), or a load function failed.
            LockTimeoutError: Others held the lock until the deadline.
            ManagerError: There is no transport, the address is this replica's own, or a state function asked for the
                training thread.
        """
        if self._transport is None:
            raise ManagerError("expected a checkpoint_transport to receive with, and this manager has none")
        if not isinstance(metadata, str):
            raise TypeError(f"expected the address that a peer's metadata() returned, got {metadata!r}")
        if step != "latest":
            step = _checked(step)
        if metadata.rstrip("/") == self._transport.metadata().rstrip("/"):
            raise ManagerError(
                f"expected the address of another replica to recover from, got this one's own {metadata}"
            )
        total = timeout if timeout is not None else self._timeout
        start_s = time.monotonic()
        with self._lock.write(f"receiving step {step} from {metadata}", total):
            into = self.replica_state()
            remaining = max(total - timedelta(seconds=time.monotonic() - start_s), timedelta(0))
            earlier, self._torn = self._torn, StateTornError(step=step, reason="the transfer was interrupted")
            try:
                received = self._transport.fetch(
                    metadata,
                    "latest" if is_fresh else step,
                    timeout=remaining,
                    unreachable_timeout=unreachable_timeout,
                    into=into,
                    check=lambda incoming: self._check_incoming(incoming, into, step),
                    # Comparing it afterwards reads every byte, too.
                    verify=False if verify else None,
                )
            except RegistryError:
                self._torn = earlier
                raise
            except TransportError as error:
                self._torn = StateTornError(step=step, reason=str(error)) if error.destination_touched else earlier
                raise
            try:
                self._load(received.state)
            except RegistryError as error:
                # Whether or not a load function ran: what fits has been received in place.
                self._torn = StateTornError(step=received.step, reason=str(error))
                raise
            received_s = time.monotonic()
            if verify:
                self._torn = StateTornError(step=received.step, reason="comparing it was interrupted")
                self._refuse_differences(received, metadata)
                self._torn = None
        loaded_s = time.monotonic()
        logger.info(
            "recovered step %d from %s: %.0f ms to receive and load it, %.0f ms to compare",
            received.step,
            metadata,
            (received_s - start_s) * 1e3,
            (loaded_s - received_s) * 1e3,
        )
        return Recovery(step=received.step, source=metadata)

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

    def shutdown(self, wait: bool = True) -> None:
        """End the threads and the transport. May be called twice.

        Args:
            wait: Whether to return only when the server has ended.
        """
        if self._snapshotter is not None:
            self._snapshotter.close()
        if self._transport is not None:
            self._transport.serve_fresh(None)
            self._transport.shutdown(wait=wait)

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
        if self._snapshotter is not None:
            self._snapshotter.state_replaced()
        try:
            self._registry.load_state_dict(parts[USER_KEY], "replicated")
        except RegistryError as error:
            self._torn = StateTornError(step=step, reason=str(error)) if error.__cause__ is not None else before
            raise
        self.load_state_dict(parts[MANAGER_KEY])
        self._torn = None

    def _check_incoming(self, incoming: Incoming, into: Mapping[str, object], step: int | Literal["latest"]) -> None:
        if step not in ("latest", incoming.step):
            raise RegistryError(f"expected the state of step {step}, what comes is of step {incoming.step}")
        check_fit(incoming, self._registry, into)

    def _refuse_differences(self, received: Received[Any], source: str) -> None:
        """Make sure that the load functions have not changed what was received."""
        differences = received.differences(self.replica_state())
        if not differences:
            return
        shown = "; ".join(differences[:_MAX_SHOWN]) + ("; …" if len(differences) > _MAX_SHOWN else "")
        self._torn = StateTornError(
            step=received.step, reason=f"after loading, the state is not the one that {source} sent: {shown}"
        )
        self._refuse_torn_state()

    def _stable_part(self, state: object) -> list[object]:
        """Of what `replica_state` returned, what changes only inside write sections."""
        assert isinstance(state, Mapping), "it is our own"
        return [state[USER_KEY][entry.key] for entry in self._registry.entries("replicated") if entry.is_stable]

    def _recall_lent(self, is_optimizer_step: bool) -> None:
        """Whoever reads the state from where it lies, gets a copy of it before it changes."""
        if self._transport is not None:
            self._transport.recall(is_optimizer_step=is_optimizer_step)

    def _require_training_thread(self) -> None:
        if self._training_thread in (None, threading.get_ident()):
            return
        keys = [entry.key for entry in self._registry.entries("replicated") if entry.on_training_thread]
        if keys:
            raise ManagerError(f"expected the training thread to call the state functions of {keys}, got another one")

    def _note_failed_step(self, error: BaseException) -> None:
        """For ``Manager``: without a quorum nobody relies on the step having been made."""

    def _note_change(self) -> None:
        self._is_past_step = True

    def _refuse_torn_state(self) -> None:
        torn = self._torn
        if torn is not None:
            # A new one each time: an exception keeps every traceback, and the frames in it, of where it was raised.
            raise StateTornError(step=torn.step, reason=torn.reason)

    def _attached_optimizers(self) -> list[Optimizer]:
        return [optimizer for attachment in self._attachments for optimizer in attachment.optimizers]


def _checked(step: object) -> int:
    try:
        number = index(step) if not isinstance(step, bool) else -1  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise ManagerError(f"expected the number of committed steps, got {type(step).__name__} {step!r}")
    return number
