"""What a lock's waits and holds add up to."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from ft_transport.telemetry.metrics import Distribution
from manager import LockTimeoutError
from manager.state.lock import StateLock

_LONG_S = 20.0
_PAUSE_S = 0.05


def costs(lock: StateLock) -> dict[tuple[str, str], float]:
    """How many, and for how long, by name and kind."""
    found: dict[tuple[str, str], float] = {}
    for reading in lock.costs.readings():
        name, (kind,) = reading.name.removeprefix("lock_"), reading.labels
        if isinstance(reading.value, Distribution):
            found[f"{name}, sum", kind] = reading.value.total
            found[name, kind] = sum(reading.value.counts)
        else:
            found[name, kind] = reading.value
    return found


@pytest.fixture
def lock() -> StateLock:
    return StateLock(timeout=timedelta(seconds=_LONG_S))


def test_nested_sections_are_one_hold_whichever_ends_first(lock: StateLock) -> None:
    with lock.write("outer"), lock.write("inner"), lock.read("innermost"):
        pass
    first, second = lock.acquire_read("first"), lock.acquire_read("second")
    first.release()
    assert costs(lock)["hold_seconds", "read"] == 0
    second.release()
    shown = costs(lock)
    assert (shown["hold_seconds", "write"], shown["wait_seconds", "write"]) == (1, 1)
    assert (shown["hold_seconds", "read"], shown["wait_seconds", "read"]) == (1, 1)


def test_who_waits_and_who_holds_is_told_in_seconds(lock: StateLock) -> None:
    is_held = threading.Event()

    def hold() -> None:
        with lock.write("holding"):
            is_held.set()
            is_waiting.wait(_PAUSE_S)

    is_waiting = threading.Event()  # nobody sets it: its wait is the pause
    thread = threading.Thread(target=hold)
    thread.start()
    assert is_held.wait(_LONG_S)
    with lock.read("waiting"):
        pass
    thread.join(_LONG_S)
    shown = costs(lock)
    assert shown["hold_seconds, sum", "write"] >= _PAUSE_S
    assert 0 < shown["wait_seconds, sum", "read"] < _LONG_S
    assert shown["wait_seconds, sum", "write"] < _PAUSE_S


def test_who_gives_up_is_counted_and_has_not_waited_for_a_hold(lock: StateLock) -> None:
    def write() -> None:
        with pytest.raises(LockTimeoutError), lock.write("too late", timedelta(0)):
            pass

    with lock.read("reading"):
        thread = threading.Thread(target=write)
        thread.start()
        thread.join(_LONG_S)
    shown = costs(lock)
    assert shown["timeouts_total", "write"] == 1
    assert (shown["wait_seconds", "write"], shown["hold_seconds", "write"]) == (0, 0)


def test_every_hold_of_many_threads_is_counted(lock: StateLock) -> None:
    def use() -> None:
        for number in range(200):
            with lock.write("writing") if number % 4 == 0 else lock.read("reading"):
                pass

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_LONG_S)
    shown = costs(lock)
    for name in ("wait_seconds", "hold_seconds"):
        assert (shown[name, "write"], shown[name, "read"]) == (200, 600)
