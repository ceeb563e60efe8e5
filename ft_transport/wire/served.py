"""A served snapshot, and the location of its bytes; ``state`` makes it, ``http`` sends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ft_transport.wire.chunks import PLAIN, Digester
from ft_transport.wire.manifest import SnapshotId


@dataclass(frozen=True, slots=True)
class MemoryFile:
    """A safetensors file inside a memory file, from position ``start`` on, which never changes.

    Attributes:
        descriptor: Descriptor of the memory file.
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
        """Yield bytes ``[start, end)`` of the data; they never change, so no thread waits for the pin."""
        yield [self.data[start:end]]


class SharedFile(Protocol):
    """A safetensors file whose data is live memory, which its owner materializes before changing it."""

    def pin(self, start: int, end: int) -> AbstractContextManager[list[memoryview]]:
        """Returns bytes ``[start, end)`` of the file, in order, as they are at the snapshot's step.

        They do not change while they are pinned, because the owner waits: do not wait for a receiver inside.

        Raises:
            SnapshotError: They are lost.
        """

    def pin_data(self, start: int, end: int) -> AbstractContextManager[list[memoryview]]:
        """Returns bytes ``[start, end)`` of the data, in order, pinned as by `pin`. A tensor lies within one view.

        Raises:
            SnapshotError: They are lost.
        """

    def encoded_digests(self) -> str:
        """Returns the digests of all chunks (``wire.manifest.encode_digests``); computes missing ones.

        Raises:
            SnapshotError: The data is lost.
        """


ServedMemory: TypeAlias = MemoryFile | SharedFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A state at a step, as one safetensors file; a copy, or live memory that is copied before it changes.

    Attributes:
        step: The committed step of the state.
        snapshot_id: Unique id.
        header: The file's first bytes: length prefix, JSON header, padding.
        memory: The memory until `close`: a memory file, or partly live memory that is shared.
        total_bytes: Length of the safetensors file.
        close: Gives the memory back. Called exactly once, when no reader is left.
        digester: Makes its digests.
    """

    step: int
    snapshot_id: SnapshotId
    header: bytes
    memory: ServedMemory
    total_bytes: int
    close: Callable[[], None]
    digester: Digester = PLAIN
