"""What a comparison of replicas shows, whatever they claim."""

from __future__ import annotations

import pytest

from manager.quorum.divergence import Claim, Divergence, find_divergence


def claims(**digests: str) -> dict[str, Claim]:
    return {name: Claim(step=8, lineage="x", digest=digest) for name, digest in digests.items()}


@pytest.mark.parametrize("digests", [{}, {"a": "1"}, {"a": "1", "b": "1"}, {"a": "1", "b": "1", "c": "1"}])
def test_equal_digests_show_nothing(digests: dict[str, str]) -> None:
    assert find_divergence("state", claims(**digests)) is None


def test_the_majority_names_who_differs() -> None:
    found = find_divergence("state", claims(a="1", b="2", c="1", d="3", e="1"))
    assert found == Divergence(step=8, replicas=frozenset("bd"), has_majority=True, majority=frozenset("ace"))


@pytest.mark.parametrize(
    "digests", [{"a": "1", "b": "2"}, {"a": "1", "b": "1", "c": "2", "d": "2"}, {"a": "1", "b": "2", "c": "3"}]
)
def test_half_is_no_majority(digests: dict[str, str]) -> None:
    assert find_divergence("state", claims(**digests)) == Divergence(
        step=8, replicas=frozenset(digests), has_majority=False
    )


def test_only_the_newest_step_of_one_history_is_compared() -> None:
    mixed = {
        **claims(a="1", b="1"),
        "older": Claim(step=4, lineage="w", digest="2"),
        "other": Claim(step=8, lineage="y", digest="3"),
        "new": Claim(),
    }
    assert find_divergence("state", mixed) is None
    assert find_divergence("state", {"new": Claim(), "newer": Claim()}) is None


def test_replicas_that_digested_different_tensors_are_not_compared() -> None:
    mixed = {**claims(a="1", b="1"), "fewer": Claim(step=8, lineage="x", tensors="w", digest="2")}
    assert find_divergence("state", mixed) is None
