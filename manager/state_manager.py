"""The manager of one replica without a quorum: its state, the lock, snapshots, recovery and checkpoints."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch.distributed as dist
from torch.optim import Optimizer

from ft_transport.runtime.signal_safe import SafeEnd
from manager.errors import ManagerError
from manager.lifecycle import Unclosed, Usability, ends_what_it_owns, interrupts_own_call
from manager.recovery.checkpoints import ResumeKeys
from manager.recovery.peers import PeerOptions, Recovery
from manager.recovery.replica import Replica
from manager.state.optimizer_guard import OptimizerAttachment
from manager.state.registry import Scope

if TYPE_CHECKING:
    from ft_transport import CheckpointStore, HTTPTransport, SaveHandle

T = TypeVar("T")

logger = logging.getLogger(__name__)


class StateManager:
    """Holds the lock over a replica's state, and connects the trainer with the transport. ``Manager`` adds the quorum.

    A training loop without one looks like this::

        manager = Manager(checkpoint_transport=HTTPTransport())
        manager.register("model", model)
        manager.register("optimizer", optimizer)
        with manager.attach(optimizer):
            for step in range(num_steps):
                manager.start_step(step)
                loss(model).backward()
                optimizer.step()

    `start_step` is the step boundary: what is registered then shows the committed step, and a requested
    snapshot begins there. The thread that calls it is the training thread. Locking methods may be called from any
    thread; registering, attaching, `start_step`, `snapshot`, `load` and `recover` belong to the training thread.
    """

    @ends_what_it_owns
    def __init__(
        self,
        load_state_dict: Callable[[Any], object] | None = None,
        state_dict: Callable[[], object] | None = None,
        *,
        checkpoint_transport: HTTPTransport[Any] | None = None,
        timeout: timedelta = timedelta(seconds=60),
        prefault: bool = False,
        checkpoint_store: CheckpointStore | None = None,
        save_every: int | None = None,
    ) -> None:
        """Make a manager without state.

        Args:
            load_state_dict: With ``state_dict``, registered under the key ``default`` (as in torchft).
            state_dict: See ``load_state_dict``.
            checkpoint_transport: Serves this replica's snapshots and receives others'. The manager owns it and shuts
                it down, also where this constructor raises.
            timeout: Deadline of every wait for the lock, and the default of `recover`.
            prefault: Whether host memory for as many snapshots as the transport may hold, each as large as the state,
                is made ready after the first step. Otherwise the first copy waits for it, inside `start_step` or
                `save`. Turn it on where that pause matters: a manager without a quorum that is recovered from, or one
                with a ``checkpoint_store``. In a quorum the state is served without a copy.
            checkpoint_store: Where durable checkpoints of all ranks of this replica go. The manager owns and closes it.
            save_every: Save a checkpoint at the beginning of every step whose number this divides.

        Raises:
            ValueError: Only one of the two functions was given.
            ConfigurationError: ``save_every`` without a store.
            TypeError: The transport is none of ``ft_transport``.
            TransportError: The transport belongs to another manager.
        """
        if (load_state_dict is None) != (state_dict is None):
            raise ValueError("expected both load_state_dict and state_dict, or neither")
        self._replica = Replica(
            timeout, checkpoint_transport, checkpoint_store, prefault=prefault, save_every=save_every
        )
        self._state = self._replica.state
        if load_state_dict is not None and state_dict is not None:
            self.register_state_dict_fn("default", load_state_dict, state_dict)
        self._usability = Usability()
        self._unclosed = Unclosed(self, self._replica.closers())
        self._end = SafeEnd()

    def metadata(self) -> str:
        """Return the address that peers recover from; raises ``ManagerError`` where there is no transport."""
        transport = self._replica.transport
        if transport is None:
            raise ManagerError("expected a checkpoint_transport to serve this replica's state, and there is none")
        return transport.metadata()

    # ------------------------------------------------------------------------------------------------------- the lock

    def allow_state_dict_read(self) -> None:
        """Let readers in again; as torchft's method. Idempotent, from any thread."""
        self._state.lock.allow()

    def disallow_state_dict_read(self) -> None:
        """Keep readers out until `allow_state_dict_read`; as torchft's method. Idempotent, from any thread.

        For the step of an optimizer; what is registered as stable changes inside `writing` sections alone.

        Raises:
            LockTimeoutError: Readers held the lock until the deadline; nothing has changed then.
        """
        self._state.lock.disallow()

    def writing(
        self, what: str = "changing the state", timeout: timedelta | None = None
    ) -> AbstractContextManager[Any]:
        """Return a context manager inside which this thread may change the state. Nests.

        Raises:
            LockTimeoutError: Others held the lock until the deadline.
        """
        return self._state.lock.write(what, timeout)

    def reading(self, what: str = "reading the state", timeout: timedelta | None = None) -> AbstractContextManager[Any]:
        """Return a context manager inside which no optimizer steps. Hold it for a copy, never across a network.

        Raises:
            LockTimeoutError: A writer held the lock until the deadline.
        """
        return self._state.lock.read(what, timeout)

    def read_lock(self, timeout: timedelta) -> AbstractContextManager[Any]:
        """Return a context manager as `reading` does. An ``HTTPTransport`` takes this method as ``read_lock``."""
        return self._state.lock.read("taking a snapshot", timeout)

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
        self._state.registry.register(
            key, load_state_dict, state_dict, scope=scope, on_training_thread=on_training_thread, is_stable=is_stable
        )

    def set_state_dict_fns(self, load_state_dict: Callable[[T], object], state_dict: Callable[[], T]) -> None:
        """Call `register_state_dict_fn`, once, with the key ``set_state_dict_fns``; torchft's older name for it."""
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

        Arguments and ``RegistryError`` as for `register_state_dict_fn`.

        Raises:
            TypeError: The object lacks one of the methods.
        """
        self._state.registry.register_object(
            key, obj, scope=scope, on_training_thread=on_training_thread, is_stable=is_stable
        )

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Return the batches of a registered loader, one epoch after the other, for ``next`` after the step boundary.

        The iterator follows the loader's state wherever that is loaded (healing, `recover`, `resume`); one that
        ``iter(loader)`` made before goes on from where it was.

        Raises:
            RegistryError: The loader is not registered.
        """
        return self._state.registry.loaders.batches(loader)

    def replace_state_dict_fn(self, key: str, state_dict: Callable[[], object], *, is_stable: bool) -> None:
        """Give ``key`` another state function; the load function stays. ``RegistryError`` if nothing is registered."""
        self._state.registry.replace(key, state_dict, is_stable=is_stable)

    def attach(self, *optimizers: Optimizer, every_commit: bool = True) -> OptimizerAttachment:
        """Make every ``step()`` of the optimizers a write section, so that no copy begins in the middle of one.

        Their parameters and states are then cloned in the background when a snapshot is taken, from the step boundary
        until the pre-step hook at the latest. Where anything else changes them meanwhile outside a `writing` section,
        leave the optimizer unattached: its state is copied at the boundary then. torchft's LocalSGD and DiLoCo need
        ``guard_local_sgd`` and ``guard_diloco``.

        Args:
            *optimizers: Registered as well, under keys of their own.
            every_commit: Whether each optimizer steps once for each commit of a quorum; a replica in which one does not
                is healed. Turn it off where steps and commits do not go together (local updates between rare
                synchronisations of one's own, optimizers by turns). torchft's LocalSGD and DiLoCo are recognised.

        Returns:
            A handle that detaches them; also a context manager.
        """
        return self._state.attach(optimizers, every_commit=every_commit)

    def replica_state(self) -> dict[str, object]:
        """Return the replicated state of this replica, live tensors included; the caller holds the lock.

        Raises:
            ManagerError: A state function that asked for the training thread would run on another one.
            RegistryError: A state function failed.
        """
        return self._state.content()

    def load(self, state: Mapping[str, Any]) -> None:
        """Apply a received state inside the write lock.

        Args:
            state: The result of `replica_state` of a peer.

        Raises:
            RegistryError: It does not fit what is registered. If a load function failed midway, this replica refuses
                to step until another load succeeds.
            ManagerError: A load function asked for the training thread.
        """
        self._state.require_training_thread()
        with self._state.lock.write("loading a received state"):
            self._state.load(state)

    def state_dict(self) -> dict[str, int | str]:
        """Return the manager's own counters, for a checkpoint: ``step``, ``batches_committed`` and ``lineage``."""
        return self._state.counters()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the manager's own counters.

        Args:
            state_dict: The result of `state_dict`. ``step`` alone, as in older checkpoints and torchft's, will do if
                all replicas load the same.

        Raises:
            ManagerError: ``step`` is no whole number from 0.
        """
        self._state.load_counters(state_dict)

    def current_step(self) -> int:
        """Return the committed step that the state shows."""
        return self._state.step

    # ----------------------------------------------------------------------------------------- snapshots and recovery

    def start_step(self, step: int, *, hold: bool = False) -> bool:
        """Begin a step. Call it at the top of every iteration, before data is drawn and ``forward`` runs.

        This is the step boundary.

        Args:
            step: The number of committed steps: the state shows exactly these.
            hold: If no snapshot was requested, keep the state such that one can still be taken
                (`SnapshotScheduler.settle`).

        Returns:
            Whether a snapshot of this step is under way or can still be taken.

        Raises:
            StateTornError: This replica holds part of a state.
            LoaderOrderError: A registered loader was drawn from before, or is not where it was loaded.
            ManagerError: The step is no whole number from 0, or below the one before; or a quorum is used.
            RegistryError: A state function runs a collective, or a leaf has no encoding (found at the first steps).
            TransportError: More checkpoints in a row could not be saved than the store allows.
        """
        self._refuse_start_step()
        self._state.steps.boundary(self._state.step, step)
        self._replica.encodings.check()
        return self._replica.begin_step(step, hold=hold)

    def snapshot(self, step: int | None = None) -> Future[None]:
        """Take a snapshot now; the training thread calls this between two steps.

        Args:
            step: The committed step; by default the last of `start_step`, if no attached optimizer has stepped since.

        Returns:
            Done when the snapshot can be fetched.

        Raises:
            ManagerClosedError: The manager was shut down, or is the parent process's.
            ManagerError: There is no transport, or which step the state shows is not known.
            LockTimeoutError: The snapshot before was not finished, or another thread was writing, until the deadline.
            TransportError: The state cannot be captured.
        """
        self._usability.require()
        snapshots = self._replica.snapshots
        if snapshots is None:
            raise ManagerError("expected a checkpoint_transport to serve the snapshot, and this manager has none")
        return snapshots.take(step)

    def recover(
        self,
        metadata: str | Sequence[str],
        step: int | Literal["latest"] = "latest",
        timeout: timedelta | None = None,
        *,
        verify: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> Recovery:
        """Receive the state of a peer into this replica's own tensors, and load it.

        The lock is held for writing meanwhile: no peer is served a partial state. If the transfer fails after
        bytes have landed, this replica refuses to step until a recovery succeeds. With a ``checkpoint_store`` all ranks
        of the store's group call this; where a peer fails one of them, all load the newest good checkpoint instead.

        Args:
            metadata: The result of ``metadata()`` of a peer's transport, of a rank in the same layout; or a list of
                those of all ranks of a replica in any layout, of which this rank takes what it needs in its own
                (``HTTPTransport.fetch_sharded``).
            step: The step to receive, or the peer's latest.
            timeout: For all of it.
            verify: Whether every bit of the loaded state is compared with the peer's. Turn it off where a load function
                changes what it takes on purpose.
            process_group: All ranks of this replica, if it has several. Each of them calls this; the latest step is the
                same for all then, and if one of them fails all do. They agree through its store; no collective runs.

        Raises:
            RecoveryFailedError: No peer could be recovered from, and there is no checkpoint.
            TransportError: The transfer failed.
            StateTornError: After loading, the state is not what was sent; or another rank of ``process_group`` failed.
            StateMismatchError: The peer's state, as modules and optimizers show it, does not fit; nothing is received.
            RegistryError: A load function failed.
            LockTimeoutError: Others held the lock until the deadline.
            ManagerError: There is no transport, the address is this replica's own, a state function asked for the
                training thread, or several ranks would each recover a latest step of their own.
        """
        self._usability.require()
        options = PeerOptions(timeout=timeout if timeout is not None else self._state.timeout, verify=verify)
        return self._replica.recover(metadata, step, options, process_group=process_group)

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
        self._usability.require()
        return self._replica.required_checkpoints().save(wait=wait, overwrite=overwrite)

    def resume(self, *, keys: ResumeKeys = "same") -> Recovery | None:
        """Load the newest intact durable checkpoint; all ranks call this, before the first step.

        ``scope="local"`` state comes from a checkpoint of the same ``replica_id`` and number of ranks alone. Otherwise
        the present local state stays, with a warning.

        If ``torch.distributed.checkpoint`` wrote the newest ``step-N`` for another program, such as torchtitan, that
        is loaded: what is registered under the names that it has.

        Args:
            keys: ``same`` refuses a checkpoint with other keys than are registered. ``shared`` loads the keys that both
                have, and a warning names the others: what is registered alone stays as it is, and what the checkpoint
                has alone is left out. In a quorum all replicas then take the state of one of them.

        Returns:
            The recovery; ``None`` if there is no checkpoint.

        Raises:
            ConfigError: ``keys`` is neither.
            ManagerError: There is no store; or replicas without a ``replica_id`` add keys.
            RegistryError: The checkpoint does not fit what is registered here, or a load function failed.
            StateTornError: After loading, the state is not the one that was saved.
            TransportError: All checkpoints are damaged, or loading failed; the same on all ranks.
        """
        self._usability.require()
        return self._replica.required_checkpoints().resume(keys)

    def shutdown(self, wait: bool = True) -> None:
        """Leave the job, end the threads and the transport. May be called twice, and from a signal handler.

        On the training thread, this also ends worker processes that `batches` draws from.

        In a handler that has interrupted another call of this package it returns at once, and the end is made when the
        handler has returned: that call may hold locks that the end needs. A forked child leaves the manager to its
        parent, and returns at once.

        Args:
            wait: Whether to return only when the server has ended.
        """
        if self._usability.is_of_parent():
            return
        self._usability.is_shut_down = True
        is_interrupting = interrupts_own_call()
        self._end(lambda: self._shut_down(wait), wait=wait and not is_interrupting)
        # Another thread may be waiting for a batch of theirs, and would wait for ever.
        if self._state.training_thread == threading.get_ident() and not is_interrupting:
            self._state.registry.loaders.end_workers()

    def _shut_down(self, wait: bool) -> None:
        self._unclosed.forget()
        self._replica.close(wait=wait)

    def _refuse_start_step(self) -> None:
        """For ``Manager``, whose steps may begin in another way."""
