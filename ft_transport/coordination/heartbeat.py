"""Heartbeats of ranks in a store: a rank that works shows it, and one that shows nothing for too long is given up."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta

from ft_transport.coordination.store_channel import AT_ONCE, StoreChannel


class Heartbeat:
    """A counter in the store that goes up while this rank works. Any thread may beat.

    Args:
        channel: To the store.
        key: Of the counter; no other rank writes it.
        interval_s: A beat that comes earlier after the last one is left out.
        timeout: For the store to answer.
    """

    def __init__(self, channel: StoreChannel, key: str, *, interval_s: float, timeout: timedelta) -> None:
        self._channel = channel
        self._key = key
        self._interval_s = interval_s
        self._timeout = timeout
        self._number = 0
        self._beat_s = 0.0

    def beat(self) -> None:
        """Shows that this rank is alive.

        Raises:
            RankGoneError: The store does not answer.
        """
        now_s = time.monotonic()
        if now_s > self._beat_s + self._interval_s:
            self._beat_s = now_s
            self._number += 1
            self._channel.post(self._key, str(self._number), self._timeout)


class HeartbeatWatch:
    """How long ago ranks have shown a heartbeat, for one wait. The first look counts as one.

    Args:
        keys: The counter of each rank.
        channel: To the store.
        now_s: When the wait begins.
    """

    def __init__(self, keys: dict[int, str], channel: StoreChannel, now_s: float) -> None:
        self._keys = keys
        self._channel = channel
        self._numbers: dict[int, bytes] = {}
        self._seen_s = dict.fromkeys(keys, now_s)

    def silent(self, ranks: Iterable[int], for_s: float, now_s: float) -> list[int]:
        """Looks at the counters of these ranks. Returns those that have not moved for longer than ``for_s``.

        Raises:
            RankGoneError: The store does not answer.
        """
        silent = []
        for rank in ranks:
            found = self._channel.get([self._keys[rank]], AT_ONCE)
            number = found[0] if found is not None else b""
            if number != self._numbers.setdefault(rank, number):
                self._numbers[rank] = number
                self._seen_s[rank] = now_s
            if now_s > self._seen_s[rank] + for_s:
                silent.append(rank)
        return silent
