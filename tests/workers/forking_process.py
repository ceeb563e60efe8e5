"""Forks children while it fetches from itself, and prints how many of them were left a socket of the transport.

    python forking_process.py NUM_CHILDREN [full]

``full``: the table of descriptors is full at each fork.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import threading
from datetime import timedelta
from typing import Any

import torch

from ft_transport import HTTPTransport, TransportSettings

_TIMEOUT = timedelta(seconds=30)
_MAX_DESCRIPTORS = 1024


def _has_sockets() -> bool:
    for number in range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]):
        try:
            candidate = socket.socket(fileno=number)
        except OSError:
            continue
        family = candidate.family
        candidate.detach()
        if family in (socket.AF_INET, socket.AF_INET6):
            return True
    return False


def main() -> None:
    num_children, is_full = int(sys.argv[1]), "full" in sys.argv
    # Each child tries every number that a descriptor can have.
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_DESCRIPTORS, _MAX_DESCRIPTORS))
    transport: HTTPTransport[Any] = HTTPTransport(_TIMEOUT, settings=TransportSettings(host="127.0.0.1"))
    transport.send_checkpoint([], 1, {"w": torch.ones(1 << 20)}, _TIMEOUT)
    stopping = threading.Event()

    def fetch() -> None:
        while not stopping.is_set():
            transport.fetch(transport.metadata(), 1)

    fetching = threading.Thread(target=fetch)
    taken = []
    if is_full:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
    else:
        fetching.start()
    num_left = _count(num_children)
    if not is_full:
        stopping.set()
        fetching.join()
    for number in taken:
        os.close(number)
    print(num_left, flush=True)
    transport.shutdown()


def _count(num_children: int) -> int:
    num_left = 0
    for _ in range(num_children):
        child = os.fork()
        if not child:
            os._exit(1 if _has_sockets() else 0)
        num_left += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return num_left


if __name__ == "__main__":
    main()
