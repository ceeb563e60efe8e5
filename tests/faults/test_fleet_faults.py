"""Many sources and many receivers: who dies, lies or differs costs bytes, and the others end with the exact state."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from certificates import issue
from encrypted_transports import tapped
from faulty_transports import (
    CHUNK_BYTES,
    STATE_BYTES,
    TIMEOUT,
    blank,
    closed_port,
    fetching_threads,
    holds,
    is_poisoned,
    is_state,
    port_of,
    state_of,
    transport,
)
from programs import Program
from proxy import Link, corrupt, cut, proxied, stall, throttle, trickle
from scripted_peer import Peer, answering, scripted

from ft_transport import (
    FetchFailedError,
    FetchProgress,
    HTTPTransport,
    PeerAuthenticationError,
    TransportError,
    state_digest,
)
from ft_transport.http.client import chunks, fetch_pool
from ft_transport.http.server import bodies
from ft_transport.telemetry.record import decode_record

WORKERS = Path(__file__).parents[1] / "workers"
TOKEN = "a-token-that-is-long-enough"


@contextmanager
def sources(number: int, *, seeds: Sequence[int] = (), **settings: Any) -> Iterator[list[HTTPTransport[Any]]]:
    """Replicas that hold the same state, or those of their seeds."""
    with ExitStack() as stack:
        made = [stack.enter_context(transport(**settings)) for _ in range(number)]
        for index, each in enumerate(made):
            each.send_checkpoint([], 1, state_of(seeds[index] if seeds else 1), TIMEOUT)
        yield made


@contextmanager
def receivers(number: int, *, records: Path | None = None, **settings: Any) -> Iterator[list[HTTPTransport[Any]]]:
    with ExitStack() as stack:
        made = []
        for index in range(number):
            recorded = {"records": records / str(index)} if records is not None else {}
            made.append(stack.enter_context(transport(4, **recorded, **settings)))
        yield made


def addresses(transports: Sequence[HTTPTransport[Any]]) -> list[str]:
    return [each.metadata() for each in transports]


def fetch_together(
    made: Sequence[HTTPTransport[Any]],
    sending: Sequence[str] | Sequence[list[str]],
    relays: Sequence[Sequence[str]] | None = None,
    **keywords: Any,
) -> list[Any]:
    """What each receives, or the error; all begin at one moment. Each may know the relays by other addresses.

    All ask all of ``sending``; where these are lists, each asks those of its own.
    """
    outcomes: list[Any] = [None] * len(made)
    start = threading.Barrier(len(made))

    def fetch(index: int) -> None:
        start.wait()
        try:
            own = sending[index] if isinstance(sending[0], list) else sending
            outcomes[index] = made[index].fetch(
                own, 1, into=blank(), relays=relays[index] if relays is not None else addresses(made), **keywords
            )
        except Exception as error:
            outcomes[index] = error

    threads = [threading.Thread(target=fetch, args=(index,)) for index in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not fetching_threads()
    return outcomes


def _relayed(records: Path, index: int) -> dict[int, int]:
    """How many bytes have come to a receiver from which other one, by its port."""
    (record,) = (decode_record(line) for line in (records / str(index)).read_bytes().splitlines())
    return {int(each.peer.rpartition(":")[2]): each.num_bytes for each in record.transfers if each.role == "relay"}


def check(outcomes: Sequence[Any]) -> None:
    for outcome in outcomes:
        assert not isinstance(outcome, Exception), outcome
        assert is_state(outcome.state, 1)


def test_several_sources_are_read_from_at_once() -> None:
    into = blank()
    with ExitStack() as stack:
        made = stack.enter_context(sources(3))
        taps = [stack.enter_context(tapped(port_of(each))) for each in made]
        receiver = stack.enter_context(transport(4))
        asked = [tap.address(of=each) for tap, each in zip(taps, made, strict=True)]
        assert is_state(receiver.fetch(asked, 1, into=into).state, 1)
        sent = [tap.proxy.num_bytes for tap in taps]
        assert min(sent) > STATE_BYTES // 32
        assert sum(sent) < STATE_BYTES * 1.05
    assert holds(into, 1)


def test_sources_that_prove_a_token_agree_on_digests_made_with_it() -> None:
    with sources(3, token=TOKEN) as made, transport(4, token=TOKEN) as receiver:
        assert is_state(receiver.fetch(addresses(made), 1, into=blank()).state, 1)


def test_receivers_pass_on_what_they_have() -> None:
    with sources(1) as (source,), tapped(port_of(source)) as tap, receivers(4) as made:
        check(fetch_together(made, [tap.address(of=source)]))
        # Four alone would take four times the state.
        assert tap.proxy.num_bytes < 1.5 * STATE_BYTES


def test_each_receiver_takes_all_but_its_own_block_from_the_one_before_it(tmp_path: Path) -> None:
    # Slow enough that all have begun before much has come.
    with sources(1, max_send_bytes_per_s=4 << 20) as (source,), receivers(4, records=tmp_path) as made:
        check(fetch_together(made, addresses([source])))
        relayed = [_relayed(tmp_path, index) for index in range(4)]
    assert [list(by_port.values()) for by_port in relayed] == [[pytest.approx(STATE_BYTES * 3 / 4, rel=0.02)]] * 4
    assert len({port for by_port in relayed for port in by_port}) == 4


def test_who_stands_behind_a_slow_receiver_takes_it_from_the_others(tmp_path: Path) -> None:
    with (
        sources(1, max_send_bytes_per_s=4 << 20) as (source,),
        receivers(4, records=tmp_path) as made,
        proxied(port_of(made[0])) as proxy,
    ):
        proxy.inject(trickle(STATE_BYTES // 8, pause_s=0.05), on="/relay", times=1000)
        through_proxy = [proxy.url, *addresses(made[1:])]
        began_s = time.monotonic()
        check(fetch_together(made, addresses([source]), [addresses(made), *[through_proxy] * 3]))
        assert time.monotonic() - began_s < 10
        assert proxy.num_faulty
        # One of them had the slow one before it.
        assert max(len(_relayed(tmp_path, index)) for index in range(1, 4)) >= 3


def test_a_relay_that_sends_what_was_not_asked_for_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    with sources(1) as (source,), receivers(3) as made:
        real = bodies.CHUNK_HEADER.pack
        liar = made[0].server.http.relays

        class Lying:
            size = bodies.CHUNK_HEADER.size

            @staticmethod
            def pack(start: int, furthest: int) -> bytes:
                return real(start + (CHUNK_BYTES * 1000 if liar.num_open else 0), furthest)

        monkeypatch.setattr(bodies, "CHUNK_HEADER", Lying)
        check(fetch_together(made, addresses([source])))


def test_a_receiver_of_another_job_gets_nothing_and_is_done_without(caplog: pytest.LogCaptureFixture) -> None:
    with sources(1, token=TOKEN) as (source,), receivers(2, token=TOKEN) as made, transport(token="another" * 3) as foe:
        everybody = [*addresses(made), foe.metadata()]
        check(fetch_together(made, addresses([source]), [everybody, everybody]))
        with pytest.raises((PeerAuthenticationError, FetchFailedError)):
            foe.fetch(addresses(made)[0], 1, relays=everybody)
    assert TOKEN not in caplog.text


def test_a_source_that_differs_is_named_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with sources(3, seeds=[1, 2, 1]) as made, transport(4) as receiver:
        with caplog.at_level(logging.WARNING, "ft_transport"):
            assert is_state(receiver.fetch(addresses(made), 1, into=blank()).state, 1)
        told = [record.getMessage() for record in caplog.records if "is left out" in record.getMessage()]
        assert len(told) == 1
        assert str(port_of(made[1])) in told[0]
        assert "step 1" in told[0]


def test_of_two_sources_that_differ_everybody_takes_the_same(caplog: pytest.LogCaptureFixture) -> None:
    with sources(2, seeds=[1, 2]) as made, receivers(2) as receiving:
        caplog.set_level(logging.WARNING)
        named = addresses(made)
        states = [
            each.fetch(order, 1, into=blank()).state
            for each, order in zip(receiving, (named, named[::-1]), strict=True)
        ]
        assert state_digest(states[0]) == state_digest(states[1])
        assert caplog.text.count("which 1 of 2 sources serve") == 2


def test_equal_sources_in_the_middle_of_a_replacement_of_the_token_are_said_to_digest_in_another_way(
    caplog: pytest.LogCaptureFixture,
) -> None:
    new = TOKEN[::-1]
    with sources(1, token=f"{TOKEN} {new}") as (old,), sources(2, token=f"{new} {TOKEN}") as changed:
        caplog.set_level(logging.WARNING)
        with transport(token=f"{new} {TOKEN}") as receiver:
            assert is_state(receiver.fetch(addresses([old, *changed]), 1, into=blank()).state, 1)
    (told,) = [record.getMessage() for record in caplog.records if "is left out" in record.getMessage()]
    assert "its digests are blake3-64 " in told


def test_a_source_of_an_earlier_step_is_left_out() -> None:
    with sources(2) as (behind, ahead), transport(4) as receiver:
        ahead.send_checkpoint([], 2, state_of(2), TIMEOUT)
        received = receiver.fetch(addresses([behind, ahead]), "latest", into=blank())
        assert received.step == 2
        assert is_state(received.state, 2)


def test_a_source_that_is_gone_from_the_start_costs_little(caplog: pytest.LogCaptureFixture) -> None:
    with sources(1) as (source,), transport(4) as receiver:
        gone = f"http://127.0.0.1:{closed_port()}/checkpoint/"
        began_s = time.monotonic()
        assert is_state(receiver.fetch([gone, source.metadata()], 1, into=blank()).state, 1)
        assert time.monotonic() - began_s < 5
    assert "is left out" in caplog.text


def test_without_any_source_the_error_names_each() -> None:
    gone = [f"http://127.0.0.1:{closed_port()}/checkpoint/" for _ in range(2)]
    with transport(4) as receiver, pytest.raises(FetchFailedError) as caught:
        receiver.fetch(gone, 1, into=blank(), timeout=timedelta(seconds=2))
    assert {failure.peer for failure in caught.value.failures} == {
        f"127.0.0.1:{url.split(':')[2].split('/')[0]}" for url in gone
    }


@pytest.mark.parametrize("fault", [cut(STATE_BYTES // 8, reset=True), stall(STATE_BYTES // 8)])
def test_one_of_two_sources_breaks_down_in_the_middle(fault: Callable[..., bool]) -> None:
    into = blank()
    with (
        sources(2) as (first, second),
        proxied(port_of(first)) as proxy,
        transport(2, stall_timeout=timedelta(seconds=1)) as receiver,
    ):
        proxy.inject(fault, on="/full", times=1000)
        assert is_state(receiver.fetch([proxy.url, second.metadata()], 1, into=into).state, 1)
        assert proxy.num_faulty
    assert holds(into, 1)


@pytest.mark.parametrize(
    "fault", [cut(STATE_BYTES // 32, reset=True), stall(STATE_BYTES // 32), corrupt(STATE_BYTES // 32)]
)
def test_a_relay_that_breaks_down_or_lies_is_done_without(
    fault: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_pool, "_RELAY_STALL_S", 1.0)
    with sources(1) as (source,), receivers(3) as made, proxied(port_of(made[0])) as proxy:
        proxy.inject(fault, on="/relay", times=1000)
        through_proxy = [proxy.url, *addresses(made[1:])]
        check(fetch_together(made, addresses([source]), [addresses(made), through_proxy, through_proxy]))
        assert proxy.num_faulty


def _lost_after(num_bytes: int) -> Callable[[Link, bytes], bool]:
    """A fault for one way to a source: what has passed on all its connections is so much, and nothing passes then."""
    left = [num_bytes]

    def fault(link: Link, data: bytes) -> bool:
        if left[0] <= 0:
            link.reset()
            return False
        left[0] -= len(data)
        link.send(data)
        return True

    return fault


@pytest.mark.parametrize("which", [0, 2])
def test_who_loses_its_sources_in_a_ring_gets_the_rest_from_the_others(which: int) -> None:
    with (
        sources(1, max_send_bytes_per_s=4 << 20) as (source,),
        proxied(port_of(source)) as proxy,
        receivers(3, max_failures=4) as made,
    ):
        proxy.inject(_lost_after(10 * CHUNK_BYTES), on="/full", times=10**6)
        made.sort(key=HTTPTransport.metadata)
        asked = [[proxy.url if index == which else source.metadata()] for index in range(3)]
        check(fetch_together(made, asked, timeout=timedelta(seconds=10)))
        assert proxy.num_faulty


def test_who_loses_its_sources_asks_who_has_the_rest_and_not_one_who_has_nothing() -> None:
    chunk_bytes = 256 << 10
    with (
        sources(1, chunk_bytes=chunk_bytes, max_send_bytes_per_s=4 << 20) as (source,),
        proxied(port_of(source)) as proxy,
        receivers(3, chunk_bytes=chunk_bytes, max_failures=4) as made,
    ):
        proxy.inject(_lost_after(3 * chunk_bytes), on="/full", times=10**6)
        made.sort(key=HTTPTransport.metadata)
        # The third one never begins.
        asked = [[proxy.url], [source.metadata()]]
        check(fetch_together(made[:2], asked, [addresses(made)] * 2, timeout=timedelta(seconds=20)))
        assert proxy.num_faulty


@pytest.mark.parametrize("number", [1, 2])
def test_a_relay_that_says_to_come_again_in_a_quarter_of_an_hour_is_done_without(number: int) -> None:
    refusal = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 999\r\nContent-Length: 2\r\n\r\n{}"
    with (
        sources(1, max_send_bytes_per_s=4 << 20) as (source,),
        receivers(number) as made,
        scripted(answering(refusal)) as port,
    ):
        relays = [*addresses(made), f"http://127.0.0.1:{port}/checkpoint/"]
        check(fetch_together(made, addresses([source]), [relays] * number, timeout=timedelta(seconds=15)))


def test_a_relay_that_does_not_hold_requests_is_not_asked_without_end() -> None:
    requests: list[str] = []

    def refuse(peer: Peer) -> None:
        while request := peer.request():
            requests.append(request)
            peer.send(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 0\r\nContent-Length: 2\r\n\r\n{}")

    with (
        sources(1, max_send_bytes_per_s=2 << 20) as (source,),
        receivers(1) as made,
        scripted(refuse) as port,
    ):
        relays = [*addresses(made), f"http://127.0.0.1:{port}/checkpoint/"]
        began_s = time.monotonic()
        check(fetch_together(made, addresses([source]), [relays]))
        assert 0 < len(requests) <= 2 + 10 * (time.monotonic() - began_s)


def test_a_relay_that_falls_silent_in_each_answer_is_left_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_pool, "_RELAY_STALL_S", 0.5)
    with sources(1) as (source,), receivers(2) as made, proxied(port_of(made[0])) as proxy:
        # Some of its chunks come with each request.
        proxy.inject(stall(3 * CHUNK_BYTES), on="/relay", times=1000)
        relays = [addresses(made), [proxy.url, made[1].metadata()]]
        check(fetch_together(made, addresses([source]), relays))
        assert 1 <= proxy.num_faulty <= 2  # It may be asked twice at one time.


def test_of_two_receivers_one_that_sends_far_too_slowly_is_not_waited_for() -> None:
    with sources(1) as (source,), receivers(2) as made, proxied(port_of(made[0])) as proxy:
        # Enough for one peer alone (`min_bytes_per_s`): its half would take 20 s.
        proxy.inject(throttle(STATE_BYTES / 40), on="/relay", times=1000)
        relays = [addresses(made), [proxy.url, made[1].metadata()]]
        began_s = time.monotonic()
        check(fetch_together(made, addresses([source]), relays))
        assert time.monotonic() - began_s < 8
        assert proxy.num_faulty >= 1


def test_all_sources_gone_in_the_middle_is_an_error_and_no_half_state(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each waits for the other's chunks.
    monkeypatch.setattr(chunks, "_RELAY_WAIT_S", 0.1)
    monkeypatch.setattr(chunks, "_LONGEST_PAUSE_S", 0.2)
    with ExitStack() as stack:
        (source,) = stack.enter_context(sources(1))
        begun = [threading.Event(), threading.Event()]

        def slowly(index: int, _progress: FetchProgress) -> None:
            begun[index].set()
            time.sleep(0.02)

        made = [
            stack.enter_context(receivers(1, on_progress=partial(slowly, index), max_failures=2))[0]
            for index in range(2)
        ]
        intos = [blank(), blank()]
        errors: list[BaseException] = []

        def fetch(index: int) -> None:
            try:
                made[index].fetch(
                    source.metadata(), 1, into=intos[index], relays=addresses(made), timeout=timedelta(seconds=60)
                )
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=fetch, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        assert all(each.wait(10) for each in begun)
        source.shutdown()
        for thread in threads:
            thread.join()
    assert [type(error) for error in errors] == [FetchFailedError, FetchFailedError]
    assert all(is_poisoned(into) for into in intos)


def test_what_is_passed_on_ends_when_the_memory_is_about_to_change() -> None:
    with sources(1) as (source,), receivers(2) as made:
        check(fetch_together(made, addresses([source])))
        relays = made[0].server.http.relays
        assert relays.num_open == 1
        made[0].server.materialize()
        assert relays.num_open == 0


def test_changed_memory_of_a_relay_is_found_by_its_digest() -> None:
    with sources(1) as (source,), receivers(2) as made:
        first = blank()
        made[0].fetch(source.metadata(), 1, into=first, relays=addresses(made))
        first["a"].fill_(7)
        first["b"].fill_(7)
        received = made[1].fetch(source.metadata(), 1, into=blank(), relays=addresses(made))
        assert is_state(received.state, 1)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_relay_whose_memory_was_freed_is_done_without(is_encrypted: bool, tmp_path: Path) -> None:
    tls = {"tls": issue(tmp_path / "peer").files} if is_encrypted else {}
    with sources(1, **tls) as (source,), receivers(2, **tls) as made:
        first = blank()
        made[0].fetch(source.metadata(), 1, into=first, relays=addresses(made))
        first["a"].untyped_storage().resize_(0)
        first["b"].untyped_storage().resize_(0)
        received = made[1].fetch(source.metadata(), 1, into=blank(), relays=addresses(made))
        assert is_state(received.state, 1)


@pytest.mark.parametrize("refused", ["ft-transport-ask_1", "ft-transport-fetch-1"])
def test_a_thread_that_the_system_refuses_is_an_error_that_names_it(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def start_unless_refused(thread: threading.Thread) -> None:
        if thread.name == refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_unless_refused)
    with sources(2) as made, transport(4) as receiver:
        with pytest.raises(TransportError, match=f"another thread \\({refused.partition('_')[0]}\\): can't start"):
            receiver.fetch(addresses(made), 1, into=blank())
        monkeypatch.undo()
        assert is_state(receiver.fetch(addresses(made), 1, into=blank()).state, 1)


def test_killed_relays_cost_the_others_nothing_but_bytes() -> None:
    num_bytes, number, num_killed = 128 * CHUNK_BYTES, 4, 2
    state = {"w": torch.arange(num_bytes // 4, dtype=torch.float32)}
    with transport() as source, ExitStack() as stack:
        source.send_checkpoint([], 5, state, TIMEOUT)
        programs = []
        for _ in range(number):
            program = Program(
                [sys.executable, str(WORKERS / "relaying_process.py"), str(num_bytes), "0.02", source.metadata()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(program)
            stack.callback(program.kill)
            programs.append(program)
        relays = [program.stdout.readline().strip() for program in programs]
        for program in programs:
            program.stdin.write(" ".join(relays) + "\n")
            program.stdin.flush()
        for program in programs:
            assert program.stdout.readline() == "begun\n"
        for program in programs[:num_killed]:
            program.kill()
        for program in programs[num_killed:]:
            assert json.loads(program.stdout.readline()) == {"digest": state_digest(state), "step": 5}
