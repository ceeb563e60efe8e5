"""A gloo process group that can be aborted, and that the manager configures again when the members change.

gloo itself cannot abort a collective: ``ProcessGroupGloo.abort()`` of torch 2.13 does nothing, and the group's
destructor waits for running collectives. The other members would wait for this replica until the group's timeout. So
`GlooProcessGroup.abort` shuts gloo's sockets down, which ends every wait on both sides at once.

gloo does not expose its sockets. But each rank publishes its address in the store, and that address is one end of all
the rank's connections. gloo/rendezvous/context.cc defines the format (``Rank``): length and name of the host, then
length and bytes of each address, which begin with a ``sockaddr``. `GlooSockets` searches the process's descriptors for
sockets with one of these addresses. If an address cannot be read, no socket is found, and only the group's timeout
limits the waits.

Child processes, forked or not, inherit gloo's sockets. If a replica is killed while its child lives, the peers would
not see the connection end. So the sockets are closed in children.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined] # exported, undeclared

from ft_transport.coordination.store import StoreConnections
from ft_transport.runtime.children import close_in_children, delaying_forks
from ft_transport.runtime.signal_safe import SafeThread, ThreadRefusedError
from manager.errors import quorum_errors

_LOOK_AFTER_S: Final = 1.0
"""Length of a slice of a wait. gloo usually detects the end of a connection within this time."""
_SPARE_DESCRIPTORS: Final = 8
"""Descriptors needed besides one for each member: gloo opens four (torch 2.13), and connections to stores need some."""
_GLOO_CONTEXT: Final = 0
"""Prefix of the ranks' keys in the store: the number of a process group's first, and only, gloo context."""


class GlooProcessGroup:
    """Runs collectives on torch's gloo process group. Each `configure` makes a new group.

    Args:
        timeout: Longest wait for a collective.
        connect_timeout: Longest wait for the other members in `configure`.

    Attributes:
        connect_timeout: Longest wait for the other members in the next `configure`.
        stores: Connections to the stores through which members meet.
    """

    def __init__(
        self, timeout: timedelta = timedelta(seconds=60), connect_timeout: timedelta = timedelta(seconds=10)
    ) -> None:
        self._timeout = timeout
        self.connect_timeout = connect_timeout
        self.stores = StoreConnections()
        # ``Any``, because torch declares only some of the group's methods.
        self._group: Any = None
        self._sockets: GlooSockets | None = None
        self._mutex = threading.Lock()
        self._world_size = 1

    def configure(
        self, store_addr: str, replica_id: str, rank: int, world_size: int, *_others: Any, **_named: Any
    ) -> None:
        """Abort the present group, and connect to the members of the next one. torchft's other arguments are ignored.

        Args:
            store_addr: ``host:port/prefix`` of the store, not used for a group of one member. The prefix must be new.
            replica_id: Ignored.
            rank: Rank in the group.
            world_size: Number of members.

        Raises:
            QuorumError: The store does not respond.
            RuntimeError: The other members did not connect in time.
        """
        del replica_id
        self.abort()
        self._world_size = world_size
        if world_size == 1:
            return
        address, _, prefix = store_addr.partition("/")
        timeout = self.connect_timeout

        def meet(store: Any) -> tuple[Any, list[bytes]]:
            meeting = PrefixStore(prefix, store)
            group: Any = ProcessGroupGloo(meeting, rank, world_size, timeout)
            group.set_timeout(self._timeout)
            return group, [bytes(meeting.get(f"{_GLOO_CONTEXT}/{other}")) for other in range(world_size)]

        with quorum_errors():
            channel = self.stores.at(address)
            # If the connection has broken since its last use, this call replaces it.
            channel.missing([prefix], timeout)
        # A child that is forked before ``sockets`` exists would inherit gloo's sockets.
        with delaying_forks(), quorum_errors():
            group, addresses = channel.call(meet, timeout, may_repeat=False)
            own = addresses.pop(rank)
            sockets = GlooSockets(own, addresses)
        with self._mutex:
            self._group, self._sockets = group, sockets

    @staticmethod
    def check_descriptors(world_size: int) -> None:
        """Make sure that `configure` can open enough file descriptors. If gloo cannot open one, it ends the process.

        Args:
            world_size: Number of members.

        Raises:
            OSError: Too few descriptors are left.
        """
        opened: list[int] = []
        try:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            opened.extend(os.dup(opened[0]) for _ in range(world_size + _SPARE_DESCRIPTORS))
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def have_members_left(self) -> bool:
        """Return whether the connection to any other member has ended. Thread-safe."""
        with self._mutex:
            sockets = self._sockets
        return sockets is not None and sockets.have_ended()

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Begin an allreduce in place.

        Raises:
            RuntimeError: The group was aborted, or gloo refused the tensors.
        """
        return _Done(tensors) if self._world_size == 1 else self._begin("allreduce", tensors, opts)

    def allgather(self, output_tensors: list[list[torch.Tensor]], input_tensors: list[torch.Tensor], opts: Any) -> Any:
        """Begin to gather a tensor from each member. It raises the same errors as `allreduce`."""
        return self._begin("allgather", output_tensors, input_tensors, opts)

    def _begin(self, collective: str, *arguments: Any) -> WatchedWork:
        with self._mutex:
            group, sockets = self._group, self._sockets
        if group is None or sockets is None:
            raise RuntimeError("expected a working process group, got one that has been aborted")
        return WatchedWork(getattr(group, collective)(*arguments), sockets, self._timeout)

    def abort(self) -> None:
        """Close the connections to the other members, so that running collectives fail on all members."""
        with self._mutex:
            # In a list, so that the thread that clears the list drops the last reference.
            last_reference, sockets = [self._group], self._sockets
            self._group = self._sockets = None
        if sockets is not None:
            sockets.shut_down()
        if last_reference[0] is not None:
            _destroy_in_background(last_reference)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name under which torchft's ``ManagedProcessGroup`` registers this group as a backend."""
        return "ft-transport-gloo"

    _get_backend_name = getBackendName  # torchft-nightly calls this method of groups that are not of its own class

    def errored(self) -> Exception | None:
        """Return ``None``, because gloo raises errors only in the ``wait`` of a collective."""
        return None

    def shutdown(self) -> None:
        """Abort the group and close the connections to stores."""
        self.abort()
        self.stores.close()


