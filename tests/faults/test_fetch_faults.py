"""A source that dies, lies or stalls costs what was in flight, or leaves an error and no half state (promises 2, 6)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from faulty_transports import (
    CHUNK_BYTES,
    STATE_BYTES,
    blank,
    closed_port,
    fetching_threads,
    holds,
    is_poisoned,
    is_state,
    network,
    transport,
)
from programs import Program, run
from proxy import Fault, Link, corrupt, cut, lie, stall, trickle

from ft_transport import (
    DeadlineExceededError,
    FetchFailedError,
    FetchProgress,
    IntegrityError,
    PeerError,
    PeerProtocolError,
    PeerUnreachableError,
    TransportError,
    UnknownHostError,
)
from ft_transport.http.client import chunks, manifests
from ft_transport.runtime import threads

MIDDLE = STATE_BYTES // 2
HEADS_BYTES = 64 << 10  # the manifest and the heads of all answers take far less


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("num_connections", [1, 4])
def test_a_connection_cut_once_costs_what_was_in_flight(num_connections: int, reset: bool) -> None:
    into = blank()
    with network(num_connections) as net:
        # Inside the first request of the connection, and inside a chunk.
        net.proxy.inject(cut(CHUNK_BYTES * 3 // 2, reset=reset))
        assert is_state(net.fetch(into=into), 1)
        assert net.proxy.num_faulty == 1
        # Of a chunk that was cut nothing is kept; a reset may also drop what the receiver had not read yet.
        lost_bytes = (3 if reset else 1) * CHUNK_BYTES
        assert net.proxy.num_bytes <= STATE_BYTES + lost_bytes + HEADS_BYTES
    assert holds(into, 1)


def test_a_connection_that_is_cut_again_and_again_still_ends() -> None:
    with network(2, max_failures=3) as net:
        # Each delivers something, so none of these failures follow in a row.
        net.proxy.inject(cut(CHUNK_BYTES * 5 // 2), times=10)
        assert is_state(net.fetch(), 1)
        assert net.proxy.num_faulty == 10


@pytest.mark.parametrize("on", ["/full", "/metadata"])
def test_a_byte_changed_once_is_fetched_again(on: str) -> None:
    into = blank()
    with network(2) as net:
        net.proxy.inject(corrupt(900 if on == "/metadata" else 100_000), on=on)
        assert is_state(net.fetch(into=into), 1)
        assert net.proxy.num_faulty == 1


def test_bytes_changed_every_time_are_an_error_that_names_them() -> None:
    into = blank()
    with network(1, max_failures=3) as net:
        net.proxy.inject(corrupt(20_000), times=1000)
        with pytest.raises(FetchFailedError) as caught:
            net.fetch(into=into)
        peer = f"127.0.0.1:{net.proxy.port}"
    failures = caught.value.failures
    assert len(failures) == 3
    for failure in failures:
        assert isinstance(failure, IntegrityError)
        assert (failure.peer, failure.step, failure.chunk) == (peer, 1, 0)
        assert failure.expected != failure.actual
        for part in (peer, "step 1", "chunk 0", f"{failure.expected:016x}", f"{failure.actual:016x}"):
            assert part in str(caught.value)
    assert caught.value.destination_touched
    assert is_poisoned(into)


def test_without_verification_nobody_notices() -> None:
    """What turning it off means; and that the test above fails for the right reason."""
    with network(1, verify=False) as net:
        net.proxy.inject(corrupt(20_000), times=1000)
        assert not is_state(net.fetch(), 1)


def test_a_manifest_changed_every_time_is_an_error() -> None:
    into = blank()
    with network(1, max_failures=3) as net:
        net.proxy.inject(corrupt(900), on="/metadata", times=1000)
        with pytest.raises(IntegrityError, match="manifest") as caught:
            net.fetch(into=into)
        assert caught.value.peer == f"127.0.0.1:{net.proxy.port}"
        assert net.proxy.num_faulty == 3
    assert not caught.value.destination_touched
    assert not into["a"].any()  # not touched, so not poisoned either


@pytest.mark.parametrize(
    ("num_connections", "fault"),
    [(1, stall(MIDDLE // 2)), (3, trickle(MIDDLE // 2, pause_s=0.02))],
    ids=["stall", "trickle"],
)
def test_the_deadline_ends_a_fetch_that_does_not_end_by_itself(num_connections: int, fault: Fault) -> None:
    into = blank()
    with network(num_connections) as net:
        net.proxy.inject(fault, times=1000)
        started_s = time.monotonic()
        with pytest.raises(DeadlineExceededError, match=r"timed out with \d+ of \d+ bytes") as caught:
            net.fetch(into=into, timeout_s=1)
        assert 0.9 < time.monotonic() - started_s < 4
        assert caught.value.step == 1
        assert isinstance(caught.value, TimeoutError)
        assert fetching_threads() == []
    assert caught.value.destination_touched
    assert "overwritten with NaN" in str(caught.value)
    assert is_poisoned(into)


@pytest.mark.parametrize("fault", [stall(MIDDLE // 2), trickle(MIDDLE // 2, pause_s=0.02)], ids=["stall", "trickle"])
def test_a_connection_that_stalls_is_replaced_long_before_the_deadline(fault: Fault) -> None:
    with network(1, stall_timeout=timedelta(seconds=0.3), min_bytes_per_s=1e8) as net:
        net.proxy.inject(fault)
        started_s = time.monotonic()
        assert is_state(net.fetch(), 1)
        assert time.monotonic() - started_s < 10
        assert net.proxy.num_faulty == 1


def test_a_stalled_connection_holds_up_no_more_than_the_chunk_that_it_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if the sockets' buffers held one of these small chunks, so that more of them are worth taking over.
    monkeypatch.setattr(chunks, "_IN_FLIGHT_BYTES", CHUNK_BYTES)
    progress: list[FetchProgress] = []
    into = blank()
    with network(2, stall_timeout=timedelta(seconds=3), on_progress=progress.append) as net:
        net.proxy.inject(stall(CHUNK_BYTES * 3 // 2))
        assert is_state(net.fetch(into=into), 1)
        assert net.proxy.num_faulty == 1
    late = [entry for entry in progress if entry.elapsed_s > 3]
    assert late
    assert min(entry.done_bytes for entry in late) >= STATE_BYTES - 2 * CHUNK_BYTES


@pytest.mark.parametrize("fault", [stall(0), stall(300), trickle(0, pause_s=0.02)], ids=["silent", "cut", "trickle"])
def test_the_deadline_also_ends_the_wait_for_the_manifest(fault: Fault) -> None:
    with network(1) as net:
        net.proxy.inject(fault, on="/metadata", times=1000)
        started_s = time.monotonic()
        with pytest.raises(DeadlineExceededError, match="timed out"):
            net.fetch(timeout_s=0.5)
        assert time.monotonic() - started_s < 4


def test_when_the_peer_is_given_up_nobody_waits_for_a_connection_that_stalls() -> None:
    stalled = threading.Event()
    with network(2) as net:
        net.proxy.inject(stall(CHUNK_BYTES // 2, stalled))

        def refuse(link: Link, data: bytes) -> bool:
            assert stalled.wait(20)
            return lie(b"206 Partial", b"418 Teapot ")(link, data)

        net.proxy.inject(refuse, times=1000)
        started_s = time.monotonic()
        with pytest.raises(FetchFailedError, match="418"):
            net.fetch()
        assert time.monotonic() - started_s < 10
        assert fetching_threads() == []


@pytest.mark.parametrize(
    ("true", "false"),
    [
        (b"206 Partial", b"200 Partial"),
        (b"Content-Range: bytes ", b"Content-Range: bytes 9"),
        (b"Content-Range: ", b"X-Range: "),
        (b"Content-Length: ", b"Content-Length: 9"),
        (b"Content-Length: ", b"X-Length: "),
        (b"HTTP/1.1 ", b"FTP/1.1 "),
    ],
)
def test_an_answer_that_does_not_fit_the_question_is_refused(true: bytes, false: bytes) -> None:
    into = blank()
    with network(2) as net:
        net.proxy.inject(lie(true, false), times=1000)
        with pytest.raises(FetchFailedError) as caught:
            net.fetch(into=into, timeout_s=20)
    assert isinstance(caught.value.failures[-1], PeerProtocolError)
    # It was refused by its head: nothing landed.
    assert not caught.value.destination_touched
    assert not into["a"].any()


def test_a_closed_port_is_tried_until_the_deadline() -> None:
    into = blank()
    with transport() as receiver:
        port = closed_port()
        with pytest.raises(DeadlineExceededError, match=rf"timed out.*refused.*127\.0\.0\.1:{port}") as caught:
            receiver.recv_checkpoint(0, f"http://127.0.0.1:{port}/checkpoint/", 1, timedelta(seconds=0.4))
    assert caught.value.step == 1
    assert not into["a"].any()


def test_a_peer_that_is_not_there_is_told_of_long_before_the_deadline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(manifests, "_FIRST_WARNING_S", 0.2)
    # Bound, so that nobody else gets the port, and not listening.
    with socket.socket() as closed, transport(1) as receiver:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(DeadlineExceededError, match="refused"):
            receiver.fetch(f"http://127.0.0.1:{port}/checkpoint/", "latest", timeout=timedelta(seconds=1.5))
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    # After 0.2 and 0.8 s; the next would come after 3.2 s.
    assert 1 <= len(warnings) <= 2
    assert f"step latest from 127.0.0.1:{port} after 0." in warnings[0]
    assert "refused" in warnings[0]


def test_a_host_that_nobody_knows_is_given_up_and_one_that_could_not_be_asked_for_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(manifests, "_UNKNOWN_HOST_S", 0.3)
    reason = [socket.EAI_NONAME]

    def look_up(*_arguments: object, **_keywords: object) -> list[Any]:
        raise socket.gaierror(reason[0], "as the resolver says it")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with transport(1) as receiver:
        with pytest.raises(
            UnknownHostError, match=r"a host name that resolves, got 'trainer-7'.*peer trainer-7:80"
        ) as caught:
            receiver.fetch("http://trainer-7/checkpoint/", timeout=timedelta(seconds=60))
        assert not caught.value.retryable
        reason[0] = socket.EAI_AGAIN
        with pytest.raises(DeadlineExceededError, match="as the resolver says it"):
            receiver.fetch("http://trainer-7/checkpoint/", timeout=timedelta(seconds=1))


def test_no_time_at_all_is_a_timeout() -> None:
    with network() as net:
        for timeout_s in (0, -1):
            with pytest.raises(DeadlineExceededError, match="timed out"):
                net.fetch(timeout_s=timeout_s)


@contextmanager
def serving_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    script = Path(__file__).parents[1] / "workers" / "serving_process.py"
    process = Program([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate(timeout=20)


def test_a_peer_that_is_killed_in_the_middle_is_an_error() -> None:
    into = {"w": blank()["a"].new_zeros(16 << 20)}  # 64 MiB: more than all socket buffers hold
    with serving_process() as (process, url):

        def kill(progress: FetchProgress) -> None:
            if progress.done_bytes > progress.total_bytes // 8:
                process.kill()

        with transport(4, on_progress=kill) as receiver, pytest.raises(FetchFailedError) as caught:
            receiver.fetch(url, "latest", into=into)
    assert all(isinstance(failure, PeerUnreachableError) for failure in caught.value.failures)
    assert caught.value.failures[-1].peer in url
    assert caught.value.destination_touched
    assert into["w"].isnan().all()
    assert fetching_threads() == []


def test_a_peer_that_is_killed_is_missed_at_once_also_where_it_leaves_a_child() -> None:
    into = {"w": blank()["a"].new_zeros(16 << 20)}
    with serving_process() as (process, url):
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def fork_and_kill(progress: FetchProgress) -> None:
            if process.poll() is None and progress.done_bytes > progress.total_bytes // 8:
                print(file=stdin, flush=True)
                assert stdout.readline() == "forked\n"
                process.kill()
                process.wait()

        with transport(1, on_progress=fork_and_kill) as receiver, pytest.raises(FetchFailedError) as caught:
            receiver.fetch(url, "latest", into=into)
    # And neither that nothing came for a while, nor that somebody accepted the connection and said nothing.
    assert "closed the connection" in str(caught.value.failures[0]) or "reset" in str(caught.value.failures[0])
    assert all("refused" in str(failure) for failure in caught.value.failures[1:])
    assert len(caught.value.failures) > 1


@pytest.mark.parametrize("arguments", [["40"], ["3", "full"]], ids=["sending and receiving", "no descriptor left"])
def test_no_forked_child_is_left_a_socket(arguments: list[str]) -> None:
    script = Path(__file__).parents[1] / "workers" / "forking_process.py"
    command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", str(script), *arguments]
    done = run(command, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("0\n", "")


class Interrupted(BaseException):
    """As KeyboardInterrupt, and nothing that pytest itself would react to."""


def raising(error: BaseException, *, after: int) -> Callable[[FetchProgress], None]:
    def on_progress(progress: FetchProgress) -> None:
        if progress.done_bytes >= after:
            raise error

    return on_progress


@pytest.mark.parametrize("num_connections", [1, 3])
@pytest.mark.parametrize("after", [0, MIDDLE, STATE_BYTES])
def test_an_interruption_from_the_callback_ends_the_fetch(num_connections: int, after: int) -> None:
    into = blank()
    with network(num_connections, on_progress=raising(Interrupted(), after=after)) as net:
        with pytest.raises(Interrupted):
            net.fetch(into=into)
        assert fetching_threads() == []
        assert is_poisoned(into)


@pytest.mark.parametrize("error", [ZeroDivisionError("user's own"), PeerUnreachableError("looks like ours")])
@pytest.mark.parametrize("after", [0, STATE_BYTES])
def test_an_error_of_the_callback_is_no_failure_of_the_peer(error: Exception, after: int) -> None:
    into = blank()
    with network(3, on_progress=raising(error, after=after)) as net:
        with pytest.raises(TransportError, match="the receiver failed") as caught:
            net.fetch(into=into)
        assert fetching_threads() == []
    assert not isinstance(caught.value, (FetchFailedError, PeerError))
    assert caught.value.__cause__ is error
    assert is_poisoned(into)


def threads_inside_fetch() -> list[str]:
    """Those that could still write into the receiver's tensors, as opposed to those that are about to end."""
    frames = sys._current_frames()
    return [
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith("ft-transport-fetch")
        and any("_receive" in frame.f_code.co_name for frame, _ in traceback.walk_stack(frames.get(thread.ident or 0)))
    ]


