"""Optimizers of all kinds in a quorum of two, whose states move to newcomers and through a checkpoint."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quorum_threads import Gate, lighthouse, make_manager, run_replicas
from state_equality import exact
from torch.optim import Optimizer

from ft_transport import CheckpointStore

MakeOptimizer = Callable[[Any], Optimizer]
"""Takes the parameters, or the model."""
States = dict[int, dict[str, object]]
"""What a replica has registered, by step and key."""

_STEADY = "steady"
_NEWCOMERS = {"a fresh newcomer": 0, "a newcomer that has stepped": 2}
"""Each with the number of steps that it takes before it joins."""
_NUM_STEPS = 3
_GENERATORS = threading.Lock()
"""The replicas of one process share the global generators, and some optimizers draw."""


@dataclass(frozen=True)
class Kind:
    """A way to make one optimizer, and the parameters that it takes."""

    make: MakeOptimizer
    dtype: torch.dtype = torch.float32
    width: int = 4
    has_vectors: bool = True
    is_sparse: bool = False
    takes_model: bool = False


class Trained:
    """A small model, and its optimizer."""

    def __init__(self, kind: Kind, seed: int) -> None:
        self._kind = kind
        # A thread has a number of its own, and with another number sums have other bits.
        torch.set_num_threads(1)
        with _seeded(seed):
            self.model: torch.nn.Module = (
                torch.nn.Embedding(7, 4, sparse=True, dtype=kind.dtype)
                if kind.is_sparse
                else torch.nn.Sequential(
                    torch.nn.Linear(kind.width, 2 * kind.width, bias=kind.has_vectors),
                    torch.nn.Linear(2 * kind.width, kind.width, bias=kind.has_vectors),
                ).to(kind.dtype)
            )
            self.optimizer: Any = kind.make(self.model if kind.takes_model else self.model.parameters())
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()  # Schedule-free optimizers have two modes.

    def backward(self, seed: int) -> None:
        """Compute the gradients of a batch."""
        self.optimizer.zero_grad()
        self._loss(seed).backward()

    def step(self, seed: int) -> None:
        """Step with the gradients as they are; an optimizer that evaluates the loss again gets a batch by the seed."""
        evaluations = count()

        @torch.enable_grad()  # type: ignore[untyped-decorator]
        def closure() -> Any:
            if next(evaluations):
                self.backward(seed)
            return self._loss(seed)

        with _seeded(seed):
            self.optimizer.step(closure)

    def _loss(self, seed: int) -> Any:
        draws = torch.Generator().manual_seed(seed)
        batch = (
            torch.randint(0, 7, (5,), generator=draws)
            if self._kind.is_sparse
            else torch.randn(5, self._kind.width, generator=draws).to(self._kind.dtype)
        )
        return self.model(batch).square().mean()


class ZooReplica:
    """One of each kind, under one manager."""

    def __init__(
        self,
        kinds: Mapping[str, Kind],
        address: str,
        name: str,
        *,
        seed: int,
        num_steps_alone: int = 0,
        **keywords: Any,
    ) -> None:
        self._seed = seed
        self.states: States = {}
        self.trained = {key: Trained(kind, seed) for key, kind in kinds.items()}
        for number in range(num_steps_alone):
            for each in self.trained.values():
                each.backward(seed + number)
                each.step(seed + number)
        self.manager = make_manager(address, name, **keywords)
        try:
            for key, each in self.trained.items():
                self.manager.register(f"model of {key}", each.model)
                self.manager.register(key, each.optimizer)
                self.manager.attach(each.optimizer)
        except BaseException:
            self.manager.shutdown()
            raise

    def step(self, *, saves: bool = False) -> None:
        """Note the states, healed ones too, and step with averaged gradients."""
        self.manager.start_quorum()
        state: Any = self.manager.replica_state()
        self.states[self.manager.current_step()] = {key: exact(part) for key, part in state["user"].items()}
        if saves:
            self.manager.save(wait=True)
        step = self.manager.current_step()
        for each in self.trained.values():
            each.backward(1000 * self._seed + step)
        self.manager.average_gradients(
            [each for trained in self.trained.values() for each in trained.model.parameters()]
        )
        if self.manager.should_commit():
            for each in self.trained.values():
                each.step(step)


class _Journey:
    """Two replicas on threads: one stays, and its states move to each replica that comes."""

    def __init__(self, kinds: Mapping[str, Kind], address: str, directory: Path) -> None:
        self._kinds = kinds
        self._address = address
        self._directory = directory
        self._gate = Gate()

    def stay(self) -> States:
        replica = self._steady(seed=0)
        try:
            for _ in range(_NUM_STEPS):
                replica.step()
            for newcomer in _NEWCOMERS:
                self._gate.open(f"{newcomer} may come")
                self._gate.wait(f"{newcomer} comes")
                while not self._gate.is_open(f"{newcomer} has left"):
                    replica.step()
            replica.step(saves=True)
            replica.step()
            return replica.states
        finally:
            replica.manager.shutdown()
            self._open_all()

    def come(self) -> dict[str, States]:
        states = {}
        try:
            for seed, (newcomer, num_steps_alone) in enumerate(_NEWCOMERS.items(), start=1):
                self._gate.wait(f"{newcomer} may come")
                replica = ZooReplica(self._kinds, self._address, "other", seed=seed, num_steps_alone=num_steps_alone)
                states[newcomer] = replica.states
                try:
                    self._gate.open(f"{newcomer} comes")
                    while len(replica.states) < _NUM_STEPS:
                        replica.step()
                finally:
                    replica.manager.shutdown()
                self._gate.open(f"{newcomer} has left")
            return states
        finally:
            self._open_all()

    def resume(self) -> States:
        """Begin anew from the checkpoint of the replica that stayed, and step as that one did."""
        replica = self._steady(seed=0, num_steps_alone=1)
        try:
            assert replica.manager.resume() is not None
            for _ in range(2):
                replica.step()
            return replica.states
        finally:
            replica.manager.shutdown()

    def _steady(self, **keywords: Any) -> ZooReplica:
        store = CheckpointStore(self._directory)
        return ZooReplica(self._kinds, self._address, _STEADY, checkpoint_store=store, **keywords)

    def _open_all(self) -> None:
        for newcomer in _NEWCOMERS:
            for event in ("may come", "comes", "has left"):
                self._gate.open(f"{newcomer} {event}")


def travels(kinds: Mapping[str, Kind], directory: Path) -> Iterator[tuple[str, list[str]]]:
    """Move the states of all kinds in each way, and step on.

    Yields:
        The way, with the parts that are not equal bit for bit at some step.
    """
    with lighthouse() as address:
        journey = _Journey(kinds, address, directory)
        steady, others = run_replicas(journey.stay, journey.come)
        (resumed,) = run_replicas(journey.resume)
        for way, states in {**others, "a checkpoint": resumed}.items():
            steps = [step for step in states if step in steady]
            assert len(steps) > 1, f"{way} has nothing to compare"
            yield way, [key for key in kinds if any(_differs(steady[step], states[step], key) for step in steps)]


def _differs(ours: dict[str, object], theirs: dict[str, object], key: str) -> bool:
    return any(ours[each] != theirs[each] for each in (key, f"model of {key}"))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with _GENERATORS:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        yield
