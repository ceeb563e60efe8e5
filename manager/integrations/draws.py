"""The random generators of a process where it drew its data, so that a resumed run draws the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from manager.state.data_order import RandomState


class Generators:
    """The global random generators, and those of data loaders and their samplers."""

    def __init__(self) -> None:
        self._globals = RandomState()
        self._own: dict[int, torch.Generator] = {}

    def include(self, *owners: object) -> None:
        """Include the generators of loaders and samplers that have one."""
        for owner in owners:
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                self._own.setdefault(id(generator), generator)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all generators."""
        return {"globals": self._globals.state_dict(), "own": [each.get_state() for each in self._own.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all generators."""
        self._globals.load_state_dict(state["globals"])
        for generator, own in zip(self._own.values(), state["own"], strict=False):
            generator.set_state(own)


class Draws:
    """The random generators of a rank, where its data was drawn. Registered as local state.

    Samplers, datasets and collators may use the global generators. Accelerate's loader draws one batch ahead of the
    training: at a step boundary, that batch was drawn before the last step changed the generators. A resumed run draws
    the same batch from the same generators, and continues with those of the boundary.
    """

    def __init__(self) -> None:
        self.is_loaded = False
        self._generators = Generators()
        self._epoch_start: dict[str, Any] = {}
        self._before_last: dict[str, Any] = {}
        self._loaded: Mapping[str, Any] = {}
        self._first: int | None = None

    def state_dict(self) -> Mapping[str, Any]:
        """Return the generators at present, at the beginning of the epoch, and before its last draw."""
        if self._loaded:
            return self._loaded
        return {
            "now": self._generators.state_dict(),
            "epoch_start": self._epoch_start,
            "before_last": self._before_last,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Set the generators, and remember those that `resume_epoch` and `before_batch` need."""
        self._loaded = saved
        self.is_loaded = True
        self._set("now")

    def watch(self, loader: DataLoader[Any]) -> None:
        """Watch the draws from a loader that draws in this process. A loader of a stream has no batches to watch."""
        batches: Any = loader.batch_sampler
        self._generators.include(loader, batches)
        if batches is None:
            return
        num_ranks = 1 if getattr(batches, "split_batches", False) else getattr(batches, "num_processes", 1)
        while hasattr(batches, "batch_sampler"):
            batches = batches.batch_sampler
            self._generators.include(batches)
        sampler = getattr(batches, "sampler", None)
        self._generators.include(sampler)
        is_counted = sampler is not None and isinstance(getattr(batches, "batch_size", None), int)
        if is_counted and not loader.num_workers and not isinstance(sampler, _WatchedSampler):
            batches.sampler = _WatchedSampler(batches.sampler, batches.batch_size * num_ranks, self)

    def begin_epoch(self) -> None:
        """Note the generators before the iterator of an epoch is created."""
        self._epoch_start, self._before_last = self._generators.state_dict(), {}

    def resume_epoch(self, num_batches: int) -> None:
        """Set the generators to the beginning of an epoch of which ``num_batches`` are skipped."""
        if not self._loaded or num_batches == 0:
            self._set("now")
            self.begin_epoch()
            self._loaded = {}
            return
        self._first = num_batches
        self._epoch_start = self._loaded["epoch_start"]
        self._set("epoch_start")

    def before_batch(self, number: int) -> None:
        """Note the generators before a batch of the epoch is drawn; in a resumed epoch, set them first."""
        if self._first is not None:
            if number < self._first:
                return
            self._set("before_last" if number == self._first else "now")
            if number > self._first:
                self._first, self._loaded = None, {}
        self._before_last = self._generators.state_dict()

    def end_resume(self) -> None:
        """Set the generators to those of the boundary, if the draws of the first step have not done so."""
        self._set("now")
        self._first, self._loaded = None, {}

    def _set(self, name: str) -> None:
        if self._loaded.get(name):
            self._generators.load_state_dict(self._loaded[name])


class _WatchedSampler:
    """A sampler that tells `Draws` before each batch of all ranks."""

    def __init__(self, sampler: Any, batch_size: int, draws: Draws) -> None:
        self._sampler, self._batch_size, self._draws = sampler, batch_size, draws

    def __iter__(self) -> Iterator[int]:
        for number, index in enumerate(self._sampler):
            if number % self._batch_size == 0:
                self._draws.before_batch(number // self._batch_size)
            yield index

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)
