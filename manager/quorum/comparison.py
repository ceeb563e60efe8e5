"""Digests what optimizers and schedulers change, tensors and hyperparameters, for comparison between replicas.

A background thread reads the tensors while forward and backward run; a read section keeps optimizers from changing them
meanwhile. Reading takes about 0.1 s for each GB on one core, once for each comparison; a longer step does not wait.

A learning rate that a scheduler changes on one replica alone appears in no state until the parameters differ for good.
After a commit the hyperparameters must be equal: every replica sets them from the same step. After a failed step they
may differ: one replica may have failed before setting them for this attempt, another one after.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from itertools import chain
from operator import is_
from typing import Any, Final

import msgspec
from torch.optim import Optimizer

from ft_transport import TransportError
from ft_transport.state.comparison import TensorDigests
from manager.errors import HyperparametersDivergedError, LockTimeoutError, ManagerError, StatesDivergedError
from manager.lifecycle import OwnedExecutor
from manager.quorum.decision import Decision
from manager.quorum.differences import DifferenceExchange
from manager.quorum.quorum_round import Participant, QuorumRound
from manager.quorum.reports import Claim
from manager.snapshots.requests import BOUNDARY_TIMEOUT
from manager.state.compatibility import WITHOUT_EFFECT, leaves, named_optimizers, plain
from manager.state.lock import Section
from manager.state.optimizer_states import belongs_to, memory_at, parameters_of

logger = logging.getLogger(__name__)

_MAX_SUSPECTED: Final = 3
"""After this number of suspected steps without a difference, further ones are trusted."""
_NAMING: Final = timedelta(seconds=2)
_MAX_DIVERGENCES: Final = 1
"""Consecutive divergences before an error: a heal does not change values that the loop sets."""

_FIXED: Final = frozenset({bool, float, int, str, type(None)})
"""Immutable types."""

_encoder: Final = msgspec.msgpack.Encoder(enc_hook=plain, order="deterministic")


class StateComparison:
    """Digests a replica's state at compared boundaries. For the training thread alone.

    Tensors outside memory that only optimizers and write sections change are not compared.

    Args:
        participant: This replica in its quorum.
        differences: Exchanges the digests of tensors that differ.

    Attributes:
        is_wanted: Whether to compare the next boundary, whichever step it is.
    """

    def __init__(self, participant: Participant, differences: DifferenceExchange) -> None:
        self._participant = participant
        self._differences = differences
        self._pool: OwnedExecutor | None = None
        self._pending: tuple[int, str, Future[dict[str, int]]] | None = None
        self.is_wanted = False
        self._num_suspected = 0

    def suspect(self, reason: str, current: QuorumRound) -> None:
        """Compare the next boundary, and log the reason, if several replicas make a step that may differ.

        Args:
            reason: Why the step may differ.
            current: The step.
        """
        decision = current.decision
        if decision is None or decision.num_participants < 2 or self._num_suspected == _MAX_SUSPECTED:
            return
        if not self._num_suspected:
            logger.warning(
                "%s; the replicas differ unless they are the same on all, so the states are compared after this step",
                reason,
            )
        self._num_suspected += 1
        self.is_wanted = True

    def begin_if_due(self) -> None:
        """Begin to digest the state of this boundary, if it is compared. Logs a state that cannot be digested."""
        own, copier = self._participant.state, self._participant.snapshots.copier
        step, every = own.step, self._participant.config.compare_every
        if not self.is_wanted and (every is None or step == 0 or step % every):
            return
        self.is_wanted = False
        section: Section | None = None
        try:
            if own.lock.write_owned():
                return
            section = own.lock.acquire_read(f"comparing step {step}", BOUNDARY_TIMEOUT, detached=True)
            state, optimizers = own.content(), own.optimizers()
            guarded = copier.guarded(optimizers) | copier.stable(state)
            check = copier.watch([each for each in parameters_of(optimizers) if memory_at(each) in guarded])
            digests = TensorDigests(state, belongs_to(guarded, at_least_bytes=0))
            if self._pool is None:
                self._pool = OwnedExecutor(1, "ft-transport-compare")
            values = {f"{key} (values)": _digest_of_values(each) for key, each in copier.values(state).items()}
            self._pending = step, own.lineage, self._pool.submit(_compute, digests, values, check, section)
            section = None
        except (TransportError, ManagerError) as error:
            level = logging.DEBUG if isinstance(error, LockTimeoutError) else logging.WARNING
            logger.log(level, "step %d is not compared with the other replicas': %s", step, error)
        finally:
            if section is not None and section.is_open:
                section.release()

    def claim(self, timeout: timedelta) -> Claim:
        """Return the digest of the last compared boundary; waits for it."""
        table = self._table(timeout)
        if table is None or self._pending is None:
            return Claim()
        step, lineage, _ = self._pending
        ordered = sorted(table.items())
        return Claim(
            step=step,
            lineage=lineage,
            tensors=_digest([name for name, _ in ordered]),
            digest=_digest([digest for _, digest in ordered]),
        )

    def _table(self, timeout: timedelta) -> dict[str, int] | None:
        """Return the digest of each tensor by path; ``None`` without a compared boundary."""
        if self._pending is None:
            return None
        step, _, future = self._pending
        try:
            error = future.exception(timeout.total_seconds())
        except FutureTimeoutError:
            error = ManagerError(f"no digest in {timeout.total_seconds():g} s")
        if error is None:
            return future.result()
        logger.warning("step %d is not compared with the other replicas': %s", step, error)
        self._pending = None
        return None

    def name(self, error: StatesDivergedError) -> None:
        """Add the paths of differing tensors to the error; all compared replicas call this at the same time."""
        if not error.tensors:
            table, timeout = self._table(self._participant.state.timeout), self._participant.config.connect_timeout
            error.tensors = self._differences.differing_tensors(error, table or {}, timeout)

    def forget(self) -> None:
        """Discard the last digest: another state has been loaded."""
        self._pending = None

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)


def _digest(values: Sequence[object]) -> str:
    return hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest()


def _digest_of_values(values: object) -> int:
    return int(_digest(list(_leaves(values, ""))), 16)


def _leaves(values: object, path: str) -> Iterator[str]:
    """Yield path and text of plain values. The text of other objects may contain their address."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _leaves(value, f"{path}.{key}")
    elif isinstance(values, (list, tuple)):
        for index, value in enumerate(values):
            yield from _leaves(value, f"{path}.{index}")
    elif isinstance(values, (bool, int, float, str, type(None))):
        yield f"{path}={values!r}"


