"""Serves 32 MiB, told apart by the seed given, until it is killed or its standard input ends; prints where."""

from __future__ import annotations

import sys
from datetime import timedelta

from faulty_transports import state_of
from transport_settings import settings_of

from ft_transport import HTTPTransport

timeout = timedelta(seconds=30)
transport: HTTPTransport[object] = HTTPTransport(
    timeout, settings=settings_of(host=sys.argv[2], advertise=sys.argv[2], allow_anyone=True, chunk_bytes=1 << 16)
)
transport.send_checkpoint([], 1, state_of(int(sys.argv[1])), timeout)
print(transport.metadata(), flush=True)
sys.stdin.read()
transport.shutdown()
