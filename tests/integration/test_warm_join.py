"""A newcomer gets what seldom changes before its first quorum, while the others train. Real Lighthouse, gloo, HTTP."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from noted_fetches import Fetches
from quorum_threads import (
    LONG_S,
    TIMEOUT,
    Gate,
    Trainer,
    lighthouse,
    loopback_transport,
    make_manager,
    new_store,
    run_replicas,
)
from state_equality import exact
from torch.distributed import TCPStore
from transport_settings import settings_of

from ft_transport import HTTPTransport, Received, TransportError
from manager import guard_diloco
from manager.quorum.members import RunningMember, read_status

pytestmark = [pytest.mark.usefixtures("quorum_ready"), pytest.mark.timeout(120)]

WIDTH = 1200
RANK = 8
TOKEN = "a-token-of-the-job-long-enough-for-one"
PLANTED_STEP = 10**9
ADAPTER_BYTES = 2 * WIDTH * RANK * 4


class Replica(Trainer):
    """A frozen layer between the two halves of an adapter."""

    def __init__(self, address: str, name: str, *, seed: int, is_frozen: bool = True, **keywords: Any) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.base = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator), requires_grad=not is_frozen)
        down = torch.nn.Parameter(torch.randn(RANK, WIDTH, generator=generator))
        up = torch.nn.Parameter(torch.randn(WIDTH, RANK, generator=generator))
        model = torch.nn.ParameterList([down, self.base, up])
        optimizer = torch.optim.AdamW([each for each in model if each.requires_grad], lr=1e-2)
        self.transport = keywords.pop("transport", None) or loopback_transport()
        super().__init__(
            address, name, model, optimizer, is_stable=True, checkpoint_transport=self.transport, **keywords
        )
        self.fetches = Fetches(self.transport)

    def backward(self) -> None:
        for parameter in self.model:
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, 0.1)

    def state(self) -> Any:
        return exact(self.manager.replica_state())


class Training:
    """Replicas that train on threads of their own until a common step."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.stores: list[TCPStore] = []  # of replicas with several ranks; they end with their last reference
        self._replicas: list[Replica | LocalReplica] = []
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []
        self._last_step: int | None = None

    def run(self, replica: Replica | LocalReplica, name: str) -> None:
        """Have a replica step until `end`."""

        def train() -> None:
            try:
                while self._last_step is None or replica.manager.current_step() < self._last_step:
                    replica.step()
                    if replica.manager.current_step() >= 2:
                        self.gate.open(name)
            except BaseException as error:
                self._errors.append(error)
                self.gate.open(name)

        self._replicas.append(replica)
        thread = threading.Thread(target=train)
        self._threads.append(thread)
        thread.start()

    def begin(self, replica: Replica | LocalReplica, name: str) -> None:
        """Have a replica step until `end`, and return when it has made two steps."""
        self.run(replica, name)
        self.gate.wait(name)

    def end(self) -> list[Any]:
        """Let all of them reach a common step. Returns their states."""
        self._last_step = max(replica.manager.current_step() for replica in self._replicas) + 3
        for thread in self._threads:
            thread.join(LONG_S)
        assert not self._errors
        return [replica.state() for replica in self._replicas]

    def close(self) -> None:
        self._last_step = 0
        for replica in self._replicas:
            replica.manager.shutdown(wait=False)
        for thread in self._threads:
            thread.join(LONG_S)
        self.stores.clear()


@pytest.fixture
def training(address: str) -> Iterator[Training]:
    made = Training()
    yield made
    made.close()


def joined(training: Training, address: str, **keywords: Any) -> Replica:
    """A newcomer, after its first committed step beside the one that trains."""
    training.begin(Replica(address, "trains", seed=1, is_frozen=keywords.get("is_frozen", True)), "trains")
    newcomer = Replica(address, "joins", seed=2, **keywords)
    training.begin(newcomer, "joins")
    return newcomer


def test_in_the_quorum_a_newcomer_fetches_no_more_than_what_steps_change(training: Training, address: str) -> None:
    newcomer = joined(training, address)
    first, second = training.end()
    assert first == second
    assert [received.num_bytes_fetched for received in newcomer.fetches.before] == [
        WIDTH * WIDTH * 4 + 3 * ADAPTER_BYTES + 2 * 4
    ]
    (healed,) = newcomer.fetches.in_quorum
    assert healed.num_bytes_fetched is not None
    assert 3 * ADAPTER_BYTES <= healed.num_bytes_fetched <= 1.02 * 3 * ADAPTER_BYTES


def test_nothing_is_asked_for_where_it_would_not_help(training: Training, address: str) -> None:
    newcomer = joined(training, address, is_frozen=False)
    first, second = training.end()
    assert first == second
    assert not newcomer.fetches.before
    assert len(newcomer.fetches.in_quorum) == 1


def ranks_of(training: Training, address: str, name: str, *, seed: int) -> list[Replica]:
    """The two ranks of a replica, each of which holds parameters of its own."""
    store = new_store()
    training.stores.append(store)
    return run_replicas(
        *(partial(Replica, address, name, seed=seed + rank, rank=rank, store=store) for rank in range(2))
    )


