"""Copies the state for a save, on the training thread, before training continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ft_transport.errors import CheckpointError, SnapshotError
from ft_transport.settings import default_num_threads
from ft_transport.state.snapshot import PendingSnapshot, Taking
from ft_transport.state.stager import Stager
from ft_transport.transfer.server import SnapshotLease
from ft_transport.wire.chunks import CHUNK_BYTES
from ft_transport.wire.snapshot import MemoryFile

State: TypeAlias = Mapping[str, object] | Callable[[], Mapping[str, object]]
Lease: TypeAlias = Callable[[], SnapshotLease]
"""A function that returns a snapshot which a transport serves. The function may wait for the snapshot."""


class StagedState:
    """A state that was copied for one save: the shared part, then the rank-local part if the state has one.

    One thread at a time uses it: the training thread until the save is submitted, then the store's thread.

    Attributes:
        local_keys: Top-level keys of the rank-local part.
        parts: The copy of each part. If the shared part is leased, its entry is a function that returns the lease.
        failure: The error that prevented the copy. `snapshots` raises it, so that all ranks learn of it.
    """

    def __init__(self) -> None:
        self.local_keys: tuple[str, ...] = ()
        self.parts: list[PendingSnapshot | Lease] = []
        self.failure: Exception | None = None
        self._leases: list[SnapshotLease] = []

    def check(self) -> None:
        """Raise the error of the copy if no later save of this state could succeed.

        Raises:
            SnapshotError: The state contains a value that cannot be saved; the path names it.
            CheckpointError: The state is not a dict.
        """
        error = self.failure
        if isinstance(error, CheckpointError) or (isinstance(error, SnapshotError) and error.path is not None):
            raise error

    def snapshots(self) -> list[SnapshotLease]:
        """Return the snapshot of each part, which is valid until `release`. The first call completes the copies.

        Raises:
            Exception: Part of the state could not be copied. Every call raises the same error.
        """
        try:
            for part in self.parts[len(self._leases) :] if self.failure is None else ():
                self._leases.append(_finished(part) if isinstance(part, PendingSnapshot) else part())
        except Exception as error:
            self.failure = error
        if self.failure is not None:
            raise self.failure
        return self._leases

    def release(self) -> None:
        """Free the copies and the snapshots."""
        for part in self.parts:
            if isinstance(part, PendingSnapshot):
                part.abandon()
        for lease in self._leases:
            lease.release()
        # The error refers to the stack frames that it passed through, and those frames refer to this object.
        self.failure = None
        self.parts.clear()
        self._leases.clear()


class StateStager:
    """Copies states for saves, the shared and the rank-local part separately. For the training thread only.

    Attributes:
        rank_local: Top-level keys of the state whose values are rank-local.
    """

    def __init__(self) -> None:
        self.rank_local: tuple[str, ...] = ()
        self._shared, self._local = (
            Stager(max_snapshots=1, num_threads=default_num_threads(), chunk_bytes=CHUNK_BYTES, is_digested=False)
            for _ in range(2)
        )

    def prefault(self, state: Mapping[str, object]) -> None:
        """Allocate memory pages for a copy of the shared part, in the background, so that the first copy is fast."""
        self._shared.prefault(self._split(state)[0])

    def stage(self, step: int, state: State | None, local: State | None, lease: Lease | None = None) -> StagedState:
        """Copy a state. If the copy fails, `StagedState.check` and `StagedState.snapshots` raise the error.

        Args:
            step: The committed step.
            state: The state; ``None`` if ``lease`` is given.
            local: Further rank-local values, by top-level key.
            lease: Returns a snapshot of the shared part, which is then not copied. `StagedState.snapshots` calls it.
        """
        staged = StagedState()
        try:
            shared, own = self._split(_called(state)) if lease is None else ({}, {})
            own.update(_called(local) if local is not None else {})
            staged.parts.append(lease if lease is not None else self._shared.begin(Taking(step=step, state=shared)))
            for key in own:
                # The list of files stores the keys as JSON.
                if not isinstance(key, str) or any("\ud800" <= character <= "\udfff" for character in key):
                    raise CheckpointError(
                        f"expected text without lone surrogates as keys of the rank-local state, got {key!r}"
                    )
            if own:
                staged.local_keys = tuple(own)
                staged.parts.append(self._local.begin(Taking(step=step, state=own)))
        except Exception as error:
            staged.failure = error
        return staged

    def close(self) -> None:
        """Free the memory for the copies."""
        self._shared.close()
        self._local.close()

    def _split(self, state: Mapping[str, object]) -> tuple[dict[str, object], dict[Any, object]]:
        """Return the shared part and the rank-local part of a state."""
        shared = {key: value for key, value in state.items() if key not in self.rank_local}
        return shared, {key: state[key] for key in self.rank_local if key in state}


def _called(state: object) -> Mapping[str, object]:
    value = state() if callable(state) else state
    if not isinstance(value, Mapping):
        raise CheckpointError(f"expected a dict as state, got {type(value).__name__}")
    return value


def _finished(pending: PendingSnapshot) -> SnapshotLease:
    snapshot = pending.finish()
    memory = snapshot.memory
    assert isinstance(memory, MemoryFile), "a store never shares live memory"
    return SnapshotLease(
        step=snapshot.step,
        descriptor=memory.descriptor,
        start=memory.start,
        num_bytes=snapshot.total_bytes,
        release=snapshot.close,
    )
