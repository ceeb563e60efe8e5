"""The memory of a snapshot that a source on the same host lends: mapped, only to be read, until it is given back.

It is mapped by the C library itself: Python's ``mmap`` keeps a descriptor of its own, which a child that is forked
meanwhile would have as well, and with it the memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import select
import socket
from typing import Final

from ft_transport.errors import PeerProtocolError, PeerUnreachableError
from ft_transport.http.fork_safety import close_in_children, making_socket
from ft_transport.http.same_host import is_own_user, is_sealed
from ft_transport.wire.same_host import DONE, HELD, LENT, MemoryTicket, socket_name

_MADV_DONTFORK: Final = 10
_MADV_POPULATE_READ: Final = 22  # Linux 5.14, include/uapi/asm-generic/mman-common.h
_FAILED: Final = ctypes.c_void_p(-1).value


class LentMemory:
    """A connection to the source, and what it has lent. A context manager that gives it back.

    `address` and `prepare` may be used by any thread, the rest belongs to one; `interrupt` is for others.

    Args:
        name: As the source told it.
        timeout_s: For each wait, in seconds.

    Attributes:
        address: Where the data is mapped, after `borrow`.

    Raises:
        PeerUnreachableError: The source is not on this host, or does not answer.
        PeerProtocolError: It is another user's.
    """

    def __init__(self, name: str, *, timeout_s: float) -> None:
        remote = socket_name(name)
        if remote is None:
            raise PeerProtocolError(f"expected the name of a socket, got {name[:64]!r}")
        self._remote = remote
        self._timeout_s = timeout_s
        self.address = 0
        self._num_bytes = 0
        with making_socket:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        close_in_children(self)
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(remote)
            # With a timeout Python waits for data also where it is told not to.
            self._socket.setblocking(False)
            if not is_own_user(self._socket):
                raise PeerProtocolError("expected a source of the same user at the socket of this host")
        except BaseException as error:
            self._socket.close()
            if isinstance(error, OSError):
                raise PeerUnreachableError(f"no source on this host: {error}") from error
            raise

    def __enter__(self) -> LentMemory:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives the memory back. Nobody may look into it any more."""
        self._socket.close()
        address, self.address = self.address, 0
        if address:
            _libc().munmap(address, self._num_bytes)

    def is_mine(self, candidate: socket.socket) -> bool:
        """See ``http.fork_safety``."""
        try:
            return bool(candidate.family == socket.AF_UNIX and candidate.getpeername() == self._remote)
        except OSError:  # not connected
            return False

    def borrow(self, ticket: MemoryTicket) -> None:
        """Shows the ticket, and maps what comes for it. Called once, with data that is not empty.

        Raises:
            PeerUnreachableError: Nothing came.
            PeerProtocolError: The snapshot is gone, or what came cannot be trusted to stay.
        """
        try:
            self._socket.sendall(ticket.ticket.encode())
            self._wait()
            # No fork comes between: a child would keep what it inherits.
            with making_socket:
                answer, lent, _flags, _address = socket.recv_fds(self._socket, len(LENT), 1, socket.MSG_CMSG_CLOEXEC)
                try:
                    if answer != LENT or not lent:
                        raise PeerProtocolError("expected the memory of a snapshot, it is gone")
                    self._map(lent[0], ticket)
                finally:
                    for descriptor in lent:
                        os.close(descriptor)
        except OSError as error:
            raise PeerUnreachableError(f"the socket of this host broke: {error}") from error

    def prepare(self, start: int, end: int) -> None:
        """Maps the pages of bytes ``[start, end)`` at once; each would cost a fault when it is read."""
        start -= start % mmap.PAGESIZE
        _libc().madvise(self.address + start, end - start, _MADV_POPULATE_READ)

    def release(self, start: int, end: int) -> None:
        """Unmaps the whole pages of bytes ``[start, end)``, which would count as memory of this process."""
        start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end - end % mmap.PAGESIZE
        if start < end:
            _libc().madvise(self.address + start, end - start, mmap.MADV_DONTNEED)

    def is_held(self) -> bool:
        """Whether the source has not taken the memory back so far, as far as is known here."""
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def was_held(self) -> bool:
        """Gives the memory back; says whether it stayed as it was until now, by the source's own word."""
        try:
            self._socket.sendall(DONE)
            self._wait()
            return self._socket.recv(len(HELD)) == HELD
        except OSError:
            return False

    def interrupt(self) -> None:
        """Ends what another thread is waiting for. Thread-safe."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(self._timeout_s * 1e3):
            raise TimeoutError(f"nothing came for {self._timeout_s:.3g} s")

    def _map(self, descriptor: int, ticket: MemoryTicket) -> None:
        end = ticket.data_start + ticket.data_bytes
        if ticket.data_start % mmap.PAGESIZE or os.fstat(descriptor).st_size < end or not is_sealed(descriptor):
            raise PeerProtocolError("expected memory that holds the snapshot and stays as long as it is")
        mapped = _libc().mmap(None, ticket.data_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, ticket.data_start)
        if mapped in (None, _FAILED):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.address, self._num_bytes = mapped, ticket.data_bytes
        _libc().madvise(self.address, self._num_bytes, _MADV_DONTFORK)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    )  # fmt: skip
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
