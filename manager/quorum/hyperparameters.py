"""Digests the hyperparameters of a replica's optimizers after each commit; the next quorum compares them.

A learning rate that a scheduler changes on one replica alone appears in no state until the parameters differ for good.
After a commit the hyperparameters must be equal: every replica sets them from the same step. After a failed step they
may differ: one replica may have failed before setting them for this attempt, another one after.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import chain
from operator import is_
from typing import Any, Final

import msgspec
from torch.optim import Optimizer

from manager.errors import HyperparametersDivergedError
from manager.quorum.decision import Decision
from manager.quorum.reports import Claim
from manager.quorum.round import Participant
from manager.state.compatibility import WITHOUT_EFFECT, leaves, named_optimizers, plain

logger = logging.getLogger(__name__)

_NAMING: Final = timedelta(seconds=2)
_MAX_DIVERGENCES: Final = 1
"""Consecutive divergences before an error: a heal does not change values that the loop sets."""

_FIXED: Final = frozenset({bool, float, int, str, type(None)})
"""Immutable types."""

_encoder: Final = msgspec.msgpack.Encoder(enc_hook=plain, order="deterministic")


class Hyperparameters:
    """Digests the hyperparameters of a replica's optimizers. For the training thread alone.

    The digest covers all values of parameter groups except those that choose a kernel, of all optimizers that are
    attached or registered as replicated state and step with each commit.

    Args:
        participant: This replica in its quorum.

    Attributes:
        claim: This replica's digest for the next quorum.
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
        membership = self._participant.membership
        table = {
            f"{name}.param_groups.{index}.{path}": told
            for name, optimizer in self._optimizers()
            if self._state.ledger.steps_with_commits(optimizer)
            for index, group in enumerate(optimizer.param_groups)
            for path, told in leaves(group)
        }
        error.tensors = membership.differences.differing_values(
            error, table, replica_id=membership.replica_id, timeout=_NAMING
        )

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
