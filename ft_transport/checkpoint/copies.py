"""What a save has copied before the trainer went on: it becomes snapshots on the store's own thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from ft_transport.checkpoint.save import SnapshotFile
from ft_transport.errors import CheckpointError, SnapshotError
from ft_transport.state.snapshot import PendingSnapshot, Snapshot
from ft_transport.state.stager import Stager
from ft_transport.transfer.server import SnapshotLease
from ft_transport.wire.served import MemoryFile


class Copies:
    """The parts of one save, in order. Adding belongs to the training thread, the rest to the store's.

    Attributes:
        local_keys: Top-level keys of the part that this rank has for itself.
    """

    def __init__(self) -> None:
        self.local_keys: tuple[str, ...] = ()
        self._parts: list[PendingSnapshot | Callable[[], SnapshotLease]] = []
        self._failure: Exception | None = None
        self._snapshots: list[Snapshot] = []
        self._leases: list[SnapshotLease] = []

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """What goes wrong inside is raised by `finish`, where the other ranks can be told of it."""
        try:
            yield
        except Exception as error:
            self._failure = error

    @property
    def refusal(self) -> Exception | None:
        """What went wrong, if it is the state itself, which no later save could copy either."""
        error = self._failure
        is_of_state = isinstance(error, SnapshotError) and error.path is not None
        return error if is_of_state or isinstance(error, CheckpointError) else None

    def add(self, stager: Stager, step: int, state: object) -> None:
        """Copies a state."""
        self._parts.append(stager.begin(step, state))

    def add_local(self, stager: Stager, step: int, state: Mapping[str, object]) -> None:
        """Copies what this rank has for itself, if there is anything."""
        if state:
            self.local_keys = tuple(state)
            self.add(stager, step, dict(state))

    def add_lease(self, lease: Callable[[], SnapshotLease]) -> None:
        """Adds a snapshot that is served; ``lease`` is called by `finish`."""
        self._parts.append(lease)

    def finish(self) -> list[SnapshotFile]:
        """The snapshots.

        Raises:
            Exception: Something could not be copied.
        """
        if self._failure is not None:
            raise self._failure
        files = []
        for part in self._parts:
            if isinstance(part, PendingSnapshot):
                snapshot = part.finish()
                self._snapshots.append(snapshot)
                memory = snapshot.memory
                assert isinstance(memory, MemoryFile), "nothing of it is shared"
                files.append(
                    SnapshotFile(descriptor=memory.descriptor, start=memory.start, num_bytes=snapshot.total_bytes)
                )
            else:
                lease = part()
                self._leases.append(lease)
                files.append(SnapshotFile(descriptor=lease.descriptor, start=lease.start, num_bytes=lease.num_bytes))
        return files

    def release(self) -> None:
        """Gives all memory back."""
        for part in self._parts:
            if isinstance(part, PendingSnapshot):
                part.abandon()
        for snapshot in self._snapshots:
            snapshot.close()
        for lease in self._leases:
            lease.release()
        # Whoever keeps the error of a save keeps the frames that it came through, and with them this object.
        self._failure = None
        for held in (self._parts, self._snapshots, self._leases):
            held.clear()
