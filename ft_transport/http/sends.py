"""To whom this process sends what, now and a moment ago: for who watches it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from ft_transport.http.audit import FetchKey
from ft_transport.telemetry.rates import Rates
from ft_transport.telemetry.told import ToldFlow

_KEPT_S: Final = 10.0
"""How long after its last request a fetch is told of."""
_MAX_KEPT: Final = 256
_MAX_TOLD: Final = 64


class Positioned(Protocol):
    """Says how far the sending of it has come."""

    @property
    def position(self) -> int:
        """In bytes."""


@dataclass(slots=True, eq=False)
class _Flow:
    role: str
    began_s: float
    ended_s: float
    num_bytes: int = 0
    running: dict[Positioned, int] = field(default_factory=dict)

    def bytes_so_far(self) -> int:
        return self.num_bytes + sum(content.position - start for content, start in self.running.items())


class Sends:
    """Sums up the requests of each fetch, like `Audit`. The event loop tells it; any thread may ask.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._mutex = threading.Lock()
        self._flows: dict[FetchKey, _Flow] = {}
        self._rates = Rates()

    def begun(self, key: FetchKey, content: Positioned, *, role: str) -> None:
        """A request begins to be answered with ``content``, whose position is asked for when somebody looks."""
        with self._mutex:
            self._flow(key, role).running[content] = content.position

    def ended(self, key: FetchKey, content: Positioned | None, num_bytes: int, *, role: str) -> None:
        """A request has been answered with so many bytes, as far as it was."""
        with self._mutex:
            flow = self._flow(key, role)
            if content is not None:
                flow.running.pop(content, None)
            flow.num_bytes += num_bytes
            flow.ended_s = self._clock()

    def told(self) -> tuple[ToldFlow, ...]:
        """Those that run or have ended a moment ago; the newest at the end."""
        now_s = self._clock()
        with self._mutex:
            self._forget(now_s)
            flows = [
                (key, flow.role, flow.began_s, flow.ended_s, flow.bytes_so_far(), bool(flow.running))
                for key, flow in list(self._flows.items())[-_MAX_TOLD:]
            ]
        return tuple(
            ToldFlow(
                peer=key.address,
                replica=key.replica,
                role=role,
                step=key.step,
                num_bytes=num_bytes,
                length_s=(now_s if is_running else ended_s) - began_s,
                bytes_per_s=self._rates.of((key, began_s), num_bytes, began_s=began_s, now_s=now_s)
                if is_running
                else num_bytes / max(ended_s - began_s, 1e-6),
                is_running=is_running,
            )
            for key, role, began_s, ended_s, num_bytes, is_running in flows
        )

    def _flow(self, key: FetchKey, role: str) -> _Flow:
        flow = self._flows.get(key)
        now_s = self._clock()
        if flow is not None and not flow.running and now_s - flow.ended_s > _KEPT_S:
            del self._flows[key]
            flow = None
        if flow is None:
            if len(self._flows) >= _MAX_KEPT:
                self._forget(now_s)
            while len(self._flows) >= _MAX_KEPT:
                del self._flows[next(iter(self._flows))]
            flow = self._flows[key] = _Flow(role, now_s, now_s)
        return flow

    def _forget(self, now_s: float) -> None:
        self._flows = {
            key: flow for key, flow in self._flows.items() if flow.running or now_s - flow.ended_s <= _KEPT_S
        }
