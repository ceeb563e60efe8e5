"""Healing one replica: from one source after the other, and how often that may fail."""

from __future__ import annotations

import logging
import time
from collections import deque
from datetime import timedelta
from typing import Final

from ft_transport import PeerAuthenticationError, TransportError, UnknownHostError
from ft_transport.coordination.rendezvous import nobody_listens
from manager.config import ManagerConfig
from manager.errors import HealFailedError, ManagerError, QuorumError, StateMismatchError
from manager.quorum.decision import Decision, Member
from manager.quorum.stall_watch import StallWatch
from manager.recovery.peers import PeerRecovery
from manager.recovery.values import PeerOptions
from manager.state.replica_state import ReplicaState

logger = logging.getLogger(__name__)

_SHARE_WITHOUT_PROGRESS: Final = 0.25
"""Of the time that is left: a source that sends nothing for as long is given up for the next one. One that sends keeps
all of the time, or else more sources would leave each too little."""

_PROBE_S: Final = 0.5
"""How long a host may take to say that nobody listens there."""

_PERMANENT: Final = (PeerAuthenticationError, StateMismatchError, UnknownHostError)
_HOPELESS: Final = "no further attempt can succeed: "
"""Begins the last reason where no source can ever deliver. Ranks tell each other their reasons as text."""


class Healer:
    """See the module. Belongs to the training thread.

    Args:
        config: How long it may take, and how often it may fail.
        state: This replica's state.
        peers: Receives it and loads it.
        watch: Looks after the waits.

    Attributes:
        num_failures: Attempts in a row that failed.
    """

    def __init__(self, config: ManagerConfig, *, state: ReplicaState, peers: PeerRecovery, watch: StallWatch) -> None:
        self._config = config
        self._state = state
        self._peers = peers
        self._watch = watch
        self._reasons: list[str] = []
        self.num_failures = 0

    def receive(
        self, decision: Decision, sources: tuple[Member, ...], *, group_rank: int, name: str
    ) -> tuple[str, ...]:
        """Receive the state from the first of the sources that delivers it.

        The quorum may name a replica that died within the last ``heartbeat_timeout``: a source at which nobody listens
        any more is asked after the others.

        Args:
            decision: Which state it is.
            sources: Whom to ask, in order.
            group_rank: Which of their ranks.
            name: Who is healing, for the log.

        Returns:
            Why none delivered; empty if one did.
        """
        deadline_s = time.monotonic() + self._config.timeout.total_seconds()
        failures: list[str] = []
        num_permanent = 0
        waiting, postponed = deque(sources), set[str]()
        while waiting:
            source = waiting.popleft()
            address = source.addresses[group_rank]
            if waiting and address not in postponed and nobody_listens(address, _PROBE_S):
                postponed.add(address)
                waiting.append(source)
                continue
            start_s = time.monotonic()
            left = timedelta(seconds=max(0.0, deadline_s - start_s))
            # Those at which nobody listens are no reason to give up this one.
            has_others = any(each.addresses[group_rank] not in postponed for each in waiting)
            progress_timeout = left * _SHARE_WITHOUT_PROGRESS if has_others else None
            try:
                self._receive_from(address, decision, left, progress_timeout, name)
            except (TransportError, ManagerError) as error:
                reason = f"{type(error).__name__}: {error}"
                num_permanent += isinstance(error, _PERMANENT)
                failures.append(f"{source.replica_id} at {address}: {reason}")
                logger.warning("%s: healing from %s failed: %s", name, source.replica_id, reason)
                continue
            logger.info(
                "%s: healed to step %d from %s in %.1f ms",
                name,
                decision.step,
                source.replica_id,
                (time.monotonic() - start_s) * 1e3,
            )
            return ()
        if failures and num_permanent == len(failures):
            failures[-1] = _HOPELESS + failures[-1]
        return tuple(failures)

    def succeeded(self) -> None:
        """Forget the failures: all ranks of the replica are healed."""
        self._reasons.clear()
        self.num_failures = 0

    def failed(self, step: int, reasons: tuple[str, ...], *, agreed: tuple[str, ...]) -> None:
        """Count a failure of any rank of the replica.

        Args:
            step: The step that was to be received.
            reasons: Why it failed.
            agreed: What all ranks have told each other, the same on each of them.

        Raises:
            HealFailedError: It was one too many, or no further attempt of one of the ranks can succeed.
        """
        self._reasons.extend(reasons)
        self.num_failures += 1
        is_hopeless = any(_HOPELESS in reason for reason in agreed)
        if is_hopeless or self.num_failures >= self._config.max_heal_attempts:
            every = tuple(self._reasons)
            self.succeeded()
            raise HealFailedError(step=step, reasons=every)

    def _receive_from(
        self, address: str, decision: Decision, timeout: timedelta, progress_timeout: timedelta | None, name: str
    ) -> None:
        with self._watch.waiting(f"{name}: receiving step {decision.step} from {address}"):
            self._peers.recover(
                address,
                decision.step,
                PeerOptions(
                    timeout=timeout,
                    unreachable_timeout=self._config.connect_timeout,
                    progress_timeout=progress_timeout,
                    is_fresh=True,
                    verify=self._config.verify_heal,
                ),
            )
        lineage = self._state.lineage
        if lineage != decision.lineage:
            raise QuorumError(f"expected lineage {decision.lineage!r} of step {decision.step}, got {lineage!r}")
