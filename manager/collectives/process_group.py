"""The two kinds of process groups that a manager accepts: torchft's, and groups with a ``reconfigure`` method.

torch's own groups have ``reconfigure`` from torch 2.14 on, and torchft's groups since 2026. Each member has a handle, a
text that identifies it. ``reconfigure`` needs the handles of all members in the order of their ranks
(``ReconfigureOptions`` in torch/csrc/distributed/c10d; torchft/process_group.py, ``reconfigure_with_store``). Members
exchange their handles through the quorum's store.
"""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
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
        """Leaves the present group, and waits until all members of the next group have met at ``store_addr``.

        ``store_addr`` is ``host:port/prefix``.
        """

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Begins an allreduce in place; returns a ``torch.distributed.Work``."""

    def abort(self) -> None:
        """Ends the group at once. Threads that wait in one of its collectives get an error."""

    def errored(self) -> Exception | None:
        """Returns an error that the group detected outside of a call, if any."""

    def shutdown(self) -> None:
        """Releases all resources."""


class Reconfigurable(Protocol):
    """A process group with ``reconfigure``. torchft's groups also have ``set_rank_info`` and ``errored``."""

    def get_reconfigure_handle(self) -> str:
        """Returns this member's handle, valid until the next ``reconfigure``."""

    def reconfigure(self, opts: Any) -> Any:
        """Begins to connect to the members in ``opts.handles``; returns a ``torch.distributed.Work``."""

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Begins an allreduce in place."""

    def abort(self) -> None:
        """Ends the running collectives."""

    def shutdown(self) -> None:
        """Releases all resources."""


class ReconfigurableGroup:
    """Adapts a `Reconfigurable` group to the interface that the manager uses (`ReplicaProcessGroup`).

    Args:
        group: The process group, which each new quorum reconfigures.
        connect_timeout: Longest wait for the exchange of handles, and longest wait for ``reconfigure``.

    Attributes:
        connect_timeout: The same limit, for the next `configure`.
        stores: Connections to the stores through which members exchange handles.
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
            QuorumError: The other members' handles did not arrive in time, or the store does not respond.
        """
        del global_ranks
        set_rank_info = getattr(self._group, "set_rank_info", None)
        if set_rank_info is not None:
            set_rank_info(replica_id, group_rank or 0, group_world_size or 1)
        # torch before 2.14 does not have the class. torchft's groups then accept any object with its attributes.
        make_options = getattr(torch._C._distributed_c10d, "ReconfigureOptions", lambda: SimpleNamespace(hints={}))
        options = make_options()
        options.uuid = quorum_id or 0
        options.handles = self._exchange(store_addr, rank, world_size)
        options.timeout = self.connect_timeout
        self._group.reconfigure(options).wait(self.connect_timeout)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Begin an allreduce in place."""
        return self._group.allreduce(tensors, opts)

    def abort(self) -> None:
        """End the running collectives."""
        self._group.abort()

    def errored(self) -> Exception | None:
        """Return an error that the group detected outside of a call, if any."""
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
        address, _, prefix = store_addr.partition("/")
        timeout = self.connect_timeout
        keys = [f"{prefix}/handle/{member}" for member in range(world_size)]
        with quorum_errors():
            channel = self.stores.at(address)
            channel.set(keys[rank], handle, timeout)
            handles = channel.get(keys, timeout)
        if handles is None:
            raise QuorumError(
                f"expected the handles of all {world_size} members in the store at {address} within "
                f"{timeout.total_seconds():g} s"
            )
        return [each.decode() for each in handles]
