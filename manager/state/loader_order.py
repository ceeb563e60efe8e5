"""Whether batches are drawn after the step boundary, and from where the last load put their loader.

A loader's state counts the batches that it has yielded. At the boundary this number fits the committed step, unless the
loop draws a batch first, as `for batch in loader` does with the boundary in its body: the state is then one batch ahead
of the model, in every checkpoint and for every replica that heals. And a load reaches iterators that are made after it;
an iterator that the loop holds goes on from where it was. Neither shows in the training, so both are refused here.
"""

from __future__ import annotations

import gc
import inspect
import logging
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import FrameType, GeneratorType
from typing import Any, Final, Generic, TypeVar

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ft_transport import refusing_collectives, state_digest
from manager.errors import LoaderOrderError, RegistryError

T = TypeVar("T")

logger = logging.getLogger(__name__)

_NO_LOADERS: Final = (nn.Module, Optimizer, LRScheduler, Mapping, Sequence, Set)
_ADVICE: Final = (
    "make `batches = manager.batches(loader)` before the loop, and draw with `next(batches)` after start_step or "
    "start_quorum"
)


class Batches(Iterator[T]):
    """The batches of a registered loader, one epoch after the other, from where the last load put it.

    Args:
        loader: The loader.
    """

    def __init__(self, loader: Iterable[T]) -> None:
        self._loader = loader
        self._iterator: Iterator[T] | None = None

    def __next__(self) -> T:
        """Return the next batch; raises ``StopIteration`` only if a whole epoch has none."""
        # A loader that was loaded at the end of an epoch yields nothing first.
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self._loader)
            try:
                return next(self._iterator)
            except StopIteration:
                self._iterator = None
        raise StopIteration

    def is_displaced(self) -> bool:
        """Whether the loader has made another iterator since: its state is that of the newest one."""
        newest = _newest_iterator(self._loader)
        return self._iterator is not None and newest is not None and newest is not self._iterator

    def draws_from(self, iterator: object) -> bool:
        """Whether the next batch comes from this iterator."""
        return self._iterator is iterator

    def rewind(self) -> Iterator[T] | None:
        """Make a new iterator before the next batch; returns the present one."""
        iterator, self._iterator = self._iterator, None
        return iterator


@dataclass(slots=True, kw_only=True)
class _Watched(Generic[T]):
    """One registered loader.

    Attributes:
        key: Of the registered state.
        loader: The loader.
        is_replicated: Whether a healing replica receives its state.
        references: To what `LoaderOrder.batches` returned. Walking a ``WeakSet`` takes 5 µs of each boundary.
        position: Where it stood when it was registered or loaded; ``None`` after the boundary that follows.
        earlier: The iterator from before the last load, as long as the loop holds it.
        rewound: Iterators of the batches from before a load that is under way.
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
    """Watches the loaders among what is registered. Belongs to the training thread.

    Attributes:
        may_heal: Whether replicated loaders are loaded at any boundary, as in a quorum.
    """

    def __init__(self) -> None:
        self.may_heal = False
        self._watched: dict[str, _Watched[Any]] = {}

    def registered(self, key: str, obj: object, *, is_replicated: bool) -> None:
        """Watch an object that has been registered, if it can be iterated over as a loader is."""
        if isinstance(obj, Iterable) and not isinstance(obj, _NO_LOADERS):
            self._watched[key] = _Watched(key=key, loader=obj, is_replicated=is_replicated, position=_position(obj))

    def batches(self, loader: Iterable[T]) -> Batches[T]:
        """See `StateManager.batches`."""
        for watched in self._watched.values():
            if watched.loader is loader:
                found: Batches[T] = Batches(loader)
                watched.references = [weakref.ref(each) for each in (*watched.batches(), found)]
                return found
        raise RegistryError(
            f"expected a registered loader, got {type(loader).__name__}; call manager.register('loader', loader, ...) "
            "before manager.batches(loader)"
        )

    def before_load(self, key: str) -> None:
        """Note which iterator the loop may hold."""
        watched = self._watched.get(key)
        if watched is None:
            return
        loader = watched.loader
        iterator = _iterator_of(loader)
        watched.rewound = [each for batches in watched.batches() if (each := batches.rewind()) is not None]
        is_own = any(each is iterator for each in watched.rewound)
        watched.earlier = weakref.ref(iterator) if iterator is not None and not is_own else None
        if _is_of_nodes(loader):
            # Otherwise the loader ignores the state if it has made an iterator to tell its own, and tells the old one.
            loader._it, loader._iter_for_state_dict = None, False  # type: ignore[attr-defined]

    def after_load(self, key: str) -> None:
        """Note where the loader stands, and end the workers of the iterators that it has given up."""
        watched = self._watched.get(key)
        if watched is None:
            return
        loader = watched.loader
        while watched.rewound:
            # An exception that is being handled may hold the iterator, and with it the worker processes.
            _end_workers(loader, watched.rewound.pop())
        if isinstance(loader, DataLoader) or _is_of_nodes(loader):
            # The loader makes its next iterator here, from which the loop draws later.
            loader.state_dict()  # type: ignore[attr-defined]
        watched.position = _position(loader)

    def end_workers(self) -> None:
        """End worker processes that no loop of the user's draws from; the loaders of torchdata stay where they are.

        Otherwise they live until the collector finds the manager, which then waits 5 s for each in vain.
        """
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
        """Refuse a loop whose loaders are ahead of the boundary that begins, or behind what was loaded.

        Args:
            is_saved: Whether local state is saved in checkpoints.

        Raises:
            LoaderOrderError: A loader is.
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
        # Without a heal so far, too: a newcomer would be the first to fail.
        is_bare = self.may_heal and watched.is_replicated and not batches and _is_handed_out(watched.loader)
        if is_earlier or is_bare:
            raise LoaderOrderError(
                f"expected iterators of the loader {watched.key!r} that follow its loaded state, and one was made "
                f"{'before a load' if is_earlier else 'without the manager'}: it goes on from where it was when the "
                f"state of another replica or of a checkpoint is loaded; {_ADVICE}",
                key=watched.key,
            )

    @staticmethod
    def _refuse_others(watched: _Watched[Any], batches: list[Batches[Any]]) -> None:
        if any(each.is_displaced() for each in batches):
            raise LoaderOrderError(
                f"expected no other iterator of the loader {watched.key!r} beside manager.batches(loader), and one was "
                "made: the loader's state is that of the other one, so a resumed or healed run would draw other "
                "batches; make a loader of its own for what reads the data besides",
                key=watched.key,
            )

    def _refuse_drawn(self, watched: _Watched[Any]) -> None:
        before, watched.position = watched.position, None
        if before is None or _position(watched.loader) <= before:
            return
        message = (
            f"expected no batch from the loader {watched.key!r} before the step boundary, and its state has changed "
            f"since it was registered or loaded: checkpoints and healed replicas would skip a batch; {_ADVICE}"
        )
        if isinstance(watched.loader, DataLoader) or _is_of_nodes(watched.loader):
            raise LoaderOrderError(message, key=watched.key)
        # It may be iterable without being a loader.
        logger.warning("%s", message)


