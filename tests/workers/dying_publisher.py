"""A trainer that is killed while it publishes: before or after its Nth request to the engine.

Usage: ``dying_publisher.py ROOT URL VERSION before|after N WEIGHTS reload|transfer|pull|sglang``: publishes what
the safetensors file WEIGHTS has, for vLLM itself, for ``directory_backend.py``, to vLLM's workers that fetch it or to
SGLang, and prints the routes that it came to.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from safetensors.torch import load_file

from ft_transport import Engine, HTTPTransport, Publisher, SGLangEngine, TransportSettings, VLLMEngine
from ft_transport.publish.engines.engine import EngineConnection


def main() -> None:
    root, url, version, moment, number, weights, way = sys.argv[1:]
    engine: Engine = SGLangEngine(url) if way == "sglang" else VLLMEngine(url)
    if way == "transfer":
        engine = VLLMEngine(url, update_info=lambda delivery: {"directory": str(delivery.directory)})
    transport: HTTPTransport[Any] | None = None
    if way == "pull":
        engine = VLLMEngine(url, pulls=True)
        transport = HTTPTransport(settings=TransportSettings(host="127.0.0.1", advertise="127.0.0.1"))
    request = EngineConnection._request
    num_requests = 0

    async def dying(self: EngineConnection, method: str, path: str, *rest: Any) -> Any:
        nonlocal num_requests
        num_requests += 1
        print(path, flush=True)
        if num_requests == int(number) and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = await request(self, method, path, *rest)
        if num_requests == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    EngineConnection._request = dying  # type: ignore[method-assign]
    with Publisher([engine], root, transport=transport) as publisher:
        publisher.publish(int(version), load_file(weights)).result()
    if transport is not None:
        transport.shutdown()


if __name__ == "__main__":
    main()
