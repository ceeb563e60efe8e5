"""What the ranks of one replica agree on, through the store that their launcher gave them (torch's TCPStore).

Group rank 0 speaks for the replica: it asks the Lighthouse, and passes the answer on. A step is committed by all ranks
or by none. Each exchange has its own number, and the keys of the one before the last are removed, so that a long run
does not fill the store.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Final

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined] # exported, undeclared

from manager.deadline import Deadline
from manager.divergence import Claim
from manager.errors import QuorumError
from manager.quorum import NO_WHOLE_STATE
from manager.stores import StoreConnection

_RESTART_ENV: Final = "TORCHELASTIC_RESTART_COUNT"
_RUN_ENV: Final = "TORCHELASTIC_RUN_ID"
_FAILED: Final = b"!"
_NOBODY: Final = ""
_NUM_KEPT: Final = 2
_LOOK_AGAIN_S: Final = 0.02
_PARTING: Final = timedelta(milliseconds=200)
"""For what is said after a timeout is over, or to somebody who may be gone."""


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says before the replica asks for a quorum, or after a step.

    Attributes:
        step: The committed step that it holds, or ``quorum.NO_WHOLE_STATE``.
        lineage: The lineage of that step.
        group: Key of the process group that it holds and that works; empty if there is none.
        num_groups: How many process groups it has begun to set up.
        address: Where it serves its state.
        can_serve: Whether it can take a snapshot of the step boundary that it is at.
        may_heal: Whether it waits for the quorum, and heals if the replica is behind.
        is_irregular: Its optimizers did not each make one step for the last commit.
        claim: What it says of the last state that was to be compared.
        refusals: Why it does not want to commit.
    """

    step: int
    lineage: str
    group: str
    num_groups: int
    address: str
    can_serve: bool = True
    may_heal: bool = True
    is_irregular: bool = False
    claim: Claim = msgspec.field(default_factory=Claim)
    refusals: tuple[str, ...] = ()


def own_store(timeout: timedelta) -> TCPStore:
    """Start a store inside this process, for a replica of one rank without a launcher."""
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timeout)


class Incarnation:
    """What the ranks of one replica share from when rank 0 makes its manager until it closes it.

    A launcher's store outlives its workers, and a process may make one manager after the other: what an earlier one
    left in the store must not be taken for an answer of this one. So rank 0 publishes a new name for itself, and each
    other rank claims a name that this rank, in whichever process, has not claimed before.

    Args:
        store: Shared by the ranks.
        rank: Rank within the replica.
        replica_id: Of this start of the replica, as rank 0 says; the others learn it.
        timeout: For rank 0 to publish its name.

    Attributes:
        prefix: Of all keys that the ranks exchange.
        replica_id: As rank 0 said.

    Raises:
        QuorumError: Rank 0 did not come in time, or the store does not answer.
    """

    def __init__(self, store: StoreConnection, rank: int, replica_id: str, timeout: timedelta) -> None:
        run = f"{os.environ.get(_RUN_ENV, '')}/{os.environ.get(_RESTART_ENV, '0')}"
        self._base = f"ft_transport/{run}"
        self._key = f"{self._base}/current"
        self._store = store
        self._published = ""
        if rank == 0:
            self._published = f"{uuid.uuid4()} {replica_id}"
            store.set(self._key, self._published, timeout)
            name = self._published
        else:
            name = self._claim(rank, timeout)
        unique, _, self.replica_id = name.partition(" ")
        self.prefix = f"{self._base}/{unique}"

    def close(self) -> None:
        """Let no rank take this incarnation for a living one. Rank 0 does it; where the store is gone, nobody can."""
        if self._published:
            with contextlib.suppress(QuorumError):
                self._store.replace(self._key, self._published, _NOBODY, _PARTING)

    def _claim(self, rank: int, timeout: timedelta) -> str:
        deadline = Deadline.after(timeout)
        earlier: set[str] = set()
        while not deadline.is_over():
            found = self._store.get([self._key], deadline.cap(timeout))
            name = found[0].decode() if found else _NOBODY
            if name != _NOBODY and name not in earlier:
                claim = f"{self._base}/{name.partition(' ')[0]}/claims/{rank}"
                if self._store.add(claim, 1, deadline.cap(timeout)) == 1:
                    return name
                earlier.add(name)
            time.sleep(min(_LOOK_AGAIN_S, deadline.cap(timeout).total_seconds()))
        raise QuorumError(
            f"rank {rank}: expected rank 0 of this replica to start within {timeout.total_seconds():g} s"
            + (f", found only what it left when it started before: {sorted(earlier)}" if earlier else "")
        )


