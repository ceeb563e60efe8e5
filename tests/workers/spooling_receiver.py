"""Fetches `latest` from the URL given, with a spool; prints how many bytes have landed after each chunk.

`spooling_receiver.py URL SPOOL NUM_CONNECTIONS`
"""

from __future__ import annotations

import sys

from faulty_transports import blank, holds, transport

url, spool, num_connections = sys.argv[1], sys.argv[2], int(sys.argv[3])
into = blank()
with transport(num_connections, on_progress=lambda progress: print(progress.done_bytes, flush=True)) as receiver:
    receiver.fetch(url, into=into, spool=spool)
assert holds(into, 1)
