"""A newcomer that could not load the state is told so by name, and costs the others no step and no snapshot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from quorum_threads import Trainer as BaseTrainer
from quorum_threads import beside, loopback_transport

from manager import HealFailedError, ManagerError, QuorumError
from manager.quorum.members import read_status

pytestmark = pytest.mark.usefixtures("quorum_ready")


class Trainer(BaseTrainer):
    def __init__(
        self,
        address: str,
        name: str,
        *,
        width: int = 4,
        has_more: bool = False,
        token: str | None = None,
        min_replica_size: int = 1,
    ) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Linear(width, 1))
        self.transport = loopback_transport(token=token)
        keywords = {"checkpoint_transport": self.transport, "min_replica_size": min_replica_size}
        super().__init__(address, name, model, torch.optim.AdamW(model.parameters()), **keywords)
        self.bank = torch.nn.Module()
        if has_more:
            self.manager.register_state_dict_fn("more", lambda _: None, dict)

    def backward(self) -> None:
        self.model(torch.ones(3, 2)).square().mean().backward()


@pytest.mark.parametrize(
    ("keywords", "healthy_token", "named"),
    [
        (
            {"width": 5, "token": "right"},
            "right",
            r"model\.0\.weight is float32 \[5, 2\] here and float32 \[4, 2\] there",
        ),
        ({"has_more": True}, None, r"registered only here: \['more'\], only there: \[\]"),
        ({"min_replica_size": 2, "token": "right"}, "right", "same rules"),
        ({}, "right", "expected replicas with the same job token"),
        ({"token": "guessed"}, "right", "expected replicas with the same job token"),
        ({"token": "right"}, None, "expected replicas with the same job token"),
    ],
    ids=["another state", "another key", "other rules", "no token", "another token", "a token of its own"],
)
def test_a_newcomer_that_is_refused_costs_the_others_nothing(
    address: str, keywords: dict[str, Any], healthy_token: str | None, named: str
) -> None:
    """The healthy replica commits each step and takes no snapshot; the Lighthouse hears nothing of the newcomer."""
    healthy = Trainer(address, "healthy", token=healthy_token)

    def step() -> None:
        assert healthy.step()

    def newcomer() -> tuple[ManagerError, list[str]]:
        trainer = Trainer(address, "newcomer", **keywords)
        try:
            with pytest.raises((HealFailedError, QuorumError), match=named) as caught:
                trainer.step()
            status = read_status(address, 1.0)
            assert status is not None
            return caught.value, [*status.alive, *(name for name, _ in status.silent)]
        finally:
            trainer.manager.shutdown()

    try:
        error, heard = beside(step, newcomer)
    finally:
        healthy.manager.shutdown()
    assert healthy.transport.server.newest_sequence() == 0
    assert "healthy:" in str(error)
    assert "right" not in str(error)
    if isinstance(error, HealFailedError):
        assert "failed once: no further attempt can succeed: the state of healthy:" in str(error)
    # A newcomer with a token does not believe unsigned answers, so it is refused in the quorum.
    if "job token" not in named or not keywords:
        assert [name.partition(":")[0] for name in heard] == ["healthy"]


def test_a_state_that_has_changed_since_the_first_step_is_looked_at_once_more(address: str) -> None:
    """Neither replica registers anything anew, so neither knows by itself that it looks different now."""

    def change(trainer: Trainer) -> None:
        trainer.model[0].register_buffer("seen", torch.ones(1))

    def newcomer() -> int:
        trainer = Trainer(address, "newcomer")
        change(trainer)
        try:
            while not trainer.step():
                pass
            return trainer.manager.current_step()
        finally:
            trainer.manager.shutdown()

    healthy = Trainer(address, "healthy")
    try:
        healthy.step()
        change(healthy)
        assert beside(healthy.step, newcomer, num_steps=0) > 1
    finally:
        healthy.manager.shutdown()


def _with_another_group(trainer: Trainer) -> None:
    more = torch.nn.Linear(1, 1)
    trainer.model.add_module("more", more)
    trainer.optimizer.add_param_group({"params": list(more.parameters())})


def _with_a_longer_buffer(trainer: Trainer) -> None:
    trainer.bank.seen = torch.zeros(len(trainer.bank.seen) + 1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_with_another_group, "model.more.weight is missing here"),
        (_with_a_longer_buffer, r"bank.seen is float32 \[1\] here and float32 \[2\] there"),
    ],
)
def test_what_a_replica_looks_like_is_known_at_the_next_boundary(
    address: str, change: Callable[[Trainer], None], named: str
) -> None:
    """A newcomer of the old form is refused before it is sent anything, and no step fails for it."""

    def with_bank(name: str) -> Trainer:
        trainer = Trainer(address, name)
        trainer.bank.register_buffer("seen", torch.zeros(1))
        trainer.manager.register("bank", trainer.bank)
        return trainer

    def step() -> None:
        assert healthy.step()

    def newcomer() -> None:
        trainer = with_bank("newcomer")
        try:
            with pytest.raises(HealFailedError, match=f"failed once: no further attempt can succeed: .*{named}"):
                trainer.step()
        finally:
            trainer.manager.shutdown()

    healthy = with_bank("healthy")
    try:
        step()
        change(healthy)
        beside(step, newcomer, num_steps=1)
    finally:
        healthy.manager.shutdown()
