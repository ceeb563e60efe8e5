"""Checks that data loaders are at the batch of the committed step, and saves random number generators.

A loader's state has the number of batches that the loader has yielded. Two mistakes in a training loop make this number
wrong without any error, so `LoaderOrder` refuses both:

- The loop draws a batch before the step boundary, as in a loop ``for batch in loader`` whose body contains the
  boundary. Then the loader's state is one batch ahead of the model, in every checkpoint and in every replica that
  heals.
- The loop uses an iterator that was made before a state was loaded. Such an iterator continues from its old position.
"""

from __future__ import annotations

import gc
import inspect
import logging
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import FrameType, GeneratorType
from typing import Any, Final, Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ft_transport import state_digest
from ft_transport.state.collectives import refusing_collectives
from manager.errors import LoaderOrderError, RegistryError
from manager.state.elastic_sampler import ElasticSampler

T = TypeVar("T")

logger = logging.getLogger(__name__)

_NO_LOADERS: Final = (nn.Module, Optimizer, LRScheduler, Mapping, Sequence, Set, ElasticSampler)
_ADVICE: Final = (
    "make `batches = manager.batches(loader)` before the loop, and draw with `next(batches)` after start_step or "
    "start_quorum"
)


class Batches(Iterator[T]):
    """An iterator over a registered loader's batches, epoch after epoch.

    After a load of the loader's state, the iterator continues at the loaded position.

    Args:
        loader: The loader.
    """

    def __init__(self, loader: Iterable[T]) -> None:
        self._loader = loader
        self._iterator: Iterator[T] | None = None

    def __next__(self) -> T:
        """Return the next batch; raise ``StopIteration`` only if a whole epoch has no batch."""
        # Twice: if the loaded state is the end of an epoch, the first iterator yields nothing.
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self._loader)
            try:
                return next(self._iterator)
            except StopIteration:
                self._iterator = None
        raise StopIteration

    def is_displaced(self) -> bool:
        """Return whether the loader has made a newer iterator. If so, its state has the position of that iterator."""
        newest = _newest_iterator(self._loader)
        return self._iterator is not None and newest is not None and newest is not self._iterator

    def draws_from(self, iterator: object) -> bool:
        """Return whether this object takes its next batch from ``iterator``."""
        return self._iterator is iterator

    def rewind(self) -> Iterator[T] | None:
        """Drop and return the present iterator; the next call of ``next`` makes a new one."""
        iterator, self._iterator = self._iterator, None
        return iterator


@dataclass(slots=True, kw_only=True)
class _Watched(Generic[T]):
    """One registered loader.

    Attributes:
        key: The key of the registered entry.
        loader: The loader.
        is_replicated: Whether a healing replica receives the loader's state.
        references: Weak references to results of `LoaderOrder.batches`. A ``WeakSet`` would cost each boundary 5 µs.
        position: The loader's position when it was registered or loaded; ``None`` after the next boundary.
        earlier: Weak reference to an iterator from before the last load, which the training loop may still use.
        rewound: Iterators that a load in progress has replaced.
    """

    key: str
    loader: Iterable[T]
    is_replicated: bool
    references: list[weakref.ref[Batches[T]]] = field(default_factory=list)
    position: Set[object] | None = None
    earlier: weakref.ref[Any] | None = None
    rewound: list[Iterator[T]] = field(default_factory=list)

    def batches(self) -> list[Batches[T]]:
        return [each for reference in self.references if (each := reference()) is not None]


