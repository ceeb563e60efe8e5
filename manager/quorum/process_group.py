"""The process group between replicas, which is set up again whenever its members change."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, cast

import torch

from ft_transport.coordination.ranks import decline, rendezvous
from ft_transport.coordination.store import StoreConnections
from ft_transport.errors import TransportError
from ft_transport.runtime.deadline import Deadline
from ft_transport.runtime.signal_safe import SafeEvent, SafeFuture
from ft_transport.runtime.threads import SafeExecutor
from manager.collectives.gloo import GlooProcessGroup
from manager.collectives.managed_work import uses_accelerator
from manager.collectives.process_group import Reconfigurable, ReconfigurableGroup, ReplicaProcessGroup
from manager.collectives.reduction_sequence import ReductionSequence
from manager.collectives.reductions import Reduction, ReductionLog
from manager.errors import QuorumError, QuorumTimeoutError, quorum_errors
from manager.quorum.decision import Decision
from manager.quorum.reports import Claim

_PREFIX: Final = "ft_transport"
_TORCHFT_GLOO: Final = "torchft-gloo"
"""The backend name of torchft's gloo group that runs in this process; its other gloo group runs in a child process."""
_MEETING: Final = "meeting"
_DECLINING: Final = timedelta(seconds=1)
_READING_S: Final = 0.5
"""Time in which other members can read a refusal before its store closes: unread, it costs them ``connect_timeout``."""


