"""A Lighthouse in a process of its own, so that neither its log nor its threads get between the figures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from urllib.parse import urlsplit

from benchmarks.processes import Channel, Child


@contextlib.contextmanager
def lighthouse(min_replicas: int) -> Iterator[str]:
    """Yields its address."""
    child = Child(_serve, min_replicas)
    try:
        yield child.receive()
    finally:
        child.close()


def _serve(channel: Channel, min_replicas: int) -> None:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=min_replicas,
        join_timeout_ms=60_000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=5000,
    )
    channel.say(f"http://127.0.0.1:{urlsplit(server.address()).port}")
    channel.wait_for_end()
