"""Data between the ranks of a group, over a gloo group of our own, with a timeout of its own.

Never over the trainer's group: its collectives and ours would meet in the wrong order. gloo closes all connections of a
group when one operation fails or times out; whoever fails for another reason closes his (`Exchange.ending_on_failure`),
so that nobody waits for him until a timeout. The group is made anew then, at the next use, by all ranks:
`Exchange.reset` is called on all of them, because all have seen the vote that follows the failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined] # exported, undeclared

from ft_transport.coordination.consensus import RankGroup
from ft_transport.errors import RankGoneError

T = TypeVar("T")

_TAG: Final = 1
_MAX_MESSAGE_BYTES: Final = 1 << 30
"""Larger ones go in pieces: gloo counts in 32 bits on some of its ways."""


class Exchange:
    """Sends bytes between ranks. One thread at a time, the same calls on every rank.

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

    def ending_on_failure(self, action: Callable[[], T]) -> Callable[[], T]:
        """``action``, which exchanges data; if it fails here, the connections end, and with them the others' waits."""

        def act() -> T:
            try:
                if self.size > 1:
                    # Who fails before he is connected would be waited for.
                    self.group()
                return action()
            except BaseException:
                self._group = None
                raise

        return act

    def gather(self, data: bytes) -> list[bytes] | None:
        """Brings what every rank has to the first, which gets it by rank; the others get ``None``.

        Raises:
            RankGoneError: A rank did not take part in time, or its connection ended.
        """
        if self.size == 1:
            return [data]
        sizes = self._sizes(len(data))
        if self.rank:
            self.send(data, 0)
            return None
        return [data, *(self.receive(sizes[source], source) for source in range(1, self.size))]

    def scatter(self, data: Sequence[bytes] | None) -> bytes:
        """Gives each rank what the first has for it.

        Raises:
            RankGoneError: As for `gather`.
        """
        if self.size == 1:
            assert data is not None, "the first rank has it"
            return data[0]
        lengths = self.broadcast_numbers([len(each) for each in data] if data is not None else None, self.size)
        if self.rank:
            return self.receive(lengths[self.rank], 0)
        assert data is not None, "the first rank has it"
        for target in range(1, self.size):
            self.send(data[target], target)
        return data[0]

    def broadcast(self, data: bytes | None) -> bytes:
        """Gives all ranks what the first has.

        Raises:
            RankGoneError: As for `gather`.
        """
        if self.size == 1:
            assert data is not None, "the first rank has it"
            return data
        (length,) = self.broadcast_numbers([len(data)] if data is not None else None, 1)
        received = bytearray(data) if data is not None else bytearray(length)
        for start in range(0, length, _MAX_MESSAGE_BYTES):
            piece = torch.frombuffer(
                received, dtype=torch.uint8, count=min(length - start, _MAX_MESSAGE_BYTES), offset=start
            )
            self._wait(lambda piece=piece: self.group().broadcast(piece, 0))
        return bytes(received)

    def broadcast_numbers(self, numbers: Sequence[int] | None, count: int) -> list[int]:
        """Gives all ranks some numbers of the first."""
        tensor = torch.tensor(list(numbers) if numbers is not None else [0] * count, dtype=torch.int64)
        if self.size > 1:
            self._wait(lambda: self.group().broadcast(tensor, 0))
        return [int(number) for number in tensor.tolist()]

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What every rank has, on all of them; of one shape and dtype.

        Raises:
            RankGoneError: As for `gather`.
        """
        if self.size == 1:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self._wait(lambda: self.group().allgather([gathered], [tensor]))
        return gathered

    def begin_all_gather(self, tensor: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
        """Begins what `all_gather` does; the tensors are there when `wait` has returned.

        Raises:
            RankGoneError: As for `gather`.
        """
        if self.size == 1:
            return None, [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        try:
            return self.group().allgather([gathered], [tensor]), gathered
        except RuntimeError as error:
            raise self.failed(error) from error

    def begin_send(self, tensor: torch.Tensor, target: int, tag: int) -> Any:
        """Begins to send; the tensor must not change until `wait` has returned.

        Raises:
            RankGoneError: As for `gather`.
        """
        try:
            return self.group().send([tensor], target, tag)
        except RuntimeError as error:
            raise self.failed(error) from error

    def begin_receive(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        """Begins to receive into a tensor, which belongs to the exchange until `wait` has returned.

        Raises:
            RankGoneError: As for `gather`.
        """
        try:
            return self.group().recv([tensor], source, tag)
        except RuntimeError as error:
            raise self.failed(error) from error

    def wait(self, work: Any) -> None:
        """Waits for what was begun.

        Raises:
            RankGoneError: As for `gather`.
        """
        if work is not None:
            self._wait(lambda: work)

    def group(self) -> Any:
        """The gloo group, made if need be.

        Raises:
            RankGoneError: Not all ranks came in time.
        """
        if self._group is None:
            store = PrefixStore(str(self._generation), self._store)
            try:
                self._group = ProcessGroupGloo(store, self.rank, self.size, self._timeout)
            except RuntimeError as error:
                raise RankGoneError(
                    f"expected all {self.size} ranks to connect within {self._timeout}: {error}"
                ) from error
        return self._group

    def failed(self, error: BaseException) -> RankGoneError:
        """What an error of gloo's means."""
        return RankGoneError(
            f"expected all ranks to exchange data within {self._timeout}; one is dead, stuck, or elsewhere in the "
            f"program: {error}"
        )

    def close(self) -> None:
        """Ends the connections."""
        self._group = None

    def _sizes(self, size: int) -> list[int]:
        return [int(each) for each in self.all_gather(torch.tensor([size], dtype=torch.int64))]

    def send(self, data: bytes, target: int) -> None:
        """Sends to one rank, which calls `receive`.

        Raises:
            RankGoneError: As for `gather`.
        """
        for start in range(0, len(data), _MAX_MESSAGE_BYTES):
            piece = torch.frombuffer(bytearray(data[start : start + _MAX_MESSAGE_BYTES]), dtype=torch.uint8)
            self._wait(lambda piece=piece: self.group().send([piece], target, _TAG))

    def receive(self, num_bytes: int, source: int) -> bytes:
        """Receives what one rank gives to `send`.

        Raises:
            RankGoneError: As for `gather`.
        """
        received = bytearray(num_bytes)
        for start in range(0, num_bytes, _MAX_MESSAGE_BYTES):
            count = min(num_bytes - start, _MAX_MESSAGE_BYTES)
            piece = torch.frombuffer(received, dtype=torch.uint8, count=count, offset=start)
            self._wait(lambda piece=piece: self.group().recv([piece], source, _TAG))
        return bytes(received)

    def _wait(self, begin: Any) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            raise self.failed(error) from error
