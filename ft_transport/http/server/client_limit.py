"""Limits how many receivers are sent data at once; the others have to retry."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from ft_transport.errors import PeerNotReadyError, StepNotServedError
from ft_transport.wire.routes import parse_step

Client: TypeAlias = tuple[str, str]
"""A receiver: its address and its name. Its connections count as one, and so do the ranks of one replica."""

_KEPT_S: Final = 1.0
"""How long a receiver keeps its slot without a request: the next one usually comes within milliseconds."""
_RETRY_AFTER_S: Final = 1.0


@dataclass(slots=True)
class _Place:
    num_answers: int = 0
    idle_since_s: float = 0.0


class ClientLimit:
    """The slots of receivers. Used only on the server's event loop.

    Args:
        max_clients: Maximum number of receivers; ``None`` for any number.
        clock: Monotonic seconds.
    """

    def __init__(self, max_clients: int | None, clock: Callable[[], float]) -> None:
        self._max_clients = max_clients
        self._clock = clock
        self._places: dict[Client, _Place] = {}

    @contextlib.contextmanager
    def serving(self, client: Client) -> Iterator[None]:
        """Reserve a slot for the receiver while a response is sent, and for a moment after the last one.

        Raises:
            PeerNotReadyError: All slots are taken.
        """
        if self._max_clients is None:
            yield
            return
        place = self._place_of(client, self._max_clients)
        place.num_answers += 1
        try:
            yield
        finally:
            place.num_answers -= 1
            place.idle_since_s = self._clock()

    def _place_of(self, client: Client, max_clients: int) -> _Place:
        if client not in self._places:
            if len(self._places) >= max_clients:
                before_s = self._clock() - _KEPT_S
                for each, place in list(self._places.items()):
                    if not place.num_answers and place.idle_since_s <= before_s:
                        del self._places[each]
            if len(self._places) >= max_clients:
                raise PeerNotReadyError(
                    f"expected a place among the receivers, {max_clients} others are sent data (max_clients)",
                    retry_after_s=_RETRY_AFTER_S,
                )
            self._places[client] = _Place()
        return self._places[client]


_NUM_KEPT: Final = 4
"""For a receiver that missed more versions, chunks are hardly larger than deltas."""


class DeltaCache:
    """The latest few deltas, by the step to which they apply. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._by_base: OrderedDict[int, bytes] = OrderedDict()

    def keep(self, base: int, delta: bytes) -> None:
        """Cache a delta and evict the oldest."""
        with self._mutex:
            self._by_base.pop(base, None)
            self._by_base[base] = delta
            while len(self._by_base) > _NUM_KEPT:
                self._by_base.popitem(last=False)

    def leading_from(self, step: str) -> memoryview:
        """Return the delta from a step to a later one.

        Raises:
            StepNotServedError: No delta from this step is cached.
        """
        base = parse_step(step)
        with self._mutex:
            delta = self._by_base.get(base) if isinstance(base, int) else None
        if delta is None:
            raise StepNotServedError(f"expected a step that a delta is kept for, got {step[:64]!r}")
        return memoryview(delta)