def test_a_signal_right_behind_the_start_of_a_thread_ends_that_thread_too(monkeypatch: pytest.MonkeyPatch) -> None:
    into = blank()
    stalled, landed = threading.Event(), threading.Event()
    start = threads.start

    def started(thread: threading.Thread) -> None:
        start(thread)
        assert stalled.wait(20)
        assert landed.wait(20)
        raise Interrupted  # as a handler does that comes before the next line of the caller

    monkeypatch.setattr(threads, "start", started)
    with network(3, on_progress=lambda _: landed.set()) as net:
        net.proxy.inject(stall(MIDDLE // 4, stalled), times=1000)
        with pytest.raises(Interrupted):
            net.fetch(into=into)
        assert threads_inside_fetch() == []
    assert is_poisoned(into)


@pytest.mark.parametrize("num_signals", [1, 3])
@pytest.mark.parametrize("num_connections", [1, 3])
def test_a_signal_on_the_callers_thread_ends_all_threads_before_it_returns(
    num_connections: int, num_signals: int
) -> None:
    into = blank()
    stalled, landed = threading.Event(), threading.Event()

    def interrupt(*_args: object) -> None:
        raise Interrupted

    def send_signals() -> None:
        assert stalled.wait(20)
        assert landed.wait(20)
        for _ in range(num_signals):  # The later ones hit the clean-up.
            os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    sending = threading.Thread(target=send_signals)
    try:
        with network(num_connections, on_progress=lambda _: landed.set()) as net:
            net.proxy.inject(stall(MIDDLE // 4, stalled), times=1000)
            sending.start()
            started_s = time.monotonic()
            try:
                net.fetch(into=into)
                pytest.fail("it was interrupted")
            except Interrupted:
                left = threads_inside_fetch()
            finally:
                signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            assert time.monotonic() - started_s < 10
            assert left == []
            sending.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    # Later signals may have interrupted the poisoning, but nobody can have written after it.
    assert is_poisoned(into) or num_signals > 1