def _compute(
    digests: TensorDigests, values: dict[str, int], check: Callable[[], None], section: Section
) -> dict[str, int]:
    try:
        computed = {**digests.compute(), **values}
        check()
        return computed
    finally:
        section.release()


class Hyperparameters:
    """Digests the hyperparameters of a replica's optimizers. For the training thread alone.

    The digest covers all values of parameter groups except those that choose a kernel, of all optimizers that are
    attached or registered as replicated state and step with each commit.

    Args:
        participant: This replica in its quorum.
        differences: Exchanges the values that differ.

    Attributes:
        claim: This replica's digest for the next quorum.
    """

    def __init__(self, participant: Participant, differences: DifferenceExchange) -> None:
        self._participant = participant
        self._differences = differences
        self._state = participant.state
        self._num_divergences = 0
        self._signature: tuple[int, ...] = ()
        self._named: list[tuple[str, Optimizer]] = []
        self._seen: list[object] = []
        self._digest = ""
        self.claim = Claim()

    def look(self, *, is_after_commit: bool) -> None:
        """Digest the hyperparameters of this boundary, unless they are the same objects as at the last one.

        A digest takes 2 µs for one parameter group, 0.3 ms for 300.

        Args:
            is_after_commit: Whether the previous step was committed; otherwise nothing is compared.
        """
        self.claim = Claim()
        if not is_after_commit:
            return
        steps_with_commits = self._state.ledger.steps_with_commits
        groups = [
            group
            for _, optimizer in self._optimizers()
            if steps_with_commits(optimizer)
            for group in optimizer.param_groups
        ]
        if not groups:
            return
        values = [each for group in groups for each in chain(group, group.values())]
        if len(values) != len(self._seen) or not all(map(is_, values, self._seen)):
            self._digest = _digest_of(groups)
            self._seen = values if all(map(_is_fixed, groups)) else []
        if self._digest:
            self.claim = Claim(
                step=self._state.step, lineage=self._state.lineage, tensors="hyperparameters", digest=self._digest
            )

    def note(self, decision: Decision) -> None:
        """Log the hyperparameters that differ; if this replica differs from the majority, let it heal, once.

        Args:
            decision: The decision of the quorum that compared them.

        Raises:
            HyperparametersDivergedError: This replica differs again after the first step since its heal.
        """
        claim, self.claim = self.claim, Claim()
        divergence, participant = decision.divergence, self._participant
        if divergence is None or divergence.compared != "hyperparameters":
            self._num_divergences = 0 if claim.digest else self._num_divergences
            return
        error = HyperparametersDivergedError(
            step=divergence.step,
            replicas=tuple(sorted(divergence.replicas | divergence.majority)),
            store_address=decision.store_address,
        )
        self.name(error)
        is_own = participant.membership.replica_id in divergence.replicas
        self._num_divergences = self._num_divergences + 1 if is_own else 0
        logger.error(
            "%s: %s; %s differ from most, and %s",
            participant.name,
            error,
            sorted(divergence.replicas),
            "this replica heals" if is_own else "they take no part before they have healed",
        )
        if is_own:
            participant.disown_state("the hyperparameters differ from those of most replicas")
        if self._num_divergences > _MAX_DIVERGENCES:
            raise error

    def name(self, error: HyperparametersDivergedError) -> None:
        """Add the differing values to the error; all compared replicas call this at the same time."""
        table = {
            f"{name}.param_groups.{index}.{path}": told
            for name, optimizer in self._optimizers()
            if self._state.ledger.steps_with_commits(optimizer)
            for index, group in enumerate(optimizer.param_groups)
            for path, told in leaves(group)
        }
        error.tensors = self._differences.differing_values(error, table, _NAMING)

    def _optimizers(self) -> list[tuple[str, Optimizer]]:
        """Return the optimizers registered as replicated state, then those only attached, with names."""
        state = self._state
        attached = state.optimizers()
        signature = (state.registry.num_changes, *map(id, attached))
        if signature != self._signature:
            self._named = named_optimizers(state.registry, attached)
            self._signature = signature
        return self._named


def _digest_of(groups: Sequence[Mapping[str, Any]]) -> str:
    """Return a digest of the compared values; empty if they are not comparable."""
    counted = [{name: value for name, value in group.items() if name not in WITHOUT_EFFECT} for group in groups]
    try:
        return hashlib.blake2b(_encoder.encode(counted), digest_size=8).hexdigest()
    # Numbers beyond 64 bits, mappings with non-str keys, values that contain themselves.
    except (OverflowError, RecursionError, TypeError, ValueError) as error:
        logger.debug("hyperparameters are not compared with the other replicas': %s", error)
        return ""


def _is_fixed(group: Mapping[str, Any]) -> bool:
    """Return whether every compared value of the group is immutable."""
    return all(
        name in WITHOUT_EFFECT or all(type(each) in _FIXED for each in (value if type(value) is tuple else (value,)))
        for name, value in group.items()
    )
