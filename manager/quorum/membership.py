"""One replica's membership in its job: its quorums and its process group.

Combines the Lighthouse, the replica's ranks and the process group; has no access to the state. The training thread and
the quorum thread call it, never both at once.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

import msgspec

from ft_transport.coordination.ranks import from_json
from ft_transport.coordination.store import StoreConnections, nobody_listens
from ft_transport.keys import Keys
from ft_transport.runtime.deadline import Deadline
from ft_transport.telemetry.metrics import Reading
from manager.collectives.process_group import Reconfigurable, ReplicaProcessGroup
from manager.config import LIGHTHOUSE_ENV, ManagerConfig
from manager.errors import quorum_errors
from manager.quorum.decision import Decision, Rules, decide
from manager.quorum.lighthouse import LighthouseSession, embedded_lighthouse
from manager.quorum.members import NAMELESS, AskState, RunningMember, name_of, refusing_members, running_members
from manager.quorum.process_group import QuorumProcessGroup
from manager.quorum.rank_exchange import Exchange, RankExchange
from manager.quorum.replica_identity import Incarnation, ReplicaId, ReplicaStore, find_store, give_back_id, take_id
from manager.quorum.reports import Member, RankReport, StateReport, member_of

logger = logging.getLogger(__name__)

_GRACE: Final = timedelta(milliseconds=200)
"""Other ranks wait longer than rank 0 by this time, so that they receive its error."""
_NO_DEADLINE: Final = Deadline()
_PROBE_S: Final = 0.2

_members_decoder: Final = msgspec.json.Decoder(tuple[Member, ...])


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumRequest:
    """The arguments of `Manager.start_quorum`.

    Attributes:
        rules: Settings that must be equal on all replicas.
        deadline: The caller's deadline. Without one each wait has a timeout of the configuration.
        shrink_only: Whether new replicas have to wait.
        may_heal: Whether this replica heals if it is behind.
    """

    rules: Rules
    deadline: Deadline
    shrink_only: bool
    may_heal: bool


class Membership:
    """See the module.

    Args:
        config: The configuration, completed from the environment.
        address: The address at which this rank serves its state to peers.
        keys: The keys of the job token, if the job has one.
        process_group: Runs the collectives; ``None`` for gloo.
        ask_state: Asks a replica for its state report.

    Attributes:
        replica_id: ``name:`` and a random part; unique among live replicas (``replica_identity``).
        group_rank: This rank within its replica.
        process_group: The process group between replicas.
        stores: Connections to the stores of all replicas.
        store: The store of this replica.
        members: The members of the last quorum.
        lighthouse: The Lighthouse's address, if this rank knows it.
        said: The replica's report in the last quorum; ``None`` before, and on ranks other than 0.

    Raises:
        QuorumError: The Lighthouse or the replica's store cannot be reached.
    """

    def __init__(
        self,
        config: ManagerConfig,
        *,
        address: str,
        keys: Keys | None,
        process_group: ReplicaProcessGroup | Reconfigurable | None,
        ask_state: AskState,
    ) -> None:
        assert config.rank is not None, "the environment has been asked"
        assert config.world_size is not None, "the environment has been asked"
        self._config = config
        self._address = address
        self._keys = keys
        self._ask_state = ask_state
        self.said: Member | None = None
        self.group_rank = config.rank
        self.members: tuple[Member, ...] = ()
        self.lighthouse = config.lighthouse_addr or ""
        self.stores = StoreConnections()
        self.process_group = QuorumProcessGroup(
            process_group,
            stores=self.stores,
            group_rank=self.group_rank,
            world_size=config.world_size,
            timeout=config.timeout,
            connect_timeout=config.connect_timeout,
        )
        self._known_namesakes: set[str] = set()
        self._session: LighthouseSession | None = None
        self._incarnation: Incarnation | None = None
        self._ranks = RankExchange(None, "", 0, 1)
        self._own_id: ReplicaId | None = None
        # A store in this process ends with the last reference.
        self._store: ReplicaStore | None = None
        self._is_asking = False
        try:
            self._start(config)
        except BaseException:
            self.close()
            raise

    def _start(self, config: ManagerConfig) -> None:
        assert config.world_size is not None, "the environment has been asked"
        self._store = find_store(config, self.stores, state_address=self._address)
        self._store_address, self.store = self._store.address, self._store.channel
        name = config.replica_id or NAMELESS
        lighthouse = self._find_lighthouse(config) if self.group_rank == 0 else ""
        self.lighthouse = lighthouse or self.lighthouse
        prefix = ""
        if config.world_size == 1:
            self._own_id = take_id(lighthouse, name)
            self.replica_id, self.process_group.num_begun = self._own_id.replica_id, self._own_id.num_groups
        else:
            self.replica_id = f"{name}:{uuid.uuid4()}"
            self._incarnation = Incarnation(self.store, self.group_rank, self.replica_id, config.timeout)
            self.replica_id, prefix = self._incarnation.replica_id, self._incarnation.prefix
        self._ranks = RankExchange(
            self.store if config.world_size > 1 else None, prefix, self.group_rank, config.world_size, self._keys
        )
        if self.group_rank == 0:
            if config.lighthouse_addr is None:
                logger.warning(
                    "replica %s: no other replica will find this one, because it runs a Lighthouse of its own; to "
                    "train with others, start torchft_lighthouse and set %s=http://host:port (or lighthouse_addr)",
                    self.replica_id,
                    LIGHTHOUSE_ENV,
                )
            self._session = LighthouseSession(
                lighthouse,
                self.replica_id,
                connect_timeout=config.connect_timeout,
                heartbeat_interval=config.heartbeat_interval,
                heartbeat_timeout=config.heartbeat_timeout,
                keys=self._keys,
                # Running replicas do not wait for a newcomer before its first request: it first receives their state.
                is_awaited=not (config.warm_join and self.running_members()),
            )
            logger.info("replica %s: takes part in the quorum of %s", self.replica_id, lighthouse)

    def _find_lighthouse(self, config: ManagerConfig) -> str:
        return config.lighthouse_addr or embedded_lighthouse(
            min_replicas=config.min_replica_size,
            heartbeat_timeout=config.heartbeat_timeout,
            join_timeout=config.timeout + config.connect_timeout,
        )

    def running_members(self) -> tuple[RunningMember, ...]:
        """Return the running replicas from the Lighthouse's page, unauthenticated; on any rank. Takes 0.2 s at most."""
        address = self._config.lighthouse_addr
        # A Lighthouse inside this process has no earlier replicas.
        return running_members(address, self._config.replica_id or NAMELESS) if address is not None else ()

    def decide(
        self, report: StateReport, request: QuorumRequest, *, announced_to: frozenset[str], num_failed_heals: int
    ) -> Decision:
        """Ask for a quorum and decide this rank's part in it.

        Args:
            report: This rank's state, without its process group. The replica heals only if all of its ranks may.
            request: The arguments of ``start_quorum``.
            announced_to: See `Member`.
            num_failed_heals: See ``quorum.decision.decide``.

        Raises:
            QuorumError: No quorum, a missing rank of this replica, or members with different settings.
        """
        own = msgspec.structs.asdict(report)
        own.update(group=self.process_group.held, num_groups=self.process_group.num_begun, address=self._address)
        deadline = request.deadline
        # A rank that is just leaving a failed collective comes later by as much.
        gathering = self._config.timeout + self._config.connect_timeout
        # Rank 0 may take all of its attempts.
        asking = (deadline.left() or self._config.quorum_timeout) * (self._config.quorum_retries + 1)
        answered = self._ranks.exchange(
            Exchange.QUORUM,
            RankReport(**own),
            lambda reports: self._ask(reports, request, announced_to),
            gathering=deadline.cap(gathering),
            answering=deadline.cap(gathering + asking) + _GRACE,
        )
        with quorum_errors():
            members = self.members = from_json(answered, _members_decoder)
        return decide(
            members, self.replica_id, request.rules, group_rank=self.group_rank, num_failed_heals=num_failed_heals
        )

    def _ask(self, reports: Sequence[RankReport], request: QuorumRequest, announced_to: frozenset[str]) -> bytes:
        """Ask the Lighthouse on behalf of all ranks; return the members as JSON."""
        assert self._session is not None, "rank 0 has one"
        own = member_of(
            reports,
            replica_id=self.replica_id,
            store_address=self._store_address,
            announced_to=announced_to,
            rules=request.rules.told(),
        )
        if not self._session.is_heard:
            refusing = refusing_members(
                own, self.running_members(), request.rules, self._ask_state, has_token=self._keys is not None
            )
            if refusing:
                return msgspec.json.encode(refusing)
        self._is_asking = True
        members = self._session.quorum(
            own,
            # As in torchft, the caller's timeout replaces the configured one.
            timeout=request.deadline.left() or self._config.quorum_timeout,
            deadline=request.deadline,
            shrink_only=request.shrink_only,
            num_retries=self._config.quorum_retries,
        )
        self._is_asking = False
        self.said = own
        self._warn_of_namesakes(members)
        return msgspec.json.encode(members)

    def _warn_of_namesakes(self, members: Sequence[Member]) -> None:
        name = name_of(self.replica_id)
        for member in members:
            is_known = member.replica_id == self.replica_id or member.replica_id in self._known_namesakes
            if is_known or name == self.replica_id or name_of(member.replica_id) != name:
                continue
            self._known_namesakes.add(member.replica_id)
            # The Lighthouse may still have a request of a replica that was killed a moment ago.
            if not nobody_listens(member.addresses[0], _PROBE_S):
                logger.warning(
                    "replica %s: another live replica has the name %r, process %s: give every replica a replica_id of "
                    "its own",
                    self.replica_id,
                    name,
                    member.process or f"at {member.addresses[0]}",
                )

    def agree(
        self, kind: Exchange, refusals: tuple[str, ...], *, timeout: timedelta, deadline: Deadline = _NO_DEADLINE
    ) -> tuple[str, ...]:
        """Return all ranks' reasons not to commit, or not to count as healed; empty if there are none.

        Args:
            kind: ``COMMIT`` or ``HEAL``.
            refusals: This rank's reasons.
            timeout: Limit of the wait for the other ranks.
            deadline: Limit of the whole call.

        Raises:
            QuorumError: A rank did not answer in time.
        """
        # A rank that is just leaving a failed collective comes later by as much.
        gathering = timeout + self._config.connect_timeout
        # Rank 0 may wait that long for another rank, and then name it.
        answering = deadline.cap(2 * gathering) + _GRACE
        return self._ranks.agree(kind, refusals, gathering=deadline.cap(gathering), answering=answering)

    def missing(self) -> str:
        """Describe the replicas that a quorum waits for; empty on other ranks than 0, or if they are unknown."""
        return self._session.missing() if self._session is not None else ""

    def is_lighthouse_lost(self) -> bool:
        """Return whether the Lighthouse was unreachable since the last quorum; known to rank 0 alone."""
        return self._session is not None and self._session.is_lost

    def num_missed_heartbeats(self) -> int:
        """Return how often the Lighthouse may have declared this replica dead; known to rank 0 alone."""
        return self._session.num_missed_heartbeats() if self._session is not None else 0

    def readings(self) -> Iterator[Reading]:
        """See ``telemetry.metrics.Source``."""
        yield Reading("member_info", 1, (self.replica_id, str(self.group_rank)))
        yield Reading("missed_heartbeats_total", self.num_missed_heartbeats())

    def fall_silent(self) -> None:
        """End the heartbeats until the next request, so that the others stop waiting for this replica."""
        if self._session is not None:
            self._session.fall_silent()

    def close(self) -> None:
        """Leave: end the heartbeats and the process group."""
        self.process_group.wait_for_readers()
        self._ranks.close()
        if self._session is not None:
            self._session.close()
        self.process_group.close()
        own_id, self._own_id = self._own_id, None
        # Not after a request without an answer: the Lighthouse may still answer it, under the reused id.
        if own_id is not None and not self._is_asking:
            # Plus one, so that the next manager's first state differs from this one's.
            give_back_id(replace(own_id, num_groups=self.process_group.num_begun + 1))
        if self._incarnation is not None:
            self._incarnation.close()
        self.stores.close()
        self._store = None
