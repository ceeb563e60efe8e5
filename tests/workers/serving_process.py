"""Serves 64 MiB until it is killed, or its standard input ends; prints where. Forks a child for each line it reads.

The children live until the standard input ends, too.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch

from ft_transport import HTTPTransport, TransportSettings

timeout = timedelta(seconds=30)
transport: HTTPTransport[object] = HTTPTransport(timeout, settings=TransportSettings(host="127.0.0.1"))
transport.send_checkpoint([], 1, {"w": torch.ones(16 << 20)}, timeout)
print(transport.metadata(), flush=True)
while sys.stdin.readline():
    if not os.fork():
        while os.read(0, 1):
            pass
        os._exit(0)
    print("forked", flush=True)
