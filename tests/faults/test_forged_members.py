"""Somebody who reaches the Lighthouse claims to be far ahead, and serves weights of his own."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from quorum_threads import Gate, lighthouse, make_manager, run_replicas

from ft_transport import HTTPTransport, TransportSettings
from manager import Manager
from manager.quorum.decision import Member
from manager.quorum.member_data import MemberTelling

pytestmark = [pytest.mark.usefixtures("quorum_ready")]

TIMEOUT = timedelta(seconds=20)
PLANTED = 666.0


def _transport(token: str | None) -> HTTPTransport[Any]:
    settings = TransportSettings(host="127.0.0.1", advertise="127.0.0.1", token=token)
    return HTTPTransport(TIMEOUT, settings=settings)


@contextmanager
def an_attacker(address: str) -> Any:
    """Asks for every quorum at step 1000, with the address of a server that has no token and serves planted weights."""
    from torchft.coordination import LighthouseClient

    transport = _transport(None)
    transport.send_checkpoint([], 1000, {"user": {"model": {"weight": torch.full((4,), PLANTED)}}}, TIMEOUT)
    member = Member(
        replica_id="evil:1", step=1000, lineage="evil", store_address="127.0.0.1:9", addresses=(transport.metadata(),)
    )
    telling = MemberTelling(None)
    over = threading.Event()
    num_asked = 0

    def ask() -> None:
        nonlocal num_asked
        client = LighthouseClient(address, TIMEOUT)
        while not over.is_set():
            with suppress(RuntimeError, TimeoutError):
                client.heartbeat("evil:1")
                client.quorum(
                    replica_id="evil:1",
                    timeout=timedelta(seconds=1),
                    address=member.addresses[0],
                    store_address=member.store_address,
                    step=1000,
                    world_size=1,
                    shrink_only=False,
                    data=telling.data_of(member),
                )
                num_asked += 1

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield lambda: num_asked
    finally:
        over.set()
        thread.join()
        transport.shutdown()


def test_planted_weights_reach_nobody_and_the_job_trains_on() -> None:
    gate = Gate()

    def step(manager: Manager, weight: torch.Tensor) -> bool:
        manager.start_quorum()
        gradient = torch.ones(4)
        manager.allreduce(gradient).wait()
        if manager.should_commit():
            with manager.writing():
                weight += gradient
            return True
        return False

    def train(name: str, num_steps: int) -> list[tuple[bool, float]]:
        weight = torch.zeros(4)
        manager = make_manager(lighthouse_address, name, checkpoint_transport=_transport("right"), min_replica_size=2)
        manager.register_state_dict_fn("model", lambda state: weight.copy_(state["weight"]), lambda: {"weight": weight})
        try:
            outcomes = []
            for _ in range(num_steps):
                outcomes.append((step(manager, weight), float(weight[0])))
                if len(outcomes) == 2:
                    gate.open(name)
                    gate.wait("attacked")
            return outcomes
        finally:
            manager.shutdown()

    with lighthouse(min_replicas=2) as lighthouse_address:

        def attack() -> list[tuple[bool, float]]:
            gate.wait("a")
            gate.wait("b")
            with an_attacker(lighthouse_address) as num_asked:
                gate.open("attacked")
                gate.wait("over")
                assert num_asked() > 0
            return []

        def until_over(name: str) -> list[tuple[bool, float]]:
            try:
                return train(name, 6)
            finally:
                gate.open("over")

        first, second, _ = run_replicas(lambda: until_over("a"), lambda: until_over("b"), attack)
    for outcomes in (first, second):
        assert [is_committed for is_committed, _ in outcomes] == [True] * 6
        assert outcomes[-1][1] < PLANTED
    assert first == second
