"""torchft's own training classes run unchanged on our manager, under a real quorum."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lock_holders import holders_of
from quorum_threads import LONG_S, Gate, loopback_transport, run_replicas
from state_equality import exact
from torch import nn

from ft_transport import HTTPTransport
from manager import Manager

pytestmark = pytest.mark.usefixtures("quorum_ready")

MIN_REPLICAS = 2

NewManager = Callable[..., Manager]


_SEEDING = threading.Lock()


def _model(seed: int, width: int = 16) -> nn.Sequential:
    # The generator belongs to all threads.
    with _SEEDING, torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 4))


def _batch(replica: int, step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * replica + step))


def test_distributed_data_parallel_and_optimizer_train_as_one_process_would(new_manager: NewManager) -> None:
    from torchft.ddp import DistributedDataParallel
    from torchft.optim import OptimizerWrapper

    num_steps = 5
    # The generator is one for all threads.
    models = [_model(seed=index) for index in (0, 1)]

    def replica(index: int) -> tuple[Any, int]:
        manager = new_manager(f"replica_{index}", min_replica_size=2)
        model = models[index]
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        manager.register("model", model)
        manager.register("optimizer", inner)
        manager.attach(inner)
        wrapped = DistributedDataParallel(manager, model)
        optimizer = OptimizerWrapper(manager, inner)
        while manager.current_step() < num_steps:
            step = manager.current_step()
            optimizer.zero_grad()
            wrapped(_batch(index, step)).square().mean().backward()
            optimizer.step()
        return exact(model.state_dict()), manager.batches_committed()

    first, second = run_replicas(lambda: replica(0), lambda: replica(1))

    # At step 0 both take the weights of the first. Halving is exact, so that the sums are the same bits.
    model = _model(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(num_steps):
        optimizer.zero_grad()
        for index in (0, 1):
            (model(_batch(index, step)).square().mean() / 2).backward()
        optimizer.step()
    assert first == second
    assert first == (exact(model.state_dict()), 2 * num_steps)


class _Trainer:
    """One replica under LocalSGD or DiLoCo."""

    def __init__(self, kind: str, manager: Manager, index: int, width: int = 16) -> None:
        from torchft.local_sgd import DiLoCo, LocalSGD

        self.index = index
        self.manager = manager
        self.model = _model(index, width)
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        manager.register("model", self.model)
        manager.register("inner", self.inner)
        self.wrapper: Any = (
            LocalSGD(manager, self.model, self.inner, sync_every=3)
            if kind == "LocalSGD"
            else DiLoCo(manager, [self.model], self.inner, self.outer, sync_every=3)
        )
        self.num_batches = 0

    def train_until(self, step: int) -> None:
        while self.manager.current_step() < step:
            self.step()

    def step(self) -> None:
        self.inner.zero_grad()
        self.model(_batch(self.index, self.num_batches)).square().mean().backward()
        self.num_batches += 1
        self.inner.step()

    def globals(self) -> Any:
        if hasattr(self.wrapper, "_fragments"):
            fragment = self.wrapper._fragments[0]
            return exact([fragment.original_parameters, self.outer.state_dict(), self.model.state_dict()])
        return exact(self.model.state_dict())


@pytest.mark.parametrize("kind", ["LocalSGD", "DiLoCo"])
def test_local_sgd_and_diloco_keep_replicas_equal_and_heal_a_late_one(kind: str, new_manager: NewManager) -> None:
    gate = Gate()

    def replica(index: int) -> Any:
        if index == 2:
            gate.wait("late")
        manager = new_manager(f"replica_{index}", use_async_quorum=False)
        trainer = _Trainer(kind, manager, index)
        with manager.attach(trainer.inner), trainer.wrapper:
            if index != 2:
                trainer.train_until(2)
                gate.open("late")
            if index == 0:
                # Until the late one takes part.
                while manager.num_participants() < 3:
                    trainer.train_until(manager.current_step() + 1)
                gate.last_step = manager.current_step() + 2  # type: ignore[attr-defined]
                gate.open("last step")
            while not hasattr(gate, "last_step"):
                trainer.train_until(manager.current_step() + 1)
            trainer.train_until(gate.last_step)  # type: ignore[attr-defined]
        found = trainer.globals()
        step = manager.current_step()
        return step, found

    outcomes = run_replicas(*(lambda index=index: replica(index) for index in range(3)))
    assert outcomes[0][0] >= 4
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_a_guarded_sync_of_local_sgd_is_a_write_section(new_manager: NewManager) -> None:
    from manager import ManagerError, guard_local_sgd

    class Watched(torch.nn.Linear):
        """Notes who holds the lock when its weight is written."""

        held: tuple[str, ...] = ()

        def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
            yield from super().parameters(recurse)
            self.held = (*self.held, "".join(holder.kind for holder in holders_of(manager_of[id(self)])))

    manager_of: dict[int, Manager] = {}

    def replica(index: int) -> Any:
        from torchft.local_sgd import LocalSGD

        manager = new_manager(f"replica_{index}", use_async_quorum=False)
        torch.manual_seed(index)
        model = Watched(4, 4)
        manager_of[id(model)] = manager
        optimizer = torch.optim.SGD(list(model.parameters()), lr=0.1)
        manager.register("model", model)
        manager.register("optimizer", optimizer)
        local_sgd = LocalSGD(manager, model, optimizer, sync_every=2)
        guard_local_sgd(manager, local_sgd)
        model.held = ()
        with manager.attach(optimizer), local_sgd:
            while manager.current_step() < 2:
                optimizer.zero_grad()
                model(_batch(index, 0)[:, :4]).square().mean().backward()
                optimizer.step()
        found = exact(model.state_dict())
        # One of the two looks at its gradients when it heals.
        return model.held[-4:], found

    first, second = run_replicas(lambda: replica(0), lambda: replica(1))
    assert first == second
    # Read for the averages, with others let in, and written.
    assert first[0] == ("", "write") * 2
    with pytest.raises(ManagerError, match="made with this manager, got str"):
        guard_local_sgd(Manager(), "local_sgd")


def test_the_outer_sync_of_diloco_is_a_write_section_and_its_backup_is_not_copied(new_manager: NewManager) -> None:
    from manager import ManagerError, guard_diloco

    def inner_step_with_reader(transport: HTTPTransport[Any], trainer: _Trainer) -> bool:
        """Whether an inner step copies the backup, which somebody may be reading."""
        trainer.manager.snapshot(trainer.manager.current_step()).result(LONG_S)
        memory = transport.server._shared[-1]
        trainer.step()
        return not memory.is_shared

    def replica(index: int) -> Any:
        transport = loopback_transport()
        manager = new_manager(f"replica_{index}", checkpoint_transport=transport, use_async_quorum=False)
        # Of the weights, the first is large enough not to be copied at once.
        trainer = _Trainer("DiLoCo", manager, index, width=4096)
        guard_diloco(manager, trainer.wrapper)
        fragment = trainer.wrapper._fragments[0]
        name, backup = next(iter(fragment.original_parameters.items()))
        held: list[tuple[str, ...]] = []
        trainer.outer.register_step_pre_hook(
            lambda *_: held.append(tuple(holder.kind for holder in holders_of(manager)))
        )
        with manager.attach(trainer.inner), trainer.wrapper:
            trainer.train_until(2)
            found = trainer.globals()
            copied = inner_step_with_reader(transport, trainer)
        assert not copied, "only an outer step changes the backup"
        state = manager.replica_state()["user"]["StreamingDiLoCoFragment_0"]  # type: ignore[index]
        assert state["original_parameters"][name] is backup
        return held, found

    first, second = run_replicas(lambda: replica(0), lambda: replica(1))
    assert first == second
    assert first[0] == [("write",)] * 2
    with pytest.raises(ManagerError, match="made with this manager, got str"):
        guard_diloco(Manager(), "diloco")
