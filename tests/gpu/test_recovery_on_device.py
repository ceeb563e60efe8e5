"""Recovery onto a real device: what a replica holds is not sent again, and all comes back to the bit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import torch
from faulty_transports import CHUNK_BYTES, TIMEOUT, transport
from noted_fetches import Fetches
from quorum_threads import LONG_S, Gate, lighthouse, loopback_transport, make_manager
from state_equality import exact
from state_tools import on_host

from ft_transport import FetchProgress, HTTPTransport, Received, TransportError
from manager.quorum.healing import copied_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

NUM_LAYERS = 24
WIDTH = 512
RANK = 8
BASE_BYTES = NUM_LAYERS * WIDTH * WIDTH * 4
ADAPTER_BYTES = NUM_LAYERS * WIDTH * RANK * 4


def layers(seed: int, device: str = "cuda") -> dict[str, list[torch.Tensor]]:
    """Frozen weights, which do not depend on the seed, each with an adapter that does."""
    frozen, trained = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    return {
        f"{number:02}": [
            torch.randn(WIDTH, WIDTH, generator=frozen).to(device),
            torch.randn(WIDTH, RANK, generator=trained).to(device),
        ]
        for number in range(NUM_LAYERS)
    }


def is_same(state: Any, expected: Any) -> bool:
    return bool(exact(on_host(state)) == exact(on_host(expected)))


@pytest.fixture
def transports() -> Iterator[tuple[HTTPTransport[Any], HTTPTransport[Any]]]:
    with transport() as source, transport(4) as receiver:
        yield source, receiver


def test_of_a_state_on_the_device_only_chunks_that_differ_are_fetched(
    transports: tuple[HTTPTransport[Any], HTTPTransport[Any]],
) -> None:
    source, receiver = transports
    state, into = layers(1), layers(1)
    into["03"][0][WIDTH // 2] += 1
    versions = {key: tensors[0]._version for key, tensors in into.items()}
    source.send_checkpoint([], 1, state, TIMEOUT)
    received = receiver.fetch(source.metadata(), 1, into=into, known="into")
    assert is_same(into, state)
    assert received.state["03"][0] is into["03"][0]
    assert received.num_bytes_fetched in (CHUNK_BYTES, 2 * CHUNK_BYTES)
    assert [key for key in into if into[key][0]._version != versions[key]] == ["03"]


def test_of_a_state_that_came_before_only_adapters_are_fetched(
    transports: tuple[HTTPTransport[Any], HTTPTransport[Any]],
) -> None:
    source, receiver = transports
    into = layers(7)
    source.send_checkpoint([], 1, layers(1), TIMEOUT)
    whole: Received[Any] = receiver.fetch(source.metadata(), 1, into=into)
    state = layers(2)
    source.send_checkpoint([], 2, state, TIMEOUT)
    before = whole.but_for(lambda own: own.shape[-1] == RANK)
    received = receiver.fetch(source.metadata(), 2, into=into, known=before)
    assert received.num_bytes_fetched == ADAPTER_BYTES
    assert is_same(into, state)
    assert not received.differences(into)


@pytest.mark.parametrize("same_host", [True, False])
def test_several_receivers_pass_on_to_each_other_what_goes_to_the_device(same_host: bool) -> None:
    state = layers(1)
    with ExitStack() as held:
        source = held.enter_context(transport(same_host=same_host))
        receivers = [held.enter_context(transport(4, same_host=same_host)) for _ in range(3)]
        source.send_checkpoint([], 1, state, TIMEOUT)
        intos = [layers(7) for _ in receivers]
        relays = [each.metadata() for each in receivers]

        def fetch(number: int) -> Received[Any]:
            return receivers[number].fetch(source.metadata(), 1, into=intos[number], relays=relays)

        with ThreadPoolExecutor(3) as pool:
            everybody = list(pool.map(fetch, range(3)))
    assert all(is_same(into, state) for into in intos)
    assert all(each.state["00"][0] is into["00"][0] for each, into in zip(everybody, intos, strict=True))


def test_a_fetch_that_fails_late_leaves_no_part_of_the_state_on_the_device() -> None:
    def on_progress(progress: FetchProgress) -> None:
        if progress.done_bytes == progress.total_bytes:
            raise RuntimeError("fails at the end")

    into = layers(7)
    with transport() as source, transport(4, on_progress=on_progress) as receiver:
        source.send_checkpoint([], 1, layers(1), TIMEOUT)
        with pytest.raises(TransportError, match="fails at the end"):
            receiver.fetch(source.metadata(), 1, into=into)
    assert all(tensor.isnan().all() for tensors in into.values() for tensor in tensors)


class Replica:
    """A frozen model on the device with an adapter that is trained."""

    def __init__(self, address: str, name: str, *, seed: int) -> None:
        tensors = layers(seed)
        generator = torch.Generator().manual_seed(seed)
        self.base = [torch.nn.Parameter(base, requires_grad=False) for base, _ in tensors.values()]
        with torch.no_grad():
            for base in self.base:
                base.copy_(torch.randn(WIDTH, WIDTH, generator=generator))
        self.adapters = [torch.nn.Parameter(adapter) for _, adapter in tensors.values()]
        self.model = torch.nn.ParameterList([*self.base, *self.adapters])
        self.optimizer = torch.optim.AdamW(self.adapters, lr=1e-2, fused=True)
        self.transport = loopback_transport()
        self.fetches = Fetches(self.transport)
        self.manager = make_manager(address, name, checkpoint_transport=self.transport)
        self.manager.register("model", self.model, is_stable=True)
        self.manager.register("optimizer", self.optimizer)
        self.manager.attach(self.optimizer)

    def step(self) -> None:
        self.manager.start_quorum()
        for parameter in self.adapters:
            gradient = torch.full(parameter.shape, 0.1)
            self.manager.allreduce(gradient).wait()
            parameter.grad = gradient.cuda()
        if self.manager.should_commit():
            self.optimizer.step()


@pytest.mark.usefixtures("quorum_ready")
def test_a_newcomer_on_the_device_fetches_no_more_in_the_quorum_than_what_steps_change() -> None:
    gate, errors = Gate(), []
    last_step: int | None = None

    def train(replica: Replica, name: str) -> None:
        try:
            while last_step is None or replica.manager.current_step() < last_step:
                replica.step()
                if replica.manager.current_step() >= 2:
                    gate.open(name)
        except BaseException as error:
            errors.append(error)
            gate.open(name)

    with lighthouse() as address:
        replicas: list[Replica] = []
        threads: list[threading.Thread] = []
        for seed, name in enumerate(("trains", "joins"), start=1):
            replicas.append(Replica(address, name, seed=seed))
            threads.append(threading.Thread(target=train, args=(replicas[-1], name)))
            threads[-1].start()
            gate.wait(name)
        last_step = max(replica.manager.current_step() for replica in replicas) + 3
        for thread in threads:
            thread.join(LONG_S)
        try:
            assert not errors
            first, second = (on_host(replica.manager.replica_state()) for replica in replicas)
            assert exact(first) == exact(second)
        finally:
            for replica in replicas:
                replica.manager.shutdown(wait=False)
    fetches = replicas[1].fetches
    (before,), (healed,) = fetches.before, fetches.in_quorum
    assert before.num_bytes_fetched is not None
    assert before.num_bytes_fetched >= BASE_BYTES
    assert healed.num_bytes_fetched is not None
    assert 3 * ADAPTER_BYTES <= healed.num_bytes_fetched <= 1.02 * 3 * ADAPTER_BYTES


def test_memory_for_what_goes_to_the_device_is_made_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    state = layers(1)
    assert copied_bytes(state) == BASE_BYTES + ADAPTER_BYTES
    with transport() as source, transport(4) as receiver:
        source.send_checkpoint([], 1, state, TIMEOUT)
        receiver.prefault_receive(copied_bytes(state))
        taken: list[object] = []
        take = receiver._client.prefaulted.take
        monkeypatch.setattr(
            receiver._client.prefaulted, "take", lambda num: (taken.append(found := take(num)), found)[1]
        )
        into = layers(7)
        receiver.fetch(source.metadata(), 1, into=into, timeout=timedelta(seconds=LONG_S))
    assert is_same(into, state)
    assert None not in taken
    assert len(taken) == 1
