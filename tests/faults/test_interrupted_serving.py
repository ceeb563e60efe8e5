"""A signal handler that raises while a replica serves the state it waits with: the wait ends, and the next is right."""

from __future__ import annotations

import itertools
from datetime import timedelta
from time import monotonic

import pytest
import torch
from interruptions import HandlerError, Interruption

from ft_transport import HTTPTransport, TransportSettings
from manager.recovery.replica import Replica

TIMEOUT = timedelta(seconds=10)
LOOPBACK = TransportSettings(host="127.0.0.1", advertise="127.0.0.1")


@pytest.mark.slow
def test_a_wait_ends_at_once_wherever_a_handler_raises() -> None:
    transport: HTTPTransport[object] = HTTPTransport(TIMEOUT, settings=LOOPBACK)
    replica = Replica(TIMEOUT, transport)
    model = torch.nn.Linear(3, 3)
    replica.state.registry.register("model", model.load_state_dict, model.state_dict)
    assert replica.snapshots is not None
    scheduler = replica.snapshots
    longest_s = 0.0
    try:
        for place in itertools.count(1):
            replica.state.begin_step(place)
            if place % 2:
                scheduler.request()
            begin = monotonic()
            with Interruption(place, ("manager.snapshots",)) as interruption:
                try:
                    with replica.snapshots.serving(TIMEOUT):
                        pass
                except HandlerError:
                    pass
            longest_s = max(longest_s, monotonic() - begin)
            # Nothing that was left behind refuses, or holds, the next snapshot.
            scheduler.take().result(TIMEOUT.total_seconds())
            assert transport.server.newest_step() == place
            assert not replica.state.lock.holders()
            if not interruption.was_raised:
                break
    finally:
        replica.close(wait=True)
    assert place > 50
    assert interruption.num_passed > 50
    assert longest_s < TIMEOUT.total_seconds() / 2
