"""Fetches from the URL given and forks a child in the middle; prints what each of the two has of the source's memory.

`forking_receiver.py URL`; JSON: what the parent has during the fetch, the child, and the parent afterwards, and how
many sockets of the same host the child has.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from datetime import timedelta
from typing import Any

from same_host import open_snapshots

from ft_transport import FetchProgress, HTTPTransport, TransportSettings

found: dict[str, Any] = {}


def sockets() -> int:
    num_found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            candidate = socket.socket(fileno=int(name))
        except OSError:
            continue
        try:
            addresses = [candidate.getsockname()]
            addresses.append(candidate.getpeername())
        except OSError:
            pass
        num_found += any(bytes(each).startswith(b"\0ft-transport/") for each in addresses if isinstance(each, bytes))
        candidate.detach()
    return num_found


def fork_once(_progress: FetchProgress) -> None:
    if found:
        return
    found["during"] = len(open_snapshots())
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, json.dumps([len(open_snapshots()), sockets()]).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        found["child"], found["sockets"] = json.loads(told.read())
    os.waitpid(child, 0)


transport: HTTPTransport[Any] = HTTPTransport(
    timedelta(seconds=30), settings=TransportSettings(host="127.0.0.1", on_progress=fork_once)
)
transport.fetch(sys.argv[1], 1)
found["after"] = len(open_snapshots())
transport.shutdown()
print(json.dumps(found))
