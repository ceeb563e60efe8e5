"""The membership of one replica in its job: `Membership` asks for quorums, and owns the process group.

It combines the session with the Lighthouse, the exchange between the replica's ranks, and the process group. It has no
access to the state.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined] # exported, undeclared

from ft_transport.coordination.ranks import decode_message
from ft_transport.coordination.store import StoreConnections, nobody_listens
from ft_transport.credentials import Keys
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
from manager.quorum.replica_identity import Incarnation, ReplicaId, find_store, give_back_id, take_id
from manager.quorum.reports import Member, RankReport, StateReport, member_of
from manager.quorum.stand_in import Absence, StandIn, find_predecessor

logger = logging.getLogger(__name__)

_GRACE: Final = timedelta(milliseconds=200)
"""The other ranks of a replica wait this much longer than rank 0, so that they still receive its error."""
_PROBE_S: Final = 0.2
_MAX_GROUPS: Final = 1 << 32
"""More process groups than one start of a replica sets up."""

_members_decoder: Final = msgspec.json.Decoder(tuple[Member, ...])


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumRequest:
    """The arguments of `Manager.start_quorum`.

    Attributes:
        deadline: The caller's deadline. If it is unlimited, the timeouts of the configuration limit each wait.
        shrink_only: Whether to admit only members of the last quorum.
        may_heal: Whether this replica heals if it is behind.
    """

    deadline: Deadline
    shrink_only: bool
    may_heal: bool


class Membership:
    """The membership of one rank, and of its replica, in the job.

    The training thread and the quorum thread may call it, but not both at once.

    Args:
        config: The configuration, completed from the environment.
        address: The address at which this rank serves its state to peers.
        keys: The keys of the job token; ``None`` without a token.
        process_group: Runs the collectives; ``None`` for gloo.
        ask_state: Requests the status of the replica at an address.

    Attributes:
        replica_id: The configured name, a colon and a random part; unique among live replicas (``replica_identity``).
        group_rank: This rank within its replica.
        process_group: The process group between this rank and the ranks of other replicas.
        stores: Connections to the key-value stores of all replicas.
        store: The key-value store of this replica.
        members: The members of the last quorum.
        lighthouse: The address of the Lighthouse; empty if this rank does not know it.
        last_report: The replica's report in its last quorum; ``None`` before the first, and on ranks other than 0.

    Raises:
        QuorumError: The Lighthouse or the replica's key-value store does not answer.
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
        self._rules = Rules(
            min_replica_size=config.min_replica_size,
            world_size_mode=config.world_size_mode,
            init_sync=config.init_sync,
            compare_every=config.compare_every,
        )
        self._address = address
        self._keys = keys
        self._ask_state = ask_state
        self.last_report: Member | None = None
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
        self._stand_in: StandIn | None = None
        self._incarnation: Incarnation | None = None
        self._ranks: RankExchange | None = None
        self._own_id: ReplicaId | None = None
        # A store that this process hosts closes with the last reference to it.
        self._hosted_store: TCPStore | None = None
        self._is_asking = False
        try:
            self._start(config)
        except BaseException:
            self.close()
            raise

    def _start(self, config: ManagerConfig) -> None:
        assert config.world_size is not None, "the environment has been asked"
        self.store, self._store_address, self._hosted_store = find_store(
            config, self.stores, state_address=self._address
        )
        name = config.replica_id or NAMELESS
        lighthouse = self._find_lighthouse(config) if self.group_rank == 0 else ""
        self.lighthouse = lighthouse or self.lighthouse
        has_keeper = self.group_rank == 0 and config.lighthouse_addr is not None and sys.platform == "linux"
        predecessor = find_predecessor(lighthouse, config.replica_id or "") if has_keeper else None
        own_id = take_id(lighthouse, name, predecessor)
        if predecessor is not None and predecessor.absence.replica_id != own_id.replica_id:
            predecessor.duty.close()
            predecessor = None
        self.replica_id, self.process_group.num_begun = own_id.replica_id, own_id.num_groups
        if has_keeper:
            self._stand_in = StandIn(
                Absence(
                    lighthouse=lighthouse,
                    replica_id=own_id.replica_id,
                    num_groups=own_id.num_groups + _MAX_GROUPS,
                    min_replicas=config.min_replica_size,
                    heartbeat_timeout_s=config.heartbeat_timeout.total_seconds(),
                ),
                name=config.replica_id or "",
                predecessor=predecessor,
            )
        if config.world_size == 1:
            self._own_id = own_id
        else:
            self._incarnation = Incarnation(self.store, self.group_rank, self.replica_id, config.timeout)
            self.replica_id = self._incarnation.replica_id
            self._ranks = RankExchange(
                self.store, self._incarnation.prefix, self.group_rank, config.world_size, self._keys
            )
        if self.group_rank == 0:
            if config.lighthouse_addr is None:
                logger.warning(
                    "replica %s: no other replica can find this one, because it runs a Lighthouse of its own; to train "
                    "with other replicas, start torchft_lighthouse and set %s=http://host:port (or lighthouse_addr)",
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
                min_replicas=config.min_replica_size,
                stand_in=self._stand_in,
                # A newcomer with a warm join sends no heartbeats yet: running replicas would wait for its request.
                starts_heartbeat=not self.running_members(),
            )
            logger.info("replica %s: connected to the Lighthouse at %s", self.replica_id, lighthouse)

    def _find_lighthouse(self, config: ManagerConfig) -> str:
        return config.lighthouse_addr or embedded_lighthouse(
            min_replicas=config.min_replica_size,
            heartbeat_timeout=config.heartbeat_timeout,
            join_timeout=config.timeout + config.connect_timeout,
        )

    def running_members(self) -> tuple[RunningMember, ...]:
        """Return the running replicas, as the Lighthouse's status page shows them. The page is not authenticated.

        Any rank may call it. A Lighthouse that does not answer costs about 0.2 s.
        """
        address = self._config.lighthouse_addr
        # Without an address, the Lighthouse runs inside this process, and no replica is running yet.
        return running_members(address, self._config.replica_id or NAMELESS) if address is not None else ()

    def decide(
        self, report: StateReport, request: QuorumRequest, *, announced_to: frozenset[str], num_failed_heals: int
    ) -> Decision:
        """Ask for a quorum, and decide what this rank does in the step.

        Args:
            report: This rank's report about its state. This method adds the fields of the process group.
            request: The arguments of ``start_quorum``.
            announced_to: Replicas that learned in the previous quorum that this replica needs a snapshot.
            num_failed_heals: Number of failed heals in a row; each attempt starts with another source.

        Raises:
            QuorumError: No quorum was formed, a rank of this replica is missing, or the members' settings differ.
        """
        own = msgspec.structs.asdict(report)
        own.update(group=self.process_group.group, num_groups=self.process_group.num_begun, address=self._address)
        own_report, deadline = RankReport(**own), request.deadline
        # A rank that waits in a failed collective arrives this much later.
        gathering = self._config.timeout + self._config.connect_timeout
        # Rank 0 may need all of its requests to the Lighthouse.
        asking = (deadline.left() or self._config.quorum_timeout) * (self._config.quorum_retries + 1)
        if self._ranks is None:
            answer = self._ask((own_report,), request, announced_to)
        else:
            answer = self._ranks.exchange(
                Exchange.QUORUM,
                own_report,
                lambda reports: self._ask(reports, request, announced_to),
                gathering=deadline.cap(gathering),
                answering=deadline.cap(gathering + asking) + _GRACE,
            )
        with quorum_errors():
            members = self.members = decode_message(answer, _members_decoder)
        return decide(
            members, self.replica_id, self._rules, group_rank=self.group_rank, num_failed_heals=num_failed_heals
        )

    def _ask(self, reports: Sequence[RankReport], request: QuorumRequest, announced_to: frozenset[str]) -> bytes:
        """Ask the Lighthouse on behalf of all ranks of this replica. Return the members of the quorum, in JSON."""
        assert self._session is not None, "only rank 0 asks, and it has a session"
        own = member_of(
            reports,
            replica_id=self.replica_id,
            store_address=self._store_address,
            announced_to=announced_to,
            rules=self._rules.as_text(),
        )
        if not self._session.has_heartbeat:
            refusing = refusing_members(
                own, self.running_members(), self._rules, self._ask_state, has_token=self._keys is not None
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
        self.last_report = own
        self._warn_of_namesakes(members)
        return msgspec.json.encode(members)

    def _warn_of_namesakes(self, members: Sequence[Member]) -> None:
        name = name_of(self.replica_id)
        for member in members:
            is_known = member.replica_id == self.replica_id or member.replica_id in self._known_namesakes
            if is_known or name == self.replica_id or name_of(member.replica_id) != name:
                continue
            self._known_namesakes.add(member.replica_id)
            # The other replica may have been killed a moment ago, after its request to the Lighthouse.
            if not nobody_listens(member.addresses[0], _PROBE_S):
                logger.warning(
                    "replica %s: another live replica has the name %r, process %s: give every replica a replica_id of "
                    "its own",
                    self.replica_id,
                    name,
                    member.process or f"at {member.addresses[0]}",
                )

    def agree(
        self, kind: Exchange, refusals: tuple[str, ...], *, timeout: timedelta, deadline: Deadline
    ) -> tuple[str, ...]:
        """Vote with the other ranks of this replica on a commit, or on whether the replica has healed.

        Args:
            kind: ``COMMIT`` or ``HEAL``.
            refusals: The reasons of this rank to vote against it; empty to agree.
            timeout: Limit of the wait for the other ranks.
            deadline: Limit of the whole call.

        Returns:
            The reasons of all ranks against it; empty if all agree.

        Raises:
            QuorumError: A rank did not vote in time.
        """
        if self._ranks is None:
            return refusals
        # A rank that waits in a failed collective arrives this much later.
        gathering = timeout + self._config.connect_timeout
        # Rank 0 may wait that long before it reports which rank is missing.
        answering = deadline.cap(2 * gathering) + _GRACE
        return self._ranks.agree(kind, refusals, gathering=deadline.cap(gathering), answering=answering)

    def missing(self) -> str:
        """Describe which replicas the quorum waits for; empty if that is unknown, as on ranks other than 0."""
        return self._session.missing() if self._session is not None else ""

    def is_lighthouse_lost(self) -> bool:
        """Return whether the Lighthouse has been unreachable since the last quorum; false on ranks other than 0."""
        return self._session is not None and self._session.was_unreachable

    def num_missed_heartbeats(self) -> int:
        """Return how often the Lighthouse may have declared this replica dead; 0 on ranks other than 0."""
        return self._session.num_missed_heartbeats() if self._session is not None else 0

    def readings(self) -> Iterator[Reading]:
        """Yield the metrics of the membership; see ``telemetry.metrics.Source``."""
        yield Reading("member_info", 1, (self.replica_id, str(self.group_rank)))
        yield Reading("missed_heartbeats_total", self.num_missed_heartbeats())

    def stop_heartbeats(self) -> None:
        """End the heartbeats until the next quorum, so that other replicas stop waiting for this one."""
        if self._session is not None:
            self._session.stop_heartbeats()

    def close(self) -> None:
        """Leave the job: end the heartbeats, and shut the process group down."""
        self.process_group.wait_for_readers()
        if self._ranks is not None:
            self._ranks.close()
        if self._session is not None:
            self._session.close()
        if self._stand_in is not None:
            self._stand_in.close()
        self.process_group.close()
        own_id, self._own_id = self._own_id, None
        # After an unanswered request the id must not be reused: the Lighthouse may still answer that request.
        if own_id is not None and not self._is_asking:
            # Plus one, so that the first states of this manager and of the next one have different lineages.
            give_back_id(replace(own_id, num_groups=self.process_group.num_begun + 1))
        if self._incarnation is not None:
            self._incarnation.close()
        self.stores.close()
        self._hosted_store = None
