"""Receives a state together with others, and passes on what it has: ``NUM_BYTES PAUSE_S URL[,URL…]``.

Prints its own address, and waits for a line with those of all receivers. Pauses after each chunk; prints ``begun``
after the first one, and at the end JSON on what it has. Lives until its standard input ends.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

import torch

from ft_transport import FetchProgress, HTTPTransport, TransportSettings, state_digest

num_bytes, pause_s = int(sys.argv[1]), float(sys.argv[2])
begun: list[bool] = []


def pause(_progress: FetchProgress) -> None:
    if not begun:
        begun.append(True)
        print("begun", flush=True)
    time.sleep(pause_s)


transport: HTTPTransport[object] = HTTPTransport(
    timedelta(seconds=60),
    settings=TransportSettings(host="127.0.0.1", on_progress=pause),
)
into = {"w": torch.zeros(num_bytes // 4)}
print(transport.metadata(), flush=True)
relays = sys.stdin.readline().split()
received = transport.fetch(sys.argv[3].split(","), into=into, relays=relays)
print(json.dumps({"digest": state_digest(received.state), "step": received.step}), flush=True)
sys.stdin.read()
transport.shutdown()
