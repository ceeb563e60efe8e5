"""Finds the snapshot or the delta that a request names, and waits for a snapshot that does not exist yet."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from aiohttp import web

from ft_transport.errors import (
    ConfigurationError,
    PeerNotReadyError,
    SnapshotReplacedError,
    StateNotServedError,
    StepNotServedError,
)
from ft_transport.http.server.body_sender import drop_connection
from ft_transport.http.server.snapshot_cache import Reader, Reading, SnapshotCache
from ft_transport.wire.manifest import SnapshotId
from ft_transport.wire.routes import (
    AFTER_PARAMETER,
    FOLLOW_PARAMETER,
    LATEST,
    MAX_RANGES,
    RANGES_PARAMETER,
    SNAPSHOT_PARAMETER,
    WAIT_PARAMETER,
    StepSelector,
    parse_after,
    parse_ranges,
    parse_step,
)

_TICK_S: Final = 0.1
_RECENT_FAILURE_S: Final = 10.0
_RETRY_S: Final = 1.0
"""How long a request waits for another attempt to take a snapshot, if the last attempt has just failed for good."""

_NUM_DELTAS: Final = 4
"""Number of cached deltas. A receiver that has missed more versions fetches chunks, which are hardly larger."""

FreshSnapshot = Callable[[int | None], int | None]
"""Requests a snapshot of the given step, or of the current state, from the owner of the state. Returns at once.

Returns a sequence number (``SnapshotCache.newest_sequence``): any snapshot with a higher number is new enough. Returns
``None`` if the step is past and no snapshot of it is being taken. Called on the event loop, and repeatedly while a
request waits for a step, until the snapshot of that step is published.
"""


class SnapshotRequests:
    """Finds the snapshots that requests name. Used only on the server's event loop.

    Args:
        cache: The cache of served snapshots.
        max_wait_s: Longest time for which a request waits for its step, in seconds.

    Attributes:
        fresh_snapshot: Requests a new snapshot from the owner of the state; ``None`` without such an owner.
    """

    def __init__(self, cache: SnapshotCache, *, max_wait_s: float) -> None:
        self._cache = cache
        self._max_wait_s = max_wait_s
        self.fresh_snapshot: FreshSnapshot | None = None
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Let all waiting requests check the cache again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def read(self, request: web.Request) -> Reading:
        """Begin to read the snapshot that a request names; if it does not exist yet, wait for it.

        Raises:
            StepNotServedError: The step is past or malformed, or no snapshot of it arrived in time.
            SnapshotReplacedError: The request names a snapshot that is no longer served.
            PeerNotReadyError: No new snapshot arrived in time.
            StateNotServedError: The state cannot be captured.
        """
        step = parse_step(request.match_info["step"])
        if step is None:
            raise StepNotServedError(
                f"expected a step number or 'latest' in the path, got {request.match_info['step'][:64]!r}"
            )
        reader = _reader_of(request)
        bound_to = request.query.get(SNAPSHOT_PARAMETER)
        if bound_to is not None:
            reading = self._cache.read(step, snapshot_id=SnapshotId(bound_to), reader=reader)
            if reading is None:
                raise SnapshotReplacedError(
                    f"expected snapshot {bound_to[:32]} of step {step}, which is no longer served; start again"
                )
            return reading
        num_failures = self._cache.num_final_failures()
        after = self._after(request) if step == LATEST else 0
        wait_s = requested_wait_s(request, self._max_wait_s)
        reading = self._cache.read(step, after_sequence=after, reader=reader)
        if reading is not None:
            return reading
        with contextlib.nullcontext() if step == LATEST else self._cache.waiting(step, reader):
            return await self._wait_for(step, after, reader, wait_s, num_failures)

    async def _wait_for(
        self, step: StepSelector, after: int, reader: Reader, wait_s: float, num_failures: int
    ) -> Reading:
        began_s = time.monotonic()
        deadline_s = began_s + wait_s
        while True:
            changed = self._changed
            reading = self._cache.read(step, after_sequence=after, reader=reader)
            if reading is not None:
                return reading
            has_failed = self._cache.has_failed_finally(_RECENT_FAILURE_S)
            # If the last attempt failed before this request, the owner may make no further attempt.
            is_given_up = has_failed and time.monotonic() >= began_s + _RETRY_S
            if is_given_up or self._cache.num_final_failures() > num_failures:
                raise StateNotServedError(f"the state cannot be captured: {self._cache.failure()}", step=step)
            remaining_s = deadline_s - time.monotonic()
            if step != LATEST and self._is_past(step):
                served = self._cache.steps()
                raise StepNotServedError(
                    f"expected a future step, or one of {list(served)}; this replica is past step {step}",
                    served=served,
                    is_past=True,
                )
            if remaining_s <= 0 or not self._may_come(step):
                return self._read_or_refuse(step, after, reader)
            with contextlib.suppress(asyncio.TimeoutError):
                # Checks often while waiting for a step: no event reports that the trainer has passed the step.
                is_awaiting_news = step == LATEST and not has_failed
                await asyncio.wait_for(changed.wait(), remaining_s if is_awaiting_news else min(remaining_s, _TICK_S))

    def _after(self, request: web.Request) -> int:
        """Return the sequence number above which a snapshot is new enough. A retry keeps its first number."""
        fresh_snapshot = self.fresh_snapshot
        if fresh_snapshot is None:
            return 0
        earlier = parse_after(request.query.get(AFTER_PARAMETER))
        if earlier is not None and self._cache.holds_newer(earlier):
            return earlier
        fresh = fresh_snapshot(None)
        assert fresh is not None, "the current state is never past"
        return fresh if earlier is None else min(earlier, fresh)

    def _is_past(self, step: int) -> bool:
        """Request a snapshot of a step from the owner; return whether the step is past and no snapshot will arrive."""
        ask = self.fresh_snapshot
        if ask is None or step in self._cache.steps() or ask(step) is not None:
            return False
        # Checks again, because the snapshot may have arrived meanwhile.
        return step not in self._cache.steps()

    def _may_come(self, step: StepSelector) -> bool:
        newest_step = self._cache.newest_step()
        return step == LATEST or newest_step is None or step > newest_step

    def _read_or_refuse(self, step: StepSelector, after: int, reader: Reader) -> Reading:
        """Begin to read a snapshot that has just arrived; raise an error with the reason if none has arrived."""
        reading = self._cache.read(step, after_sequence=after, reader=reader)
        if reading is not None:
            return reading
        served = self._cache.steps()
        failure = self._cache.failure()
        attempt = f"; the last attempt failed: {failure}" if failure is not None else ""
        if not served:
            raise PeerNotReadyError(
                f"expected a snapshot, but none has been taken yet{attempt}", after=after, step=step
            )
        if step == LATEST:
            raise PeerNotReadyError(
                f"expected a snapshot of the current state, but the newest one is older (step {served[-1]}): the "
                f"trainer has not reached the next step boundary, or every snapshot is still being fetched{attempt}",
                after=after,
                step=step,
            )
        raise StepNotServedError(f"expected step {step}, but this replica serves {list(served)}", served=served)


class DeltaCache:
    """Caches the latest few deltas, by the step to which they apply. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._by_base: OrderedDict[int, bytes] = OrderedDict()

    def keep(self, base: int, delta: bytes) -> None:
        """Cache a delta that applies to the step ``base``, and evict the oldest delta."""
        with self._mutex:
            self._by_base.pop(base, None)
            self._by_base[base] = delta
            while len(self._by_base) > _NUM_DELTAS:
                self._by_base.popitem(last=False)

    def leading_from(self, step: str) -> memoryview:
        """Return the delta that applies to a step.

        Raises:
            StepNotServedError: No delta that applies to this step is cached.
        """
        base = parse_step(step)
        with self._mutex:
            delta = self._by_base.get(base) if isinstance(base, int) else None
        if delta is None:
            raise StepNotServedError(f"expected a step to which a cached delta applies, got {step[:64]!r}")
        return memoryview(delta)


