"""Ceilings of the hardware: a memory copy, and a bare ``sendfile`` → ``recv_into`` loop.

``ft-transport bench`` and the benchmarks of the repository measure beside these.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from ft_transport.runtime.handler_safety import SafeExecutor, SafeThread

NUM_CONNECTIONS: Final = 4
READ_BYTES: Final = 1 << 20
RANGE: Final = struct.Struct("<QQ")


class MemoryCopy:
    """Copies tensors into warm memory at the machine's limit, in several ways.

    Args:
        sources: The tensors.
        memory: The target, uint8 of the tensors' total size; new warm memory by default.
    """

    def __init__(self, sources: Sequence[torch.Tensor], memory: torch.Tensor | None = None) -> None:
        self._sources = [source.detach().reshape(-1).view(torch.uint8) for source in sources if source.nbytes]
        sizes = [source.nbytes for source in self._sources]
        # Filling touches every page.
        self._memory = memory if memory is not None else torch.full((sum(sizes),), 1, dtype=torch.uint8)
        self._targets = list(torch.split(self._memory, sizes))
        self._num_threads = torch.get_num_threads()
        pairs = [
            (target.data_ptr(), source.data_ptr(), source.nbytes)
            for target, source in zip(self._targets, self._sources, strict=True)
        ]
        self._shares = _equal_shares(pairs, self._num_threads)
        self._pool = SafeExecutor(self._num_threads, "ft-transport-ceiling")

    @property
    def memory(self) -> memoryview:
        """The warm memory, for other uses of this size."""
        return self._memory.numpy().data

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def torch_copy(self) -> None:
        """``Tensor.copy_``, tensor by tensor, with all intra-op threads."""
        for target, source in zip(self._targets, self._sources, strict=True):
            target.copy_(source)

    def memmove(self) -> None:
        """``ctypes.memmove``, tensor by tensor, in as many threads."""
        for future in [self._pool.submit(_move_all, share) for share in self._shares]:
            future.result()


def _move_all(share: Sequence[tuple[int, int, int]]) -> None:
    memmove = ctypes.memmove
    for target, source, num_bytes in share:
        memmove(target, source, num_bytes)


def _equal_shares(pairs: Sequence[tuple[int, int, int]], num_shares: int) -> list[list[tuple[int, int, int]]]:
    """Divide by bytes, cutting tensors, so that all threads end together."""
    share_bytes = -(-sum(num_bytes for _, _, num_bytes in pairs) // num_shares)
    shares: list[list[tuple[int, int, int]]] = [[]]
    room = share_bytes
    for pair in pairs:
        target, source, num_bytes = pair
        while num_bytes > room:
            shares[-1].append((target, source, room))
            target, source, num_bytes = target + room, source + room, num_bytes - room
            shares.append([])
            room = share_bytes
        shares[-1].append((target, source, num_bytes))
        room -= num_bytes
    return shares


@contextlib.contextmanager
def bare_sender(num_bytes: int, *, host: str = "127.0.0.1") -> Iterator[int]:
    """Serves ``num_bytes`` of a resident memory file, a thread per connection; yields the port."""
    descriptor = os.memfd_create("bare-sender")
    listener = socket.create_server((host, 0))
    try:
        block = os.urandom(1 << 20)
        for start in range(0, num_bytes, len(block)):
            os.pwrite(descriptor, block[: num_bytes - start], start)

        def accept() -> None:
            with contextlib.suppress(OSError):  # The listener was closed.
                while True:
                    connected, _ = listener.accept()
                    SafeThread(target=_send_ranges, args=(connected, descriptor), daemon=True).start()

        acceptor = SafeThread(target=accept, daemon=True)
        acceptor.start()
        yield listener.getsockname()[1]
        # close() alone does not wake the thread that is in accept().
        listener.shutdown(socket.SHUT_RDWR)
        acceptor.join()
    finally:
        listener.close()
        os.close(descriptor)


def _send_ranges(connected: socket.socket, descriptor: int) -> None:
    with connected, contextlib.suppress(OSError):
        while len(request := connected.recv(RANGE.size, socket.MSG_WAITALL)) == RANGE.size:
            start, end = RANGE.unpack(request)
            while start < end:
                start += os.sendfile(connected.fileno(), descriptor, start, end - start)


def bare_receiver(port: int, destination: memoryview, *, host: str = "127.0.0.1") -> Callable[[], None]:
    """Return a function that fills ``destination`` once over parallel connections, an equal part by each.

    The function makes the connections, as a first fetch does.
    """

    def receive(part: int) -> None:
        position = len(destination) * part // NUM_CONNECTIONS
        end = len(destination) * (part + 1) // NUM_CONNECTIONS
        with socket.create_connection((host, port)) as connected:
            connected.sendall(RANGE.pack(position, end))
            while position < end:
                # Waiting for the whole block saves a system call for each partial arrival.
                got = connected.recv_into(
                    destination[position : min(position + READ_BYTES, end)], 0, socket.MSG_WAITALL
                )
                if not got:
                    raise ConnectionError(f"expected {end - position} more bytes, the sender closed the connection")
                position += got

    def fetch() -> None:
        with SafeExecutor(NUM_CONNECTIONS, "ft-transport-ceiling") as threads:
            list(threads.map(receive, range(NUM_CONNECTIONS)))

    return fetch
