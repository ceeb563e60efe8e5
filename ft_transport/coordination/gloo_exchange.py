"""Exchanges bulk data between the ranks of a group, over a gloo group of its own with its own timeout.

The trainer's process group is never used: the order of its collectives and of ours could differ between ranks.
gloo closes all connections of a group when one operation fails or times out. A rank that fails for another reason
closes its connections as well (`GlooExchange.ending_on_failure`), so that the other ranks fail fast. All ranks learn of
a failure through the vote that follows the exchange. Then all of them call `GlooExchange.reset`, and the next use makes
a new group.
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
"""Larger messages are sent in pieces of this size. gloo counts bytes in 32 bits in some code paths. And if a rank
announces more bytes than it sends, the receiver allocates only one piece too many."""
MAX_MESSAGE_BYTES: Final = 4 << 30
"""A larger announced length is refused. Messages describe states, and the header of a state has at most 100 MB."""


class GlooExchange:
    """Exchanges bytes between ranks. All ranks make the same calls, from one thread at a time.

    A method that exchanges data raises `RankGoneError` if a rank does not take part in time or closes its connection,
    and `PeerProtocolError` if a rank announces an impossible length.

    Args:
        group: The ranks.
        channel: Distinguishes several exchanges of one group.
        timeout: Limit of each operation.
    """

    def __init__(self, group: RankGroup, channel: str, timeout: timedelta) -> None:
        self.rank, self.size = group.rank, group.size
        self._ranks = group
        self._channel = f"{channel}/gloo"
        self._timeout = timeout
        self._generation = 0
        self._group: Any = None

    def reset(self, generation: int) -> None:
        """Drop the gloo group, so that the next use makes a new one.

        Args:
            generation: Number of the new group: the same on all ranks, and greater than all earlier ones.
        """
        self._group = None
        self._generation = generation

    def close(self) -> None:
        """Close the connections to the other ranks."""
        self._group = None

    def ending_on_failure(self, action: Callable[[], T]) -> Callable[[], T]:
        """Return a function that calls ``action`` and, if it fails, closes the connections to the other ranks.

        Then the other ranks do not wait for this rank until the timeout.

        Args:
            action: Exchanges data.
        """

        def act() -> T:
            try:
                if self.size > 1:
                    # Connect first: the other ranks would wait for a rank that fails before it is connected.
                    self._connected()
                return action()
            except BaseException:
                self._group = None
                raise

        return act

    def gather(self, data: bytes) -> list[bytes] | None:
        """Send the data of every rank to rank 0. Return the data by rank on rank 0, and ``None`` on other ranks."""
        sizes = [int(each) for each in self.all_gather(torch.tensor([len(data)], dtype=torch.int64))]
        if self.rank:
            self.send(data, 0)
            return None
        return [data, *(self.receive(sizes[source], source) for source in range(1, self.size))]

    def scatter(self, data: Sequence[bytes] | None) -> bytes:
        """Send to each rank its part of the data of rank 0, and return this rank's part.

        Args:
            data: On rank 0, the parts by rank; ``None`` on the other ranks.
        """
        lengths = self._broadcast_numbers([len(each) for each in data] if data is not None else None, self.size)
        if self.rank:
            return self.receive(lengths[self.rank], 0)
        assert data is not None, "rank 0 passes the data"
        for target in range(1, self.size):
            self.send(data[target], target)
        return data[0]

    def broadcast(self, data: bytes | None) -> bytes:
        """Send the data of rank 0 to all ranks, and return it. The other ranks pass ``None``."""
        (length,) = self._broadcast_numbers([len(data)] if data is not None else None, 1)
        if data is not None:
            self._broadcast(_pieces_of(data))
            return data
        return _joined(length, 0, lambda piece: self._broadcast([piece]))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, by rank. All tensors must have the same shape and dtype."""
        work, gathered = self.begin_all_gather(tensor)
        self.wait(work)
        return gathered

    def send(self, data: bytes, target: int) -> None:
        """Send data to rank ``target``, which calls `receive`."""
        for piece in _pieces_of(data):
            self.wait(self.begin_send(piece, target, _TAG))

    def receive(self, num_bytes: int, source: int) -> bytes:
        """Receive the data that rank ``source`` sends with `send`, and whose length it has announced."""
        return _joined(num_bytes, source, lambda piece: self.wait(self.begin_receive(piece, source, _TAG)))

    def begin_all_gather(self, tensor: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
        """Start an `all_gather`. Return the work for `wait`, and tensors that have their data after `wait`."""
        if self.size == 1:
            return None, [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        return self._begin(lambda group: group.allgather([gathered], [tensor])), gathered

    def begin_send(self, tensor: torch.Tensor, target: int, tag: int) -> Any:
        """Start to send a tensor, and return the work for `wait`. The tensor must not change before `wait` returns."""
        return self._begin(lambda group: group.send([tensor], target, tag))

    def begin_receive(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        """Start to receive into a tensor, and return the work for `wait`. Use the tensor only after `wait` returns."""
        return self._begin(lambda group: group.recv([tensor], source, tag))

    def wait(self, work: Any) -> None:
        """Wait for an operation that a ``begin_`` method has started.

        Args:
            work: The result of that method; ``None`` in a group of one rank.
        """
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
        """Return the gloo group. Connect it first if necessary."""
        if self._group is None:
            store = PrefixStore(str(self._generation), self._ranks.store(self._channel, self._timeout))
            try:
                self._group = ProcessGroupGloo(store, self.rank, self.size, self._timeout)
            except RuntimeError as error:
                raise RankGoneError(
                    f"expected all {self.size} ranks to connect within {self._timeout}: {error}"
                ) from error
        return self._group

    def _failed(self, error: RuntimeError) -> RankGoneError:
        return RankGoneError(
            f"expected all ranks to exchange data within {self._timeout}; a rank is dead, stuck, or elsewhere in the "
            f"program: {error}"
        )


def _pieces_of(data: bytes) -> Iterator[torch.Tensor]:
    """Yield copies of the data, divided into tensors of at most `_PIECE_BYTES`."""
    for start in range(0, len(data), _PIECE_BYTES):
        yield torch.frombuffer(bytearray(data[start : start + _PIECE_BYTES]), dtype=torch.uint8)


def _joined(num_bytes: int, source: int, receive: Callable[[torch.Tensor], object]) -> bytes:
    """Receive a message in pieces, and join them. Each piece is allocated only after the previous one has arrived.

    Args:
        num_bytes: The announced length of the message.
        source: The sending rank, for errors.
        receive: Receives the next piece into a tensor.
    """
    if not 0 <= num_bytes <= MAX_MESSAGE_BYTES:
        raise PeerProtocolError(
            f"expected rank {source} to announce at most {MAX_MESSAGE_BYTES} bytes, got {num_bytes}"
        )
    pieces = []
    for start in range(0, num_bytes, _PIECE_BYTES):
        piece = bytearray(min(num_bytes - start, _PIECE_BYTES))
        receive(torch.frombuffer(piece, dtype=torch.uint8))
        pieces.append(piece)
    return b"".join(pieces)
