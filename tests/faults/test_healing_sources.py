"""Healing where sources are slow or hang: one that delivers keeps its time, one that does not leaves it to others."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from msgspec.structs import replace
from proxy import Fault, Link, Proxy, cut, delay, proxied, stall
from transport_settings import settings_of

from ft_transport import HTTPTransport
from manager import HealFailedError, Manager, ManagerConfig, StateTornError
from manager.quorum.decision import Heals
from manager.quorum.healing import MAX_ATTEMPTS, Healer
from manager.quorum.reports import Member
from manager.quorum.telemetry import StallWatch
from manager.recovery.peers import PeerRecovery
from manager.state.replica_state import ReplicaState

STATE_BYTES = 1 << 20
CHUNK_BYTES = 1 << 16
HEADS_BYTES = 64 << 10
TIMEOUT = timedelta(seconds=30)
TIMEOUT_S = 6.0
DIES_HALFWAY = (("/full", cut(STATE_BYTES // 2)), ("/full", cut(0)))
TRANSFER_S = 3.4
"""More than half of the time, and less than is left once a hanging source was given up."""


def throttled(link: Link, data: bytes) -> bool:
    """Passes the state on at a rate that takes `TRANSFER_S` for all of it."""
    for start in range(0, len(data), 1 << 12):
        due_s = TRANSFER_S * link.num_bytes / STATE_BYTES
        if link.stopping.wait(max(0.0, link.started_s + due_s - time.monotonic())):
            return False
        link.send(data[start : start + (1 << 12)])
    return True


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def _transport(token: str | None = None) -> HTTPTransport[Any]:
    settings = settings_of(
        host="127.0.0.1", advertise="127.0.0.1", chunk_bytes=CHUNK_BYTES, token=token, same_host=False
    )
    return HTTPTransport(TIMEOUT, 1, settings=settings)


class Sources:
    """Healthy replicas that serve one state, each behind a proxy, and one that heals from them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.weight = torch.zeros(STATE_BYTES // 4)
        self.state = state = ReplicaState(TIMEOUT)
        state.registry.register("weight", lambda part: self.weight.copy_(part["w"]), lambda: {"w": self.weight})
        transport = _transport()
        stack.callback(transport.shutdown)
        watch = StallWatch(60.0)
        stack.callback(watch.close)
        participant: Any = SimpleNamespace(
            config=ManagerConfig(timeout=timedelta(seconds=TIMEOUT_S), connect_timeout=timedelta(seconds=2)),
            state=state,
            peers=PeerRecovery(state, transport),
            waiting=watch.waiting,
            membership=SimpleNamespace(group_rank=0),
            name="newcomer",
        )
        self.healer = Healer(participant)

    def add(self, *faults: tuple[str, Fault], token: str | None = None, more: bool = False) -> tuple[Member, Proxy]:
        weight = torch.arange(float(STATE_BYTES // 4))
        healthy = Manager(checkpoint_transport=_transport(token))
        self._stack.callback(healthy.shutdown)
        healthy.register_state_dict_fn("weight", lambda _: None, lambda: {"w": weight})
        if more:
            healthy.register_state_dict_fn("more", lambda _: None, dict)
        healthy.start_step(3)
        healthy.snapshot().result(30)
        proxy = self._stack.enter_context(proxied(urlsplit(healthy.metadata()).port or 0))
        for on, fault in faults:
            proxy.inject(fault, on=on, times=100 if fault is not faults[0][1] or len(faults) == 1 else 1)
        member = Member(replica_id=f"on {proxy.port}", step=3, lineage="", store_address="", addresses=(proxy.url,))
        return member, proxy

    def heal(self, *sources: Member, receivers: tuple[Member, ...] = ()) -> tuple[str, ...]:
        decision: Any = SimpleNamespace(step=3, lineage="")
        role = Heals(sources=sources, receivers=receivers)
        failures = self.healer.receive(decision, role)
        assert failures or torch.equal(self.weight, torch.arange(float(STATE_BYTES // 4)))
        return failures


@pytest.fixture
def sources() -> Iterator[Sources]:
    with ExitStack() as stack:
        yield Sources(stack)


def test_a_slow_source_that_delivers_keeps_its_time_though_there_are_others(sources: Sources) -> None:
    slow, _ = sources.add(("/checkpoint", throttled))
    other, unused = sources.add()
    started_s = time.monotonic()
    assert sources.heal(slow, other, other) == ()
    assert time.monotonic() - started_s > TIMEOUT_S / 2
    assert not unused.requests


def test_a_source_keeps_its_time_though_one_that_is_gone_is_left(sources: Sources) -> None:
    late, _ = sources.add(("/metadata", delay(TIMEOUT_S / 3)))
    gone = replace(late, replica_id="gone", addresses=(f"http://127.0.0.1:{closed_port()}/checkpoint/",))
    assert sources.heal(gone, late) == ()


def test_a_source_that_hangs_leaves_the_others_the_time_they_need(sources: Sources) -> None:
    hanging, _ = sources.add(("/metadata", stall(after=0)))
    slow, _ = sources.add(("/checkpoint", throttled))
    assert sources.heal(hanging, slow) == ()


def test_a_source_whose_process_is_gone_is_asked_after_the_others(sources: Sources) -> None:
    healthy, _ = sources.add()
    gone, also_gone = (
        replace(healthy, replica_id=name, addresses=(f"http://127.0.0.1:{closed_port()}/checkpoint/",))
        for name in ("gone", "also gone")
    )
    started_s = time.monotonic()
    assert sources.heal(gone, also_gone, healthy) == ()
    assert time.monotonic() - started_s < TIMEOUT_S / 8


def test_a_source_that_hangs_is_named_with_how_long_nothing_came(sources: Sources) -> None:
    first, proxy = sources.add(("/full", stall(after=STATE_BYTES // 2)))
    gone = replace(first, replica_id="gone", addresses=(f"http://127.0.0.1:{closed_port()}/checkpoint/",))
    hung, closed = sources.heal(first, gone)
    assert f"127.0.0.1:{proxy.port}" in hung
    assert "no data arrived for 1.5 s" in hung
    assert "timed out with" in hung
    assert "gone" in closed


def test_what_can_never_succeed_is_not_tried_again(sources: Sources) -> None:
    barred, barred_proxy = sources.add(token="secret")
    other, other_proxy = sources.add(more=True)
    failures = sources.heal(barred, other)
    assert "PeerAuthenticationError" in failures[0]
    assert "StateMismatchError: expected replicated state with exactly the keys ['weight']" in failures[1]
    # Whether somebody listens is asked with a connection that requests nothing.
    assert [sum(map(bool, proxy.requests)) for proxy in (barred_proxy, other_proxy)] == [1, 1]
    assert sources.healer.num_failures == 0
    with pytest.raises(HealFailedError, match="no further attempt can succeed"):
        sources.healer.failed(3, failures, agreed=failures)


def test_where_one_source_may_come_back_it_is_tried_again(sources: Sources) -> None:
    barred, _ = sources.add(token="secret")
    gone = replace(barred, replica_id="gone", addresses=(f"http://127.0.0.1:{closed_port()}/checkpoint/",))
    failures = sources.heal(gone, barred)
    assert len(failures) == 2
    sources.healer.failed(3, failures, agreed=failures)
    assert sources.healer.num_failures == 1


def test_a_source_that_dies_on_its_way_leaves_the_next_one_the_rest_to_send(sources: Sources) -> None:
    dying, proxy = sources.add(*DIES_HALFWAY)
    other, rest = sources.add()
    assert sources.heal(dying, other) == ()
    assert proxy.num_bytes > STATE_BYTES // 2
    assert rest.num_bytes < STATE_BYTES // 2 + CHUNK_BYTES + HEADS_BYTES


def test_an_attempt_goes_on_where_the_one_before_was_until_all_is_given_up(sources: Sources) -> None:
    dying, _ = sources.add(*DIES_HALFWAY)
    assert sources.heal(dying)
    assert sources.weight[1] == 1.0
    sources.healer.failed(3, ("it died",), agreed=())
    again, _ = sources.add(("/full", cut(STATE_BYTES // 4)), ("/full", cut(0)))
    assert sources.heal(again)
    with pytest.raises(StateTornError):
        sources.state.refuse_partial()
    for _ in range(MAX_ATTEMPTS - 2):
        sources.healer.failed(3, ("it died",), agreed=())
    with pytest.raises(HealFailedError):
        sources.healer.failed(3, ("it died",), agreed=())
    # Nothing goes on from it any more, so nobody is to take it for a state.
    assert sources.weight.isnan().all()
    healthy, whole = sources.add()
    assert sources.heal(healthy) == ()
    assert whole.num_bytes > STATE_BYTES


def test_a_state_that_came_from_elsewhere_meanwhile_is_not_overwritten(sources: Sources) -> None:
    dying, _ = sources.add(*DIES_HALFWAY)
    assert sources.heal(dying)
    sources.weight.fill_(5.0)
    sources.state.partial = None  # as a checkpoint that was loaded leaves it
    for _ in range(MAX_ATTEMPTS - 1):
        sources.healer.failed(3, ("it died",), agreed=())
    with pytest.raises(HealFailedError):
        sources.healer.failed(3, ("it died",), agreed=())
    assert sources.weight.eq(5.0).all()


def gone_like(member: Member, name: str) -> Member:
    return replace(member, replica_id=name, addresses=(f"http://127.0.0.1:{closed_port()}/checkpoint/",))


def test_replicas_that_heal_together_ask_all_sources_and_do_without_who_is_gone(
    sources: Sources, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first, first_proxy = sources.add()
    second, second_proxy = sources.add()
    gone, never_there = gone_like(first, "gone"), gone_like(first, "never there")
    started_s = time.monotonic()
    assert sources.heal(gone, first, second, receivers=(gone, never_there)) == ()
    assert time.monotonic() - started_s < TIMEOUT_S / 2
    assert "from 2 sources, 2 replicas together" in caplog.text
    assert all(any("/metadata" in request for request in proxy.requests) for proxy in (first_proxy, second_proxy))


def test_where_healing_together_fails_the_sources_are_asked_one_by_one(
    sources: Sources, caplog: pytest.LogCaptureFixture
) -> None:
    healthy, proxy = sources.add()
    # All that is asked for first is ended; then it is there.
    proxy.inject(stall(after=0), on="/metadata", times=1)
    barred, _ = sources.add(token="secret")
    assert sources.heal(barred, healthy, receivers=(barred, gone_like(healthy, "never there"))) == ()
    assert "now tries each source alone" in caplog.text
