"""A signal handler that raises may hit any instruction of the lock; the lock has to be whole afterwards."""

from __future__ import annotations

import itertools
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType

import pytest
from lock_holders import elsewhere

from manager.errors import LockTimeoutError
from manager.state.lock import StateLock

_ROUNDS = 2_000
_DEADLINE_S = 90.0
_SHORT = timedelta(seconds=5)
_CALLED_BY_LOCK = ("readerwriterlock", "threading", "contextlib")
_LOCK = ("manager.", "readerwriterlock")

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


@pytest.mark.parametrize("num_raises", [1, 4])
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
        for acquire in (lock.acquire_write, lock.acquire_read):
            elsewhere(lambda acquire=acquire: acquire("check", _SHORT).release())  # type: ignore[misc]
    assert lock.holders() == ()
    assert lock.is_read_allowed
    assert alarm.num_raised > _ROUNDS // 20


def _give_up(lock: StateLock) -> None:
    section = lock.acquire_read("signalled", detached=True)
    try:
        with suppress(LockTimeoutError):
            lock.acquire_write("impatient", timedelta(milliseconds=1))
    finally:
        section.release()


def _close_since_mark(lock: StateLock) -> None:
    mark = lock.mark()
    lock.acquire_write("signalled", stepping=object())
    lock.close_sections_opened_since(mark)


def _raise() -> None:
    raise _InterruptedError


class _Interruption:
    """Raises at the n-th place within the lock where a handler could, and may be once more, m calls later.

    Or does another thing, as a finalizer could.
    """

    def __init__(
        self, first: int, second: int, *, act: Callable[[], None] = _raise, act_again: Callable[[], None] = _raise
    ) -> None:
        self._num_left = {"first": first, "second": second}
        self._act = {"first": act, "second": act_again}
        self.has_raised = {"first": False, "second": False}

    def __enter__(self) -> _Interruption:
        self._previous = sys.gettrace(), sys.getprofile()
        sys.settrace(self._trace)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.setprofile(self._previous[1])
        sys.settrace(self._previous[0])

    def _profile(self, frame: FrameType, event: str, _argument: object) -> None:
        # Handlers run at the beginning of functions and after calls into C.
        if event in ("call", "c_return") and frame.f_globals["__name__"].startswith(_LOCK):
            self._count("first")

    def _trace(self, frame: FrameType, _event: str, _argument: object) -> None:
        if self.has_raised["first"] and frame.f_globals["__name__"].startswith(_LOCK):
            self._count("second")

    def _count(self, which: str) -> None:
        self._num_left[which] -= 1
        if self._num_left[which] == 0:
            self.has_raised[which] = True
            self._act[which]()


@pytest.mark.parametrize("operate", [_write, _read, _disallow_and_allow, _sections, _give_up, _close_since_mark])
def test_lock_is_whole_after_one_or_two_interruptions_at_every_place(operate: Callable[[StateLock], None]) -> None:
    num_places = 0
    with ThreadPoolExecutor(1) as pool:
        for first in itertools.count(1):
            for second in range(25):
                lock = StateLock(timeout=_SHORT)
                with suppress(_InterruptedError), _Interruption(first, second) as interruption:
                    operate(lock)
                lock.allow()
                pool.submit(lambda lock=lock: lock.acquire_write("check", timedelta(0)).release()).result()
                assert lock.holders() == ()
                assert lock.is_read_allowed
                if second and not interruption.has_raised["second"]:
                    break
            if not interruption.has_raised["first"]:
                break
            num_places += 1
    assert num_places > 20


@pytest.mark.parametrize("is_interrupted_first", [False, True])
def test_finalizer_may_release_another_section_at_every_place(is_interrupted_first: bool) -> None:
    with ThreadPoolExecutor(1) as pool:

        def can_write(lock: StateLock) -> bool:
            try:
                pool.submit(lambda: lock.acquire_write("check", timedelta(0)).release()).result(20)
            except LockTimeoutError:
                return False
            return True

        for first in itertools.count(1):
            for second in range(1, 25 if is_interrupted_first else 2):
                lock = StateLock(timeout=_SHORT)
                kept, other = (lock.acquire_read(what, detached=True) for what in ("kept", "other"))
                if is_interrupted_first:
                    interruption = _Interruption(first, second, act_again=kept.release)
                else:
                    interruption = _Interruption(first, 0, act=kept.release)
                with suppress(_InterruptedError), interruption:
                    lock.acquire_read("first").release()
                    lock.acquire_read("second").release()
                    with lock.read("open"):
                        assert not can_write(lock)
                if kept.is_open:
                    kept.release()
                assert not can_write(lock)
                other.release()
                assert lock.holders() == ()
                assert can_write(lock)
                if not interruption.has_raised["second" if is_interrupted_first else "first"]:
                    break
            if not interruption.has_raised["first"]:
                break
        assert first > 20


def test_interrupted_section_is_closed_while_the_error_is_handled() -> None:
    """Where a handler raises once: but in the first instruction of a release, which nothing can protect."""
    unprotected = {"release", "__exit__", "_close"}
    for first in itertools.count(1):
        lock = StateLock(timeout=_SHORT)
        interruption = _Interruption(first, 0)
        try:
            with interruption:
                _sections(lock)
                _write(lock)
        except _InterruptedError as error:
            where = [frame.name for frame in traceback.extract_tb(error.__traceback__) if "lock.py" in frame.filename]
            if where[-1] not in unprotected:
                assert lock.holders() == (), where
        if not interruption.has_raised["first"]:
            break
    assert first > 20


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
