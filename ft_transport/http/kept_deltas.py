"""Caches deltas for receivers that have one of the latest versions."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from ft_transport.errors import StepNotServedError
from ft_transport.wire.routes import parse_step

_NUM_KEPT: Final = 4
"""For a receiver that missed more versions, chunks are hardly larger than deltas."""


class KeptDeltas:
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
