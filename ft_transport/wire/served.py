"""Where the server finds the bytes of a snapshot: what the tensors' side makes and the network's side sends."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class MemoryFile:
    """A safetensors file that lies in a memory file from position ``start`` on, and never changes."""

    descriptor: int
    start: int


class LentFile(Protocol):
    """A safetensors file whose data is somebody's live memory, until he wants to change it."""

    def borrow(self, start: int, end: int) -> AbstractContextManager[list[memoryview]]:
        """Bytes ``[start, end)`` of the file, in order, as they are at the snapshot's step.

        The owner waits for whoever is inside: nothing there may wait for a receiver.

        Raises:
            SnapshotError: They are lost.
        """

    def encoded_digests(self) -> str:
        """The digests of all chunks (``wire.manifest.encode_digests``); computes those that are missing.

        Raises:
            SnapshotError: The data is lost.
        """


ServedMemory: TypeAlias = MemoryFile | LentFile
