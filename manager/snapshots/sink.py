"""What the manager needs of a transport to have snapshots served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ft_transport import HeldState


class SnapshotInProgress(Protocol):
    """As ``ft_transport.SnapshotInProgress``."""

    def copy_deferred(self) -> None:
        """Copies what was left for later, under the read lock."""

    def publish(self) -> None:
        """Serves it."""

    def abandon(self) -> None:
        """Gives everything back."""


class SnapshotSink(Protocol):
    """Where snapshots go; ``ft_transport.HTTPTransport`` is one. The last three methods answer at once."""

    def hold_state(
        self,
        step: int,
        state: object,
        *,
        deferrable: Callable[[torch.Tensor], bool],
        max_bytes: int,
        check: Callable[[], None],
        lasts: Callable[[torch.Tensor], bool] | None = None,
    ) -> HeldState | None:
        """Copies what is not deferrable."""

    def begin_held(self, held: HeldState) -> SnapshotInProgress:
        """Begins the snapshot of a held state, by a copy of it."""

    def share_held(self, held: HeldState) -> SnapshotInProgress:
        """Begins the snapshot of a held state, served from where it lies."""

    def prefault(self, state: object) -> None:
        """Makes memory for snapshots of a state of this size ready, in the background."""

    def begin_snapshot(
        self,
        step: int,
        state: object,
        *,
        deferrable: Callable[[torch.Tensor], bool] | None = None,
        shareable: Callable[[torch.Tensor], bool] | None = None,
        check_deferred: Callable[[], None],
        check_shared: Callable[[], None],
    ) -> SnapshotInProgress:
        """Copies what is neither deferrable nor shareable."""

    def newest_sequence(self) -> int:
        """How many snapshots were published."""

    def newest_step(self) -> int | None:
        """Step of the newest one."""

    def snapshot_failed(self, step: int, error: BaseException, *, is_final: bool = False) -> None:
        """Tells whoever waits for a snapshot why none has come."""
