"""What the ranks of one replica agree on, through the store that their launcher gave them (torch's TCPStore).

Group rank 0 speaks for the replica: it asks the Lighthouse, and passes the answer on. A step is committed by all ranks
or by none. Each exchange has its own number, and the keys of the one before the last are removed, so that a long run
does not fill the store.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import msgspec
from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined] # exported, undeclared

from manager.errors import QuorumError
from manager.quorum import NO_WHOLE_STATE

_INCARNATION_ENV: Final = "TORCHELASTIC_RESTART_COUNT"
_RUN_ENV: Final = "TORCHELASTIC_RUN_ID"
_FAILED: Final = b"!"


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says before the replica asks for a quorum, or after a step.

    Attributes:
        step: The committed step that it holds, or ``quorum.NO_WHOLE_STATE``.
        lineage: The lineage of that step.
        group: Key of the process group that it holds and that works; empty if there is none.
        num_groups: How many process groups it has begun to set up.
        address: Where it serves its state.
        can_serve: Whether it can take a snapshot of the step boundary that it is at.
        refusals: Why it does not want to commit.
    """

    step: int
    lineage: str
    group: str
    num_groups: int
    address: str
    can_serve: bool = True
    refusals: tuple[str, ...] = ()


def connect_store(host: str, port: int, timeout: timedelta) -> Store:
    """Connect to the replica's store.

    Raises:
        QuorumError: Nobody answers there in time.
    """
    try:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    except DistError as error:
        raise QuorumError(
            f"expected a store at {host}:{port} within {timeout.total_seconds():g} s (store_addr and store_port, or "
            f"MASTER_ADDR and MASTER_PORT): {error}"
        ) from error
    # A launcher's store outlives its workers; what those before left there must not be taken for ours.
    incarnation = f"{os.environ.get(_RUN_ENV, '')}/{os.environ.get(_INCARNATION_ENV, '0')}"
    return PrefixStore(f"ft_transport/{incarnation}", store)


def own_store(timeout: timedelta) -> tuple[TCPStore, int]:
    """Start a store inside this process, for a replica of one rank without a launcher. Returns it and its port."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    return store, store.port


class ReplicaGroup:
    """The ranks of one replica. Every rank calls the same methods in the same order; none is called by two threads.

    Args:
        store: Shared by the ranks; ``None`` for a replica of one rank, which needs nobody's agreement.
        rank: Rank within the replica.
        world_size: Number of ranks.
    """

    def __init__(self, store: Store | None, rank: int, world_size: int) -> None:
        assert store is not None or world_size == 1, "ranks need a store to agree"
        self._store = store
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
        if self.world_size == 1:
            return (report,)
        self._num_exchanges += 1
        self._kind = kind
        self._set(self._key(self.rank), msgspec.json.encode(report))
        if self.rank != 0:
            return (report,)
        deadline_s = time.monotonic() + timeout.total_seconds()
        encoded = [
            self._get(self._key(rank), timedelta(seconds=max(0.001, deadline_s - time.monotonic())), f"rank {rank}")
            for rank in range(self.world_size)
        ]
        return tuple(msgspec.json.decode(each, type=RankReport) for each in encoded)

    def publish(self, answer: bytes | QuorumError) -> None:
        """Pass on the answer that follows a `gather`, or the reason why there is none. Group rank 0 calls this."""
        if self.world_size == 1:
            return
        self._set(self._key("answer"), _FAILED + str(answer).encode() if isinstance(answer, QuorumError) else answer)
        self._old_keys.append([self._key(name) for name in (*range(self.world_size), "answer")])
        if len(self._old_keys) > 2:
            for key in self._old_keys.popleft():
                self._delete(key)

    def await_answer(self, timeout: timedelta) -> bytes:
        """Wait for what group rank 0 publishes. The other ranks call this.

        Raises:
            QuorumError: It failed, or did not answer in time.
        """
        answer = self._get(self._key("answer"), timeout, "rank 0")
        if answer.startswith(_FAILED):
            raise QuorumError(f"rank 0 of this replica: {answer[len(_FAILED) :].decode()}")
        return answer

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
        if self.world_size == 1:
            return report.refusals
        try:
            reports = self.gather(kind, report, gathering)
        except QuorumError as error:
            self.publish(error)
            raise
        if self.rank != 0:
            return tuple(msgspec.json.decode(self.await_answer(answering), type=list[str]))
        refusals = [f"rank {rank}: {reason}" for rank, each in enumerate(reports) for reason in each.refusals]
        self.publish(msgspec.json.encode(refusals))
        return tuple(refusals)

    def close(self) -> None:
        """Let go of the store; what is called afterwards raises."""
        self._store = None

    def _open_store(self) -> Store:
        if self._store is None:
            raise QuorumError(f"rank {self.rank}: has been shut down")
        return self._store

    def _key(self, name: int | str) -> str:
        return f"{self._num_exchanges}/{self._kind}/{name}"

    def _set(self, key: str, value: bytes) -> None:
        try:
            self._open_store().set(key, value)  # type: ignore[arg-type] # bytes are taken as they are
        except DistError as error:
            raise QuorumError(f"rank {self.rank}: expected this replica's store to answer: {error}") from error

    def _get(self, key: str, timeout: timedelta, who: str) -> bytes:
        try:
            self._open_store().wait([key], timeout)
            return bytes(self._open_store().get(key))
        except DistError as error:
            raise QuorumError(
                f"rank {self.rank}: expected {who} of this replica within {timeout.total_seconds():g} s: {error}"
            ) from error

    def _delete(self, key: str) -> None:
        try:
            self._open_store().delete_key(key)
        except DistError as error:
            raise QuorumError(f"rank {self.rank}: expected this replica's store to answer: {error}") from error


def report_of_group(reports: Sequence[RankReport]) -> RankReport:
    """What the replica as a whole holds: no more than its worst rank.

    Raises:
        QuorumError: Ranks hold the same step with different histories, which only a fault of ours can bring about.
    """
    step = min(report.step for report in reports)
    at_step = [report for report in reports if report.step == step]
    # A rank that is behind has another lineage than those which healed without it; all of them heal again.
    lineages = {report.lineage for report in at_step} if step != NO_WHOLE_STATE else {""}
    if step == 0 and len(lineages) > 1:
        # One rank was given the state of another replica, one was not: both begin again.
        lineages = {""}
    if len(lineages) > 1:
        raise QuorumError(f"expected ranks of one replica with one history at step {step}, got {sorted(lineages)}")
    groups = {report.group for report in reports}
    return RankReport(
        step=step,
        lineage=lineages.pop(),
        group=groups.pop() if len(groups) == 1 else "",
        num_groups=sum(report.num_groups for report in reports),
        address=reports[0].address,
        can_serve=all(report.can_serve for report in reports),
    )
