"""A replica that restarts after the others have finished does what docs/checkpoints.md says."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from quorum_threads import lighthouse, make_manager
from state_equality import exact

from ft_transport import CheckpointStore
from manager import CommitFailedError, Manager, QuorumTimeoutError

pytest.importorskip("torchft")

pytestmark = [pytest.mark.usefixtures("quorum_ready")]

_NUM_STEPS = 4
_SHORT = timedelta(seconds=1)


def _replica(address: str, **keywords: Any) -> tuple[Manager, torch.nn.Linear, Callable[[], None]]:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    manager = make_manager(address, "late", **keywords)
    manager.register("model", model)
    manager.register("optimizer", optimizer)
    manager.attach(optimizer)

    def train() -> None:
        while manager.current_step() < _NUM_STEPS:
            manager.start_quorum()
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                manager.allreduce(parameter.grad)
            if manager.should_commit():
                optimizer.step()

    return manager, model, train


def _end_after(manager: Manager, train: Callable[[], None]) -> None:
    try:
        train()
    finally:
        manager.shutdown()


def test_one_replica_is_enough_for_both_and_it_trains_fresh_weights_to_the_end() -> None:
    with lighthouse(min_replicas=1) as address:
        manager, _, train = _replica(address, min_replica_size=1)

        _end_after(manager, train)

        assert manager.current_step() == _NUM_STEPS


def test_the_lighthouse_is_content_with_one_and_the_replica_is_not() -> None:
    with lighthouse(min_replicas=1) as address:
        manager, _, train = _replica(address, min_replica_size=2, max_retries=5)

        with pytest.raises(CommitFailedError, match="expected at least 2 replicas, got 1"):
            _end_after(manager, train)

        assert manager.current_step() == 0


def test_neither_is_content_with_one() -> None:
    with lighthouse(min_replicas=2) as address:
        manager, _, train = _replica(
            address, min_replica_size=2, quorum_timeout=_SHORT, timeout=_SHORT, connect_timeout=_SHORT
        )

        with pytest.raises(QuorumTimeoutError, match="need min_replicas 2"):
            _end_after(manager, train)

        assert manager.current_step() == 0


def test_a_replica_that_loads_the_newest_checkpoint_first_has_nothing_left_to_train(tmp_path: Path) -> None:
    with lighthouse(min_replicas=1) as address:
        saver, model, train = _replica(address, checkpoint_store=CheckpointStore(tmp_path), save_every=_NUM_STEPS)
        train()
        saver.start_quorum()
        saver.should_commit()
        saver.shutdown()
        late, fresh, train_late = _replica(address, checkpoint_store=CheckpointStore(tmp_path, read_only=True))

        recovery = late.resume()
        _end_after(late, train_late)

        assert recovery is not None
        assert recovery.step == late.current_step() == _NUM_STEPS
        assert exact(fresh.state_dict()) == exact(model.state_dict())