class ReplicaGroup:
    """The ranks of one replica. Every rank calls the same methods in the same order; none is called by two threads.

    Args:
        store: Shared by the ranks; ``None`` for a replica of one rank, which needs nobody's agreement.
        prefix: Of the keys in it; never used before.
        rank: Rank within the replica.
        world_size: Number of ranks.
    """

    def __init__(self, store: StoreConnection | None, prefix: str, rank: int, world_size: int) -> None:
        assert store is not None or world_size == 1, "ranks need a store to agree"
        self._store = store
        self._prefix = prefix
        self.rank = rank
        self.world_size = world_size
        self._num_exchanges = 0
        self._kind = ""
        self._old_keys: deque[list[str]] = deque()

    def gather(self, kind: str, report: RankReport, timeout: timedelta) -> tuple[RankReport, ...]:
        """Bring every rank's report to group rank 0; the others get their own alone.

        Args:
            kind: What the exchange is for: ranks that disagree about it miss each other, and do not misread each other.
            report: This rank's.
            timeout: For all of them together.

        Raises:
            QuorumError: A rank did not report in time.
        """
        if self._store is None:
            return (report,)
        self._num_exchanges += 1
        self._kind = kind
        deadline = Deadline.after(timeout)
        self._store.set(self._key(self.rank), msgspec.json.encode(report), timeout)
        if self.rank != 0:
            return (report,)
        keys = {self._key(rank): f"rank {rank}" for rank in range(1, self.world_size)}
        encoded = self._await(self._store, keys, deadline.cap(timeout))
        return (report, *(msgspec.json.decode(each, type=RankReport) for each in encoded))

    def publish(self, answer: bytes, timeout: timedelta) -> None:
        """Pass on the answer that follows a `gather`. Group rank 0 calls this.

        Args:
            answer: For all the others.
            timeout: For the store to take it.

        Raises:
            QuorumError: The store does not answer.
        """
        if self._store is None:
            return
        keys = [self._key(name) for name in (*range(self.world_size), "answer")]
        self._old_keys.append(keys)
        old = self._old_keys.popleft() if len(self._old_keys) > _NUM_KEPT else []
        self._store.set(keys[-1], answer, timeout, remove=old)

    def publish_failure(self, error: QuorumError) -> None:
        """Pass on why there is no answer. Group rank 0 calls this, and has the error to raise in any case."""
        with contextlib.suppress(QuorumError):
            self.publish(_FAILED + str(error).encode(), _PARTING)

    def await_answer(self, timeout: timedelta) -> bytes:
        """Wait for what group rank 0 publishes. The other ranks call this.

        Raises:
            QuorumError: It failed, or did not answer in time.
        """
        assert self._store is not None, "one rank alone exchanges nothing"
        (answer,) = self._await(self._store, {self._key("answer"): "rank 0"}, timeout)
        if answer.startswith(_FAILED):
            raise QuorumError(f"rank 0 of this replica: {answer[len(_FAILED) :].decode()}")
        return answer

    def _await(self, store: StoreConnection, keys: dict[str, str], timeout: timedelta) -> list[bytes]:
        """Wait for what others write; ``keys`` says which key comes from which rank."""
        missing, reason = list(keys), ""
        try:
            if (values := store.get(missing, timeout)) is not None:
                return values
            missing = store.missing(missing, _PARTING)
        except QuorumError as error:
            reason = f" ({error})"
        raise QuorumError(
            f"rank {self.rank}: expected {', '.join(keys[key] for key in missing)} of this replica within "
            f"{timeout.total_seconds():g} s{reason}"
        )

    def agree(self, kind: str, report: RankReport, *, gathering: timedelta, answering: timedelta) -> tuple[str, ...]:
        """Tell why the replica does not commit: every rank's refusals, the same for all. Empty if it commits.

        Args:
            kind: See `gather`.
            report: This rank's.
            gathering: How long rank 0 waits for the others.
            answering: How long the others wait for rank 0.

        Raises:
            QuorumError: A rank did not answer in time.
        """
        if self._store is None:
            return report.refusals
        try:
            reports = self.gather(kind, report, gathering)
        except QuorumError as error:
            self.publish_failure(error)
            raise
        if self.rank != 0:
            return tuple(msgspec.json.decode(self.await_answer(answering), type=list[str]))
        refusals = [f"rank {rank}: {reason}" for rank, each in enumerate(reports) for reason in each.refusals]
        self.publish(msgspec.json.encode(refusals), gathering)
        return tuple(refusals)

    def _key(self, name: int | str) -> str:
        return f"{self._prefix}/{self._num_exchanges}/{self._kind}/{name}"


def report_of_group(reports: Sequence[RankReport]) -> RankReport:
    """What the replica as a whole holds and does: ranks that hold different states hold no whole one together."""
    states = {(report.step, report.lineage, report.is_irregular) for report in reports}
    step, lineage, is_irregular = states.pop()
    if states and step == 0 and all(other == 0 for other, _, _ in states):
        # One rank was given the state of another replica, one was not: both begin again.
        lineage, is_irregular = "", False
    elif states:
        step, lineage, is_irregular = NO_WHOLE_STATE, "", False
    groups = {report.group for report in reports}
    return RankReport(
        step=step,
        lineage=lineage,
        group=groups.pop() if len(groups) == 1 else "",
        num_groups=sum(report.num_groups for report in reports),
        address=reports[0].address,
        can_serve=all(report.can_serve for report in reports),
        may_heal=all(report.may_heal for report in reports),
        is_irregular=is_irregular,
        claim=_claim_of_group([report.claim for report in reports]),
    )


def _claim_of_group(claims: Sequence[Claim]) -> Claim:
    if len({(claim.step, claim.lineage) for claim in claims}) > 1:
        return Claim()
    # Ranks hold parts of different shapes, so each has names and digests of its own.
    return replace(
        claims[0],
        tensors="-".join(claim.tensors for claim in claims),
        digest="-".join(claim.digest for claim in claims),
    )
