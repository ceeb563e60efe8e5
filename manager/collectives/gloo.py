"""The collectives between replicas: a process group that the manager configures again whenever the members change.

`GlooProcessGroup` wraps torch's own gloo group in the four methods that the manager calls. Every process group of
torchft (``torchft.process_group.ProcessGroup``) has the same methods, so the manager accepts its NCCL groups, too.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined] # exported, undeclared

from ft_transport.coordination.store import StoreConnections
from ft_transport.runtime.fork_safety import delaying_forks
from ft_transport.runtime.handler_safety import SafeThread, ThreadRefusedError
from manager.collectives.gloo_abort import GlooSockets
from manager.errors import quorum_errors

_LOOK_AFTER_S: Final = 1.0
"""gloo usually notices the end of a connection by itself within this time."""
_SPARE_DESCRIPTORS: Final = 8
"""A member opens one for each other member and four more (torch 2.13), and some for connections to stores."""
_GLOO_CONTEXT: Final = 0
"""The prefix of the ranks' keys in the store, for a process group's first (and only) gloo context."""


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


class GlooProcessGroup:
    """torch's gloo process group; each `configure` makes a new one.

    Args:
        timeout: Limits each collective.
        connect_timeout: Limits each `configure`.

    Attributes:
        connect_timeout: As given; the next `configure` reads it.
        stores: Connections to the stores that members meet at.
    """

    def __init__(
        self, timeout: timedelta = timedelta(seconds=60), connect_timeout: timedelta = timedelta(seconds=10)
    ) -> None:
        self._timeout = timeout
        self.connect_timeout = connect_timeout
        self.stores = StoreConnections()
        # Any: torch declares only some of its methods.
        self._group: Any = None
        self._sockets: GlooSockets | None = None
        self._mutex = threading.Lock()
        self._world_size = 1

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
        """Meet the other members. A group of one member needs no store.

        Args:
            store_addr: ``host:port/prefix``; the prefix must not have been used before.
            replica_id: For messages.
            rank: Rank in the group.
            world_size: Number of members.
            quorum_id: Not used.
            group_rank: Not used.
            group_world_size: Not used.
            global_ranks: Not used.

        Raises:
            QuorumError: The store does not answer.
            RuntimeError: The other members did not arrive in time.
        """
        del replica_id, quorum_id, group_rank, group_world_size, global_ranks
        self.abort()
        self._world_size = world_size
        if world_size == 1:
            return
        place, _, prefix = store_addr.partition("/")
        timeout = self.connect_timeout

        def meet(store: Any) -> tuple[Any, list[bytes]]:
            meeting = PrefixStore(prefix, store)
            group: Any = ProcessGroupGloo(meeting, rank, world_size, timeout)
            group.set_timeout(self._timeout)
            return group, [bytes(meeting.get(f"{_GLOO_CONTEXT}/{other}")) for other in range(world_size)]

        with quorum_errors():
            channel = self.stores.at_address(place)
            # This call replaces a connection that has broken since its last use.
            channel.missing([prefix], timeout)
        # A child that forks before gloo's sockets are known would inherit them.
        with delaying_forks(), quorum_errors():
            group, said = channel.call(meet, timeout, may_repeat=False)
            own = said.pop(rank)
            sockets = GlooSockets(own, said)
        with self._mutex:
            self._group, self._sockets = group, sockets

    @staticmethod
    def check_descriptors(world_size: int) -> None:
        """Make sure that `configure` can open its descriptors: without them gloo ends the process.

        Args:
            world_size: Number of members.

        Raises:
            OSError: Too few are left.
        """
        opened: list[int] = []
        try:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            opened.extend(os.dup(opened[0]) for _ in range(world_size + _SPARE_DESCRIPTORS))
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def have_members_left(self) -> bool:
        """Return whether a connection to another member has ended. Thread-safe."""
        with self._mutex:
            sockets = self._sockets
        return sockets is not None and sockets.have_ended()

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Begin an allreduce in place.

        Raises:
            RuntimeError: The group was aborted, or gloo refuses.
        """
        if self._world_size == 1:
            return _Done(tensors)
        with self._mutex:
            group, sockets = self._group, self._sockets
        if group is None or sockets is None:
            raise RuntimeError("expected a process group, and it has been aborted")
        return WatchedWork(group.allreduce(tensors, opts), sockets, self._timeout)

    def allgather(self, output_tensors: list[list[torch.Tensor]], input_tensors: list[torch.Tensor], opts: Any) -> Any:
        """Begin to gather a tensor of each member; errors as for `allreduce`."""
        with self._mutex:
            group, sockets = self._group, self._sockets
        if group is None or sockets is None:
            raise RuntimeError("expected a process group, and it has been aborted")
        return WatchedWork(group.allgather(output_tensors, input_tensors, opts), sockets, self._timeout)

    def abort(self) -> None:
        """Close the connections to the other members, so that collectives fail on all of them."""
        with self._mutex:
            # In a list: the thread that clears the list then drops the last reference.
            held, sockets = [self._group], self._sockets
            self._group = self._sockets = None
        if sockets is not None:
            sockets.shut_down()
        if held[0] is not None:
            _let_go(held)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name under which torchft's ``ManagedProcessGroup`` registers a backend of its own."""
        return "ft-transport-gloo"

    _get_backend_name = getBackendName  # the name in torchft-nightly, for a group that is not of torchft's class

    def errored(self) -> Exception | None:
        """Return ``None``: gloo raises its errors in the collectives' ``wait``."""
        return None

    def shutdown(self) -> None:
        """Abort the group, and close the connections to stores."""
        self.abort()
        self.stores.close()


