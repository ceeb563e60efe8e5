"""One replica: its state, the snapshots of it, and the ways in which it comes back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ft_transport import PeerError, TransportError
from manager.errors import RecoveryFailedError
from manager.recovery.checkpoints import Checkpoints
from manager.recovery.peers import PeerRecovery
from manager.recovery.values import Recovery
from manager.snapshots.state_snapshots import StateSnapshots
from manager.state.replica_state import ReplicaState

if TYPE_CHECKING:
    from ft_transport import HTTPTransport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """The parts of one replica. The managers hold one; each method belongs to the training thread.

    Attributes:
        state: Its state.
        transport: Serves snapshots of the state and receives others'; ``None`` without one.
        snapshots: The snapshots that the transport serves; ``None`` without a transport.
        peers: Recovers from live peers; ``None`` without a transport.
        checkpoints: Saves and loads durable checkpoints; ``None`` without a store.
    """

    state: ReplicaState
    transport: HTTPTransport[Any] | None
    snapshots: StateSnapshots | None
    peers: PeerRecovery | None
    checkpoints: Checkpoints | None

    def begin_step(self, step: int, *, hold: bool = False) -> bool:
        """The step boundary; see `StateManager.start_step`."""
        self.state.begin_step(step)
        is_kept = self.snapshots.boundary(hold=hold) if self.snapshots is not None else False
        if self.checkpoints is not None:
            self.checkpoints.boundary()
        return is_kept

    def recover_from_anywhere(self, receive: Callable[[], Recovery], timeout: timedelta) -> Recovery:
        """Have all ranks take the state of their peers, or all that of the newest good checkpoint.

        Args:
            receive: Receives a peer's state on this rank.
            timeout: For receiving.

        Raises:
            RecoveryFailedError: No peer could be recovered from, and there is no checkpoint.
        """
        checkpoints = self.checkpoints
        assert checkpoints is not None, "the caller has a store"
        recoveries: list[Recovery] = []
        own_errors: list[Exception] = []

        def recover() -> None:
            try:
                recoveries.append(receive())
            except TransportError as error:
                raise PeerError(f"{type(error).__name__}: {error}") from error
            except Exception as error:
                own_errors.append(error)
                raise

        try:
            checkpoints.run_on_all_ranks("recover from live peers", recover, timeout=2 * timeout)
        except PeerError as error:
            logger.warning("no live peer could be recovered from, checkpoints are tried: %s", error)
            self._note_alone(recoveries, error)
            resumed = checkpoints.resume()
            if resumed is None:
                raise RecoveryFailedError(
                    f"expected a live peer or a checkpoint in {checkpoints.root}, there is none; from peers: {error}"
                ) from error
            return resumed
        except TransportError as error:
            self._note_alone(recoveries, error)
            # Another rank's trouble is the store's error, one's own is as it would be without a store.
            raise own_errors[0] if own_errors else error from None
        return recoveries[0]

    def _note_alone(self, recoveries: Sequence[Recovery], error: TransportError) -> None:
        """Where this rank has recovered and another has not, it must not step."""
        for recovery in recoveries:
            self.state.mark_partial(
                recovery.step, f"this rank has received it, another of this replica has not: {error}"
            )

    def close(self, *, wait: bool) -> None:
        """End the snapshots, the store and the transport, in this order."""
        with ExitStack() as closing:
            if self.transport is not None:
                closing.callback(self.transport.shutdown, wait=wait)
                closing.callback(self.transport.serve_fresh, None)
            if self.checkpoints is not None:
                # It may still be saving a snapshot of the transport's.
                closing.callback(self.checkpoints.close)
            if self.snapshots is not None:
                closing.callback(self.snapshots.close)
