"""Reads a snapshot from memory that a source on the same host lends to this process as a file descriptor.

The receiver reads the memory with ``preadv``, which fills many tensors in one call without the interpreter. To map the
memory was slower: if each page is read only once, mapping it costs as much as copying it.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import mmap
import os
import select
import socket
from collections.abc import Sequence
from typing import Final

from ft_transport.errors import PeerProtocolError, PeerUnreachableError
from ft_transport.runtime.children import close_files_in_children, close_in_children, making_socket
from ft_transport.runtime.unix_sockets import is_own_user
from ft_transport.wire.routes import DONE, HELD, LENT, MemoryTicket, socket_name

_MAX_BUFFERS: Final = 1024
"""Maximum number of buffers in one call of ``preadv``: ``IOV_MAX`` of Linux."""


class LentMemory:
    """A connection to a source on this host, and the memory that the source lends.

    A ``with`` block gives the memory back at its end. Several threads may call `read` and `is_held` at once. Any thread
    may call `interrupt`. Only one thread calls the other methods.

    Args:
        name: Name of the source's unix socket, as the source announced it.
        timeout_s: Timeout of each wait, in seconds.

    Raises:
        PeerUnreachableError: The source is not on this host, or does not respond.
        PeerProtocolError: The source runs as another user.
    """

    def __init__(self, name: str, *, timeout_s: float) -> None:
        remote = socket_name(name)
        if remote is None:
            raise PeerProtocolError(f"expected the name of a socket, got {name[:64]!r}")
        self._remote = remote
        self._timeout_s = timeout_s
        self._memory: io.FileIO | None = None
        self._data_start = 0
        self._file: tuple[int, int] | None = None
        with making_socket:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        close_in_children(self)
        close_files_in_children(self)
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(remote)
            # Non-blocking, because with a timeout `is_held` would wait for data.
            self._socket.setblocking(False)
            if not is_own_user(self._socket):
                raise PeerProtocolError("expected a source that runs as this process's user, got one of another user")
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
        """Give the memory back to the source. Called when no thread reads the memory any more."""
        self._socket.close()
        if self._memory is not None:
            self._memory.close()
            self._file = None

    def is_mine(self, candidate: socket.socket) -> bool:
        """Whether ``candidate`` is this connection's socket, which forked children close (``runtime.children``)."""
        try:
            return bool(candidate.family == socket.AF_UNIX and candidate.getpeername() == self._remote)
        except OSError:  # not connected
            return False

    def is_my_file(self, status: os.stat_result) -> bool:
        """Whether ``status`` describes the lent file, which forked children close (``runtime.children``)."""
        return self._file == (status.st_dev, status.st_ino)

    def borrow(self, ticket: MemoryTicket) -> None:
        """Send the ticket, and receive the descriptor of the snapshot's memory. Called once.

        Raises:
            PeerUnreachableError: The source did not respond.
            PeerProtocolError: The snapshot no longer exists, or its memory could change or shrink.
        """
        try:
            self._socket.sendall(ticket.ticket.encode())
            self._wait()
            # No fork until the descriptor has its owner: a child would inherit it and never close it.
            with making_socket:
                answer, lent, _flags, _address = socket.recv_fds(self._socket, len(LENT), 1, socket.MSG_CMSG_CLOEXEC)
                if lent:
                    self._take(lent[0])
                if answer != LENT or self._memory is None:
                    raise PeerProtocolError("expected the memory of a snapshot, but the source no longer lends it")
                self._check(self._memory, ticket)
        except OSError as error:
            raise PeerUnreachableError(f"the connection to the source on this host broke: {error}") from error

    def read(self, buffers: Sequence[memoryview], start: int) -> None:
        """Copy the snapshot's data into buffers, beginning at byte ``start``.

        Args:
            buffers: Writable buffers, filled in order; none is empty.
            start: Position of the first byte to copy, within the data.

        Raises:
            OSError: The memory cannot be read, or is shorter than announced.
        """
        assert self._memory is not None, "after borrow"
        descriptor, position, left = self._memory.fileno(), self._data_start + start, list(buffers)
        while left:
            num_bytes = os.preadv(descriptor, left[:_MAX_BUFFERS], position)
            if not num_bytes:
                raise OSError(f"expected {sum(map(len, left))} more bytes at {position}, but the memory ends there")
            position += num_bytes
            num_full = 0
            while num_full < len(left) and num_bytes >= len(left[num_full]):
                num_bytes -= len(left[num_full])
                num_full += 1
            left = left[num_full:]
            if num_bytes:
                left[0] = left[0][num_bytes:]

    def is_held(self) -> bool:
        """Whether the source still lends the memory, as far as this process can tell without waiting."""
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def was_held(self) -> bool:
        """Give the memory back; return whether the source confirms that the memory was unchanged until now."""
        try:
            self._socket.sendall(DONE)
            self._wait()
            return self._socket.recv(len(HELD)) == HELD
        except OSError:
            return False

    def interrupt(self) -> None:
        """Interrupt another thread that waits for the source. Thread-safe."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(self._timeout_s * 1e3):
            raise TimeoutError(f"no response within {self._timeout_s:.3g} s")

    def _take(self, descriptor: int) -> None:
        """Store the received descriptor in an object that closes it exactly once, even if a signal handler raises."""
        try:
            self._memory = io.FileIO(descriptor)
        except OSError:  # a directory
            os.close(descriptor)
            raise
        status = os.fstat(descriptor)
        self._file = (status.st_dev, status.st_ino)

    def _check(self, memory: io.FileIO, ticket: MemoryTicket) -> None:
        end, descriptor = ticket.data_start + ticket.data_bytes, memory.fileno()
        if ticket.data_start % mmap.PAGESIZE or os.fstat(descriptor).st_size < end or not is_sealed(descriptor):
            raise PeerProtocolError(f"expected sealed, page-aligned memory of {end} bytes or more, got other memory")
        self._data_start = ticket.data_start


_F_SEAL_FUTURE_WRITE: Final = 0x10  # Linux 5.1, include/uapi/linux/fcntl.h


def is_sealed(descriptor: int) -> bool:
    """Whether a memory file can neither shrink nor be written through a descriptor."""
    wanted = fcntl.F_SEAL_SHRINK | _F_SEAL_FUTURE_WRITE
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & wanted == wanted
    except OSError:  # no memory file
        return False
