"""Divides the samples of each step among the replicas that train it, so that failures change no batch."""

from __future__ import annotations

import hashlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import torch
from torch.utils.data import Sampler

from manager.errors import ConfigError, ManagerError, RegistryError

T = TypeVar("T")

_MAX_ORDERS: Final = 2
"""A microbatch may lie in two epochs."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which microbatches of a step a rank draws.

    Attributes:
        replica: Rank of the replica among the replicas that contribute to the step; ``None`` if it does not contribute.
        num_replicas: Number of replicas that contribute.
    """

    replica: int | None = 0
    num_replicas: int = 1


@dataclass(slots=True)
class Draws:
    """The microbatches that one iterator of a loader loads.

    Attributes:
        place: The place for which it loads.
        step: The step of the next microbatch.
        number: Number of the next microbatch among those of the place in the step.
        issued: The microbatches that the iterator has begun to load and not returned, in order, by their first sample.
    """

    place: Place
    step: int
    number: int
    issued: deque[int] = field(default_factory=deque)

    def aim(self, place: Place, step: int, number: int) -> None:
        """Continue with the ``number``-th microbatch of a place in a step."""
        self.place, self.step, self.number = place, step, number


class ElasticSampler(Sampler[list[int]]):
    """A batch sampler whose samples follow from the committed steps, this replica's place in the step, and the seed.

    Each step trains on the same ``num_microbatches * batch_size`` samples, however many replicas contribute and however
    often the step is repeated. The replicas divide the microbatches of the step. Every epoch contains each sample once;
    a step may take its last samples from the next epoch.

    Register the sampler with the manager (replicated state), pass it to a ``DataLoader`` as ``batch_sampler``, and draw
    with `ElasticBatches`. Only the training thread may use it.

    Args:
        num_samples: Number of samples in the dataset.
        batch_size: Number of samples in a microbatch.
        num_microbatches: Number of microbatches of a step, over all replicas and ranks; a multiple of ``num_ranks``.
        seed: Determines the order of the samples in all epochs.
        shuffle: Whether every epoch has a random order of its own; otherwise, the order of the dataset.
        rank: This rank among the ranks of its replica that draw different samples.
        num_ranks: Number of these ranks: the data-parallel ranks within a replica, or of a job without a quorum.

    Attributes:
        num_dropped: Number of microbatches that a loader prefetched, but another replica trains since the number of
            replicas has changed.
        generation: Number of states that were loaded.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        batch_size: int,
        num_microbatches: int,
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        if min(num_samples, batch_size, num_microbatches, num_ranks) < 1 or not 0 <= rank < num_ranks:
            raise ConfigError(
                "expected positive numbers and a rank below num_ranks, got "
                f"{num_samples=}, {batch_size=}, {num_microbatches=}, {rank=}, {num_ranks=}"
            )
        if num_microbatches % num_ranks:
            raise ConfigError(
                f"expected num_microbatches to be a multiple of num_ranks, so that all ranks of a replica draw equally "
                f"many, got {num_microbatches} and {num_ranks}"
            )
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.num_rounds = num_microbatches // num_ranks
        self.num_dropped = 0
        self.generation = 0
        self._seed = seed
        self._shuffle = shuffle
        self._rank = rank
        self._num_ranks = num_ranks
        self._step_samples = num_microbatches * batch_size
        self._base = (0, 0)
        self._current_step: weakref.WeakMethod[Callable[[], int]] | None = None
        self._orders: dict[int, torch.Tensor] = {}
        self._beginning: Draws | None = None

    def __iter__(self) -> Iterator[list[int]]:
        """Yield samples without end, for the loader of `ElasticBatches`.

        Raises:
            ManagerError: The loop iterates over the loader itself.
        """
        if self._beginning is None:
            raise ManagerError(
                "expected the loop to draw from ElasticBatches(manager, loader): the loader itself does not know which "
                "microbatches are this replica's"
            )
        return self._drawn(self._beginning)

    def iterate(self, loader: Iterable[T], draws: Draws) -> Iterator[T]:
        """Return a new iterator of a loader with this sampler, which loads as ``draws`` says."""
        self._beginning = draws
        try:
            return iter(loader)
        finally:
            self._beginning = None

    def follow(self, current_step: weakref.WeakMethod[Callable[[], int]]) -> None:
        """Let the state contain the position of the present step, which a manager's method returns."""
        self._current_step = current_step

    def aim_beyond(self, draws: Draws, place: Place, step: int, number: int) -> None:
        """Let an iterator continue with the first microbatch of a place that lies beyond those that it has issued.

        Args:
            draws: The iterator's microbatches.
            place: A place with a microbatch in each step.
            step: A step.
            number: Number of a microbatch of the place in the step; earlier ones are not needed.
        """
        newest = max(draws.issued)
        draws.aim(place, step, number)
        while self.starts(draws.step, place)[draws.number] <= newest:
            self._advance(draws)

    def starts(self, step: int, place: Place) -> list[int]:
        """Return this rank's microbatches of a step, each by the position of its first sample in all epochs."""
        if place.replica is None:
            return []
        first = self._position_of(step)
        rounds = range(place.replica, self.num_rounds, place.num_replicas)
        return [first + (each * self._num_ranks + self._rank) * self.batch_size for each in rounds]

    def samples(self, start: int) -> list[int]:
        """Return the indices of the samples of the microbatch that begins at a position."""
        if not self._shuffle:
            # Without a list of all samples: a stream may have any number.
            return [position % self.num_samples for position in range(start, start + self.batch_size)]
        found: list[int] = []
        while len(found) < self.batch_size:
            epoch, place = divmod(start + len(found), self.num_samples)
            found += self._order_of(epoch)[place : place + self.batch_size - len(found)].tolist()
        return found

    def description(self) -> str:
        """Return a text that is equal for two samplers exactly if they give all steps the same microbatches."""
        order = f"seed {self._seed}" if self._shuffle else "in order"
        return (
            f"{self.num_rounds} x {self._num_ranks} microbatches of {self.batch_size} of {self.num_samples} samples, "
            f"{order}, from {self._position_of(0)}"
        )

    def state_dict(self) -> dict[str, int]:
        """Return the position of the present step."""
        current_step = self._current_step() if self._current_step is not None else None
        step = current_step() if current_step is not None else self._base[0]
        return {
            "num_samples": self.num_samples,
            "seed": self._seed,
            "shuffle": int(self._shuffle),
            "step": step,
            "position": self._position_of(step),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position of another sampler, whose steps may have had another number of samples.

        Raises:
            RegistryError: The other sampler has another number of samples.
        """
        if state["num_samples"] != self.num_samples:
            raise RegistryError(
                f"expected a sampler of {self.num_samples} samples, got the state of one of {state['num_samples']}: "
                "its epochs have another length"
            )
        self._seed, self._shuffle = state["seed"], bool(state["shuffle"])
        self._base = (state["step"], state["position"])
        self._orders.clear()
        self.generation += 1

    def _drawn(self, draws: Draws) -> Iterator[list[int]]:
        while True:
            starts = self.starts(draws.step, draws.place)
            start = starts[draws.number]
            self._advance(draws)
            samples = self.samples(start)
            draws.issued.append(start)
            yield samples

    def _advance(self, draws: Draws) -> None:
        if draws.number + 1 < len(self.starts(draws.step, draws.place)):
            draws.number += 1
        else:
            draws.aim(draws.place, draws.step + 1, 0)

    def _position_of(self, step: int) -> int:
        base_step, position = self._base
        return position + (step - base_step) * self._step_samples

    def _order_of(self, epoch: int) -> torch.Tensor:
        order = self._orders.get(epoch)
        if order is None:
            while len(self._orders) >= _MAX_ORDERS:
                del self._orders[next(iter(self._orders))]
            order = self._orders[epoch] = self._make_order(epoch)
        return order

    def _make_order(self, epoch: int) -> torch.Tensor:
        digest = hashlib.blake2b(f"{self._seed} {epoch}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        return torch.randperm(self.num_samples, generator=generator)