def test_each_rank_of_a_newcomer_gets_its_own_part_before_the_quorum(training: Training, address: str) -> None:
    for rank, replica in enumerate(ranks_of(training, address, "trains", seed=1)):
        training.run(replica, f"trains {rank}")
    for rank in range(2):
        training.gate.wait(f"trains {rank}")
    newcomers = ranks_of(training, address, "joins", seed=11)
    for rank, newcomer in enumerate(newcomers):
        training.run(newcomer, f"joins {rank}")
    for rank in range(2):
        training.gate.wait(f"joins {rank}")
    *trained, first, second = training.end()
    assert [first, second] == trained
    assert first != second
    for newcomer in newcomers:
        (before,) = newcomer.fetches.before
        assert before.num_bytes_fetched == WIDTH * WIDTH * 4 + 3 * ADAPTER_BYTES + 2 * 4
        (healed,) = newcomer.fetches.in_quorum
        assert healed.num_bytes_fetched is not None
        assert healed.num_bytes_fetched <= 1.02 * 3 * ADAPTER_BYTES


def test_replicas_that_all_start_ask_nobody_before_the_quorum(training: Training) -> None:
    with lighthouse(min_replicas=2) as address:
        replicas = [Replica(address, f"replica_{seed}", seed=seed, min_replica_size=2) for seed in (1, 2)]
        for replica in replicas:
            training.run(replica, replica.manager.replica_id())
        for replica in replicas:
            training.gate.wait(replica.manager.replica_id())
        first, second = training.end()
        assert first == second
        assert not any(replica.fetches.before for replica in replicas)
        training.close()


def test_nobody_waits_for_a_newcomer_that_has_not_asked_for_a_quorum(training: Training, address: str) -> None:
    training.begin(Replica(address, "trains", seed=1), "trains")
    newcomer = Replica(address, "joins", seed=2)
    try:
        status = read_status(address, LONG_S)
        assert status is not None
        assert [name.partition(":")[0] for name in status.alive] == ["trains"]
    finally:
        training.end()
        newcomer.manager.shutdown()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline_s


def wait_until_asked(address: str, num_replicas: int) -> None:
    """Waits until so many replicas wait for the quorum."""
    wait_for(lambda: (status := read_status(address, LONG_S)) is not None and status.num_asking == num_replicas)


@contextmanager
def after_the_first_fetch(replica: Replica, act: Callable[[], object]) -> Iterator[None]:
    """Calls ``act`` when what comes before the quorum has been received, loaded and compared."""
    decide = replica.manager._loop.membership.decide  # type: ignore[union-attr]
    is_first = True

    def noted(*arguments: Any, **keywords: Any) -> Any:
        nonlocal is_first
        if is_first:
            act()
        is_first = False
        return decide(*arguments, **keywords)

    replica.manager._loop.membership.decide = noted  # type: ignore[union-attr,method-assign]
    yield


