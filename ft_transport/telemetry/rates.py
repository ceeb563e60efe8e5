"""How fast something has grown lately, found out when somebody asks, and at no other time."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

_WINDOW_S: Final = 0.8
"""Whoever asks more often than that is told of the time since the look before."""
_MAX_KEPT: Final = 4096


@dataclass(slots=True)
class _Looks:
    earlier: tuple[float, int]
    latest: tuple[float, int]


class Rates:
    """Remembers the last looks at things that grow. Any thread may use it.

    Several may ask, at moments of their own: each is told of a time of `_WINDOW_S` at least, if there was one.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._looks: dict[Hashable, _Looks] = {}

    def of(self, key: Hashable, num_bytes: int, *, began_s: float, now_s: float) -> float:
        """How many bytes per second have come lately.

        Args:
            key: Of what grows.
            num_bytes: How far it has come; a smaller number than before begins anew.
            began_s: When it began with 0, by any clock.
            now_s: Now, by the same.
        """
        with self._mutex:
            looks = self._looks.pop(key, None)
            if looks is None or num_bytes < looks.latest[1]:
                looks = _Looks((began_s, 0), (began_s, 0))
            if now_s - looks.latest[0] >= _WINDOW_S:
                looks.earlier, looks.latest = looks.latest, (now_s, num_bytes)
            self._looks[key] = looks  # the newest at the end
            if len(self._looks) > _MAX_KEPT:
                del self._looks[next(iter(self._looks))]
            length_s = now_s - looks.earlier[0]
            return (num_bytes - looks.earlier[1]) / length_s if length_s > 0 else 0.0
