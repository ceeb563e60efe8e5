"""Digests a replica's tensors and hyperparameters, which the next quorum compares between replicas.

A background thread reads the tensors while ``forward`` and ``backward`` run. It holds a read section of the state lock,
so that no optimizer changes the tensors meanwhile. This takes about 0.1 s for each GB. The training thread waits only
if its step is shorter.

If a scheduler changes a learning rate on one replica only, the replicas' parameters soon differ, and no tensor shows
why. So the hyperparameters are compared too. After a commit they must be equal on all replicas, since every replica
sets them for the same step. After a failed step they may differ: one replica may have failed before it set them, and
another one afterwards.
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
from manager.quorum.differences import differing_tensors, differing_values
from manager.quorum.quorum_round import Participant, QuorumRound
from manager.quorum.reports import Claim, digest_of
from manager.snapshots.requests import BOUNDARY_TIMEOUT
from manager.state.compatibility import WITHOUT_EFFECT, leaves, named_optimizers, plain
from manager.state.lock import Section
from manager.state.optimizer_states import belongs_to, memory_at, parameters_of

logger = logging.getLogger(__name__)

_MAX_SUSPECTED: Final = 3
"""Number of suspected steps after which `StateComparison.suspect` has no effect any more."""
_NAMING: Final = timedelta(seconds=2)
_MAX_DIVERGENCES: Final = 1
"""Number of heals before different hyperparameters are an error: a heal cannot change values that the loop sets."""

_FIXED: Final = frozenset({bool, float, int, str, type(None)})
"""Immutable types."""

_encoder: Final = msgspec.msgpack.Encoder(enc_hook=plain, order="deterministic")


class StateComparison:
    """Digests a replica's state at step boundaries, for the quorum to compare. For the training thread only.

    It digests only tensors that nothing but optimizers and write sections can change.

    Args:
        participant: This replica and its quorum.

    Attributes:
        is_wanted: Whether to compare at the next step boundary, even if ``compare_every`` does not require it.
    """

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._pool: OwnedExecutor | None = None
        self._pending: tuple[int, str, Future[dict[str, int]]] | None = None
        self.is_wanted = False
        self._num_suspected = 0

    def suspect(self, reason: str, current: QuorumRound) -> None:
        """Compare the replicas at the next step boundary, because the present step may make their states differ.

        The first call logs a warning. After three comparisons of this kind, further calls have no effect.

        Args:
            reason: Why the states may differ; the warning begins with this text.
            current: The round of the present step.
        """
        decision = current.decision
        if decision is None or decision.num_participants < 2 or self._num_suspected == _MAX_SUSPECTED:
            return
        if not self._num_suspected:
            logger.warning(
                "%s; this may make the replicas' states differ, so they are compared after this step",
                reason,
            )
        self._num_suspected += 1
        self.is_wanted = True

    def begin_if_due(self) -> None:
        """Begin to digest the state if the replicas compare it at this step boundary. If that fails, log the reason."""
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
            values = {
                f"{key} (values)": int(digest_of(list(_leaves(each, ""))), 16)
                for key, each in copier.values(state).items()
            }
            self._pending = step, own.lineage, self._pool.submit(_compute, digests, values, check, section)
            section = None
        except (TransportError, ManagerError) as error:
            level = logging.DEBUG if isinstance(error, LockTimeoutError) else logging.WARNING
            logger.log(level, "the state of step %d is not compared with the other replicas: %s", step, error)
        finally:
            if section is not None and section.is_open:
                section.release()

    def claim(self, timeout: timedelta) -> Claim:
        """Wait for the digest of the last compared step boundary, and return it; without a digest, return ``Claim()``.

        Args:
            timeout: Limit of the wait.
        """
        table = self._table(timeout)
        if table is None or self._pending is None:
            return Claim()
        step, lineage, _ = self._pending
        ordered = sorted(table.items())
        return Claim(
            step=step,
            lineage=lineage,
            tensors=digest_of([name for name, _ in ordered]),
            digest=digest_of([digest for _, digest in ordered]),
        )

    def _table(self, timeout: timedelta) -> dict[str, int] | None:
        """Return the digest of each tensor, by path; ``None`` if there is no digest."""
        if self._pending is None:
            return None
        step, _, future = self._pending
        try:
            error = future.exception(timeout.total_seconds())
        except FutureTimeoutError:
            error = ManagerError(f"expected a digest within {timeout.total_seconds():g} s, got none")
        if error is None:
            return future.result()
        logger.warning("the state of step %d is not compared with the other replicas: %s", step, error)
        self._pending = None
        return None

    def find_differences(self, error: StatesDivergedError) -> None:
        """Find the tensors that differ, and store their paths in the error.

        All compared replicas must call this method at the same time, because they exchange their digests.
        """
        if not error.tensors:
            participant = self._participant
            table, timeout = self._table(participant.state.timeout), participant.config.connect_timeout
            error.tensors = differing_tensors(participant.membership, error, table or {}, timeout)

    def handle_divergence(self, decision: Decision) -> None:
        """Log which replicas have a divergent state; if this replica is one of them, make it heal.

        Args:
            decision: The decision of the quorum that compared the states.
        """
        divergence, participant = decision.divergence, self._participant
        if divergence is None or divergence.compared == "hyperparameters":
            return
        is_own = participant.membership.replica_id in divergence.replicas
        if is_own:
            # Until this replica has healed, its state must not count, even if other replicas die and it becomes common.
            self.forget()
            participant.disown_state("the state differs from that of most replicas")
        logger.error(
            "%s: the state of %s at step %d differs from that of most replicas; %s",
            participant.name,
            sorted(divergence.replicas),
            divergence.step,
            "this replica heals" if is_own else "they take no part before they have healed",
        )

    def forget(self) -> None:
        """Discard the last digest, so that the next quorum does not compare it."""
        self._pending = None

    def close(self) -> None:
        """End the background thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)


