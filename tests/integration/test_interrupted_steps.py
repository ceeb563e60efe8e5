"""A step in which a collective was interrupted is not committed, whatever the training loop does afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from quorum_threads import lighthouse, make_manager

from manager import GlooProcessGroup, Manager

pytestmark = pytest.mark.usefixtures("quorum_ready")


class _Interrupted:
    def wait(self, timeout: timedelta | None = None) -> bool:
        raise KeyboardInterrupt


class _InterruptibleGroup(GlooProcessGroup):
    """As a signal handler that raises, at a place of choice."""

    place = ""

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        if self.place == "begin":
            raise KeyboardInterrupt
        return _Interrupted() if self.place == "wait" else super().allreduce(tensors, opts)


@pytest.fixture
def group() -> _InterruptibleGroup:
    return _InterruptibleGroup()


@pytest.fixture
def manager(group: _InterruptibleGroup) -> Iterator[Manager]:
    with lighthouse() as address:
        manager = make_manager(address, "replica_0", pg=group, has_part=True)
        yield manager
        manager.shutdown()


@pytest.mark.parametrize("place", ["begin", "wait", "wait in should_commit"])
def test_an_interrupted_collective_is_never_committed(manager: Manager, group: _InterruptibleGroup, place: str) -> None:
    manager.start_quorum()
    manager.wait_quorum()
    group.place = place.split(maxsplit=1)[0]
    if place == "wait in should_commit":
        manager.allreduce(torch.ones(2))
        with pytest.raises(KeyboardInterrupt):
            manager.should_commit()
    else:
        with pytest.raises(KeyboardInterrupt):
            manager.allreduce(torch.ones(2)).wait()
    group.place = ""
    manager.allreduce(torch.ones(2)).wait()
    assert not manager.should_commit()
    assert manager.current_step() == 0

    manager.start_quorum()
    manager.allreduce(torch.ones(2))
    assert manager.should_commit()
    assert manager.current_step() == 1
