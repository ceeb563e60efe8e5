"""The connections under a gloo process group, and how to end them.

gloo cannot abort a collective: ``ProcessGroupGloo.abort()`` of torch 2.13 does nothing, and the group's destructor
waits for collectives that run. Other members would wait for this replica until the group's timeout. Shutting the
sockets down ends every wait on both sides at once.

gloo does not expose its sockets. Each rank publishes its address in the store (gloo/rendezvous/context.cc, ``Rank``:
length and name of the host, then length and bytes of each address, which begin with a ``sockaddr``), and all its
connections have that address at one end. `GlooSockets` searches the process's descriptors for sockets with one of these
addresses. If an address cannot be read, no socket is found, and the group's timeout limits the waits.

Children inherit the sockets of gloo, whether forked or started otherwise. A peer would not see the end of a killed
replica while such a child lives, so the sockets are closed in children.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from ft_transport.runtime.fork_safety import close_in_children

_OPEN_FILES: Final = Path("/proc/self/fd")
_ESTABLISHED: Final = 1
"""``tcpi_state`` (``TCP_ESTABLISHED`` in ``linux/tcp_states.h``), the first byte of ``struct tcp_info``."""
_LENGTH: Final = struct.Struct("<Q")
_IPV4_END: Final = 8
_IPV6_START: Final = 8
_IPV6_END: Final = 24

Endpoint: TypeAlias = tuple[str, int]
"""Address, IPv4 wherever it can be, and port."""


class GlooSockets:
    """The sockets of one process group, found right after its setup.

    Args:
        own: This rank's address, as in the store.
        others: The other ranks' addresses.
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
        """Return whether a socket is a connection of this group, or its listener."""
        if self._own is None or candidate.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        return _endpoint(candidate.getsockname()) == self._own or _other_end_of(candidate) in self._others

    def __len__(self) -> int:
        """Return the number of sockets found."""
        return len(self._sockets)

    def have_ended(self) -> bool:
        """Return whether either end of a connection has closed it. Thread-safe."""
        return self._is_shut_down or any(not _is_established(*each) for each in self._sockets)

    def shut_down(self) -> None:
        """End the connections: waits on them fail at once, here and at the other end."""
        found, self._sockets = self._sockets, []
        self._is_shut_down = bool(found)
        for descriptor, inode in found:
            # gloo may have closed the socket, and another file may have its number.
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
        raise ValueError("expected a sockaddr")
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
    except OSError:  # no Linux
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
    except OSError:  # a listener, or closed meanwhile
        return None
