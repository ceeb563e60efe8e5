"""The process groups that a manager accepts: torchft's, and those with a ``reconfigure`` method.

torch's own groups have it from 2.14 on, and torchft's since 2026. Each member has a handle; ``reconfigure`` takes the
handles of all members in the order of their ranks (``ReconfigureOptions`` in torch/csrc/distributed/c10d;
torchft/process_group.py, ``reconfigure_with_store``). Members exchange their handles through the quorum's store.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch

from ft_transport.coordination.store import StoreConnections
from manager.errors import QuorumError, quorum_errors


class ReplicaProcessGroup(Protocol):
    """A process group with one rank per replica; signatures as in torchft's ``ProcessGroup``."""

    def configure(  # noqa: PLR0917 - torchft's signature
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Leaves the current group and joins the next one at ``store_addr`` (``host:port/prefix``). Blocks."""

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Begins an allreduce in place; returns a ``torch.distributed.Work``."""

    def abort(self) -> None:
        """Ends the group at once; threads that wait in one of its collectives fail."""

    def errored(self) -> Exception | None:
        """Returns an error that the group noticed by itself."""

    def shutdown(self) -> None:
        """Releases all resources."""


class Reconfigurable(Protocol):
    """The methods of such a process group; torchft's groups add ``set_rank_info`` and ``errored``."""

    def get_reconfigure_handle(self) -> str:
        """Returns this member's name until the next ``reconfigure``."""

    def reconfigure(self, opts: Any) -> Any:
        """Begins to meet the members that the options name; returns a ``torch.distributed.Work``."""

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Begins an allreduce in place."""

    def abort(self) -> None:
        """Ends collectives that run."""

    def shutdown(self) -> None:
        """Releases all resources."""


@dataclass(slots=True)
class _Options:
    """Stands in for ``ReconfigureOptions`` in versions of torch that lack it."""

    uuid: int = 0
    handles: list[str] = field(default_factory=list)
    timeout: timedelta | None = None
    hints: dict[str, str] = field(default_factory=dict)


class ReconfigurableGroup:
    """Adapts a `Reconfigurable` to the methods that the manager calls (`ReplicaProcessGroup`).

    Args:
        group: The process group; each new quorum reconfigures it.
        connect_timeout: Limits the exchange of handles, and ``reconfigure``.

    Attributes:
        connect_timeout: As given; the next `configure` reads it.
        stores: Connections to the stores that members meet at.
    """

    def __init__(self, group: Reconfigurable, connect_timeout: timedelta) -> None:
        self._group = group
        self.connect_timeout = connect_timeout
        self.stores = StoreConnections()

    def configure(  # noqa: PLR0917 - torchft's signature
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Exchange handles at ``store_addr`` (``host:port/prefix``) and reconfigure the group.

        Raises:
            QuorumError: The other members did not arrive in time, or the store does not answer.
        """
        del global_ranks
        set_rank_info = getattr(self._group, "set_rank_info", None)
        if set_rank_info is not None:
            set_rank_info(replica_id, group_rank or 0, group_world_size or 1)
        options = getattr(torch._C._distributed_c10d, "ReconfigureOptions", _Options)()
        options.uuid = quorum_id or 0
        options.handles = self._exchange(store_addr, rank, world_size)
        options.timeout = self.connect_timeout
        self._group.reconfigure(options).wait(self.connect_timeout)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Begin an allreduce in place."""
        return self._group.allreduce(tensors, opts)

    def abort(self) -> None:
        """End collectives that run."""
        self._group.abort()

    def errored(self) -> Exception | None:
        """Return an error that the group noticed by itself."""
        errored = getattr(self._group, "errored", None)
        error = errored() if errored is not None else None
        return error if isinstance(error, Exception) else None

    def shutdown(self) -> None:
        """Release all resources."""
        self._group.shutdown()
        self.stores.close()

    def _exchange(self, store_addr: str, rank: int, world_size: int) -> list[str]:
        handle = self._group.get_reconfigure_handle()
        if world_size == 1:
            return [handle]
        place, _, prefix = store_addr.partition("/")
        timeout = self.connect_timeout
        keys = [f"{prefix}/handle/{member}" for member in range(world_size)]
        with quorum_errors():
            channel = self.stores.at_address(place)
            channel.set(keys[rank], handle, timeout)
            handles = channel.get(keys, timeout)
        if handles is None:
            raise QuorumError(f"expected all of {keys} within {timeout.total_seconds():g} s")
        return [each.decode() for each in handles]
