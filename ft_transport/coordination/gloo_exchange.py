"""Data exchange between the ranks of a group, over a separate gloo group with a separate timeout.

The trainer's group is never used: its collectives and ours would meet in the wrong order. gloo closes all connections
of a group when one operation fails or times out. A rank that fails for another reason drops its group
(`GlooExchange.ending_on_failure`), so that its peers fail fast. All ranks then make a new group at the next use:
`GlooExchange.reset` is called on all of them, because all have seen the vote that follows the failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined] # exported, undeclared

from ft_transport.coordination.ranks import RankGroup
from ft_transport.errors import PeerProtocolError, RankGoneError

T = TypeVar("T")

_TAG: Final = 1
_PIECE_BYTES: Final = 16 << 20
"""Size of the pieces in which larger messages go. gloo counts in 32 bits in some code paths; and a rank that announces
more bytes than it has makes the others allocate only one piece."""
MAX_MESSAGE_BYTES: Final = 4 << 30
"""Messages describe states, whose headers have at most 100 MB; a larger announced length is refused."""


class GlooExchange:
    """Sends bytes between ranks. One thread at a time, the same calls on every rank.

    Methods that exchange data raise `RankGoneError` if a rank does not take part in time or its connection ends, and
    `PeerProtocolError` if a rank announces an impossible length.

    Args:
        group: The ranks.
        channel: Distinguishes several exchanges of one group.
        timeout: Limit of each operation.
    """

    def __init__(self, group: RankGroup, channel: str, timeout: timedelta) -> None:
        self.rank, self.size = group.rank, group.size
        self._store = group.store(f"{channel}/gloo")
        self._timeout = timeout
        self._generation = 0
        self._group: Any = None

    def reset(self, generation: int) -> None:
        """Drop the group; the next use makes another one.

        Args:
            generation: The same number on all ranks, and greater than any before.
        """
        self._group = None
        self._generation = generation

    def close(self) -> None:
        """Close the connections."""
        self._group = None

    def ending_on_failure(self, action: Callable[[], T]) -> Callable[[], T]:
        """Wrap ``action``, which exchanges data, to close the connections if it fails: this ends other ranks' waits."""

        def act() -> T:
            try:
                if self.size > 1:
                    # The other ranks would wait for a rank that fails before it is connected.
                    self._connected()
                return action()
            except BaseException:
                self._group = None
                raise

        return act

    def gather(self, data: bytes) -> list[bytes] | None:
        """Send the data of every rank to the first, which gets it by rank; the others get ``None``."""
        sizes = [int(each) for each in self.all_gather(torch.tensor([len(data)], dtype=torch.int64))]
        if self.rank:
            self.send(data, 0)
            return None
        return [data, *(self.receive(sizes[source], source) for source in range(1, self.size))]

    def scatter(self, data: Sequence[bytes] | None) -> bytes:
        """Send each rank its part of the first rank's data."""
        lengths = self._broadcast_numbers([len(each) for each in data] if data is not None else None, self.size)
        if self.rank:
            return self.receive(lengths[self.rank], 0)
        assert data is not None, "the first rank has it"
        for target in range(1, self.size):
            self.send(data[target], target)
        return data[0]

    def broadcast(self, data: bytes | None) -> bytes:
        """Send the first rank's data to all ranks."""
        (length,) = self._broadcast_numbers([len(data)] if data is not None else None, 1)
        if data is not None:
            self._broadcast(_pieces_of(data))
            return data
        return _joined(length, 0, lambda piece: self._broadcast([piece]))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, on every rank; all have the same shape and dtype."""
        work, gathered = self.begin_all_gather(tensor)
        self.wait(work)
        return gathered

    def send(self, data: bytes, target: int) -> None:
        """Send to one rank, which calls `receive`."""
        for piece in _pieces_of(data):
            self.wait(self.begin_send(piece, target, _TAG))

    def receive(self, num_bytes: int, source: int) -> bytes:
        """Receive the data that one rank passes to `send`, and whose length it has announced."""
        return _joined(num_bytes, source, lambda piece: self.wait(self.begin_receive(piece, source, _TAG)))

    def begin_all_gather(self, tensor: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
        """Start an `all_gather`; the tensors have their data when `wait` has returned."""
        if self.size == 1:
            return None, [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        return self._begin(lambda group: group.allgather([gathered], [tensor])), gathered

    def begin_send(self, tensor: torch.Tensor, target: int, tag: int) -> Any:
        """Start to send; the tensor must not change until `wait` has returned."""
        return self._begin(lambda group: group.send([tensor], target, tag))

    def begin_receive(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        """Start to receive into a tensor, which the exchange owns until `wait` has returned."""
        return self._begin(lambda group: group.recv([tensor], source, tag))

    def wait(self, work: Any) -> None:
        """Wait for an operation that a ``begin`` method started."""
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failed(error) from error

    def _broadcast_numbers(self, numbers: Sequence[int] | None, count: int) -> list[int]:
        tensor = torch.tensor(list(numbers) if numbers is not None else [0] * count, dtype=torch.int64)
        self._broadcast([tensor])
        return [int(number) for number in tensor.tolist()]

    def _broadcast(self, pieces: Iterable[torch.Tensor]) -> None:
        if self.size > 1:
            for piece in pieces:
                self.wait(self._begin_broadcast(piece))

    def _begin_broadcast(self, tensor: torch.Tensor) -> Any:
        return self._begin(lambda group: group.broadcast(tensor, 0))

    def _begin(self, operation: Callable[[Any], Any]) -> Any:
        group = self._connected()
        try:
            return operation(group)
        except RuntimeError as error:
            raise self._failed(error) from error

    def _connected(self) -> Any:
        """Return the gloo group; make it first if it does not exist."""
        if self._group is None:
            store = PrefixStore(str(self._generation), self._store)
            try:
                self._group = ProcessGroupGloo(store, self.rank, self.size, self._timeout)
            except RuntimeError as error:
                raise RankGoneError(
                    f"expected all {self.size} ranks to connect within {self._timeout}: {error}"
                ) from error
        return self._group

    def _failed(self, error: RuntimeError) -> RankGoneError:
        return RankGoneError(
            f"expected all ranks to exchange data within {self._timeout}; one is dead, stuck, or elsewhere in the "
            f"program: {error}"
        )


def _pieces_of(data: bytes) -> Iterator[torch.Tensor]:
    """Yield copies of the data in pieces, as tensors that gloo can count."""
    for start in range(0, len(data), _PIECE_BYTES):
        yield torch.frombuffer(bytearray(data[start : start + _PIECE_BYTES]), dtype=torch.uint8)


def _joined(num_bytes: int, source: int, receive: Callable[[torch.Tensor], object]) -> bytes:
    """Receive the pieces of a message and join them; each is allocated only when the pieces before it have arrived."""
    if not 0 <= num_bytes <= MAX_MESSAGE_BYTES:
        raise PeerProtocolError(
            f"expected rank {source} to announce up to {MAX_MESSAGE_BYTES} bytes, it announced {num_bytes}"
        )
    pieces = []
    for start in range(0, num_bytes, _PIECE_BYTES):
        piece = bytearray(min(num_bytes - start, _PIECE_BYTES))
        receive(torch.frombuffer(piece, dtype=torch.uint8))
        pieces.append(piece)
    return b"".join(pieces)
