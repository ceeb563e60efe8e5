"""A signal handler that raises while the training thread waits for threads of its own: the wait ends with what the
handler raised, and the next one is right.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from types import FrameType

import pytest
import torch
from faulty_transports import closed_port, holds, network, state_of
from interruptions import HandlerError, Interruption, at_every_place
from served_memory import until

from ft_transport.runtime.signal_safe import SafeThread
from ft_transport.runtime.threads import SafeExecutor, outcome_of
from manager.quorum.healing import _listening

# Python swallows what is raised in a callback of a weak reference, and closes the sockets of a call that was left.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

NUM_ALARMS = int(os.environ.get("FT_TRANSPORT_INTERRUPTIONS", "10"))
"""By hand, some thousands."""
SECOND = timedelta(seconds=10)

Wait = tuple[Callable[[], object], Callable[[], None]]
"""A call that waits for threads, and a check that a call that nothing interrupts is right."""


def differences(held: ExitStack) -> Wait:
    net = held.enter_context(network())
    net.sender.send_checkpoint([], 2, {"weight": torch.zeros(3)}, SECOND)
    received = net.receiver.fetch(net.proxy.url, 2)
    other = {"weight": torch.ones(3)}

    def check() -> None:
        assert received.differences(received.state) == ()
        assert received.differences(other) == ("the bytes differ in weight",)

    return lambda: received.differences(other), check


def known_into(held: ExitStack) -> Wait:
    net = held.enter_context(network(2))
    into = state_of(1)

    def check() -> None:
        into["a"][0] += 1
        net.receiver.fetch(net.proxy.url, 1, into=into, known="into")
        assert holds(into, 1)

    return lambda: net.receiver.fetch(net.proxy.url, 1, into=into, known="into"), check


def healing(held: ExitStack) -> Wait:
    """Whether sources listen, asked by name: each look-up has a thread of its own."""
    net = held.enter_context(network())
    addresses = [f"http://localhost:{port}/checkpoint/" for port in (net.proxy.port, closed_port())]

    def check() -> None:
        assert _listening(addresses) == addresses[:1]

    return lambda: _listening(addresses), check


def call(held: ExitStack) -> Wait:
    return lambda: outcome_of(list), lambda: None


def start(held: ExitStack) -> Wait:
    """A thread that is interrupted as it is started runs, or never begins; nobody waits for it."""
    threads: list[SafeThread] = []

    def begin() -> None:
        threads.append(SafeThread(target=list))
        threads[-1].start()
        threads[-1].join()

    def check() -> None:
        while threads:
            threads.pop().join()

    return begin, check


def executor(held: ExitStack) -> Wait:
    def begin() -> None:
        with SafeExecutor(3, "ft-transport-test") as pool:
            assert list(pool.map(int, "1234")) == [1, 2, 3, 4]

    return begin, begin


def _num_places(call: Callable[[], object]) -> int:
    with Interruption(1 << 40) as interruption:
        call()
    return interruption.num_passed


@pytest.fixture(params=[differences, known_into, healing, call, start, executor])
def wait(request: pytest.FixtureRequest) -> Iterator[Wait]:
    before = threading.active_count()
    with ExitStack() as held:
        yield request.param(held)
    until(lambda: threading.active_count() <= before)


@pytest.mark.timeout(120 if NUM_ALARMS < 100 else 3600)
def test_it_ends_wherever_a_handler_raises(wait: Wait) -> None:
    interrupted, check = wait
    # A fetch has thousands of places, and each check takes as long as a fetch; by hand, all of them.
    every = 1 if NUM_ALARMS > 1000 else max(1, _num_places(interrupted) // 20)
    at_every_place(interrupted, check, at_least=10, every=every)


@pytest.mark.timeout(120 if NUM_ALARMS < 100 else 3600)
def test_it_ends_when_an_alarm_raises(wait: Wait) -> None:
    is_armed = False

    def interrupt(_signum: int, _frame: FrameType | None) -> None:
        # The system may deliver it late, on another thread.
        if is_armed:
            raise HandlerError

    interrupted, check = wait
    interrupted()
    start_s = time.monotonic()
    interrupted()
    length_s = time.monotonic() - start_s
    num_raised = 0
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        # Where the machine is busy, many an alarm comes when the call is over.
        while num_raised < NUM_ALARMS:
            try:
                is_armed = True
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, random.uniform(0, length_s)))
                interrupted()
                is_armed = False
            except HandlerError:
                num_raised += 1
                is_armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            check()
    finally:
        signal.signal(signal.SIGALRM, before)
