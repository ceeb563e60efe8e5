"""Serves `state_of(SEED)` as step STEP in small chunks until its standard input ends; prints where.

`seeded_source.py SEED STEP`
"""

from __future__ import annotations

import sys

from faulty_transports import TIMEOUT, state_of, transport

seed, step = int(sys.argv[1]), int(sys.argv[2])
with transport() as sender:
    sender.send_checkpoint([], step, state_of(seed), TIMEOUT)
    print(sender.metadata(), flush=True)
    sys.stdin.read()
