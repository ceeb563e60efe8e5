"""The process group between replicas that this rank holds: its members, and how it meets those of the next one."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any, Final, cast

import torch
from torch.distributed import AllreduceOptions

from ft_transport.coordination.rendezvous import rendezvous
from ft_transport.coordination.store_connections import StoreConnections
from ft_transport.runtime.deadline import Deadline
from manager.collectives.gloo import GlooProcessGroup, ReplicaProcessGroup
from manager.collectives.reconfigurable import Reconfigurable, ReconfigurableGroup
from manager.errors import QuorumError, quorum_errors
from manager.quorum.decision import Decision

_PREFIX: Final = "ft_transport"


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
        self._mutex = threading.Lock()
        self._begun = ""
        self._is_closed = False

    def configure(self, decision: Decision, deadline: Deadline, *, replica_id: str) -> float:
        """Meet the members of a process group, if this rank does not hold it already.

        Args:
            decision: Which group it is.
            deadline: For everything, where it comes before ``connect_timeout`` is over.
            replica_id: This replica's.

        Returns:
            Seconds that it took; 0 if there was nothing to do.

        Raises:
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
        prefix = f"{_PREFIX}/{decision.group}/{self._group_rank}"
        if len(decision.group_members) > 1:
            with quorum_errors():
                rendezvous(
                    store=self._stores.at_address(decision.store_address),
                    prefix=f"{prefix}/meeting",
                    rank=decision.rank,
                    names=decision.group_members,
                    addresses=decision.group_addresses,
                    timeout=deadline.cap(self._connect_timeout),
                )
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
            self.held = decision.group
        return time.monotonic() - start_s

    def _limit_connecting(self, deadline: Deadline) -> None:
        """``configure`` of torchft takes no timeout; process groups of this package are told beforehand."""
        if isinstance(self.wrapped, (GlooProcessGroup, ReconfigurableGroup)):
            self.wrapped.connect_timeout = deadline.cap(self._connect_timeout)

    def abort(self) -> None:
        """End the process group at once, so that whoever waits for this replica in it does not wait for long."""
        with self._mutex:
            was_held, self.held = self.held, ""
        if was_held:
            self.wrapped.abort()

    def error(self) -> Exception | None:
        """Return an error that the process group noticed by itself."""
        return self.wrapped.errored()

    def allreduce(self, tensor: torch.Tensor, reduce_op: Any) -> Any:
        """Begin an allreduce in place over the members."""
        options = AllreduceOptions()
        options.reduceOp = reduce_op
        return self.wrapped.allreduce([tensor], options)

    def close(self) -> None:
        """Leave it for good."""
        with self._mutex:
            self._is_closed = True
            self.held = ""
        self.wrapped.shutdown()


def group_number(group: str) -> int:
    """Return a number for the key of a process group: torchft's use it in names and logs as the id of a quorum."""
    return int(group.rpartition("-")[2], 16) >> 1
