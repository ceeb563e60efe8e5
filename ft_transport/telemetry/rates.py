"""Recent growth rates, computed only on request."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

_WINDOW_S: Final = 0.8
"""More frequent requests get the rate since an earlier look."""
_MAX_KEPT: Final = 4096


@dataclass(slots=True)
class _Looks:
    earlier: tuple[float, int]
    latest: tuple[float, int]


class Rates:
    """Remembers the last looks at values that grow. Any thread may use it.

    Several clients may ask at different moments: each gets a rate over at least `_WINDOW_S`, if that much has passed.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._looks: dict[Hashable, _Looks] = {}

    def of(self, key: Hashable, num_bytes: int, *, began_s: float, now_s: float) -> float:
        """Return the bytes per second of late.

        Args:
            key: Identifies the value.
            num_bytes: Its present size; a smaller number than before restarts it.
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
