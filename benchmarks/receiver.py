"""A fresh receiver of ``fetch``: fetches a state once or a few times, checks it, and says what it measured.

The first fetch is a process's first one, as that of a recovering replica is. Imports, the destination's memory and the
transport's construction come before anything is measured.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Final

from benchmarks.fetch_variants import VARIANTS, Fetch, Receiver
from benchmarks.machine import PeakMemory, Watch, back_free_memory
from benchmarks.replicas.processes import Channel
from benchmarks.states import digest_of

_SETTLE_S: Final = 0.2
"""A sender that takes part in the fetch is given this long to be ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What one fetch was."""

    seconds: float
    others_share: float | None
    peak_bytes: int | None
    digest: str | None


def receive(channel: Channel, key: str, receiver: Receiver, num_fetches: int, sender_id: int) -> None:
    """Says a list of `Fetched`."""
    variant = next(variant for variant in VARIANTS if variant.key == key)
    fetch = variant.prepare(receiver)
    fresh_bytes = int(variant.fresh_times * receiver.num_bytes)
    fetched = []
    for _ in range(num_fetches):
        time.sleep(_SETTLE_S)
        fetched.append(_measure(fetch, fresh_bytes, sender_id))
    channel.say(fetched)
    channel.wait_for_end()


def _measure(fetch: Fetch, fresh_bytes: int, sender_id: int) -> Fetched:
    back_free_memory(fresh_bytes)
    memory = PeakMemory.start()
    watch = Watch([os.getpid(), sender_id])
    watch.start()
    started_s = time.perf_counter()
    state = fetch()
    seconds = time.perf_counter() - started_s
    return Fetched(
        seconds=seconds,
        others_share=watch.stop(),
        peak_bytes=memory.growth_bytes() if memory is not None else None,
        digest=digest_of(state) if state is not None else None,
    )