def test_frozen_weights_that_something_has_changed_since_are_received_whole(
    training: Training, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    training.begin(Replica(address, "trains", seed=1), "trains")
    newcomer = Replica(address, "joins", seed=2)
    with after_the_first_fetch(newcomer, newcomer.base.data.neg_):
        training.begin(newcomer, "joins")
    first, second = training.end()
    assert first == second
    partly, whole = newcomer.fetches.in_quorum
    assert (partly.num_bytes_fetched or 0) < (whole.num_bytes_fetched or 0)
    assert "receiving the complete state again" in caplog.text


def test_weights_that_were_frozen_and_have_changed_at_the_source_arrive(training: Training, address: str) -> None:
    # One chunk has frozen weights alone.
    settings = settings_of(host="127.0.0.1", advertise="127.0.0.1", chunk_bytes=1 << 20)
    source = Replica(address, "trains", seed=1, transport=HTTPTransport(TIMEOUT, settings=settings))
    training.begin(source, "trains")
    newcomer = Replica(address, "joins", seed=2)

    def change() -> None:
        with source.manager.writing("the frozen weights"), torch.no_grad():
            source.base.neg_()

    with after_the_first_fetch(newcomer, change):
        training.begin(newcomer, "joins")
    first, second = training.end()
    assert first == second
    # The other chunks have trained weights as well: that they differ is found by comparing.
    assert [received.num_bytes_fetched for received in newcomer.fetches.in_quorum][1:] == [
        WIDTH * WIDTH * 4 + 3 * ADAPTER_BYTES + 2 * 4
    ]
    assert (newcomer.fetches.in_quorum[0].num_bytes_fetched or 0) > 3 << 20


def test_a_source_that_dies_midway_costs_no_more_than_what_it_has_sent(
    training: Training, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    training.begin(Replica(address, "trains", seed=1), "trains")
    newcomer = Replica(address, "joins", seed=2)
    fetch = newcomer.transport.fetch

    def dying(*arguments: Any, **keywords: Any) -> Received[Any]:
        if "max_bytes_per_s" not in keywords:
            return fetch(*arguments, **keywords)
        error = TransportError("expected the rest, and the peer is gone")
        error.destination_touched = True
        with torch.no_grad():
            newcomer.base.fill_(torch.nan)
        raise error

    newcomer.transport.fetch = dying  # type: ignore[method-assign]
    training.begin(newcomer, "joins")
    first, second = training.end()
    assert first == second
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("the preparation before the first quorum failed" in record.getMessage() for record in warnings) == 1


def test_newcomers_in_one_quorum_pass_on_to_each_other_what_they_have_received(
    training: Training, address: str
) -> None:
    source = Replica(address, "trains", seed=1, is_frozen=False)
    assert source.step()
    assert source.step()
    newcomers = [Replica(address, f"joins_{seed}", seed=seed, is_frozen=False) for seed in (2, 3)]
    for newcomer in newcomers:
        training.run(newcomer, newcomer.manager.replica_id())
    wait_until_asked(address, len(newcomers))
    # The Lighthouse answers them only together with the one that trains.
    training.run(source, "trains")
    for newcomer in newcomers:
        training.gate.wait(newcomer.manager.replica_id())
    first, *others = training.end()
    assert others == [first, first]
    together = {newcomer.transport.metadata() for newcomer in newcomers}
    assert [set(newcomer.fetches.relays) for newcomer in newcomers] == [together, together]


class LocalReplica:
    """Trains for itself, but for a sync with the others every few steps; what is global alone is replicated."""

    def __init__(self, address: str, name: str, *, seed: int) -> None:
        from torchft.local_sgd import DiLoCo

        generator = torch.Generator().manual_seed(seed)
        self.model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        with torch.no_grad():
            self.model.weight.copy_(torch.randn(WIDTH, WIDTH, generator=generator))
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
        outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self.transport = loopback_transport()
        self.manager = make_manager(address, name, checkpoint_transport=self.transport, use_async_quorum=False)
        self.fetches = Fetches(self.transport)
        self.manager.attach(self.inner, every_commit=False)
        self.diloco = DiLoCo(self.manager, [self.model], self.inner, outer, sync_every=4)
        guard_diloco(self.manager, self.diloco)
        self.diloco.__enter__()

    def step(self) -> bool:
        self.inner.zero_grad()
        self.model(torch.ones(2, WIDTH)).square().mean().backward()
        self.inner.step()
        return True

    def state(self) -> Any:
        return exact(self.manager.replica_state())

    def num_arenas(self) -> int:
        """How many hold a copy of the state."""
        return self.transport.server._stager._pool.num_taken()


def test_what_is_global_is_fetched_between_two_syncs_and_nothing_in_the_quorum(
    training: Training, address: str
) -> None:
    source = LocalReplica(address, "trains", seed=1)
    while source.manager.current_step() < 2:
        source.step()
    newcomer = LocalReplica(address, "joins", seed=2)
    training.run(newcomer, "joins")
    # The next sync serves it; then the source makes no step before the newcomer has asked for the quorum.
    wait_for(lambda: source.manager._replica.snapshots._requests._wanted_after >= 0)  # type: ignore[union-attr]
    before = source.manager.current_step()
    while source.manager.current_step() == before:
        source.step()
    # Steps between two syncs leave alone what is being read.
    source.step()
    source.step()
    wait_until_asked(address, 1)
    assert source.num_arenas() == 0
    training.run(source, "trains")
    training.gate.wait("joins")
    first, second = training.end()
    assert first == second
    assert [received.step for received in newcomer.fetches.before] == [before + 1]
    assert not newcomer.fetches.in_quorum
    assert source.num_arenas() == 0


@pytest.mark.parametrize("named", [None, "http://a\0b/"])
def test_whom_the_page_names_falsely_a_newcomer_gets_nothing_from(
    training: Training, address: str, caplog: pytest.LogCaptureFixture, named: str | None
) -> None:
    trained = Replica(address, "trains", seed=1, transport=loopback_transport(token=TOKEN))
    training.begin(trained, "trains")
    newcomer = Replica(address, "joins", seed=2, transport=loopback_transport(token=TOKEN))
    stranger = loopback_transport()
    stranger.send_checkpoint([1], PLANTED_STEP, {**newcomer.manager.replica_state()}, TIMEOUT)
    told = RunningMember(replica_id="trains:1", step=PLANTED_STEP, addresses=(named or stranger.metadata(),))
    newcomer.manager._loop.membership.running_members = lambda: (told,)  # type: ignore[union-attr,method-assign]
    try:
        training.begin(newcomer, "joins")
        first, second = training.end()
    finally:
        stranger.shutdown()
    assert first == second
    assert not newcomer.fetches.before
    assert newcomer.manager.current_step() < PLANTED_STEP
    assert "the preparation before the first quorum failed" in caplog.text
    assert named or "PeerAuthenticationError" in caplog.text
