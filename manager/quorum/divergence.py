"""Finds replicas whose state differs from the majority's, from digests of one step. No I/O, no clocks.

Replicas with the same step and lineage should have the same bits in everything that optimizers change. A bit flip in
memory, a library that computes differently, or a bug here makes one of them differ, and nothing else would show it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import msgspec

Compared: TypeAlias = Literal["state", "reductions", "hyperparameters"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One replica's digest at a step boundary.

    Attributes:
        step: The committed step of that boundary; -1 without a digest.
        lineage: The lineage of that step.
        tensors: Digest of the names of the digested tensors. A replica whose ``forward`` changes some tensors leaves
            them out; then it is not comparable with others.
        digest: Digest of these tensors.
    """

    step: int = -1
    lineage: str = ""
    tensors: str = ""
    digest: str = ""


# Unused: built here, before several threads import modules with decoders of types that contain it.
_claim_decoder: Final = msgspec.json.Decoder(Claim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A difference between replicas.

    Attributes:
        step: The compared step.
        replicas: The replicas that differ from the majority; without a majority all compared replicas.
        has_majority: Whether more than half agree.
        majority: The replicas that agree.
        compared: The kind of digests.
    """

    step: int
    replicas: frozenset[str]
    has_majority: bool
    majority: frozenset[str] = frozenset()
    compared: Compared = "state"


def find_divergence(compared: Compared, claims: Mapping[str, Claim]) -> Divergence | None:
    """Compare the newest comparable claims.

    Args:
        compared: The kind of digests.
        claims: Claims by replica.

    Returns:
        The difference; ``None`` if all agree, or fewer than two replicas are comparable.
    """
    newest = max((claim.step for claim in claims.values()), default=-1)
    at_newest = {replica: claim for replica, claim in claims.items() if claim.step == newest >= 0}
    # Another lineage is another state anyway, and leads to a heal.
    kinds = Counter((claim.lineage, claim.tensors) for claim in at_newest.values())
    if not kinds:
        return None
    kind = min(kinds, key=lambda each: (-kinds[each], each))
    digests = {replica: claim.digest for replica, claim in at_newest.items() if (claim.lineage, claim.tensors) == kind}
    numbers = Counter(digests.values())
    if len(numbers) < 2:
        return None
    digest, number = numbers.most_common(1)[0]
    if 2 * number <= len(digests):
        return Divergence(step=newest, replicas=frozenset(digests), has_majority=False, compared=compared)
    differing = frozenset(replica for replica, each in digests.items() if each != digest)
    return Divergence(
        step=newest,
        replicas=differing,
        has_majority=True,
        majority=frozenset(digests.keys() - differing),
        compared=compared,
    )
