"""``fetch(known=PartialState())``: what had landed is not fetched again, and nothing wrong stays in it."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_transports import (
    CHUNK_BYTES,
    STATE_BYTES,
    TIMEOUT,
    blank,
    fetching_threads,
    holds,
    is_poisoned,
    is_state,
    network,
    port_of,
    send_when_free,
    spread_out,
    state_of,
    transport,
)
from interruptions import HandlerError, Interruption
from programs import Program
from proxy import Proxy, cut, proxied, stall

from ft_transport import (
    ConfigurationError,
    FetchFailedError,
    FetchProgress,
    FetchTimeout,
    PartialState,
    TransportError,
)
from ft_transport.http.peer_address import PeerAddress

SOURCE = Path(__file__).parents[1] / "workers" / "lending_process.py"
NUM_CHUNKS = STATE_BYTES // CHUNK_BYTES
MIDDLE_BYTES = STATE_BYTES // 2
HEADS_BYTES = 64 << 10
FAILING: Any = {"max_failures": 2}


@contextmanager
def source() -> Iterator[tuple[Program, Proxy]]:
    """A process that serves `state_of(1)`, and the way to it, which counts."""
    command = [sys.executable, str(SOURCE), "1", "127.0.0.1"]
    with Program(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        with proxied(PeerAddress.from_url(program.stdout.readline().strip()).port) as proxy:
            yield program, proxy
        program.kill()


def failed_fetch(net: Any, into: Any, at: int = MIDDLE_BYTES, **keywords: Any) -> TransportError:
    """A fetch over one connection that is cut for good behind so many bytes."""
    net.proxy.inject(cut(at))
    net.proxy.inject(cut(0), times=100)
    with pytest.raises(FetchFailedError) as caught:
        net.receiver.fetch(net.proxy.url, 1, into=into, **keywords)
    return caught.value


@pytest.mark.parametrize(("num_connections", "is_in_place"), [(1, True), (4, False)])
def test_a_killed_source_costs_what_was_in_flight(num_connections: int, is_in_place: bool) -> None:
    into = blank() if is_in_place else None
    with source() as (killed, first), source() as (_, second):

        def kill(_data: bytes) -> None:
            if first.num_bytes >= MIDDLE_BYTES:
                killed.kill()
                # What it has sent already must not suffice.
                first.cut_all()

        first.watch_answers = kill
        part = PartialState()
        with transport(num_connections, **FAILING) as receiver:
            with pytest.raises(FetchFailedError) as caught:
                receiver.fetch(first.url, 1, into=into, known=part)
            num_bytes = part.num_bytes
            # A reset also drops what the receiver had not read yet.
            assert MIDDLE_BYTES // 8 <= num_bytes < STATE_BYTES
            assert caught.value.destination_touched == is_in_place
            assert ("tensors hold part of the state" in str(caught.value)) == is_in_place
            received = receiver.fetch(second.url, 1, into=into, known=part)
        assert is_state(received.state, 1)
        assert into is None or received.state["a"] is into["a"]
        assert received.num_bytes_fetched == STATE_BYTES - num_bytes
        assert second.num_bytes <= STATE_BYTES - num_bytes + HEADS_BYTES


@pytest.mark.parametrize("is_in_place", [True, False])
def test_all_that_one_connection_brings_is_kept_but_the_chunk_it_broke_in(is_in_place: bool) -> None:
    into, part = blank() if is_in_place else spread_out(blank()), PartialState()
    with network(**FAILING) as net, transport() as other:
        error = failed_fetch(net, into, 20 * CHUNK_BYTES + CHUNK_BYTES // 2, known=part)
        assert error.destination_touched == is_in_place
        assert part.landed() == list(range(20))
        assert net.proxy.num_bytes <= 21 * CHUNK_BYTES + HEADS_BYTES
        other.send_checkpoint([], 1, state_of(1), TIMEOUT)
        received = net.receiver.fetch(other.metadata(), 1, into=into, known=part)
        assert received.num_bytes_fetched == (NUM_CHUNKS - 20) * CHUNK_BYTES
        assert is_state(received.state, 1)
        assert holds(into, 1)


@pytest.mark.parametrize("is_in_place", [True, False])
def test_what_the_receiver_had_and_what_landed_are_both_used(is_in_place: bool) -> None:
    own = state_of(1)
    for chunk in range(NUM_CHUNKS // 4, NUM_CHUNKS // 2):
        own["a"][(chunk + 1) * CHUNK_BYTES // 4 - 1] += 1
    into, part = own if is_in_place else spread_out(own), PartialState("into")
    with network(**FAILING) as net:
        failed_fetch(net, into, 5 * CHUNK_BYTES + CHUNK_BYTES // 2, known=part)
        assert len(part.landed()) == NUM_CHUNKS * 3 // 4 + 5
        received = net.receiver.fetch(net.sender.metadata(), 1, into=into, known=part)
        assert received.num_bytes_fetched == (NUM_CHUNKS // 4 - 5) * CHUNK_BYTES
        assert holds(into, 1)


def test_where_an_attempt_has_overwritten_what_came_before_all_of_it_is_digested() -> None:
    with network(**FAILING) as net:
        whole: Any = net.receiver.fetch(net.sender.metadata(), 1, into=(into := blank()))
        newer = state_of(1)
        newer["a"][0] += 1
        newer["a"][CHUNK_BYTES // 4] += 1
        net.sender.send_checkpoint([], 2, {**newer, "seed": 2}, TIMEOUT)
        part = PartialState(whole.but_for(lambda own: False))
        net.proxy.inject(cut(CHUNK_BYTES // 2))
        net.proxy.inject(cut(0), times=100)
        with pytest.raises(FetchFailedError) as caught:
            net.receiver.fetch(net.proxy.url, 2, into=into, known=part)
        assert caught.value.destination_touched
        received = net.receiver.fetch(net.sender.metadata(), 2, into=into, known=part)
        assert received.num_bytes_fetched == 2 * CHUNK_BYTES
        assert torch.equal(into["a"], newer["a"])
        assert not received.differences({**into, "seed": 2})


def test_of_another_state_the_chunks_that_differ_are_fetched_too() -> None:
    with network(**FAILING) as net, transport() as other:
        failed_fetch(net, into := blank(), known=(part := PartialState()))
        landed = set(part.landed())
        newer = state_of(1)
        for chunk in (3, 7, NUM_CHUNKS - 2):
            chunk_of_element = chunk * CHUNK_BYTES // 4
            (newer["a"] if chunk < NUM_CHUNKS // 2 else newer["b"])[chunk_of_element % newer["a"].numel()] += 1
        assert {3, 7} < landed
        assert NUM_CHUNKS - 2 not in landed
        other.send_checkpoint([], 2, {**newer, "seed": 2}, TIMEOUT)
        received = net.receiver.fetch(other.metadata(), 2, into=into, known=part)
        assert received.num_bytes_fetched == (NUM_CHUNKS - len(landed) + 2) * CHUNK_BYTES
        assert received.step == received.state["seed"] == 2
        assert torch.equal(into["a"], newer["a"])
        assert torch.equal(into["b"], newer["b"])


@pytest.mark.parametrize("is_in_place", [True, False])
def test_a_state_of_other_tensors_begins_anew(is_in_place: bool) -> None:
    with network(**FAILING) as net, transport() as other:
        into = blank() if is_in_place else None
        failed_fetch(net, into, known=(part := PartialState()))
        other.send_checkpoint([], 2, {"a": state_of(2)["a"], "c": torch.ones(5)}, TIMEOUT)
        received = net.receiver.fetch(other.metadata(), 2, into=into, known=part)
        assert torch.equal(received.state["a"], state_of(2)["a"])
        assert torch.equal(received.state["c"], torch.ones(5))
        # It belongs to the receiver and not to what came: no part of another state may be trained on.
        assert into is None or into["b"].isnan().all()


def test_whoever_used_the_tensors_all_the_same_loses_bandwidth_alone() -> None:
    with network(**FAILING) as net:
        failed_fetch(net, into := blank(), known=(part := PartialState()))
        num_landed = len(part.landed())
        into["a"][0] += 1
        net.proxy.inject(cut(1 << 40), times=100)
        received = net.receiver.fetch(net.sender.metadata(), 1, into=into, known=part)
        assert received.num_bytes_fetched == (NUM_CHUNKS - num_landed + 1) * CHUNK_BYTES
        assert is_state(received.state, 1)


def test_it_may_fail_again_and_again() -> None:
    into, part = blank(), PartialState()
    with network(**FAILING) as net:
        for number in range(1, 5):
            with proxied(port_of(net.sender)) as proxy:
                proxy.inject(cut(10 * CHUNK_BYTES + CHUNK_BYTES // 2))
                proxy.inject(cut(0), times=100)
                with pytest.raises(FetchFailedError):
                    net.receiver.fetch(proxy.url, 1, into=into, known=part)
                assert len(part.landed()) == 10 * number
        # No source answers: what had landed stays as it is.
        with pytest.raises(TransportError) as unreachable:
            net.receiver.fetch(
                proxy.url, 1, into=into, known=part, timeout=FetchTimeout(total=TIMEOUT, unreachable=0 * TIMEOUT)
            )
        assert len(part.landed()) == 40
        assert unreachable.value.destination_touched
        received = net.receiver.fetch(net.sender.metadata(), 1, into=into, known=part)
        assert received.num_bytes_fetched == (NUM_CHUNKS - 40) * CHUNK_BYTES
        assert holds(into, 1)


def test_a_snapshot_that_is_replaced_on_the_way_keeps_what_is_the_same() -> None:
    into, replaced = blank(), threading.Event()

    def replace(progress: FetchProgress) -> None:
        if progress.done_bytes < STATE_BYTES // 4 or replaced.is_set():
            return
        replaced.set()
        # The sender replaces what nobody receives any more.
        net.proxy.cut_all()
        send_when_free(net.sender, 3, {**state_of(1), "seed": 3})

    one_place = {"max_snapshots": 1, "stall_timeout": timedelta(seconds=5)}
    with network(on_progress=replace, sender=one_place) as net:
        net.proxy.inject(stall(MIDDLE_BYTES))
        received = net.receiver.fetch(net.proxy.url, into=into, known=PartialState())
        assert received.step == received.state["seed"] == 3
        assert received.num_bytes_fetched is not None
        assert MIDDLE_BYTES // 2 < received.num_bytes_fetched <= STATE_BYTES * 3 // 4
    assert holds(into, 1)


def test_giving_up_leaves_nothing_to_train_on() -> None:
    with network(**FAILING) as net:
        failed_fetch(net, into := blank(), known=(part := PartialState()))
        assert not into["a"].isnan().any()
        part.discard()
        assert is_poisoned(into)
        assert not part.num_bytes
        into["a"].fill_(1)
        part.discard()
        assert into["a"][0] == 1


def test_a_fetch_that_succeeds_empties_it() -> None:
    with network(**FAILING) as net:
        failed_fetch(net, into := blank(), known=(part := PartialState()))
        net.receiver.fetch(net.sender.metadata(), 1, into=into, known=part)
        assert part.landed() == []
        part.discard()
        assert holds(into, 1)
        assert net.receiver.fetch(net.sender.metadata(), 1, into=into, known=part).num_bytes_fetched == STATE_BYTES


def test_another_value_as_known_is_refused() -> None:
    with network() as net, pytest.raises(ConfigurationError, match=r'"into" or None as known, got str \'yes\''):
        net.receiver.fetch(net.sender.metadata(), 1, known="yes")  # type: ignore[arg-type]


def test_the_error_crosses_a_process_boundary() -> None:
    with network(**FAILING) as net:
        error = failed_fetch(net, blank(), known=PartialState())
        copy = pickle.loads(pickle.dumps(error))
    assert copy.destination_touched
    assert str(copy) == str(error)


# A handler that raises where a block ends leaves a socket to the garbage collector, which closes it and says so.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("at", [*range(1, 2400, 480), *range(2400, 12000, 4000)])
def test_wherever_it_is_interrupted_it_can_go_on(at: int) -> None:
    into, part = blank(), PartialState()
    with network(2) as net:
        with (
            suppress(HandlerError, TransportError),
            Interruption(at, modules=("ft_transport.",)) as interruption,
        ):
            net.receiver.fetch(net.proxy.url, 1, into=into, known=part)
        assert interruption.num_passed >= min(at, 2000)
        assert fetching_threads() == []
        received = net.receiver.fetch(net.proxy.url, 1, into=into, known=part)
        assert is_state(received.state, 1)
