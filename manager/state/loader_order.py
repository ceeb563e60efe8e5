"""Whether batches are drawn after the step boundary, and from where the last load put their loader.

A loader's state counts the batches that it has yielded. At the boundary this number fits the committed step, unless the
loop draws a batch first, as `for batch in loader` does with the boundary in its body: the state is then one batch ahead
of the model, in every checkpoint and for every replica that heals. And a load reaches iterators that are made after it;
an iterator that the loop holds goes on from where it was. Neither shows in the training, so both are refused here.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
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
        newest = getattr(self._loader, "_iterator", self._iterator)
        return self._iterator is not None and newest is not self._iterator

    def rewind(self) -> None:
        """Make a new iterator before the next batch."""
        self._iterator = None


@dataclass(slots=True, kw_only=True)
class _Watched(Generic[T]):
    """One registered loader.

    Attributes:
        key: Of the registered state.
        loader: The loader.
        is_replicated: Whether a healing replica receives its state.
        batches: What `LoaderOrder.batches` returned.
        position: Where it stood when it was registered or loaded; ``None`` after the boundary that follows.
        earlier: The iterator from before the last load, as long as the loop holds it.
    """

    key: str
    loader: Iterable[T]
    is_replicated: bool
    batches: weakref.WeakSet[Batches[T]] = field(default_factory=weakref.WeakSet)
    position: object = None
    earlier: weakref.ref[Any] | None = None


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
                watched.batches.add(found)
                return found
        raise RegistryError(
            f"expected a registered loader, got {type(loader).__name__}; call manager.register('loader', loader, ...) "
            "before manager.batches(loader)"
        )

    def before_load(self, key: str) -> None:
        """Note which iterator the loop may hold."""
        watched = self._watched.get(key)
        if watched is not None:
            for each in watched.batches:
                each.rewind()
            iterator = _iterator_of(watched.loader)
            watched.earlier = weakref.ref(iterator) if iterator is not None else None

    def after_load(self, key: str) -> None:
        """Note where the loader stands."""
        watched = self._watched.get(key)
        if watched is not None:
            if isinstance(watched.loader, DataLoader):
                # The loader makes its next iterator here, from which the loop draws later.
                watched.loader.state_dict()  # type: ignore[attr-defined]
            watched.position = _position(watched.loader)

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
            self._refuse_earlier(watched)
            self._refuse_others(watched)
            self._refuse_drawn(watched)

    def _refuse_earlier(self, watched: _Watched[Any]) -> None:
        earlier, watched.earlier = watched.earlier, None
        if earlier is not None and earlier() is not None:
            gc.collect()
        is_earlier = earlier is not None and earlier() is not None
        # Without a heal so far, too: a newcomer would be the first to fail.
        is_bare = self.may_heal and watched.is_replicated and not watched.batches and _is_handed_out(watched.loader)
        if is_earlier or is_bare:
            raise LoaderOrderError(
                f"expected iterators of the loader {watched.key!r} that follow its loaded state, and one was made "
                f"{'before a load' if is_earlier else 'without the manager'}: it goes on from where it was when the "
                f"state of another replica or of a checkpoint is loaded; {_ADVICE}",
                key=watched.key,
            )

    @staticmethod
    def _refuse_others(watched: _Watched[Any]) -> None:
        if any(each.is_displaced() for each in watched.batches):
            raise LoaderOrderError(
                f"expected no other iterator of the loader {watched.key!r} beside manager.batches(loader), and one was "
                "made: the loader's state is that of the other one, so a resumed or healed run would draw other "
                "batches; make a loader of its own for what reads the data besides",
                key=watched.key,
            )

    def _refuse_drawn(self, watched: _Watched[Any]) -> None:
        position, watched.position = watched.position, None
        if position is None or _position(watched.loader) == position:
            return
        message = (
            f"expected no batch from the loader {watched.key!r} before the step boundary, and its state has changed "
            f"since it was registered or loaded: checkpoints and healed replicas would skip a batch; {_ADVICE}"
        )
        if isinstance(watched.loader, DataLoader):
            raise LoaderOrderError(message, key=watched.key)
        # It may be iterable without being a loader.
        logger.warning("%s", message)


def _position(loader: object) -> object:
    """What drawing a batch changes; ``None`` if it cannot be found out."""
    if isinstance(loader, DataLoader):
        return int(getattr(_iterator_of(loader), "_num_yielded", 0))
    try:
        with refusing_collectives():
            return state_digest(loader.state_dict())  # type: ignore[attr-defined]
    except Exception as error:
        logger.debug("batches drawn from %s are not noticed: %s", type(loader).__name__, error)
        return None


def _iterator_of(loader: object) -> object:
    """The iterator that a loader of torch made last, unless it has ended."""
    iterator = getattr(loader, "_iterator", None) if isinstance(loader, DataLoader) else None
    return None if getattr(iterator, "_finished", False) else iterator


def _is_handed_out(loader: object) -> bool:
    """Whether a loop may hold the iterator; the loader also makes one to tell its own state."""
    return _iterator_of(loader) is not None and not getattr(loader, "_initial_iter_for_state_dict", False)
