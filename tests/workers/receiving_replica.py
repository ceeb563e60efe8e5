"""For each line on standard input, fetches ``latest`` from the URL given; prints its step and digest as JSON."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

from stepping_trainer import digest_of

from ft_transport import HTTPTransport

timeout = timedelta(seconds=30)
transport: HTTPTransport[Any] = HTTPTransport(timeout)
for _line in sys.stdin:
    received = transport.fetch(sys.argv[1], "latest", timeout=timeout)
    print(json.dumps({"step": received.step, "digest": digest_of(received.state["user"])}), flush=True)
transport.shutdown(wait=False)
