"""Limits how many receivers are sent data at once; the others have to retry."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from ft_transport.errors import PeerNotReadyError

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
