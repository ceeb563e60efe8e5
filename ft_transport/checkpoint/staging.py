"""Staging: a state is copied before training goes on; the store's own thread turns the copy into snapshot files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, TypeAlias

from ft_transport.errors import CheckpointError, SnapshotError
from ft_transport.state.snapshot import PendingSnapshot, Taking
from ft_transport.state.stager import Stager
from ft_transport.transfer.server import SnapshotLease
from ft_transport.wire.chunks import CHUNK_BYTES
from ft_transport.wire.snapshot import MemoryFile

State: TypeAlias = Mapping[str, object] | Callable[[], Mapping[str, object]]
"""A state, or a function that returns it."""


class StagedState:
    """The parts of one save, in order. Made by a `StateStager`; only the store's thread calls the methods.

    Attributes:
        local_keys: Top-level keys of the rank-local part.
    """

    def __init__(self) -> None:
        self.local_keys: tuple[str, ...] = ()
        self._parts: list[PendingSnapshot | Callable[[], SnapshotLease]] = []
        self._failure: Exception | None = None
        self._leases: list[SnapshotLease] = []

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Let `files` raise the errors of the body, so that this rank can report them to the others."""
        try:
            yield
        except Exception as error:
            self._failure = error

    def add(self, part: PendingSnapshot | Callable[[], SnapshotLease]) -> None:
        """Add a copy, or a snapshot that a transport serves; `files` calls a function that returns one."""
        self._parts.append(part)

    def check(self) -> None:
        """Raise an error that lies in the state itself, and that would prevent later saves too.

        Raises:
            SnapshotError: The state contains a value that cannot be saved; the path names it.
            CheckpointError: The state is no dict.
        """
        error = self._failure
        is_of_state = isinstance(error, SnapshotError) and error.path is not None
        if error is not None and (is_of_state or isinstance(error, CheckpointError)):
            raise error

    def files(self) -> list[SnapshotLease]:
        """Return the snapshots, by part; the first call completes them, and `release` releases them.

        Raises:
            Exception: Part of the state could not be copied; every call raises the same error.
        """
        if self._failure is None:
            with self.noting_failure():
                for part in self._parts[len(self._leases) :]:
                    self._leases.append(_finished(part) if isinstance(part, PendingSnapshot) else part())
        if self._failure is not None:
            raise self._failure
        return self._leases

    def release(self) -> None:
        """Free all memory."""
        for part in self._parts:
            if isinstance(part, PendingSnapshot):
                part.abandon()
        for lease in self._leases:
            lease.release()
        # The error of a save refers to the frames that it passed, and so to this object.
        self._failure = None
        self._parts.clear()
        self._leases.clear()


class StateStager:
    """Copies states in two parts, shared and rank-local. For the training thread.

    Args:
        num_threads: Number of threads that copy.

    Attributes:
        rank_local: Top-level keys of the state whose values are rank-local.
    """

    def __init__(self, num_threads: int) -> None:
        self.rank_local: tuple[str, ...] = ()
        self._shared: Final = _make_stager(num_threads)
        self._local: Final = _make_stager(num_threads)

    def prefault(self, state: Mapping[str, object]) -> None:
        """Prefault the memory for the shared part of a state in the background."""
        self._shared.prefault(self._split(state)[0])

    def stage(self, step: int, state: State, local: State | None) -> StagedState:
        """Copy a state; the `StagedState` raises the errors."""
        staged = StagedState()
        with staged.noting_failure():
            shared, own = self._split(_called(state))
            own.update(_called(local) if local is not None else {})
            staged.add(self._shared.begin(Taking(step=step, state=shared)))
            self._stage_local(staged, step, own)
        return staged

    def stage_leased(self, step: int, lease: Callable[[], SnapshotLease], local: State | None) -> StagedState:
        """Copy only the rank-local part; `StagedState.files` calls ``lease``."""
        staged = StagedState()
        staged.add(lease)
        with staged.noting_failure():
            self._stage_local(staged, step, _called(local) if local is not None else {})
        return staged

    def close(self) -> None:
        """Free the memory."""
        self._shared.close()
        self._local.close()

    def _stage_local(self, staged: StagedState, step: int, state: Mapping[str, object]) -> None:
        keys: Iterable[object] = state
        for key in keys:
            # The list of files contains the keys as JSON.
            if not isinstance(key, str) or any("\ud800" <= character <= "\udfff" for character in key):
                raise CheckpointError(
                    f"expected text without lone surrogates as keys of what a rank has for itself, got {key!r}"
                )
        if state:
            staged.local_keys = tuple(state)
            staged.add(self._local.begin(Taking(step=step, state=dict(state))))

    def _split(self, state: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
        """Return the shared and the rank-local part of a state."""
        shared = {key: value for key, value in state.items() if key not in self.rank_local}
        return shared, {key: state[key] for key in self.rank_local if key in state}


def _finished(pending: PendingSnapshot) -> SnapshotLease:
    snapshot = pending.finish()
    memory = snapshot.memory
    assert isinstance(memory, MemoryFile), "nothing of it is shared"
    return SnapshotLease(
        step=snapshot.step,
        descriptor=memory.descriptor,
        start=memory.start,
        num_bytes=snapshot.total_bytes,
        release=snapshot.close,
    )


def _make_stager(num_threads: int) -> Stager:
    return Stager(max_snapshots=1, num_threads=num_threads, chunk_bytes=CHUNK_BYTES, is_digested=False)


def _called(state: State) -> Mapping[str, object]:
    value = state() if callable(state) else state
    if not isinstance(value, Mapping):
        raise CheckpointError(f"expected a dict as state, got {type(value).__name__}")
    return value