class WatchedWork(dist._Work):  # type: ignore[name-defined, misc] # torch declares no type for it
    """A collective of gloo whose `wait` fails soon after a connection under it has ended.

    gloo at times misses the end of a connection, and the collective would wait until the group's timeout.

    Args:
        work: The collective of gloo.
        sockets: The connections of its process group.
        timeout: The longest wait.
    """

    def __init__(self, work: Any, sockets: GlooSockets, timeout: timedelta) -> None:
        super().__init__()
        self._work = work
        self._sockets = sockets
        self._timeout = timeout

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the collective is done.

        Raises:
            RuntimeError: The collective failed or was not done in time.
            ConnectionError: A connection has ended, and gloo has not noticed.
        """
        deadline_s = time.monotonic() + (timeout if timeout is not None else self._timeout).total_seconds()
        had_ended = False
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                return bool(self._work.wait(timedelta(seconds=max(0.001, min(_LOOK_AFTER_S, left_s)))))
            except RuntimeError:
                # A completed work raises its own failure; otherwise this slice of the wait was too short.
                if self._work.is_completed():
                    return bool(self._work.wait())
                if left_s > _LOOK_AFTER_S and not had_ended:
                    # gloo gets one more turn to notice.
                    had_ended = self._sockets.have_ended()
                    continue
                held, self._work = [self._work], None
                _let_go(held)
                if not had_ended:
                    raise
                raise ConnectionError("expected the collective to end: a member has closed its connection") from None

    def is_completed(self) -> bool:
        """Return whether the collective is done."""
        return self._work is None or bool(self._work.is_completed())


def _let_go(held: list[Any]) -> None:
    """Clear the list on a thread of its own: the destructors of gloo wait for collectives that run.

    The interpreter joins that thread before it ends: a destructor that takes the GIL afterwards aborts the process.
    """
    try:
        SafeThread(target=held.clear, name="ft-transport-gloo-end", daemon=False).start()
    except ThreadRefusedError:  # The interpreter ends, or no thread is left.
        held.clear()


class _Done(dist._Work):  # type: ignore[name-defined, misc] # torch declares no type for it
    """A collective of one member."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        del timeout
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensors)
        return future
