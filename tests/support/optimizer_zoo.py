"""Optimizers of all kinds under one manager, whose states move from replica to replica."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from state_equality import exact
from torch.optim import Optimizer

from ft_transport import CheckpointStore, HTTPTransport, TransportSettings
from manager import Manager

TIMEOUT = timedelta(seconds=20)

MakeOptimizer = Callable[[Iterable[Any]], Optimizer]


@dataclass(frozen=True)
class Kind:
    """A way to make one optimizer, and the parameters that it takes."""

    make: MakeOptimizer
    dtype: torch.dtype = torch.float32
    width: int = 4
    has_vectors: bool = True
    is_sparse: bool = False


class Trained:
    """A small model, and its optimizer."""

    def __init__(self, kind: Kind, seed: int) -> None:
        torch.manual_seed(seed)
        self._kind = kind
        self.model: torch.nn.Module = (
            torch.nn.Embedding(7, 4, sparse=True, dtype=kind.dtype)
            if kind.is_sparse
            else torch.nn.Sequential(
                torch.nn.Linear(kind.width, 2 * kind.width, bias=kind.has_vectors),
                torch.nn.Linear(2 * kind.width, kind.width, bias=kind.has_vectors),
            ).to(kind.dtype)
        )
        self.optimizer: Any = kind.make(self.model.parameters())
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()  # Schedule-free optimizers have two modes.

    def step(self, seed: int) -> None:
        # Some optimizers draw, too.
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        draws = torch.Generator().manual_seed(seed)
        drawn = (
            torch.randint(0, 7, (5,), generator=draws)
            if self._kind.is_sparse
            else torch.randn(5, self._kind.width, generator=draws).to(self._kind.dtype)
        )

        @torch.enable_grad()  # type: ignore[untyped-decorator]
        def closure() -> Any:
            self.optimizer.zero_grad()
            loss = self.model(drawn).square().mean()
            loss.backward()
            return loss

        closure()
        self.optimizer.step(closure)


class ZooReplica:
    """One of each kind, under one manager."""

    def __init__(self, kinds: Mapping[str, Kind], seed: int, *, store: CheckpointStore | None = None) -> None:
        transport: HTTPTransport[Any] = HTTPTransport(
            TIMEOUT, settings=TransportSettings(host="127.0.0.1", advertise="127.0.0.1")
        )
        self.manager = Manager(
            checkpoint_transport=transport,
            timeout=TIMEOUT,
            checkpoint_store=store,
        )
        self.trained = {name: Trained(kind, seed) for name, kind in kinds.items()}
        for name, each in self.trained.items():
            self.manager.register(f"model of {name}", each.model)
            self.manager.register(name, each.optimizer)

    def train(self, num_steps: int, seed: int) -> None:
        for number in range(num_steps):
            step = self.manager.current_step()
            self.manager.start_step(step)
            for each in self.trained.values():
                each.step(seed + number)
            self.manager.load_state_dict({"step": step + 1})

    def recover_from(self, other: ZooReplica) -> None:
        other.manager.snapshot(other.manager.current_step()).result(TIMEOUT.total_seconds())
        self.manager.recover(other.manager.metadata())

    def unlike(self, other: ZooReplica) -> list[str]:
        """The parts that are not equal, bit for bit."""
        ours: Any = self.manager.replica_state()
        theirs: Any = other.manager.replica_state()
        return [key for key, part in theirs["user"].items() if exact(part) != exact(ours["user"][key])]


def travels(kinds: Mapping[str, Kind], directory: Path) -> Iterator[tuple[str, list[str]]]:
    """Move the states of all kinds in each way.

    Yields:
        The way, with the parts that differ at once or two steps later.
    """
    num_threads = torch.get_num_threads()
    with ExitStack() as managers:
        # For tensors this small a second thread costs more than it does.
        torch.set_num_threads(1)
        managers.callback(torch.set_num_threads, num_threads)

        def replica(seed: int, **options: Any) -> ZooReplica:
            made = ZooReplica(kinds, seed, **options)
            managers.callback(made.manager.shutdown)
            return made

        source = replica(0, store=CheckpointStore(directory))
        source.train(3, seed=10)
        fresh, stepped = replica(1), replica(2)
        stepped.train(4, seed=20)
        for way, receiver in (("into a fresh one", fresh), ("into one that has stepped", stepped)):
            receiver.recover_from(source)
            yield way, receiver.unlike(source)
        source.manager.save(wait=True)
        resumed = replica(3, store=CheckpointStore(directory, read_only=True))
        resumed.train(1, seed=30)
        assert resumed.manager.resume() is not None
        yield "from a checkpoint", resumed.unlike(source)
        everybody = (source, fresh, stepped, resumed)
        for each in everybody:
            each.train(2, seed=40)
        for way, receiver in (("fresh", fresh), ("stepped", stepped), ("resumed", resumed)):
            yield f"two steps after, {way}", receiver.unlike(source)
        fresh.train(1, seed=50)
        fresh.recover_from(stepped)
        yield "once more", fresh.unlike(source)
        for each in (source, fresh):
            each.train(1, seed=60)
        yield "a step after that", fresh.unlike(source)
