"""The process group between replicas that this rank holds: its members, and how it meets those of the next one."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, cast

import torch

from ft_transport.coordination.rendezvous import decline, rendezvous
from ft_transport.coordination.store_connections import StoreConnections
from ft_transport.errors import TransportError
from ft_transport.runtime.deadline import Deadline
from ft_transport.runtime.handler_safety import SafeExecutor, SafeFuture
from manager.collectives.gloo import GlooProcessGroup, ReplicaProcessGroup
from manager.collectives.reconfigurable import Reconfigurable, ReconfigurableGroup
from manager.collectives.reduction_sequence import GatheringGroup, ReductionSequence
from manager.collectives.reductions import Reduction, ReductionLog
from manager.errors import QuorumError, QuorumTimeoutError, quorum_errors
from manager.quorum.decision import Decision
from manager.quorum.divergence import Claim

_PREFIX: Final = "ft_transport"
_TORCHFT_GLOO: Final = "torchft-gloo"
"""torchft's name for its gloo group in this process; a difference ends only the child process of its other one."""
_MEETING: Final = "meeting"
_DECLINING: Final = timedelta(seconds=1)
_READING_S: Final = 0.5
"""Members that find the store of a refusal gone wait for it until ``connect_timeout``."""


class HeldProcessGroup:
    """The process group of one rank, set up afresh for other members.

    `abort` may be called by any thread; the rest by the training thread and the thread that forms quorums, never by
    both at once.

    Args:
        process_group: What runs the collectives; ``None`` for gloo. This object shuts it down.
        stores: The connections by which members meet.
        group_rank: This rank within its replica.
        world_size: How many ranks the replica has.
        timeout: For each collective of gloo.
        connect_timeout: For meeting the other members.

    Attributes:
        wrapped: What runs the collectives.
        held: The key of the group whose members have been met; empty if there is none.
        num_begun: How many groups this replica has begun to set up under its id.
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
        self.held = ""
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
        """Meet the members of a process group, if this rank does not hold it already.

        Args:
            decision: Which group it is.
            deadline: For everything, where it comes before ``connect_timeout`` is over.
            replica_id: This replica's.

        Returns:
            Seconds that it took; 0 if there was nothing to do.

        Raises:
            OSError: This process has too few descriptors left.
            Exception: Whatever the process group raises if the others do not come.
        """
        if decision.rank is None or decision.group == self.held:
            return 0.0
        start_s = time.monotonic()
        with self._mutex:
            if self._is_closed:
                raise QuorumError(f"replica {replica_id}: has been shut down")
            if decision.group == self._begun:
                raise QuorumError(f"the process group {decision.group} was given up in this step")
            self._begun = decision.group
            self.held = ""
            self.num_begun += 1
        prefix = self._prefix(decision)
        if len(decision.group_members) > 1:
            if isinstance(self.wrapped, GlooProcessGroup):
                try:
                    self.wrapped.check_descriptors(len(decision.group_members))
                except OSError as error:
                    self._tell_refusal(decision, str(error))
                    raise
            with quorum_errors():
                rendezvous(
                    store=self._stores.at_address(decision.store_address),
                    prefix=f"{prefix}/{_MEETING}",
                    rank=decision.rank,
                    names=decision.group_members,
                    addresses=decision.group_addresses,
                    timeout=deadline.cap(self._connect_timeout),
                )
        self._end_reducing(deadline)
        self._limit_connecting(deadline)
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
            self.held, self._members, self._sequence = decision.group, decision.group_members, None
        return time.monotonic() - start_s

    def decline(self, decision: Decision, reason: str) -> None:
        """Let no member wait for this rank in a process group that it has given up before it was set up.

        Args:
            decision: Which group it is.
            reason: Why, for the others.
        """
        if decision.rank is None or len(decision.group_members) <= 1:
            return
        with self._mutex:
            if self._is_closed or decision.group == self._begun:
                return
            # The next attempt has another key: under this one the others find the refusal.
            self._begun = decision.group
            self.held = ""
            self.num_begun += 1
        self._tell_refusal(decision, reason)

    def _tell_refusal(self, decision: Decision, reason: str) -> None:
        assert decision.rank is not None, "a replica that stands by is waited for by nobody"
        self._refused_s = time.monotonic()
        with suppress(TransportError):
            decline(
                store=self._stores.at_address(decision.store_address),
                prefix=f"{self._prefix(decision)}/{_MEETING}",
                name=decision.group_members[decision.rank],
                reason=reason,
                timeout=_DECLINING,
            )

    def _prefix(self, decision: Decision) -> str:
        return f"{_PREFIX}/{decision.group}/{self._group_rank}"

    def _limit_connecting(self, deadline: Deadline) -> None:
        """``configure`` of torchft takes no timeout; process groups of this package are told beforehand."""
        if isinstance(self.wrapped, (GlooProcessGroup, ReconfigurableGroup)):
            self.wrapped.connect_timeout = deadline.cap(self._connect_timeout)

    def abort(self) -> None:
        """End the process group at once, so that whoever waits for this replica in it does not wait for long."""
        with self._mutex:
            was_held, self.held = self.held, ""
            sequence, self._sequence = self._sequence, None
        if sequence is not None:
            sequence.fail(RuntimeError("expected a process group, and it has been aborted"))
        if was_held:
            self.wrapped.abort()

    def wait_for_readers(self) -> None:
        """After a refusal, give the other members time to read it, which may lie in a store of this process."""
        waited_s = time.monotonic() - self._refused_s
        if waited_s < _READING_S:
            time.sleep(_READING_S - waited_s)

    def have_members_left(self) -> bool:
        """Whether another member has ended the group, as far as the process group shows it. Thread-safe."""
        if isinstance(self.wrapped, GlooProcessGroup):
            return self.wrapped.have_members_left()
        return self.wrapped.errored() is not None

    def error(self) -> Exception | None:
        """Return an error that the process group noticed by itself."""
        return self.wrapped.errored()

    def allreduce(self, tensor: torch.Tensor, reduction: Reduction) -> Any:
        """Begin an allreduce in place over the members.

        Over gloo nothing is sent before all members have begun the same one (`ReductionSequence`).

        Args:
            tensor: Of a DTensor its local part.
            reduction: What is reduced, and how.
        """
        sequence = self._present_sequence()
        if sequence is not None:
            return sequence.add(reduction, tensor)
        self._log.add(reduction, tensor)
        return self.wrapped.allreduce([tensor], reduction.options)

    def _end_reducing(self, deadline: Deadline) -> None:
        """Wait until nothing of an earlier group is reduced: it would go on in the next one, beside other collectives.

        Raises:
            QuorumTimeoutError: It goes on.
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
        """Forget what the step before has reduced; what it reduced after its commit, too."""
        self._sequence = None
        self._log = ReductionLog()

    def end_step(self) -> None:
        """Announce that this rank has begun all reductions of the step."""
        sequence = self._present_sequence()
        if sequence is not None:
            sequence.end()

    def compare_step(self, timeout: timedelta | None) -> Claim:
        """After `end_step`, make sure that the members have made the same reductions.

        Args:
            timeout: For the others to end the step.

        Returns:
            What the next quorum has to compare, without step and lineage; an empty claim if it is compared.

        Raises:
            ReductionMismatchError: They have not.
            Exception: What the process group raised.
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
        """Leave it for good."""
        with self._mutex:
            self._is_closed = True
            self.held = ""
            sequence, self._sequence = self._sequence, None
        if sequence is not None:
            sequence.fail(RuntimeError("expected a process group, and it has been shut down"))
        self.wrapped.shutdown()
        self._reducing.shutdown(wait=False)

    def _present_sequence(self) -> ReductionSequence | None:
        """The reductions of the present step; ``None`` where they are not compared before they are sent."""
        if self._sequence is None and self.held and len(self._members) > 1 and _is_gloo(self.wrapped):
            group = cast("GatheringGroup", self.wrapped)
            self._has_reduced = True
            self._sequence = ReductionSequence(group, self._members, timeout=self._timeout, executor=self._reducing)
        return self._sequence


def _is_gloo(group: Any) -> bool:
    """Whether a different reduction on another member would end this process."""
    name = getattr(group, "getBackendName", str)()
    return isinstance(group, GlooProcessGroup) or name == _TORCHFT_GLOO


def group_number(group: str) -> int:
    """Return a number for the key of a process group: torchft's use it in names and logs as the id of a quorum."""
    return int(group.rpartition("-")[2], 16) >> 1
