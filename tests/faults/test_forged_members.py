"""Somebody who reaches the Lighthouse claims to be far ahead, and serves other weights, or waits for a token."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from quorum_threads import LONG_S, Gate, lighthouse, make_manager, run_replicas
from scripted_peer import Peer, scripted
from served_memory import until

from ft_transport import HTTPTransport, TransportSettings
from manager import Manager, ManagerError
from manager.quorum.members import SignedReports, read_status
from manager.quorum.reports import Member

pytestmark = [pytest.mark.usefixtures("quorum_ready")]

TIMEOUT = timedelta(seconds=20)
PLANTED = 666.0
STEP = 1000


def _transport(token: str | None) -> HTTPTransport[Any]:
    settings = TransportSettings(host="127.0.0.1", advertise="127.0.0.1", token=token)
    return HTTPTransport(TIMEOUT, settings=settings)


@contextmanager
def planted_weights() -> Iterator[tuple[str, list[str]]]:
    """The address of a server that asks nobody for a token, and what it has heard of tokens: nothing is recorded."""
    transport = _transport(None)
    transport.send_checkpoint([], STEP, {"user": {"model": {"weight": torch.full((4,), PLANTED)}}}, TIMEOUT)
    try:
        yield transport.metadata(), []
    finally:
        transport.shutdown()


@contextmanager
def listening() -> Iterator[tuple[str, list[str]]]:
    """The address of something that answers nothing of use, and what it was shown."""
    heard: list[str] = []

    def script(peer: Peer) -> None:
        while request := peer.request():
            heard.append(request)
            peer.send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    with scripted(script) as port:
        yield f"http://127.0.0.1:{port}/checkpoint/", heard


def ask_for_quorums(address: str, served_at: str, over: threading.Event, asked: threading.Event) -> None:
    """As a member whose words are well-formed and signed by nobody."""
    from torchft.coordination import LighthouseClient

    member = Member(replica_id="evil:1", step=STEP, lineage="evil", store_address="127.0.0.1:9", addresses=(served_at,))
    telling, client = SignedReports(None), LighthouseClient(address, TIMEOUT)
    while not over.is_set():
        with suppress(RuntimeError, TimeoutError):
            client.heartbeat("evil:1")
            client.quorum(
                replica_id="evil:1",
                timeout=timedelta(seconds=1),
                address=served_at,
                store_address=member.store_address,
                step=STEP,
                world_size=1,
                shrink_only=False,
                data=telling.data_of(member),
            )
            asked.set()


def run_this_package(address: str, _served_at: str, over: threading.Event, asked: threading.Event) -> None:
    """This package's own Manager, without the token."""
    while not over.is_set():
        weight = torch.full((4,), PLANTED)
        manager = make_manager(address, "evil", checkpoint_transport=_transport(None), min_replica_size=2)
        manager.register_state_dict_fn("model", lambda state: None, lambda weight=weight: {"weight": weight})
        manager.load_state_dict({**manager.state_dict(), "step": STEP})
        try:
            assert manager.current_step() == STEP
            manager.start_quorum(timeout=timedelta(seconds=1))
            manager.allreduce(torch.zeros(4)).wait()
            manager.should_commit()
        except ManagerError:
            asked.set()
        finally:
            manager.shutdown()


def is_there(address: str) -> bool:
    """Whether the Lighthouse waits for the attacker, so that no quorum is without it."""
    status = read_status(address, 1.0)
    return status is not None and any(name.startswith("evil") for name in status.alive)


@pytest.mark.parametrize(
    ("attack", "server"),
    [(ask_for_quorums, planted_weights), (ask_for_quorums, listening), (run_this_package, planted_weights)],
    ids=["weights", "token", "own manager"],
)
def test_planted_weights_reach_nobody_and_the_job_trains_on(
    attack: Callable[[str, str, threading.Event, threading.Event], None],
    server: Callable[[], AbstractContextManager[tuple[str, list[str]]]],
) -> None:
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

        def attack_them() -> list[tuple[bool, float]]:
            gate.wait("a")
            gate.wait("b")
            over, asked = threading.Event(), threading.Event()
            with server() as (served_at, heard), ThreadPoolExecutor(1) as pool:
                attacking = pool.submit(attack, lighthouse_address, served_at, over, asked)
                until(lambda: is_there(lighthouse_address))
                gate.open("attacked")
                gate.wait("over")
                over.set()
                attacking.result(LONG_S)
                assert asked.is_set()
                assert heard == []
            return []

        def until_over(name: str) -> list[tuple[bool, float]]:
            try:
                return train(name, 6)
            finally:
                gate.open("over")

        first, second, _ = run_replicas(lambda: until_over("a"), lambda: until_over("b"), attack_them)
    for outcomes in (first, second):
        assert [is_committed for is_committed, _ in outcomes] == [True] * 6
        assert outcomes[-1][1] < PLANTED
    assert first == second