class LoaderOrder:
    """Watches the registered data loaders. Only the training thread may use this object.

    Attributes:
        may_heal: Whether a heal may load the replicated loaders at a boundary; true in a quorum.
    """

    def __init__(self) -> None:
        self.may_heal = False
        self._watched: dict[str, _Watched[Any]] = {}
        self._enders: list[weakref.WeakMethod[Callable[[], None]]] = []

    def registered(self, key: str, obj: object, *, is_replicated: bool) -> None:
        """Watch a newly registered object if it may be a data loader: an iterable that is no container or module."""
        if isinstance(obj, Iterable) and not isinstance(obj, _NO_LOADERS):
            self._watched[key] = _Watched(key=key, loader=obj, is_replicated=is_replicated, position=_position(obj))

    def batches(self, loader: Iterable[T]) -> Batches[T]:
        """Return an iterator over the batches of a registered loader (`StateManager.batches`)."""
        for watched in self._watched.values():
            if watched.loader is loader:
                found: Batches[T] = Batches(loader)
                watched.references = [weakref.ref(each) for each in (*watched.batches(), found)]
                return found
        raise RegistryError(
            f"expected a registered loader, got a {type(loader).__name__} that is not registered; call "
            "manager.register('loader', loader, ...) before manager.batches(loader)"
        )

    def before_load(self, key: str) -> None:
        """Before the loader ``key`` is loaded, remember the iterator that the training loop may hold."""
        watched = self._watched.get(key)
        if watched is None:
            return
        loader = watched.loader
        iterator = _iterator_of(loader)
        watched.rewound = [each for batches in watched.batches() if (each := batches.rewind()) is not None]
        is_own = any(each is iterator for each in watched.rewound)
        watched.earlier = weakref.ref(iterator) if iterator is not None and not is_own else None
        if _is_of_nodes(loader):
            # Without this, a loader that made an iterator for its own state dict ignores the loaded state.
            loader._it, loader._iter_for_state_dict = None, False  # type: ignore[attr-defined]

    def after_load(self, key: str) -> None:
        """After a load of the loader ``key``, record its position and end the workers of replaced iterators."""
        watched = self._watched.get(key)
        if watched is None:
            return
        loader = watched.loader
        while watched.rewound:
            # An exception in progress may refer to the iterator, and so keep the worker processes alive.
            _end_workers(loader, watched.rewound.pop())
        if isinstance(loader, DataLoader) or _is_of_nodes(loader):
            # This makes the loader's next iterator, from which the training loop draws later.
            loader.state_dict()  # type: ignore[attr-defined]
        watched.position = _position(loader)

    def end_with_workers(self, end: Callable[[], None]) -> None:
        """Let `end_workers` call a method, if its object still exists then."""
        self._enders = [each for each in self._enders if each() is not None] + [weakref.WeakMethod(end)]

    def end_workers(self) -> None:
        """End the worker processes of torchdata's loaders, unless an iterator that the loop made may read from them.

        The loaders keep their positions. Without this call, the workers run until the garbage collector frees the
        loader, and each delays the collector by 5 s.
        """
        for ender in self._enders:
            end = ender()
            if end is not None:
                end()
        for watched in self._watched.values():
            loader, iterator = watched.loader, _newest_iterator(watched.loader)
            readers = [each for each in watched.batches() if each.draws_from(iterator)]
            is_of_torchdata = hasattr(loader, "_initial_iter_for_state_dict")
            if not is_of_torchdata or not hasattr(iterator, "_shutdown_workers"):
                continue
            if readers or not _is_handed_out(loader):
                loader.load_state_dict(loader.state_dict())  # type: ignore[attr-defined]
                for each in readers:
                    each.rewind()
                _end_workers(loader, iterator)

    def check(self, *, is_saved: bool) -> None:
        """Raise an error if a batch was drawn before this step boundary, or from an iterator that ignores loads.

        Args:
            is_saved: Whether checkpoints contain local state, so that local loaders have to be checked, too.

        Raises:
            LoaderOrderError: The loop uses a loader wrongly; the message says how.
        """
        for watched in self._watched.values():
            if not (watched.is_replicated or is_saved):
                continue
            batches = watched.batches()
            self._refuse_earlier(watched, batches)
            self._refuse_others(watched, batches)
            self._refuse_drawn(watched)

    def _refuse_earlier(self, watched: _Watched[Any], batches: list[Batches[Any]]) -> None:
        earlier, watched.earlier = watched.earlier, None
        if earlier is not None and earlier() is not None:
            gc.collect()
        is_earlier = earlier is not None and earlier() is not None
        # Raised before the first heal, too, so that this mistake shows before a newcomer needs the loader.
        is_bare = self.may_heal and watched.is_replicated and not batches and _is_handed_out(watched.loader)
        if is_earlier or is_bare:
            raise LoaderOrderError(
                f"expected the loop to draw from manager.batches for the loader {watched.key!r}, but it has an "
                f"iterator that was made {'before a load' if is_earlier else 'without the manager'}: such an iterator "
                f"goes on from its old position after a state of a replica or of a checkpoint is loaded; {_ADVICE}",
                key=watched.key,
            )

    @staticmethod
    def _refuse_others(watched: _Watched[Any], batches: list[Batches[Any]]) -> None:
        if any(each.is_displaced() for each in batches):
            raise LoaderOrderError(
                f"expected manager.batches(loader) to be the only iterator of the loader {watched.key!r}, but another "
                "was made: the loader's state has the position of the newest iterator, so a resumed or healed run "
                "would draw other batches; give other readers of the data a loader of their own",
                key=watched.key,
            )

    def _refuse_drawn(self, watched: _Watched[Any]) -> None:
        before, watched.position = watched.position, None
        if before is None or _position(watched.loader) <= before:
            return
        message = (
            f"expected no batch from the loader {watched.key!r} before the step boundary, but its state has changed "
            f"since it was registered or loaded: checkpoints and healed replicas would skip a batch; {_ADVICE}"
        )
        if isinstance(watched.loader, DataLoader) or _is_of_nodes(watched.loader):
            raise LoaderOrderError(message, key=watched.key)
        # Only a warning: an iterable object need not be a loader.
        logger.warning("%s", message)


