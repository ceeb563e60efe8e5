"""A handler that raises anywhere in a condition, an event, a future or an executor leaves it usable by others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial

import pytest
from interruptions import at_every_place

from ft_transport.runtime.signal_safe import SafeCondition, SafeEvent, SafeFuture
from ft_transport.runtime.threads import SafeExecutor

LONG_S = 20.0


def on_another_thread(call: Callable[[], object]) -> None:
    """Returns when another thread has made the call; fails where it waits."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(LONG_S)
    assert not thread.is_alive(), "the lock is held for good"


def _locked(condition: threading.Condition) -> None:
    with condition:
        condition.notify_all()


def test_a_condition() -> None:
    condition = SafeCondition()
    at_every_place(partial(_locked, condition), lambda: on_another_thread(partial(_locked, condition)), at_least=2)


def test_the_standard_librarys_condition_keeps_its_lock() -> None:
    """Why all this; where this fails, it may be thrown away."""
    condition = threading.Condition(threading.Lock())

    def check() -> None:
        assert condition.acquire(timeout=0.2), "the lock is held for good"
        condition.release()

    with pytest.raises(AssertionError, match="for good"):
        at_every_place(partial(_locked, condition), check, at_least=2)


def test_a_wait_for_a_condition() -> None:
    condition = SafeCondition()

    def wait() -> None:
        with condition:
            condition.wait(0.001)

    at_every_place(wait, lambda: on_another_thread(partial(_locked, condition)), at_least=8)


@pytest.mark.parametrize("name", ["set", "is_set", "wait", "clear"])
def test_an_event(name: str) -> None:
    event = SafeEvent()
    call = partial(event.wait, 0.001) if name == "wait" else getattr(event, name)

    def check() -> None:
        on_another_thread(event.set)
        assert event.wait(LONG_S)
        event.clear()

    at_every_place(call, check, at_least=1)


def test_a_future() -> None:
    futures: list[Future[int]] = [SafeFuture()]

    def call() -> None:
        assert not futures[-1].done()
        with pytest.raises(FutureTimeoutError):
            futures[-1].result(0.001)

    def check() -> None:
        on_another_thread(partial(futures[-1].set_result, 3))
        assert futures[-1].result(LONG_S) == 3
        futures.append(SafeFuture())

    at_every_place(call, check, at_least=8)


def test_an_executor() -> None:
    executor = SafeExecutor(1, "test")
    assert executor.submit(int, "3").result(LONG_S) == 3

    def check() -> None:
        assert executor.submit(int, "4").result(LONG_S) == 4

    at_every_place(lambda: executor.submit(int, "5").result(LONG_S), check, at_least=8)
    executor.shutdown()
    with pytest.raises(RuntimeError, match="after the shutdown"):
        executor.submit(int)


def test_an_executor_that_nobody_refers_to_ends_its_threads_after_their_jobs() -> None:
    done: list[float] = []
    executor = SafeExecutor(2, "dropped")
    for _ in range(4):
        executor.submit(lambda: done.append(time.monotonic()))
    threads = list(executor._threads)
    del executor
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    assert len(done) == 4


def test_a_job_that_raises_says_so() -> None:
    executor = SafeExecutor(1, "test")
    with pytest.raises(ValueError, match="invalid literal"):
        executor.submit(int, "x").result(LONG_S)
    executor.shutdown()
