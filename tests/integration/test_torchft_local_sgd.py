"""The LocalSGD and DiLoCo classes of torchft run unchanged on the lock controls of our manager."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
from lock_holders import can_read, holders_of

from ft_transport import HTTPTransport
from manager import Manager, RandomState

pytest.importorskip("torchft")
from torchft.local_sgd import DiLoCo, LocalSGD

pytestmark = pytest.mark.usefixtures("torchft_ready")

_TIMEOUT = timedelta(seconds=30)
_SYNC_EVERY = 3


class _DoneWork:
    """Stands in for ``torch.distributed.Work`` (as ``torchft/work.py: _DummyWork``): done already."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class QuorumOfOne(Manager):
    """Stands in for the quorum: a single replica, which always commits. With a real one: ``test_torchft_classes.py``.

    These are the members that the classes in ``torchft/local_sgd.py`` use of ``torchft/manager.py`` besides
    ``register_state_dict_fn``, ``disallow_state_dict_read`` and ``allow_state_dict_read``, which are ours.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._use_async_quorum = False
        self.num_commits = 0
        self.holders_at_commit: list[tuple[str, ...]] = []

    def start_quorum(self, *_: Any, **__: Any) -> None: ...

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> _DoneWork:
        tensor.mul_(0.5)  # the average with a replica of zeros: a sync that can be told from none
        return _DoneWork()

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        self.holders_at_commit.append(tuple(holder.what for holder in holders_of(self)))
        self.num_commits += 1
        return True

    def current_step(self) -> int:
        return self.num_commits


class Training:
    """One replica under LocalSGD or DiLoCo."""

    def __init__(self, kind: str, transport: HTTPTransport[Any]) -> None:
        torch.manual_seed(0)
        self.manager = QuorumOfOne(checkpoint_transport=transport, timeout=_TIMEOUT)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(16, 2048), torch.nn.BatchNorm1d(2048), torch.nn.Linear(2048, 4)
        )
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self.manager.register("model", self.model)
        self.manager.register("inner", self.inner)
        self.manager.register("rng", RandomState())
        self.wrapper: Any = (
            LocalSGD(self.manager, self.model, self.inner, sync_every=_SYNC_EVERY)
            if kind == "LocalSGD"
            else DiLoCo(self.manager, [self.model], self.inner, self.outer, sync_every=_SYNC_EVERY)
        )

    def train_step(self, closure: Callable[[], Any] | None = None) -> None:
        self.inner.zero_grad()
        self.model(torch.randn(8, 16)).square().mean().backward()
        self.inner.step(closure)


@pytest.mark.parametrize(("kind", "attached"), [("LocalSGD", True), ("DiLoCo", False)])
def test_snapshots_at_boundaries_are_exact_and_no_inner_step_can_be_read(
    kind: str,
    attached: bool,
    new_transport: Callable[[], HTTPTransport[Any]],
    fetched_while_looping: Callable[[Manager, HTTPTransport[Any], Callable[[], None]], int],
) -> None:
    transport = new_transport()
    training = Training(kind, transport)
    manager = training.manager
    readable: list[bool] = []

    def look() -> float:
        readable.append(can_read(manager))
        return 0.0

    def fail() -> float:
        raise RuntimeError("out of memory")

    with manager.attach(training.inner) if attached else nullcontext(), training.wrapper:
        assert fetched_while_looping(manager, transport, training.train_step) >= 6
        # The steps at which the averaged parameters replace the local ones were among them.
        assert manager.num_commits >= 2
        training.train_step(look)
        assert readable == [False]
        if attached:
            with pytest.raises(RuntimeError, match="out of memory"):
                training.train_step(fail)
        assert can_read(manager)
    assert not holders_of(manager)
    # torchft's classes allow reading before they change the parameters at a sync; a known gap of theirs.
    assert set(manager.holders_at_commit) == {()}
    manager.shutdown()
