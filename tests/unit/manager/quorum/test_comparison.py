"""The digest of a boundary shows every value of the parameter groups that has changed, however it was changed."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from manager.quorum.comparison import Hyperparameters
from manager.quorum.quorum_round import Participant
from manager.state.replica_state import ReplicaState


class Boundaries:
    """One optimizer's boundaries, seen by a participant that is nothing but its state."""

    def __init__(self, **values: Any) -> None:
        parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        self.optimizer = torch.optim.SGD([{"params": [each]} for each in parameters], lr=0.1)
        self.group = self.optimizer.param_groups[1]
        self.group.update(values)
        state = ReplicaState(timedelta(seconds=5))
        state.attach((self.optimizer,), every_commit=True)
        self._hyperparameters = Hyperparameters(cast("Participant", SimpleNamespace(state=state)))

    def digest(self) -> str:
        self._hyperparameters.digest(is_after_commit=True)
        return self._hyperparameters.claim.digest


@pytest.mark.parametrize(
    ("value", "other"),
    [(0.5, 0.25), (True, 1), (1, 1.0), ((0.9, 0.99), (0.9, 0.999)), ("cosine", "linear"), (None, 0)],
)
def test_another_value_in_a_group_is_another_digest(value: object, other: object) -> None:
    boundaries = Boundaries(extra=value)
    before = boundaries.digest()
    assert before == boundaries.digest() != ""
    boundaries.group["extra"] = other
    assert boundaries.digest() != before
    boundaries.group["extra"] = value
    assert boundaries.digest() == before


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1, 2], lambda value: value.append(3)),
        ({"a": 1}, lambda value: value.update(a=2)),
        (([1],), lambda value: value[0].append(2)),
        (torch.tensor(0.1), lambda value: value.mul_(2)),
    ],
)
def test_a_value_that_changes_in_place_is_another_digest(value: object, change: Any) -> None:
    boundaries = Boundaries(extra=value)
    before = boundaries.digest()
    assert before == boundaries.digest() != ""
    change(value)
    assert boundaries.digest() != before


def test_another_key_with_the_same_value_is_another_digest() -> None:
    boundaries = Boundaries(extra=0.5)
    before = boundaries.digest()
    boundaries.group["other"] = boundaries.group.pop("extra")
    assert boundaries.digest() != before


def test_a_value_that_cannot_be_compared_makes_no_digest_until_it_is_gone() -> None:
    boundaries = Boundaries(extra=1 << 70)
    assert boundaries.digest() == boundaries.digest() == ""
    boundaries.group["extra"] = 1
    assert boundaries.digest() != ""
