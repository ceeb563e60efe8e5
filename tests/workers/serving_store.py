"""Serves a store until its standard input ends; prints its port."""

from __future__ import annotations

import sys

from torch.distributed import TCPStore

if __name__ == "__main__":
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    sys.stdin.read()