class QuorumProcessGroup:
    """The process group that connects one rank to the same rank of each other replica.

    Any thread may call `abort`. The training thread and the quorum thread may call the rest, but not both at once.

    Args:
        process_group: Runs the collectives; ``None`` for gloo. This object shuts it down.
        stores: Connections to the key-value stores through which the members find each other.
        group_rank: This rank within its replica.
        world_size: Number of ranks of the replica.
        timeout: Limit of each collective of gloo.
        connect_timeout: Limit of the wait for the other members.

    Attributes:
        wrapped: The object that runs the collectives.
        group: Key of the process group that is set up; empty without one.
        num_begun: Number of process groups that this replica has begun to set up under its id.
    """

    def __init__(
        self,
        process_group: ReplicaProcessGroup | Reconfigurable | None,
        *,
        stores: StoreConnections,
        group_rank: int,
        world_size: int | None,
        timeout: timedelta,
        connect_timeout: timedelta,
    ) -> None:
        if process_group is None:
            process_group = GlooProcessGroup(timeout=timeout, connect_timeout=connect_timeout)
        elif not hasattr(process_group, "configure"):
            process_group = ReconfigurableGroup(process_group, connect_timeout)
        if isinstance(process_group, (GlooProcessGroup, ReconfigurableGroup)):
            process_group.stores = stores
        self.wrapped = cast("ReplicaProcessGroup", process_group)
        self.group = ""
        self.num_begun = 0
        self._stores = stores
        self._group_rank = group_rank
        self._world_size = world_size
        self._connect_timeout = connect_timeout
        self._timeout = timeout
        self._mutex = threading.Lock()
        self._begun = ""
        self._refused_s = -_READING_S
        self._is_closed = False
        self._members: tuple[str, ...] = ()
        self._reducing = SafeExecutor(1, "ft-transport-reduce")
        self._sequence: ReductionSequence | None = None
        self._has_reduced = False
        self._log = ReductionLog()

    def configure(self, decision: Decision, deadline: Deadline, *, replica_id: str) -> float:
        """Set up the process group of a quorum, unless this rank has that group already.

        Args:
            decision: The decision of the quorum.
            deadline: Limit of the whole call. ``connect_timeout`` applies as well.
            replica_id: The id of this replica.

        Returns:
            The duration in seconds; 0 if the rank has the group already.

        Raises:
            OSError: This process has too few descriptors left.
            Exception: The group could not be set up, for example because a member did not arrive.
        """
        if decision.rank is None or decision.group == self.group:
            return 0.0
        start_s = time.monotonic()
        if self.group and uses_accelerator() and not _is_gloo(self.wrapped):
            # The next group aborts this one, whose last collectives, such as those of a loss, may be queued only. Half
            # the time, because the others wait for this member.
            with suppress(TimeoutError):
                self.wait_for_device(deadline.cap(self._connect_timeout / 2))
        with self._mutex:
            if self._is_closed:
                raise QuorumError(f"replica {replica_id} has been shut down")
            if decision.group == self._begun:
                raise QuorumError(f"the process group {decision.group} was given up in this step")
            self._begin(decision)
        prefix = self._prefix(decision)
        if len(decision.group_members) > 1:
            if isinstance(self.wrapped, GlooProcessGroup):
                try:
                    self.wrapped.check_descriptors(len(decision.group_members))
                except OSError as error:
                    self._publish_refusal(decision, str(error))
                    raise
            with quorum_errors():
                rendezvous(
                    store=self._stores.at(decision.store_address),
                    prefix=f"{prefix}/{_MEETING}",
                    rank=decision.rank,
                    names=decision.group_members,
                    addresses=decision.group_addresses,
                    timeout=deadline.cap(self._connect_timeout),
                )
        self._end_reducing(deadline)
        if isinstance(self.wrapped, (GlooProcessGroup, ReconfigurableGroup)):
            # Set here, because torchft's ``configure`` has no argument for it.
            self.wrapped.connect_timeout = deadline.cap(self._connect_timeout)
        self.wrapped.configure(
            f"{decision.store_address}/{prefix}",
            replica_id,
            decision.rank,
            len(decision.group_members),
            group_number(decision.group),
            self._group_rank,
            self._world_size,
            None,
        )
        with self._mutex:
            self.group, self._members, self._sequence = decision.group, decision.group_members, None
        return time.monotonic() - start_s

    def decline(self, decision: Decision, reason: str) -> None:
        """Refuse to set up the process group of a quorum, so that its other members do not wait for this rank.

        Args:
            decision: The decision of the quorum.
            reason: Why this rank refuses, for messages of the other members.
        """
        if decision.rank is None or len(decision.group_members) <= 1:
            return
        with self._mutex:
            if self._is_closed or decision.group == self._begun:
                return
            # The next attempt has another key: under this one the other members read the refusal.
            self._begin(decision)
        self._publish_refusal(decision, reason)

    def _begin(self, decision: Decision) -> None:
        self._begun = decision.group
        self.group = ""
        self.num_begun += 1

    def _publish_refusal(self, decision: Decision, reason: str) -> None:
        assert decision.rank is not None, "no other member waits for a replica that takes no part"
        self._refused_s = time.monotonic()
        with suppress(TransportError):
            decline(
                store=self._stores.at(decision.store_address),
                prefix=f"{self._prefix(decision)}/{_MEETING}",
                name=decision.group_members[decision.rank],
                reason=reason,
                timeout=_DECLINING,
            )

    def _prefix(self, decision: Decision) -> str:
        return f"{_PREFIX}/{decision.group}/{self._group_rank}"

    def abort(self) -> None:
        """End the process group at once, so that other members stop waiting for this replica."""
        with self._mutex:
            group, self.group = self.group, ""
            sequence, self._sequence = self._sequence, None
        if sequence is not None:
            sequence.fail(RuntimeError("expected a working process group, got one that has been aborted"))
        if group:
            self.wrapped.abort()

    def wait_for_readers(self) -> None:
        """Wait a moment after `decline`, so that other members can read the refusal from a store in this process."""
        waited_s = time.monotonic() - self._refused_s
        if waited_s < _READING_S:
            time.sleep(_READING_S - waited_s)

    def have_members_left(self) -> bool:
        """Return whether another member has left the process group, as far as this rank knows. Thread-safe."""
        if isinstance(self.wrapped, GlooProcessGroup):
            return self.wrapped.have_members_left()
        # ``errored`` of torchft's NCCL group waits for the stream, which a collective with a dead member blocks.
        is_busy = uses_accelerator() and not torch.accelerator.current_stream().query()
        return not is_busy and self.wrapped.errored() is not None

    def error(self) -> Exception | None:
        """Return an error that the process group detected outside of a collective; ``None`` if there is none."""
        return self.wrapped.errored()

    def allreduce(self, tensor: torch.Tensor, reduction: Reduction) -> Any:
        """Begin to reduce a tensor in place over the members, and return a work object to wait for.

        Over gloo, nothing is sent before all members have begun the same reduction (`ReductionSequence`).

        Args:
            tensor: The tensor, or the local part of a DTensor.
            reduction: The operation, and the name of the tensor.
        """
        sequence = self._present_sequence()
        if sequence is not None:
            return sequence.add(reduction, tensor)
        self._log.add(reduction, tensor)
        return self.wrapped.allreduce([tensor], reduction.options)

    def wait_for_device(self, timeout: timedelta) -> None:
        """Wait until the device has finished the collectives. If that takes too long, abort the process group.

        A collective with a dead member runs for ever, and torch cannot wait for a device with a timeout.

        Raises:
            TimeoutError: The group was aborted.
        """
        is_done, is_late = SafeEvent(), SafeEvent()

        def watch() -> None:
            if not is_done.wait(timeout.total_seconds()):
                is_late.set()
                self.abort()

        # gloo's collectives have ended by now, and a replica alone waits for no other.
        if self.group and len(self._members) > 1 and not _is_gloo(self.wrapped):
            self._reducing.submit(watch)
        try:
            torch.accelerator.synchronize()
        finally:
            is_done.set()
        if is_late.is_set():
            raise TimeoutError(f"expected the device to finish the collectives within {timeout.total_seconds():g} s")

    def _end_reducing(self, deadline: Deadline) -> None:
        """Wait for the reductions of the previous group to end, so that they do not continue in the next one.

        Raises:
            QuorumTimeoutError: They did not end in time.
        """
        if not self._has_reduced:
            return
        sequence, self._sequence = self._sequence, None
        if sequence is not None and sequence.is_running:
            sequence.abort()
        waited_s = deadline.cap(self._connect_timeout).total_seconds()
        ended = SafeFuture[None]()
        self._reducing.submit(ended.set_result, None)
        if not ended.wait(waited_s):
            raise QuorumTimeoutError(
                f"expected the reductions of an earlier process group to end within {waited_s:g} s"
            )
        self._has_reduced = False

    def begin_step(self) -> None:
        """Forget the reductions of the previous step, including those after its commit."""
        self._sequence = None
        self._log = ReductionLog()

    def end_step(self) -> None:
        """Announce that this rank has begun all reductions of the step."""
        sequence = self._present_sequence()
        if sequence is not None:
            sequence.end()

    def compare_step(self, timeout: timedelta | None) -> Claim:
        """Compare the members' reductions of this step, after `end_step`, or leave that to the next quorum.

        Args:
            timeout: Limit of the wait for the other members to end the step.

        Returns:
            A claim without step and lineage, which the next quorum compares. It is empty if this call has compared the
            reductions.

        Raises:
            ReductionMismatchError: The reductions differ.
            Exception: The process group failed.
        """
        sequence = self._sequence
        if sequence is not None:
            sequence.wait_for_end(timeout)
            self._sequence = None
            return Claim()
        log, self._log = self._log, ReductionLog()
        if len(self._members) <= 1:
            return Claim()
        names, digest = log.summary()
        return Claim(tensors=names, digest=digest)

    def close(self) -> None:
        """Shut the process group down."""
        with self._mutex:
            self._is_closed = True
            self.group = ""
            sequence, self._sequence = self._sequence, None
        if sequence is not None:
            sequence.fail(RuntimeError("expected a working process group, got one that has been shut down"))
        self.wrapped.shutdown()
        self._reducing.shutdown(wait=False)

    def _present_sequence(self) -> ReductionSequence | None:
        """Return the sequence that checks the reductions of this step; ``None`` if the backend does not need it."""
        if self._sequence is None and self.group and len(self._members) > 1 and _is_gloo(self.wrapped):
            self._has_reduced = True
            self._sequence = ReductionSequence(
                self.wrapped, self._members, timeout=self._timeout, executor=self._reducing
            )
        return self._sequence


def _is_gloo(group: Any) -> bool:
    """Return whether the group is gloo's and in this process, where a mismatched reduction would end the process."""
    name = getattr(group, "getBackendName", str)()
    return isinstance(group, GlooProcessGroup) or name == _TORCHFT_GLOO


def group_number(group: str) -> int:
    """Return a process group's number, which its key contains. torchft's names and logs call it the quorum id."""
    return int(group.rpartition("-")[2], 16) >> 1
