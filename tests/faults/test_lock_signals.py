"""A signal handler that raises may hit any instruction of the lock; the lock has to be whole afterwards."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType

import pytest

from manager.errors import LockTimeoutError
from manager.state.lock import StateLock

_ROUNDS = 2_000
_DEADLINE_S = 90.0
_SHORT = timedelta(seconds=5)
_CALLED_BY_LOCK = ("readerwriterlock", "threading", "contextlib")

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")


class _InterruptedError(Exception):
    """Raised by the handler."""


class _Alarm:
    """Raises at most ``num_raises`` times after it was armed, and only within the code of the lock."""

    def __init__(self) -> None:
        self.num_raises = 0
        self.num_raised = 0

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if self.num_raises and _is_within_lock(frame):
            self.num_raises -= 1
            self.num_raised += 1
            if self.num_raises:
                # Soon, so that it hits the handling of the first one; a periodic timer would nest the handlers.
                signal.setitimer(signal.ITIMER_REAL, 0.00002)
            raise _InterruptedError

    def arm(self, delay_s: float, num_raises: int) -> None:
        self.num_raises = num_raises
        signal.setitimer(signal.ITIMER_REAL, delay_s)

    def disarm(self) -> None:
        self.num_raises = 0
        signal.setitimer(signal.ITIMER_REAL, 0)


def _is_within_lock(frame: FrameType | None) -> bool:
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("manager."):
            return True
        # Python swallows what is raised in a callback of the garbage collector or of a weak reference.
        if not module.startswith(_CALLED_BY_LOCK):
            return False
        frame = frame.f_back
    return False


@pytest.fixture
def alarm() -> Iterator[_Alarm]:
    alarm = _Alarm()
    previous = signal.signal(signal.SIGALRM, alarm.handle)
    try:
        yield alarm
    finally:
        alarm.disarm()
        signal.signal(signal.SIGALRM, previous)


@contextmanager
def _contended(lock: StateLock) -> Iterator[list[int]]:
    """One thread that reads and one that writes, over and over; yields two numbers that are equal to any reader."""
    stop = threading.Event()
    state = [0, 0]
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            while not stop.is_set():
                if index:
                    with lock.write("background", _SHORT):
                        state[0] += 1
                        time.sleep(0)
                        state[1] += 1
                else:
                    with lock.read("background", _SHORT):
                        assert state[0] == state[1]
                time.sleep(0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in (0, 1)]
    for thread in threads:
        thread.start()
    try:
        yield state
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
    assert errors == []


def _write(lock: StateLock) -> None:
    with lock.write("signalled"), lock.write("nested"):
        pass


def _read(lock: StateLock) -> None:
    with lock.read("signalled"), lock.read("nested"):
        pass


def _disallow_and_allow(lock: StateLock) -> None:
    try:
        lock.disallow()
    finally:
        lock.allow()


def _sections(lock: StateLock) -> None:
    section = lock.acquire_write("signalled")
    section.release()
    section = lock.acquire_read("signalled", detached=True)
    section.release()


def _assert_whole(lock: StateLock) -> None:
    results: list[BaseException] = []

    def check() -> None:
        try:
            lock.acquire_write("check", _SHORT).release()
            lock.acquire_read("check", _SHORT).release()
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=check, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert results == []


@pytest.mark.parametrize("num_raises", [1, 2, 4])
@pytest.mark.parametrize("operate", [_write, _read, _disallow_and_allow, _sections])
def test_lock_is_whole_after_an_interruption_anywhere(
    alarm: _Alarm, operate: Callable[[StateLock], None], num_raises: int
) -> None:
    lock = StateLock(timeout=_SHORT)
    generator = random.Random(num_raises)
    deadline_s = time.monotonic() + _DEADLINE_S
    with _contended(lock) as state:
        for _ in range(_ROUNDS // 4):
            assert time.monotonic() < deadline_s
            # The longest lies well beyond one operation, so that some rounds are hit while they wait.
            delay_s = generator.choice([20e-6, 60e-6, 300e-6]) * (0.05 + generator.random())
            try:
                alarm.arm(delay_s, num_raises)
                until_s = time.monotonic() + delay_s
                while time.monotonic() < until_s:
                    operate(lock)
            except _InterruptedError:
                pass
            alarm.disarm()
            # The interrupted call may have been the allow.
            lock.allow()
            with lock.write("after", _SHORT):
                assert state[0] == state[1]
            with lock.read("after", _SHORT):
                assert state[0] == state[1]
            assert not lock.write_owned()
        _assert_whole(lock)
    assert lock.holders() == ()
    assert lock.is_read_allowed
    assert alarm.num_raised > _ROUNDS // 20


def test_wait_is_interrupted_at_once_and_leaves_the_others_waiting(alarm: _Alarm) -> None:
    lock = StateLock(timeout=timedelta(seconds=30))
    holder = lock.acquire_read("a long copy", detached=True)
    others: list[str] = []
    threads = [
        threading.Thread(target=lambda: (lock.acquire_write("other").release(), others.append("w")), daemon=True),
        threading.Thread(target=lambda: (lock.acquire_read("other").release(), others.append("r")), daemon=True),
    ]
    alarm.arm(0.2, 1)
    threads[0].start()
    threads[1].start()
    with pytest.raises(_InterruptedError):
        lock.acquire_write("signalled")
    # The copy goes on after the rebuild, so that nobody else may write yet.
    assert [entry.what for entry in lock.holders() if entry.kind == "read" and entry.what != "other"] == ["a long copy"]
    with pytest.raises(LockTimeoutError, match="a long copy"):
        lock.acquire_write("too early", timedelta(milliseconds=100))
    assert "w" not in others
    holder.release()
    for thread in threads:
        thread.join(20)
    assert sorted(others) == ["r", "w"]
    assert lock.holders() == ()