def requested_wait_s(request: web.Request, longest_s: float) -> float:
    """Return how many seconds the request may wait: ``longest_s``, or the requested time if that is shorter.

    Raises:
        ConfigurationError: The requested time is malformed.
    """
    return min(longest_s, _requested_s(request, WAIT_PARAMETER, longest_s))


def requested_pause_s(request: web.Request, longest_s: float) -> float:
    """Return how many seconds the response may wait for each further chunk: at most ``longest_s``.

    If the request names no time, the response does not wait.

    Raises:
        ConfigurationError: The requested time is malformed.
    """
    return min(longest_s, _requested_s(request, FOLLOW_PARAMETER, 0.0))


def requested_ranges(request: web.Request) -> Sequence[tuple[int, int]]:
    """Return the half-open byte ranges of a request for relayed chunks.

    Raises:
        ConfigurationError: The ranges are missing or malformed.
    """
    ranges = parse_ranges(request.query.get(RANGES_PARAMETER, ""))
    if ranges is None:
        raise ConfigurationError(
            f"expected at most {MAX_RANGES} ranges, not empty and without overlap, such as {RANGES_PARAMETER}=0-10"
        )
    return ranges


def _requested_s(request: web.Request, parameter: str, default_s: float) -> float:
    text = request.query.get(parameter)
    if text is None:
        return default_s
    try:
        asked_s = float(text)
    except ValueError:
        asked_s = -1.0
    if not 0 <= asked_s < float("inf"):
        raise ConfigurationError(f"expected a number of seconds in '{parameter}', got {text[:64]!r}")
    return asked_s


def _reader_of(request: web.Request) -> Reader:
    """Return the reader for the connection of a request."""
    transport = request.transport
    if transport is None:
        return Reader(lambda: True, lambda ended: ended())
    loop = asyncio.get_running_loop()

    def cut_off(ended: Callable[[], None]) -> None:
        try:
            loop.call_soon_threadsafe(_cut_off, loop, transport, ended)
        except RuntimeError:  # The loop was closed, after every connection.
            ended()

    # If the server closes the connection after the response, the receiver may still read on a closed connection.
    return Reader(transport.is_closing if request.keep_alive else lambda: False, cut_off)


def _cut_off(loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, ended: Callable[[], None]) -> None:
    drop_connection(transport)
    # Runs after the callback by which asyncio closes the socket.
    loop.call_soon(ended)