def _position(loader: object) -> Set[object]:
    """Return a set that is a subset of an earlier one only if no batch was drawn in between.

    It is empty if draws cannot be detected. The state of an iterable that is no iterator is not compared, because it
    may change without a draw: a loop may fill a replay buffer before the first boundary.
    """
    if isinstance(loader, DataLoader) or _is_of_nodes(loader):
        return {int(getattr(_iterator_of(loader), "_num_yielded", 0))}
    if isinstance(loader, Iterator):
        try:
            with refusing_collectives():
                return {state_digest(loader.state_dict())}  # type: ignore[attr-defined]
        except Exception as error:
            logger.debug("batches that are drawn from %s cannot be detected: %s", type(loader).__name__, error)
            return set()
    return _loops_over(loader)


def _loops_over(loader: object) -> Set[object]:
    """Return the suspended generators of an object whose ``__iter__`` is a generator function."""
    code = getattr(type(loader).__iter__, "__code__", None)  # type: ignore[attr-defined]
    if code is None or not code.co_flags & inspect.CO_GENERATOR:
        return set()
    holders = gc.get_referrers(loader)
    # In Python 3.10 the frame refers to the loader, and the generator refers to the frame.
    frames = [each for each in holders if isinstance(each, FrameType) and each.f_code is code]
    return {
        weakref.ref(each)
        for each in holders + (gc.get_referrers(*frames) if frames else [])
        if isinstance(each, GeneratorType)
        and each.gi_code is code
        and inspect.getgeneratorstate(each) == inspect.GEN_SUSPENDED
    }


def _end_workers(loader: object, iterator: object) -> None:
    """End an iterator's worker processes, if its loader has replaced the iterator."""
    if iterator is not _newest_iterator(loader):
        end_workers_of(iterator)


def end_workers_of(iterator: object) -> None:
    """End the worker processes of an iterator of a data loader, if it has any."""
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


def _is_of_nodes(loader: object) -> bool:
    """Return whether the object is a ``torchdata.nodes.Loader``."""
    nodes = sys.modules.get("torchdata.nodes")
    return nodes is not None and isinstance(loader, nodes.Loader)


def _newest_iterator(loader: object) -> object:
    """Return the newest iterator of a loader of torch or torchdata; ``None`` if the loader does not expose it."""
    if isinstance(loader, DataLoader):
        return loader._iterator
    return loader._it if _is_of_nodes(loader) else None  # type: ignore[attr-defined]


def _iterator_of(loader: object) -> object:
    """Return the loader's newest iterator; ``None`` if it has ended."""
    iterator = _newest_iterator(loader)
    return None if getattr(iterator, "_finished", False) else iterator


def _is_handed_out(loader: object) -> bool:
    """Return whether a training loop may use the newest iterator; false if the loader made it for a state dict."""
    own = "_iter_for_state_dict" if _is_of_nodes(loader) else "_initial_iter_for_state_dict"
    return _iterator_of(loader) is not None and not getattr(loader, own, False)


class RandomState:
    """The global random generators of Python, of numpy (if it is imported), and of torch on the CPU and CUDA devices.

    Register this object like a module. If it is ``local`` state, a replica resumes its own random numbers from a
    checkpoint. If it is ``replicated`` state, a recovered replica draws the same numbers as its peer.
    """

    def state_dict(self) -> dict[str, object]:
        """Return the generators' states. Tensors in the result are copies, uint8 on the CPU."""
        state: dict[str, object] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            state["numpy"] = numpy.random.get_state(legacy=False)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch declares no types
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the generators that ``state`` contains. The other generators stay unchanged."""
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        numpy = sys.modules.get("numpy")
        if numpy is not None and "numpy" in state:
            numpy.random.set_state(state["numpy"])
        if torch.cuda.is_available() and len(state.get("cuda", ())) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])
