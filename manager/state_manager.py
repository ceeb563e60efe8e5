"""The manager of one replica without a quorum: its state, the state lock, snapshots, recovery and checkpoints."""

from __future__ import annotations

import logging
import signal
import sys
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
from manager.recovery.kept_steps import KeepSettings
from manager.recovery.peers import PeerOptions, Recovery
from manager.recovery.replica import Replica
from manager.state.optimizer_guard import OptimizerAttachment
from manager.state.registry import Scope

if TYPE_CHECKING:
    from ft_transport import CheckpointStore, HTTPTransport, SaveHandle

T = TypeVar("T")

logger = logging.getLogger(__name__)


class StateManager:
    """Owns the lock over a replica's state, and serves, recovers, saves and loads the state.

    `Manager` extends this class by a quorum. Without a quorum, the training loop is::

        manager = Manager(checkpoint_transport=HTTPTransport())
        manager.register("model", model)
        manager.register("optimizer", optimizer)
        with manager.attach(optimizer):
            for step in range(num_steps):
                manager.start_step(step)
                loss(model).backward()
                optimizer.step()

    `start_step` is the step boundary: a requested snapshot begins in this call. The thread that calls it is the
    training thread. Any thread may call the methods of the lock; only the training thread may call the other methods.
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
        keep_every: int | None = None,
        copies: int = 1,
        failure_domain: str | None = None,
    ) -> None:
        """Create a manager.

        Args:
            load_state_dict: Load function, registered with ``state_dict`` under the key ``default``, as in torchft.
            state_dict: State function; see ``load_state_dict``.
            checkpoint_transport: Serves this replica's snapshots and receives snapshots of peers. The manager shuts it
                down, even if this constructor raises.
            timeout: Deadline of every wait for the lock, and default timeout of `recover`.
            prefault: Whether to allocate the memory of all snapshots right after the first step. If not, the first
                `start_step` or `save` that copies the state takes longer. In a quorum, receivers need no copy.
            checkpoint_store: Stores the durable checkpoints of all ranks of this replica. The manager closes it.
            save_every: Interval of checkpoints, in steps.
            keep_every: Interval, in steps, of snapshots that outlive this process. The last two stay in host memory,
                and `resume` loads them after a restart on this host.
            copies: Number of hosts that hold the snapshots of ``keep_every`` for each rank. With 2, the ranks can
                resume after the loss of any host.
            failure_domain: Name of what fails together with this process. Default: the name of its host.

        Raises:
            ValueError: Only one of ``load_state_dict`` and ``state_dict`` was given.
            ConfigurationError: ``save_every`` was given without a store, or ``keep_every`` without a transport.
            TypeError: The transport is not an ``HTTPTransport`` of ``ft_transport``.
            TransportError: The transport belongs to another manager.
        """
        if (load_state_dict is None) != (state_dict is None):
            given = "load_state_dict" if state_dict is None else "state_dict"
            raise ValueError(f"expected both load_state_dict and state_dict, or neither; got only {given}")
        self._replica = Replica(
            timeout,
            checkpoint_transport,
            checkpoint_store,
            prefault=prefault,
            save_every=save_every,
            keep=KeepSettings(every=keep_every, copies=copies, domain=failure_domain),
        )
        self._state = self._replica.state
        if load_state_dict is not None and state_dict is not None:
            self.register_state_dict_fn("default", load_state_dict, state_dict)
        self._usability = Usability()
        self._unclosed = Unclosed(self, self._replica.closers())
        self._end = SafeEnd()

    def metadata(self) -> str:
        """Return the address from which peers recover this replica's state.

        Raises:
            ManagerError: The manager has no transport.
        """
        transport = self._replica.transport
        if transport is None:
            raise ManagerError("expected a checkpoint_transport to serve the state, and this manager has none")
        return transport.metadata()

    def allow_state_dict_read(self) -> None:
        """Release the lock of `disallow_state_dict_read`; idempotent. As in torchft; any thread may call it."""
        self._state.lock.allow()

    def disallow_state_dict_read(self) -> None:
        """Block readers of the state until `allow_state_dict_read`. As in torchft; any thread may call it.

        Call it before an optimizer steps. State that is registered with ``is_stable`` may change only inside `writing`.

        Raises:
            LockTimeoutError: Readers held the lock until the deadline. After this error, readers are not blocked.
        """
        self._state.lock.disallow()

    def writing(
        self, what: str = "changing the state", timeout: timedelta | None = None
    ) -> AbstractContextManager[Any]:
        """Return a nestable context manager inside which this thread holds the write lock and may change the state.

        Raises:
            LockTimeoutError: Other threads held the lock until the deadline.
        """
        return self._state.lock.write(what, timeout)

    def reading(self, what: str = "reading the state", timeout: timedelta | None = None) -> AbstractContextManager[Any]:
        """Return a context manager of the read lock: no attached optimizer steps. Never wait for a network inside.

        Raises:
            LockTimeoutError: Another thread held the write lock until the deadline.
        """
        return self._state.lock.read(what, timeout)

    def read_lock(self, timeout: timedelta) -> AbstractContextManager[Any]:
        """Return the context manager of `reading`, for the argument ``read_lock`` of an ``HTTPTransport``."""
        return self._state.lock.read("taking a snapshot", timeout)

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
        """Register the two functions of one part of the state. As in torchft.

        Args:
            key: Name of the part, the same on every replica.
            load_state_dict: Function that loads a received part. The manager calls it while it holds the write lock.
            state_dict: Function that returns the part, with live tensors. The manager calls it for every snapshot.
            scope: ``replicated`` state is equal on every replica, and peers receive it; ``local`` state is saved in
                checkpoints only.
            on_training_thread: Whether the manager may call the functions only on the training thread.
            is_stable: Whether tensors of the part change only inside `writing` or in a step of an attached optimizer.
                Receivers read these tensors without a copy, unless an attached optimizer changes them.

        Raises:
            RegistryError: The key is taken.
        """
        self._state.registry.register(
            key, load_state_dict, state_dict, scope=scope, on_training_thread=on_training_thread, is_stable=is_stable
        )

    def set_state_dict_fns(self, load_state_dict: Callable[[T], object], state_dict: Callable[[], T]) -> None:
        """Register two functions under the key ``set_state_dict_fns``. Call `register_state_dict_fn` instead."""
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
        """Register an object with ``state_dict`` and ``load_state_dict``: a module, optimizer, scheduler, data loader.

        The other arguments are those of `register_state_dict_fn`.

        Raises:
            RegistryError: The key is taken.
            TypeError: The object lacks one of the methods.
        """
        self._state.registry.register_object(
            key, obj, scope=scope, on_training_thread=on_training_thread, is_stable=is_stable
        )

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Return an iterator over a registered loader, epoch after epoch. Call ``next`` after each step boundary.

        After a load of the loader's state, this iterator continues at the loaded position; ``iter(loader)`` does not.

        Raises:
            RegistryError: The loader is not registered.
        """
        return self._state.registry.loaders.batches(loader)

    def attach(self, *optimizers: Optimizer, every_commit: bool = True) -> OptimizerAttachment:
        """Make every ``step()`` of the optimizers hold the write lock, so that no copy begins during a step.

        A snapshot then copies their parameters and states in the background, until the next ``step()``. Do not attach
        an optimizer if other code changes its parameters or states outside `writing` sections. For torchft's LocalSGD
        and DiLoCo, call ``guard_local_sgd`` or ``guard_diloco``. The returned context manager detaches the optimizers.

        Args:
            *optimizers: The optimizers. Register their states as well, under keys of their own.
            every_commit: Whether each optimizer must step exactly once per commit in a quorum. If one does not, the
                replica heals. Pass false if optimizers alternate, or step between rare synchronisations of your own.
        """
        return self._state.attach(optimizers, every_commit=every_commit)

    def replica_state(self) -> dict[str, object]:
        """Return the replicated state of this replica, with live tensors. The caller must hold the lock.

        Raises:
            ManagerError: A state function must run on the training thread, and this is another thread.
            RegistryError: A state function failed.
        """
        return self._state.content()

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the result of a peer's `replica_state`, while holding the write lock.

        Raises:
            RegistryError: The state does not fit the registered objects, or a load function failed. If a load function
                failed midway, this replica refuses to step until another load succeeds.
            ManagerError: A load function must run on the training thread, and this is another thread.
        """
        self._state.require_training_thread()
        with self._state.lock.write("loading a received state"):
            self._state.load(state)

    def state_dict(self) -> dict[str, int | str]:
        """Return the manager's own counters, for a checkpoint: ``step``, ``batches_committed`` and ``lineage``."""
        return self._state.counters()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the manager's counters (see `state_dict`). ``step`` alone suffices if all replicas load one checkpoint.

        Raises:
            ManagerError: ``step`` is not a whole number from 0.
        """
        self._state.load_counters(state_dict)

    def current_step(self) -> int:
        """Return the number of committed steps that the state contains."""
        return self._state.step

    def start_step(self, step: int) -> bool:
        """Begin a step, at the step boundary: the top of every iteration, before you draw data and run ``forward``.

        Args:
            step: Number of committed steps that the state contains.

        Returns:
            Whether a snapshot of this step has begun.

        Raises:
            StateTornError: This replica has only part of a state.
            LoaderOrderError: A batch of a registered loader was drawn too early, or from an outdated iterator.
            ManagerError: The step is not a whole number from 0, is below the last step, or the manager has a quorum.
            RegistryError: In one of the first steps: a state function runs a collective, or a leaf has no encoding.
            TransportError: More saves in a row failed than the store allows.
        """
        self._refuse_start_step()
        self._replica.end_if_preempted(step, lambda: None)
        self._state.steps.boundary(self._state.step, step)
        self._replica.encodings.check(self._state.optimizers())
        return self._replica.begin_step(step)

    def on_preemption(
        self,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1),
        is_announced: Callable[[], bool] | None = None,
        grace: timedelta = timedelta(seconds=25),
    ) -> None:
        """End this process in an orderly way when a preemption is announced to any rank of this replica.

        All ranks stop at the same step boundary: their ``start_step`` or ``start_quorum`` keeps the state
        (``keep_every``), saves it (``checkpoint_store``), and raises ``PreemptedExit``, a ``SystemExit`` with exit code
        75. Other replicas do not wait. A further signal after two seconds, or the end of ``grace``, ends the process at
        once; what was kept and saved before is whole. All ranks must call this, with signals on the main thread.

        Args:
            signals: The signals that announce a preemption, such as those of Kubernetes and of ``sbatch --signal``.
                Their handlers are replaced. With an empty sequence, any thread may call this.
            is_announced: Function that returns whether a preemption is announced, for notices that have to be polled.
                A thread calls it ten times per second.
            grace: Time from the announcement until the process is ended.

        Raises:
            ConfigurationError: This replica has several ranks, and ``torch.distributed`` is not initialised.
            ManagerError: This is not the main thread and there are signals, or the method was called before.
        """
        self._usability.require()
        self._unclosed.add(self._replica.expect_preemption(signals, is_announced, grace).close)

    def snapshot(self, step: int | None = None) -> Future[None]:
        """Take a snapshot. Call it between two steps. The returned future completes when peers can fetch the snapshot.

        Args:
            step: The committed step of the state. Required if an attached optimizer has stepped since the step
                boundary; otherwise the default is the step of that boundary.

        Raises:
            ManagerError: The manager has no transport, was shut down, or cannot infer ``step``.
            LockTimeoutError: A snapshot was unfinished, or another thread held the write lock, until the deadline.
            TransportError: The state cannot be copied.
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
        """Receive the state of a peer into this replica's own tensors, and load the state.

        If the transfer fails after it has overwritten tensors, this replica refuses to step until a recovery succeeds.
        With a ``checkpoint_store``, all ranks of the store's group must call this. If one of them cannot recover from a
        peer, all of them load the newest intact checkpoint.

        Args:
            metadata: The address that ``metadata()`` returned on a peer with the same layout. For a peer with another
                layout, the addresses of all its ranks; this rank receives only the parts that it needs.
            step: The step to receive, or ``latest``: the peer's present step.
            timeout: Deadline of the whole call.
            verify: Whether to compare every bit of the loaded state with the peer's. Pass false if a load function
                deliberately changes the values that it loads.
            process_group: The process group of all ranks of this replica, if it has several. All of them must call
                this. They agree on a step through the group's store. If one rank fails, all ranks fail.

        Raises:
            RecoveryFailedError: Recovery from peers failed, and the store has no checkpoint.
            TransportError: The transfer failed.
            StateTornError: The loaded state differs from the sent state, or another rank of ``process_group`` failed.
            StateMismatchError: The peer's state does not fit the registered objects. Nothing was received.
            RegistryError: A load function failed.
            LockTimeoutError: Other threads held the lock until the deadline.
            ManagerError: There is no transport, or ``metadata`` is this replica's address; or this replica has several
                ranks, and neither ``step`` nor ``process_group`` is given.
        """
        self._usability.require()
        options = PeerOptions(timeout=timeout if timeout is not None else self._state.timeout, verify=verify)
        return self._replica.recover(metadata, step, options, process_group=process_group)

    def save(self, *, wait: bool = False, overwrite: bool = False) -> SaveHandle:
        """Save a durable checkpoint of the present step in the background. All ranks must call this.

        Call it right after the step boundary, before you draw data, so that the checkpoint has the matching position of
        the data loader. State that is registered with ``scope="local"`` is saved for each rank.

        Args:
            wait: Whether to return only when the checkpoint is complete.
            overwrite: Whether to replace an existing checkpoint of this step.

        Raises:
            ManagerError: The manager has no store, or an optimizer has stepped since the step boundary.
            StateTornError: This replica has only part of a state.
            TransportError: As for ``CheckpointStore.save``.
        """
        self._usability.require()
        return self._replica.required_checkpoints().save(wait=wait, overwrite=overwrite)

    def resume(self, *, keys: ResumeKeys = "same") -> Recovery | None:
        """Load the newest kept state or durable checkpoint. All ranks must call this before the first step.

        With ``keep_every``, all ranks load the newest step that every rank has kept, unless a durable checkpoint is
        newer. A rank finds its kept states if it runs the same command in the same job and directory on the same host,
        with the same ``replica_id`` and rank. Instead of a damaged state, an older one is loaded, with a warning.

        State with ``scope="local"`` is loaded only if the checkpoint has the same ``replica_id`` and number of ranks.
        Otherwise the present local state is unchanged, and a warning is logged. The newest ``step-N`` may be a
        checkpoint that ``torch.distributed.checkpoint`` wrote for another program, such as torchtitan.

        Args:
            keys: For checkpoints: ``same`` requires exactly the registered keys. ``shared`` loads the keys that are
                both registered and saved, and logs a warning that lists all other keys. State under other registered
                keys is unchanged; in a quorum, all replicas then load that state from one of them.

        Returns:
            The step and source of the state; ``None`` if there is neither a kept state nor a checkpoint.

        Raises:
            ConfigurationError: Ranks with ``keep_every`` have not initialised ``torch.distributed``.
            ManagerError: The manager has neither a store nor ``keep_every``; or the checkpoint lacks registered keys,
                and the replicas have no ``replica_id``.
            RegistryError: The checkpoint does not fit the registered objects, or a load function failed.
            StateTornError: The loaded state differs from the saved one; or all kept states are damaged, and there is no
                checkpoint.
            TransportError: All checkpoints are damaged, or loading failed on a rank; raised on all ranks.
        """
        self._usability.require()
        return self._replica.resume(keys)

    def shutdown(self, wait: bool = True) -> None:
        """Leave the job, and end the manager's threads and transport. Idempotent; a signal handler may call this.

        On the training thread, this also ends the worker processes of `batches`. In a signal handler that interrupted
        another call of this package, ``shutdown`` returns at once and takes effect after the handler. In a forked child
        it does nothing. With ``wait``, it returns only when the transport's server has ended.

        The states of ``keep_every`` are dropped, unless an exception is propagating or being handled (``finally``,
        ``except``): then a restarted process can resume.
        """
        if self._usability.is_of_parent():
            return
        self._usability.is_shut_down = True
        is_interrupting = interrupts_own_call()
        is_over = sys.exc_info()[0] is None
        self._end(lambda: self._shut_down(wait, is_over), wait=wait and not is_interrupting)
        # If another thread ended the workers, the training thread could wait for a batch for ever.
        if self._state.training_thread == threading.get_ident() and not is_interrupting:
            self._state.registry.loaders.end_workers()

    def _shut_down(self, wait: bool, is_over: bool) -> None:
        self._unclosed.forget()
        self._replica.close(wait=wait, is_over=is_over)

    def _refuse_start_step(self) -> None:
        """Raise if steps must begin with another method; `Manager` overrides this."""