def _position(loader: object) -> Set[object]:
    """What drawing a batch adds to or replaces; empty if it cannot be found out.

    Drawing is what counts, not a changed state: a registered replay buffer is filled before the first boundary.
    """
    if isinstance(loader, DataLoader) or _is_of_nodes(loader):
        return {int(getattr(_iterator_of(loader), "_num_yielded", 0))}
    if isinstance(loader, Iterator):
        try:
            with refusing_collectives():
                return {state_digest(loader.state_dict())}  # type: ignore[attr-defined]
        except Exception as error:
            logger.debug("batches drawn from %s are not noticed: %s", type(loader).__name__, error)
            return set()
    return _loops_over(loader)


def _loops_over(loader: object) -> Set[object]:
    """The loops that have drawn from an object whose ``__iter__`` is a generator, and are not at its end."""
    code = getattr(type(loader).__iter__, "__code__", None)  # type: ignore[attr-defined]
    if code is None or not code.co_flags & inspect.CO_GENERATOR:
        return set()
    holders = gc.get_referrers(loader)
    # In Python 3.10 the frame refers to the loader, and the generator to its frame.
    frames = [each for each in holders if isinstance(each, FrameType) and each.f_code is code]
    return {
        weakref.ref(each)
        for each in holders + (gc.get_referrers(*frames) if frames else [])
        if isinstance(each, GeneratorType)
        and each.gi_code is code
        and inspect.getgeneratorstate(each) == inspect.GEN_SUSPENDED
    }


def _end_workers(loader: object, iterator: object) -> None:
    """End the worker processes of an iterator, if there are any and the loader has given the iterator up."""
    if iterator is not _newest_iterator(loader) and hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


def _is_of_nodes(loader: object) -> bool:
    """Whether the object is a ``torchdata.nodes.Loader``."""
    nodes = sys.modules.get("torchdata.nodes")
    return nodes is not None and isinstance(loader, nodes.Loader)


def _newest_iterator(loader: object) -> object:
    """The iterator that a loader of torch or torchdata made last, if the loader knows it."""
    if isinstance(loader, DataLoader):
        return loader._iterator
    return loader._it if _is_of_nodes(loader) else None  # type: ignore[attr-defined]


def _iterator_of(loader: object) -> object:
    """The same, unless the iterator has ended."""
    iterator = _newest_iterator(loader)
    return None if getattr(iterator, "_finished", False) else iterator


def _is_handed_out(loader: object) -> bool:
    """Whether a loop may hold the iterator; the loader also makes one to tell its own state."""
    own = "_iter_for_state_dict" if _is_of_nodes(loader) else "_initial_iter_for_state_dict"
    return _iterator_of(loader) is not None and not getattr(loader, own, False)
