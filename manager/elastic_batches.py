"""Draws this replica's microbatches of each step from a data loader with an `ElasticSampler`."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

from torch.utils.data import DataLoader

from manager.errors import ConfigError, ManagerError, RegistryError
from manager.manager import Manager
from manager.state.data_order import end_workers_of
from manager.state.elastic_sampler import Draws, ElasticSampler, Place
from manager.state_manager import StateManager

T = TypeVar("T")

logger = logging.getLogger(__name__)


class ElasticBatches(Generic[T]):
    """Iterates over this replica's microbatches of the present step. Only the training thread may use it.

    Iterate once per step, after ``start_quorum`` or ``start_step``, and divide the loss of each microbatch by
    ``len(batches)``. The manager weights the averages of the step, so that each microbatch counts equally, however many
    each replica has. A replica that does not contribute to the step has none.

    A repeated step yields the same batch objects again, so do not change them in place. If the number of replicas
    changes, microbatches that the loader has prefetched for other replicas are dropped (``sampler.num_dropped``).

    Args:
        manager: The manager, with which the sampler is registered.
        loader: A ``DataLoader`` with an `ElasticSampler` as ``batch_sampler``, which returns batches in order.

    Raises:
        ConfigError: The loader has another sampler, or may change the order of the batches.
        RegistryError: The sampler is not registered as replicated state.
    """

    def __init__(self, manager: StateManager, loader: DataLoader[T]) -> None:
        sampler = loader.batch_sampler
        if not isinstance(sampler, ElasticSampler):
            raise ConfigError(
                "expected a DataLoader with batch_sampler=ElasticSampler(...), got one with "
                f"{type(sampler if sampler is not None else loader.sampler).__name__}"
            )
        if not getattr(loader, "in_order", True):
            raise ConfigError("expected a DataLoader that returns batches in order, got one with in_order=False")
        if not any(each is sampler for each in manager._state.registry.holders(ElasticSampler).values()):
            raise RegistryError(
                "expected the sampler to be registered as replicated state, so that all replicas have one order: call "
                "manager.register('sampler', sampler) before ElasticBatches(manager, loader)"
            )
        self._manager = manager
        self._loader = loader
        self._sampler = sampler
        self._iterator: Iterator[T] | None = None
        self._draws = Draws(Place(), 0, 0)
        self._key = (-1, -1)
        self._drawn: dict[int, T] = {}
        sampler.follow(weakref.WeakMethod(manager.current_step))
        manager._state.registry.loaders.end_with_workers(self.close)

    def __len__(self) -> int:
        """Return the number of this replica's microbatches in the present step, after waiting for the quorum."""
        return len(self._sampler.starts(self._manager.current_step(), self._place()))

    def __iter__(self) -> Iterator[T]:
        """Yield this replica's microbatches of the present step.

        Raises:
            ManagerError: The loader has ended.
            QuorumError: The quorum could not be formed.
        """
        place, sampler = self._place(), self._sampler
        step = self._manager.current_step()
        if sampler.generation != self._key[0]:
            # The loader may have loaded samples in the order of before.
            self.close()
        if (sampler.generation, step) != self._key:
            self._key = (sampler.generation, step)
            self._drawn.clear()
        starts = sampler.starts(step, place)
        for number, start in enumerate(starts):
            if start not in self._drawn:
                self._drawn[start] = self._draw(place, step, number, start)
            self._note(is_drawing=number + 1 < len(starts))
            yield self._drawn[start]

    def close(self) -> None:
        """End the loader's worker processes; a later iteration starts others. ``manager.shutdown`` calls this, too."""
        iterator, self._iterator = self._iterator, None
        end_workers_of(iterator)

    def _place(self) -> Place:
        """Return this replica's place in the step, and let the manager weight the step's averages."""
        manager = self._manager
        if not isinstance(manager, Manager):
            return Place()
        manager._joined().num_microbatches(self._sampler.num_rounds, self._sampler.description())
        return Place(manager.participating_rank(), manager.num_participants())

    def _note(self, *, is_drawing: bool) -> None:
        if isinstance(self._manager, Manager):
            self._manager._joined().note_drawing(is_drawing=is_drawing)

    def _draw(self, place: Place, step: int, number: int, start: int) -> T:
        try:
            if self._iterator is None:
                self._draws = Draws(place, step, number)
                self._iterator = self._sampler.iterate(self._loader, self._draws)
            elif start not in self._draws.issued:
                self._draws.aim(place, step, number)
            elif self._draws.place != place:
                # Microbatches that it has begun to load may be of use; the next ones are for the new place.
                self._sampler.aim_beyond(self._draws, place, step, number)
            num_dropped = 0
            while True:
                batch = next(self._iterator)
                if self._draws.issued.popleft() == start:
                    break
                num_dropped += 1
        except BaseException as error:
            # It is unknown which microbatch this iterator would return next.
            self.close()
            if isinstance(error, StopIteration):
                raise ManagerError("expected a loader whose iterators do not end") from error
            raise
        if num_dropped:
            self._sampler.num_dropped += num_dropped
            logger.info("step %d: dropped %d prefetched microbatches, which other replicas train", step, num_dropped)
        return batch
