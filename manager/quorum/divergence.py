"""Which replicas hold another state than most, told from digests of one step: decided without I/O or clocks.

Replicas that hold the same step and lineage should hold the same bits of all that optimizers change. A bit that
flipped in memory, a library that computes differently, or a mistake of ours makes one of them differ, and nothing else
shows it.
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
    """What one replica says of the state that it held at a step boundary.

    Attributes:
        step: The committed step of that boundary; -1 if it has compared nothing yet.
        lineage: Its lineage.
        tensors: Names the tensors that were digested. Where ``forward`` changes some on one replica alone, it has left
            them out, and cannot be compared with the others.
        digest: Of these tensors.
    """

    step: int = -1
    lineage: str = ""
    tensors: str = ""
    digest: str = ""


# Not used: several modules have decoders of what holds it, and several threads may import them at once.
_claim_decoder: Final = msgspec.json.Decoder(Claim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """What a comparison has shown.

    Attributes:
        step: Whose states were compared.
        replicas: Those that differ from the majority; all that were compared, if there is no majority.
        has_majority: Whether most agree.
        majority: Those that do.
        compared: What was compared.
    """

    step: int
    replicas: frozenset[str]
    has_majority: bool
    majority: frozenset[str] = frozenset()
    compared: Compared = "state"


def find_divergence(compared: Compared, claims: Mapping[str, Claim]) -> Divergence | None:
    """Compare the newest claims that belong together.

    Args:
        compared: What they are about.
        claims: By replica.

    Returns:
        What differs; ``None`` if nothing does, or fewer than two replicas can be compared.
    """
    newest = max((claim.step for claim in claims.values()), default=-1)
    at_newest = {replica: claim for replica, claim in claims.items() if claim.step == newest >= 0}
    # Another lineage is another state in any case, and is healed for that.
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
