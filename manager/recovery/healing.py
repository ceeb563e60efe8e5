"""Heals one replica: receives the state from its sources, and limits the number of failures."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from ft_transport import PeerAuthenticationError, StateNotServedError, TransportError, UnknownHostError
from ft_transport.coordination.rendezvous import nobody_listens
from ft_transport.runtime.handler_safety import SafeExecutor
from ft_transport.telemetry.recorder import current
from manager.config import ManagerConfig
from manager.errors import HealFailedError, ManagerError, QuorumError, StateMismatchError
from manager.quorum.decision import Decision, Heals
from manager.quorum.stall_watch import StallWatch
from manager.recovery.peers import PeerRecovery
from manager.recovery.values import PeerOptions
from manager.state.registration_check import nonfinite_parameters
from manager.state.replica_state import ReplicaState

logger = logging.getLogger(__name__)

MAX_ATTEMPTS: Final = 3
"""A replica gives up after as many failed rounds in a row, each over all sources."""
_SHARE_WITHOUT_PROGRESS: Final = 0.25
"""A source that sends nothing for this share of the remaining time is dropped for the next one. A source that sends may
use all of the time: with shares for each source, many sources would leave each too little."""

_MAX_SHOWN: Final = 5
_MAX_PROBED_AT_ONCE: Final = 16
_PROBE_S: Final = 0.5
"""Limit of a probe for a closed port."""

_PERMANENT: Final = (PeerAuthenticationError, StateMismatchError, StateNotServedError, UnknownHostError)
_HOPELESS: Final = "no further attempt can succeed: "
"""Start of the last reason if no source can ever deliver. Ranks exchange reasons as text."""


def _tell_retry(error: Exception, address: str) -> None:
    recording = current()
    if recording is not None:
        recording.retry(error, peer=address)


def _listening(addresses: Sequence[str]) -> list[str]:
    """Return the addresses with an open port: a request to a source that has just died would wait."""
    with SafeExecutor(min(len(addresses), _MAX_PROBED_AT_ONCE), "ft-transport-probe") as pool:
        is_gone = list(pool.map(lambda address: nobody_listens(address, _PROBE_S), addresses))
    return [address for address, gone in zip(addresses, is_gone, strict=True) if not gone]


class Healer:
    """Heals one replica. For the training thread alone.

    Args:
        config: Timeouts, and the maximum number of failures.
        state: This replica's state.
        peers: Receives and loads a peer's state.
        watch: Reports long waits.

    Attributes:
        num_failures: Number of failed attempts in a row.
        source: The replicas that served the last state.
    """

    def __init__(self, config: ManagerConfig, *, state: ReplicaState, peers: PeerRecovery, watch: StallWatch) -> None:
        self._config = config
        self._state = state
        self._peers = peers
        self._watch = watch
        self._reasons: list[str] = []
        self.source = ""
        self.num_failures = 0

    def receive(self, decision: Decision, role: Heals, *, group_rank: int, name: str) -> tuple[str, ...]:
        """Receive the state: from all sources at once, together with other healing replicas; or from one by one.

        The quorum may include a replica that died within the last ``heartbeat_timeout``: a source with a closed port is
        tried after the others.

        Args:
            decision: Names the state.
            role: The sources in order, and the other healing replicas.
            group_rank: The rank of the sources to ask.
            name: This replica's name for the log.

        Returns:
            The reasons of all failures; empty after a success.
        """
        sources = role.sources
        deadline_s = time.monotonic() + self._config.timeout.total_seconds()
        failures: list[str] = []
        is_alone = len(role.receivers) <= 1 or self._peers.knows_most
        if not is_alone and self._receive_together(decision, role, group_rank=group_rank, name=name):
            return ()
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
            # Sources with closed ports are no alternative to this one.
            has_others = any(each.addresses[group_rank] not in postponed for each in waiting)
            progress_timeout = left * _SHARE_WITHOUT_PROGRESS if has_others else None
            options = PeerOptions(
                timeout=left,
                unreachable_timeout=self._config.connect_timeout,
                progress_timeout=progress_timeout,
                is_fresh=True,
                verify=self._config.verify_heal,
                keep_partial=True,
            )
            try:
                self._receive_from(address, decision, options, name)
            except (TransportError, ManagerError) as error:
                reason = f"{type(error).__name__}: {error}"
                num_permanent += isinstance(error, _PERMANENT)
                failures.append(f"{source.replica_id} at {address}: {reason}")
                _tell_retry(error, address)
                logger.warning("%s: healing from %s failed: %s", name, source.replica_id, reason)
                continue
            self.source = source.replica_id
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
        """Reset the failures: all ranks of the replica have healed."""
        self._reasons.clear()
        self.num_failures = 0

    def warn_of_damage(self, decision: Decision, *, name: str) -> None:
        """Log parameters of the received state with a NaN or an infinity, which the source has as well.

        Args:
            decision: The decision of this heal.
            name: This replica's name for the log.
        """
        damaged = nonfinite_parameters(self._state.registry, self._state.optimizers())
        if damaged:
            more = f" and {len(damaged) - _MAX_SHOWN} more" if len(damaged) > _MAX_SHOWN else ""
            logger.error(
                "%s: the state of step %d that %s served holds NaN or infinity in %s%s, and training does not mend it; "
                "load a durable checkpoint from before",
                name,
                decision.step,
                self.source,
                ", ".join(damaged[:_MAX_SHOWN]),
                more,
            )

    def failed(self, step: int, reasons: tuple[str, ...], *, agreed: tuple[str, ...]) -> None:
        """Count a failure of any rank of the replica.

        Args:
            step: The step to receive.
            reasons: The reasons on this rank.
            agreed: The reasons of all ranks, the same on each of them.

        Raises:
            HealFailedError: The limit is reached, or no further attempt of a rank can succeed.
        """
        self._reasons.extend(reasons)
        self.num_failures += 1
        is_hopeless = any(_HOPELESS in reason for reason in agreed)
        if is_hopeless or self.num_failures >= MAX_ATTEMPTS:
            every = tuple(self._reasons)
            self.succeeded()
            self._peers.discard_partial()
            raise HealFailedError(step=step, reasons=every)

    def _receive_together(self, decision: Decision, role: Heals, *, group_rank: int, name: str) -> bool:
        """Receive the state from all sources and from other healing replicas at once; return whether that succeeded."""
        listening = _listening([source.addresses[group_rank] for source in role.sources])
        if not listening:
            return False
        start_s = time.monotonic()
        timeout = self._config.timeout
        options = PeerOptions(
            timeout=timeout,
            unreachable_timeout=self._config.connect_timeout,
            progress_timeout=timeout * _SHARE_WITHOUT_PROGRESS,
            is_fresh=True,
            verify=self._config.verify_heal,
            keep_partial=True,
            others=tuple(listening[1:]),
            relays=tuple(receiver.addresses[group_rank] for receiver in role.receivers),
        )
        try:
            self._receive_from(listening[0], decision, options, name)
        except (TransportError, ManagerError) as error:
            _tell_retry(error, listening[0])
            logger.warning(
                "%s: healing together with others failed, the sources are asked one by one: %s: %s",
                name,
                type(error).__name__,
                error,
            )
            return False
        self.source = ", ".join(source.replica_id for source in role.sources)
        logger.info(
            "%s: healed to step %d from %d sources, %d replicas together, in %.1f ms",
            name,
            decision.step,
            len(listening),
            len(role.receivers),
            (time.monotonic() - start_s) * 1e3,
        )
        return True

    def _receive_from(self, address: str, decision: Decision, options: PeerOptions, name: str) -> None:
        with self._watch.waiting(f"{name}: receiving step {decision.step} from {address}"):
            self._peers.recover(address, decision.step, options)
        lineage = self._state.lineage
        if lineage != decision.lineage:
            raise QuorumError(f"expected lineage {decision.lineage!r} of step {decision.step}, got {lineage!r}")
