"""Snapshots come and go while others fetch: what arrives is always one whole state (promise 1)."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from faulty_transports import (
    CHUNK_BYTES,
    STATE_BYTES,
    TIMEOUT,
    Net,
    blank,
    holds,
    is_poisoned,
    is_state,
    network,
    send_when_free,
    spread_out,
    state_of,
    transport,
)
from proxy import Link, cut, stall

from ft_transport import (
    DeadlineExceededError,
    FetchProgress,
    SnapshotLimitError,
    StepNotServedError,
    TransportError,
)

ONE_PLACE = {"max_snapshots": 1, "lease": timedelta(0), "stall_timeout": timedelta(seconds=5)}


class Publisher:
    """Replaces the snapshot from inside a fetch, as soon as the sender sees that its connections are gone."""

    def __init__(self, step: int, seed: int) -> None:
        self._step = step
        self._seed = seed
        self.done = threading.Event()
        self.net: Net

    def __call__(self, progress: FetchProgress) -> None:
        if self.done.is_set() or progress.done_bytes < STATE_BYTES // 4:
            return
        self.done.set()
        # Everything that the sender would wait for ends: all connections through the proxy are cut.
        self.net.proxy.cut_all()
        send_when_free(self.net.sender, self._step, state_of(self._seed))


@pytest.mark.parametrize("num_connections", [1, 3])
@pytest.mark.parametrize("step", [1, "latest"])
def test_a_fetch_whose_snapshot_is_replaced_starts_again(num_connections: int, step: Any) -> None:
    into = blank()
    # The same step with other numbers: only the id of the snapshot tells them apart.
    publisher = Publisher(step=1, seed=2)
    with network(num_connections, on_progress=publisher, sender=ONE_PLACE) as net:
        publisher.net = net
        # The buffers on the way could hold everything that the first attempt asks for.
        net.proxy.inject(stall(STATE_BYTES * 3 // 8 // num_connections), times=num_connections)
        received = net.fetch(step, into=into)
    assert publisher.done.is_set()
    assert received["seed"] == 2
    assert holds(into, 2)


@pytest.mark.parametrize("is_in_place", [True, False])
def test_what_came_before_is_not_relied_on_when_an_attempt_has_begun_to_overwrite_it(is_in_place: bool) -> None:
    base = {"w": torch.randn(CHUNK_BYTES // 4)}
    blank_one = {"w": torch.zeros(CHUNK_BYTES // 4)}
    into = blank_one if is_in_place else spread_out(blank_one)
    with network(1, sender=ONE_PLACE) as net:
        send_when_free(net.sender, 2, base)
        whole: Any = net.receiver.fetch(net.proxy.url, 2, into=into)
        send_when_free(net.sender, 3, {"w": base["w"] + 1})

        def replace(link: Link, data: bytes) -> bool:
            link.send(data[: CHUNK_BYTES // 2])
            net.proxy.cut_all()
            send_when_free(net.sender, 3, base)
            return False

        net.proxy.inject(replace)
        received = net.receiver.fetch(net.proxy.url, 3, into=into, known=whole)
        assert net.proxy.num_faulty == 1
    assert torch.equal(into["w"], base["w"])
    assert not received.differences(into)


def test_a_step_that_is_gone_leaves_poison_and_says_so() -> None:
    """The second attempt fails before a byte lands, and still the first one has touched the receiver's tensors."""
    into = blank()
    publisher = Publisher(step=2, seed=2)
    with network(2, on_progress=publisher, sender=ONE_PLACE) as net:
        publisher.net = net
        net.proxy.inject(stall(STATE_BYTES * 3 // 16), times=2)
        with pytest.raises(StepNotServedError) as caught:
            net.fetch(1, into=into)
    assert caught.value.served == (2,)
    assert caught.value.destination_touched
    assert is_poisoned(into)


def test_the_deadline_holds_for_all_attempts_together() -> None:
    into = blank()
    with network(1, sender=ONE_PLACE, max_failures=10_000) as net:
        net.proxy.inject(cut(CHUNK_BYTES // 2), times=10_000)
        with pytest.raises(DeadlineExceededError) as caught:
            net.fetch(1, into=into, timeout_s=0.6)
    assert caught.value.destination_touched
    assert is_poisoned(into)


def test_replacement_is_an_error_of_its_own() -> None:
    with network(1, sender=ONE_PLACE) as net:
        net.proxy.inject(lambda link, data: bool(link.send(_CONFLICT)), times=10_000)
        with pytest.raises(TransportError) as caught:
            net.fetch(1, timeout_s=0.5)
    # Each attempt began again, until the time was over.
    assert isinstance(caught.value, DeadlineExceededError)
    assert 4 < len(net.proxy.requests) < 40


_CONFLICT = b"HTTP/1.1 409 Conflict\r\nContent-Length: 0\r\n\r\n"


def test_many_receive_one_snapshot_while_the_sender_goes_on() -> None:
    num_receivers = 4
    steps = 20
    go = threading.Barrier(num_receivers + 1)
    with transport(max_snapshots=3, lease=timedelta(seconds=1)) as sender:
        sender.send_checkpoint([], 0, state_of(0), TIMEOUT)

        def fetch_all(_index: int) -> list[tuple[int, bool]]:
            fetched = []
            with transport(2) as receiver:
                into = blank()
                go.wait(30)
                for _ in range(4):
                    received = receiver.fetch(sender.metadata(), "latest", into=into)
                    fetched.append((received.step, is_state(received.state, received.step)))
            return fetched

        with ThreadPoolExecutor(num_receivers) as pool:
            running = [pool.submit(fetch_all, index) for index in range(num_receivers)]
            go.wait(30)
            published, refused = 0, 0
            while not all(future.done() for future in running):
                try:
                    sender.send_checkpoint([], published + 1, state_of((published + 1) % steps), TIMEOUT)
                    published += 1
                except SnapshotLimitError:
                    refused += 1
                    threading.Event().wait(0.005)
                if published + 1 == steps:
                    break
            fetched = [item for future in running for item in future.result()]
    assert len(fetched) == 4 * num_receivers
    assert all(whole for _, whole in fetched)
    assert published > 0


def test_while_all_places_are_being_fetched_a_snapshot_is_refused_and_nothing_breaks() -> None:
    refused: list[SnapshotLimitError] = []
    net: Net

    def refuse(_progress: FetchProgress) -> None:
        if not refused:
            with pytest.raises(SnapshotLimitError, match=r"at most 1 .*steps \[1\]") as caught:
                net.sender.send_checkpoint([], 2, state_of(2), TIMEOUT)
            refused.append(caught.value)

    with network(2, on_progress=refuse, sender=ONE_PLACE) as net:
        assert is_state(net.fetch(1), 1)
        assert refused[0].retryable
        assert net.sender.server.newest_step() == 1
        net.proxy.cut_all()
        send_when_free(net.sender, 2, state_of(2))
        assert is_state(net.fetch(2), 2)
