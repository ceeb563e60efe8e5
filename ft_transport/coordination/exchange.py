"""Data between the ranks of a group, over a gloo group of our own, with a timeout of its own.

Never over the trainer's group: its collectives and ours would meet in the wrong order. gloo closes all connections of a
group when one operation fails or times out; a rank that fails for another reason drops its group
(`Exchange.ending_on_failure`), so that its peers fail fast. The group is made anew then, at the next use, by all ranks:
`Exchange.reset` is called on all of them, because all have seen the vote that follows the failure.
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
"""Larger messages go in pieces: gloo counts in 32 bits on some of its ways, and a rank that announces more than it has
makes the others take no more memory than for one."""
MAX_MESSAGE_BYTES: Final = 4 << 30
"""What is exchanged describes states, whose headers have 100 MB at most; a rank that announces more is not believed."""


class Exchange:
    """Sends bytes between ranks. One thread at a time, the same calls on every rank.

    What exchanges data raises `RankGoneError` where a rank does not take part in time, or its connection ends, and
    `PeerProtocolError` where one announces a length that cannot be.

    Args:
        group: The ranks.
        channel: Tells several of one group apart.
        timeout: For each operation.
    """

    def __init__(self, group: RankGroup, channel: str, timeout: timedelta) -> None:
        self.rank, self.size = group.rank, group.size
        self._store = group.store(f"{channel}/gloo")
        self._timeout = timeout
        self._generation = 0
        self._group: Any = None

    def reset(self, generation: int) -> None:
        """Lets go of the group; the next use makes another one.

        Args:
            generation: The same number on all ranks, and greater than any before.
        """
        self._group = None
        self._generation = generation

    def close(self) -> None:
        """Ends the connections."""
        self._group = None

    def ending_on_failure(self, action: Callable[[], T]) -> Callable[[], T]:
        """``action``, which exchanges data; if it fails here, the connections end, and with them the others' waits."""

        def act() -> T:
            try:
                if self.size > 1:
                    # A rank that fails before it is connected would be waited for.
                    self._connected()
                return action()
            except BaseException:
                self._group = None
                raise

        return act

    def gather(self, data: bytes) -> list[bytes] | None:
        """Brings what every rank has to the first, which gets it by rank; the others get ``None``."""
        sizes = [int(each) for each in self.all_gather(torch.tensor([len(data)], dtype=torch.int64))]
        if self.rank:
            self.send(data, 0)
            return None
        return [data, *(self.receive(sizes[source], source) for source in range(1, self.size))]

    def scatter(self, data: Sequence[bytes] | None) -> bytes:
        """Gives each rank what the first has for it."""
        lengths = self._broadcast_numbers([len(each) for each in data] if data is not None else None, self.size)
        if self.rank:
            return self.receive(lengths[self.rank], 0)
        assert data is not None, "the first rank has it"
        for target in range(1, self.size):
            self.send(data[target], target)
        return data[0]

    def broadcast(self, data: bytes | None) -> bytes:
        """Gives all ranks what the first has."""
        (length,) = self._broadcast_numbers([len(data)] if data is not None else None, 1)
        if data is not None:
            self._broadcast(_pieces_of(data))
            return data
        return _joined(length, 0, lambda piece: self._broadcast([piece]))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What every rank has, on all of them; of one shape and dtype."""
        work, gathered = self.begin_all_gather(tensor)
        self.wait(work)
        return gathered

    def send(self, data: bytes, target: int) -> None:
        """Sends to one rank, which calls `receive`."""
        for piece in _pieces_of(data):
            self.wait(self.begin_send(piece, target, _TAG))

    def receive(self, num_bytes: int, source: int) -> bytes:
        """Receives what one rank gives to `send`, which has announced its length."""
        return _joined(num_bytes, source, lambda piece: self.wait(self.begin_receive(piece, source, _TAG)))

    def begin_all_gather(self, tensor: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
        """Begins what `all_gather` does; the tensors are there when `wait` has returned."""
        if self.size == 1:
            return None, [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        return self._begin(lambda group: group.allgather([gathered], [tensor])), gathered

    def begin_send(self, tensor: torch.Tensor, target: int, tag: int) -> Any:
        """Begins to send; the tensor must not change until `wait` has returned."""
        return self._begin(lambda group: group.send([tensor], target, tag))

    def begin_receive(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        """Begins to receive into a tensor, which belongs to the exchange until `wait` has returned."""
        return self._begin(lambda group: group.recv([tensor], source, tag))

    def wait(self, work: Any) -> None:
        """Waits for what was begun."""
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
        """The gloo group, made if need be."""
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
    """Copies of it, as tensors that gloo can count."""
    for start in range(0, len(data), _PIECE_BYTES):
        yield torch.frombuffer(bytearray(data[start : start + _PIECE_BYTES]), dtype=torch.uint8)


def _joined(num_bytes: int, source: int, receive: Callable[[torch.Tensor], object]) -> bytes:
    """What comes in pieces, each of which gets its memory when those before it are there."""
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