class WatchedWork(dist._Work):  # type: ignore[name-defined, misc] # torch declares no type for it
    """A gloo collective whose `wait` fails soon after a connection of its process group has ended.

    gloo sometimes does not detect the end of a connection, and would wait until the group's timeout.

    Args:
        work: gloo's work for the collective.
        sockets: The connections of the process group.
        timeout: Longest wait, if `wait` receives no timeout.
    """

    def __init__(self, work: Any, sockets: GlooSockets, timeout: timedelta) -> None:
        super().__init__()
        self._work = work
        self._sockets = sockets
        self._timeout = timeout

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the collective is done.

        Raises:
            RuntimeError: The collective failed, or was not done in time.
            ConnectionError: A connection has ended, and gloo has not detected that.
        """
        deadline_s = time.monotonic() + (timeout if timeout is not None else self._timeout).total_seconds()
        had_ended = False
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                return bool(self._work.wait(timedelta(seconds=max(0.001, min(_LOOK_AFTER_S, left_s)))))
            except RuntimeError:
                # If the work is completed, it failed. Otherwise only this slice of the wait is over.
                if self._work.is_completed():
                    return bool(self._work.wait())
                if left_s > _LOOK_AFTER_S and not had_ended:
                    # After the end of a connection, wait one more slice for gloo to detect it.
                    had_ended = self._sockets.have_ended()
                    continue
                last_reference, self._work = [self._work], None
                _destroy_in_background(last_reference)
                if not had_ended:
                    raise
                raise ConnectionError(
                    "expected the collective to end, but a member has closed its connection"
                ) from None

    def is_completed(self) -> bool:
        """Return whether the collective is done."""
        return self._work is None or bool(self._work.is_completed())


def _destroy_in_background(last_reference: list[Any]) -> None:
    """Drop the reference in the list on another thread, because gloo's destructors wait for running collectives.

    The thread is no daemon, so the interpreter waits for it. A destructor that needs the GIL after the interpreter's
    end would abort the process.
    """
    try:
        SafeThread(target=last_reference.clear, name="ft-transport-gloo-end", daemon=False).start()
    except ThreadRefusedError:  # The interpreter is ending, or the system allows no more threads.
        last_reference.clear()


class _Done(dist._Work):  # type: ignore[name-defined, misc] # torch declares no type for it
    """A completed collective in a group of one member. Its result is its input tensors."""

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


_OPEN_FILES: Final = Path("/proc/self/fd")
_ESTABLISHED: Final = 1
"""``TCP_ESTABLISHED`` in ``linux/tcp_states.h``, a value of ``tcpi_state``, the first byte of ``struct tcp_info``."""
_LENGTH: Final = struct.Struct("<Q")
_IPV4_END: Final = 8
_IPV6_START: Final = 8
_IPV6_END: Final = 24

Endpoint: TypeAlias = tuple[str, int]
"""IP address, as IPv4 if possible, and port."""


class GlooSockets:
    """Finds the sockets of a process group that has just been set up, and can shut them down.

    Args:
        own: This rank's address, as gloo encodes it in the store.
        others: The other ranks' addresses, in the same encoding.
    """

    def __init__(self, own: bytes, others: Sequence[bytes]) -> None:
        self._sockets: list[tuple[int, int]] = []
        self._is_shut_down = False
        self._own: Endpoint | None = None
        self._others: frozenset[Endpoint] = frozenset()
        try:
            self._own = _endpoint_in(own)
            self._others = frozenset(_endpoint_in(other) for other in others)
        except (ValueError, struct.error):
            return
        close_in_children(self)
        for descriptor in _descriptors():
            inode = _inode_of(descriptor)
            if inode is None:
                continue
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
                if not self.is_mine(duplicate):
                    continue
                fcntl.fcntl(descriptor, fcntl.F_SETFD, fcntl.fcntl(descriptor, fcntl.F_GETFD) | fcntl.FD_CLOEXEC)
                if _other_end_of(duplicate) is not None:
                    self._sockets.append((descriptor, inode))

    def is_mine(self, candidate: socket.socket) -> bool:
        """Return whether a socket is a connection or the listener of this process group."""
        if self._own is None or candidate.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        return _endpoint(candidate.getsockname()) == self._own or _other_end_of(candidate) in self._others

    def __len__(self) -> int:
        """Return the number of sockets found."""
        return len(self._sockets)

    def have_ended(self) -> bool:
        """Return whether a connection of the group was closed, at either end. Thread-safe."""
        return self._is_shut_down or any(not _is_established(*each) for each in self._sockets)

    def shut_down(self) -> None:
        """End the connections, so that waits for their data fail at once, here and at the other end."""
        found, self._sockets = self._sockets, []
        self._is_shut_down = bool(found)
        for descriptor, inode in found:
            # Compares inodes: gloo may have closed the socket, and another file may have got its descriptor.
            if _inode_of(descriptor) == inode:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
                    duplicate.shutdown(socket.SHUT_RDWR)


def _is_established(descriptor: int, inode: int) -> bool:
    if _inode_of(descriptor) != inode:
        return False
    try:
        with socket.socket(fileno=os.dup(descriptor)) as duplicate:
            return duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED
    except OSError:
        return False


def _endpoint_in(encoded: bytes) -> Endpoint:
    (name_bytes,) = _LENGTH.unpack_from(encoded)
    start = 2 * _LENGTH.size + name_bytes
    address = encoded[start : start + _IPV6_END]
    if len(address) < _IPV6_END:
        raise ValueError(f"expected a sockaddr of {_IPV6_END} bytes, got {len(address)}")
    family = int.from_bytes(address[:2], "little")
    port = int.from_bytes(address[2:4], "big")
    if family == socket.AF_INET:
        return str(ipaddress.IPv4Address(address[4:_IPV4_END])), port
    if family == socket.AF_INET6:
        return _normal(str(ipaddress.IPv6Address(address[_IPV6_START:_IPV6_END]))), port
    raise ValueError(f"expected an Internet address, got family {family}")


def _normal(host: str) -> str:
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped if mapped is not None else address)


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir(_OPEN_FILES)]
    except OSError:  # /proc exists only on Linux
        return []


def _inode_of(descriptor: int) -> int | None:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


def _endpoint(name: tuple[Any, ...]) -> Endpoint:
    return _normal(name[0]), name[1]


def _other_end_of(connection: socket.socket) -> Endpoint | None:
    try:
        return _endpoint(connection.getpeername())
    except OSError:  # a listener, or a connection that was closed meanwhile
        return None
