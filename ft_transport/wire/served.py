"""Where the server finds the bytes of a snapshot; ``state`` makes it, ``http`` sends it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class MemoryFile:
    """A safetensors file that lies in a memory file from position ``start`` on, and never changes.

    Attributes:
        descriptor: Of the memory file.
        start: Where the safetensors file begins.
        data_start: Where its data begins.
        data: The data, mapped.
    """

    descriptor: int
    start: int
    data_start: int
    data: memoryview

    @contextmanager
    def pin_data(self, start: int, end: int) -> Iterator[list[memoryview]]:
        """Bytes ``[start, end)`` of the data; they never change, so nothing waits for the pin."""
        yield [self.data[start:end]]


class SharedFile(Protocol):
    """A safetensors file whose data is live memory, which its owner materializes before changing it."""

    def pin(self, start: int, end: int) -> AbstractContextManager[list[memoryview]]:
        """Bytes ``[start, end)`` of the file, in order, as they are at the snapshot's step.

        They do not change while they are pinned, because the owner waits: do not wait for a receiver inside.

        Raises:
            SnapshotError: They are lost.
        """

    def pin_data(self, start: int, end: int) -> AbstractContextManager[list[memoryview]]:
        """Bytes ``[start, end)`` of the data, in order, pinned as by `pin`. A tensor lies within one view.

        Raises:
            SnapshotError: They are lost.
        """

    def encoded_digests(self) -> str:
        """The digests of all chunks (``wire.manifest.encode_digests``); computes those that are missing.

        Raises:
            SnapshotError: The data is lost.
        """


ServedMemory: TypeAlias = MemoryFile | SharedFile