def _leaves(values: object, path: str) -> Iterator[str]:
    """Yield ``path=value`` for each plain value. Other objects are skipped: their text may contain a memory address."""
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
    """Digests the hyperparameters of a replica's optimizers, for the quorum to compare. For the training thread only.

    The digest covers the optimizers that step with each commit and are attached or registered as replicated state. It
    covers all values of their parameter groups, except values that only choose a kernel, such as ``foreach``.

    Args:
        participant: This replica and its quorum.

    Attributes:
        claim: The digest for the next quorum; an empty claim if there is no digest.
    """

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._state = participant.state
        self._num_divergences = 0
        self._signature: tuple[int, ...] = ()
        self._named: list[tuple[str, Optimizer]] = []
        self._seen: list[object] = []
        self._digest = ""
        self.claim = Claim()

    def digest(self, *, is_after_commit: bool) -> None:
        """Digest the hyperparameters at this step boundary. Unchanged immutable values are not digested again.

        The call takes 2 µs for one parameter group, and 0.3 ms for 300.

        Args:
            is_after_commit: Whether the previous step was committed. If not, nothing is compared.
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

    def handle_divergence(self, decision: Decision) -> None:
        """Log the hyperparameters that differ. If this replica differs from the majority, make it heal once.

        Args:
            decision: The decision of the quorum that compared the hyperparameters.

        Raises:
            HyperparametersDivergedError: This replica has healed once, but still differs from the majority.
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
        self.find_differences(error)
        is_own = participant.membership.replica_id in divergence.replicas
        self._num_divergences = self._num_divergences + 1 if is_own else 0
        logger.error(
            "%s: %s; %s differ from most replicas, and %s",
            participant.name,
            error,
            sorted(divergence.replicas),
            "this replica heals" if is_own else "they take no part before they have healed",
        )
        if is_own:
            participant.disown_state("the hyperparameters differ from those of most replicas")
        if self._num_divergences > _MAX_DIVERGENCES:
            raise error

    def find_differences(self, error: StatesDivergedError) -> None:
        """Find the hyperparameters that differ, and store them with their values in the error.

        All compared replicas must call this method at the same time, because they exchange their values.
        """
        table = {
            f"{name}.param_groups.{index}.{path}": text
            for name, optimizer in self._optimizers()
            if self._state.ledger.steps_with_commits(optimizer)
            for index, group in enumerate(optimizer.param_groups)
            for path, text in leaves(group)
        }
        error.tensors = differing_values(self._participant.membership, error, table, _NAMING)

    def _optimizers(self) -> list[tuple[str, Optimizer]]:
        """Return the optimizers with their names: those registered as replicated state, then those only attached."""
        state = self._state
        attached = state.optimizers()
        signature = (state.registry.num_changes, *map(id, attached))
        if signature != self._signature:
            self._named = named_optimizers(state.registry, attached)
            self._signature = signature
        return self._named


def _digest_of(groups: Sequence[Mapping[str, Any]]) -> str:
    """Return a digest of the values that affect a step; empty if one of them cannot be compared."""
    compared = [{name: value for name, value in group.items() if name not in WITHOUT_EFFECT} for group in groups]
    try:
        return hashlib.blake2b(_encoder.encode(compared), digest_size=8).hexdigest()
    # For numbers beyond 64 bits, mappings with other keys than strings, and values that contain themselves.
    except (OverflowError, RecursionError, TypeError, ValueError) as error:
        logger.debug("the hyperparameters are not compared with the other replicas: %s", error)
        return ""


def _is_fixed(group: Mapping[str, Any]) -> bool:
    """Return whether every compared value of a parameter group is immutable."""
    return all(
        name in WITHOUT_EFFECT or all(type(each) in _FIXED for each in (value if type(value) is tuple else (value,)))
        for name, value in group.items()
    )
