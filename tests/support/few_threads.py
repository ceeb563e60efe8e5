"""An engine beside which nothing else may take all threads of the notifier."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class OnFewThreads:
    """An engine that needs a thread, as looking up a host's name does, of the few that a small machine has."""

    url = "few://"
    headers: Mapping[str, str] = {}

    async def deliver(self, connection: Any, delivery: Any) -> int:
        if delivery.version == 0:
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))
        return await asyncio.to_thread(lambda: int(delivery.version))
