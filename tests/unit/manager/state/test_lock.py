"""What a user of the lock can rely on, apart from signals (tests/faults/test_lock_signals.py)."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from lock_holders import can_read, can_write, elsewhere

from manager.errors import (
    LockHolder,
    LockNotHeldError,
    LockOrderError,
    LockTimeoutError,
    ManagerError,
    RegistryError,
    StateTornError,
)
from manager.state import lock as lock_module
from manager.state.lock import StateLock

_SOON = timedelta(milliseconds=80)
_LONG_S = 20.0


@pytest.fixture
def lock() -> StateLock:
    return StateLock(timeout=timedelta(seconds=_LONG_S))


def _in_thread(function: Callable[[], Any], name: str = "other") -> Future[Any]:
    """Run a function on a thread of its own; the future has its outcome."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def test_write_excludes_readers_and_writers_and_read_only_writers(lock: StateLock) -> None:
    with lock.write("w"):
        assert not can_read(lock)
        assert not can_write(lock)
    with lock.read("r"):
        assert can_read(lock)
        assert not can_write(lock)
    assert can_write(lock)


def test_timeout_names_every_holder(lock: StateLock) -> None:
    section = _in_thread(lambda: lock.acquire_read("snapshot of step 12"), "snapshot-copy").result(_LONG_S)
    second = lock.acquire_read("a digest", detached=True)
    with pytest.raises(LockTimeoutError) as caught:
        lock.acquire_write("optimizer step", _SOON)
    error = caught.value
    assert isinstance(error, TimeoutError)
    assert isinstance(error, ManagerError)
    assert {(holder.kind, holder.what) for holder in error.holders} == {
        ("read", "snapshot of step 12"),
        ("read", "a digest"),
    }
    assert error.waited_s >= 0.08
    assert str(error).startswith("waited 0.1 s to write ('optimizer step'); the lock is held for reading by thread ")
    assert "by thread 'snapshot-copy' ('snapshot of step 12') for 0." in str(error)
    section.release()
    second.release()
    assert can_write(lock)


def test_timeouts_and_refusals_leave_nothing_behind(lock: StateLock, caplog: pytest.LogCaptureFixture) -> None:
    with lock.write("w"):
        for attempt in (lock.acquire_read, lock.acquire_write):
            with pytest.raises(LockTimeoutError):
                elsewhere(lambda attempt=attempt: attempt("x", _SOON))
        assert len(lock.holders()) == 1
    with lock.read("r"), pytest.raises(LockOrderError):
        lock.acquire_write("x")
    assert can_write(lock)
    assert can_read(lock)
    assert lock.holders() == ()
    assert caplog.text == "", "none is reported as dropped"


def test_default_deadline_applies() -> None:
    lock = StateLock(timeout=_SOON)
    with lock.write("w"), pytest.raises(LockTimeoutError):
        elsewhere(lambda: lock.acquire_read("x"))
    with pytest.raises(ValueError, match="at least 0"):
        StateLock(timeout=timedelta(seconds=-1))
    with pytest.raises(ValueError, match="at least 0"):
        lock.acquire_write("x", timedelta(seconds=-1))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_nested_sections_open_the_lock_only_when_the_last_closes(lock: StateLock, order: tuple[int, ...]) -> None:
    sections = [lock.acquire_write("first"), lock.acquire_write("second"), lock.acquire_read("third")]
    assert len(lock.holders()) == 3
    for index in order[:-1]:
        sections[index].release()
        assert not can_read(lock)
    assert len(lock.holders()) == 1
    elsewhere(sections[order[-1]].release)
    assert can_write(lock)
    assert not lock.write_owned()


def test_reads_nest_even_while_a_writer_waits(lock: StateLock) -> None:
    outer = lock.acquire_read("outer")
    writer = _in_thread(lambda: lock.acquire_write("writer").release())
    # Preferring writers, the lock refuses other readers from the moment that the writer waits.
    while can_read(lock):
        pass
    with lock.read("inner", _SOON):
        detached = lock.acquire_read("detached", _SOON, detached=True)
        outer.release()
        assert not writer.done()
    assert not writer.done()
    detached.release()
    writer.result(_LONG_S)


def test_writing_in_the_own_read_is_refused_at_once(lock: StateLock) -> None:
    with lock.read("snapshot of step 3"):
        with pytest.raises(LockOrderError, match=r"cannot write \('step'\).*'snapshot of step 3'") as caught:
            lock.acquire_write("step")
        assert [holder.what for holder in caught.value.holders] == ["snapshot of step 3"]
        with pytest.raises(LockOrderError):
            lock.disallow()
        assert lock.is_read_allowed
    with lock.write("step"):
        assert elsewhere(lock.write_owned) is False
        assert lock.write_owned()
    assert not lock.write_owned()


def test_detached_read_belongs_to_no_thread(lock: StateLock) -> None:
    section = lock.acquire_read("copy", detached=True)
    with pytest.raises(LockTimeoutError, match="'copy'"):
        lock.acquire_write("step", _SOON)
    elsewhere(section.release)
    with lock.write("step"), pytest.raises(LockOrderError, match="detached read"):
        lock.acquire_read("copy", detached=True)


def test_detached_read_outlives_the_read_it_was_opened_in(lock: StateLock) -> None:
    with lock.read("outer"):
        section = lock.acquire_read("copy", detached=True)
    with pytest.raises(LockTimeoutError):
        lock.acquire_write("step", _SOON)
    section.release()
    assert can_write(lock)


def test_second_release_is_refused_and_releases_nothing(lock: StateLock) -> None:
    section = lock.acquire_read("first")
    section.release()
    assert not section.is_open
    with lock.read("second"):
        with pytest.raises(LockNotHeldError, match="read section 'first'"):
            section.release()
        assert not can_write(lock)


def test_section_released_by_two_threads_is_released_once(lock: StateLock) -> None:
    with ThreadPoolExecutor(4) as pool:
        for _ in range(300):
            sections = [lock.acquire_write("outer"), lock.acquire_write("inner")]
            barrier = threading.Barrier(4)

            def release(index: int, sections: Any = sections, barrier: Any = barrier) -> bool:
                barrier.wait(_LONG_S)
                try:
                    sections[index % 2].release()
                except LockNotHeldError:
                    return False
                return True

            assert sorted(pool.map(release, range(4))) == [False, False, True, True]
            assert lock.holders() == ()
    assert can_write(lock)


def test_nesting_races_with_a_releaseelsewhere(lock: StateLock) -> None:
    with ThreadPoolExecutor(1) as pool:
        for _ in range(1000):
            outer = lock.acquire_write("outer")
            released = pool.submit(outer.release)
            with lock.write("inner"):
                released.result(_LONG_S)
                assert [holder.what for holder in lock.holders()] == ["inner"]
                assert len(lock.holders()) == 1
    assert can_write(lock)


def test_error_in_the_body_releases(lock: StateLock) -> None:
    with pytest.raises(KeyboardInterrupt), lock.write("w"):
        raise KeyboardInterrupt

    def release_and_fail() -> None:
        with lock.write("released in the body") as section:
            section.release()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        release_and_fail()
    assert can_write(lock)


def test_dropped_section_is_closed_even_while_others_wait(lock: StateLock, caplog: pytest.LogCaptureFixture) -> None:
    kept = [lock.acquire_write("forgotten")]
    waiting = _in_thread(lambda: lock.acquire_write("waiter").release())
    with caplog.at_level(logging.WARNING):
        kept.clear()
        waiting.result(_LONG_S)
    assert "'forgotten'" in caplog.text
    assert lock.holders() == ()


def test_releases_and_ended_waits_wake_who_waits(lock: StateLock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "_SLICE_S", 1000.0)
    for acquire in (lock.acquire_read, lock.acquire_write):
        held = lock.acquire_write("held")
        waiting = [_in_thread(lambda acquire=acquire: acquire("waiting").release()) for _ in range(2)]
        held.release()
        for each in waiting:
            each.result(_LONG_S)
    held = lock.acquire_read("held", detached=True)
    writer = _in_thread(lambda: lock.acquire_write("impatient", timedelta(milliseconds=500)))
    while can_read(lock):
        pass
    reader = _in_thread(lambda: lock.acquire_read("behind the writer").release())
    reader.result(_LONG_S)
    assert isinstance(writer.exception(_LONG_S), LockTimeoutError)
    held.release()


def _succeeds_in_child(function: Callable[[], object]) -> bool:
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.alarm(int(_LONG_S))
            status = 0 if function() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_child_keeps_the_sections_of_the_thread_that_forked_and_no_others(lock: StateLock) -> None:
    sections = [elsewhere(lambda: lock.acquire_read("elsewhere")), lock.acquire_read("copy", detached=True)]
    own = lock.acquire_read("own")

    def check() -> bool:
        assert [holder.what for holder in lock.holders()] == ["own"]
        assert not can_write(lock)
        own.release()
        return can_write(lock) and not any(section.is_open for section in sections)

    assert _succeeds_in_child(check)
    assert len(lock.holders()) == 3
    for section in (own, *sections):
        section.release()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_child_forked_in_the_midst_of_anything_has_a_free_lock(lock: StateLock) -> None:
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            lock.acquire_write("busy").release()

    busy = _in_thread(work)
    try:
        for _ in range(8):
            assert _succeeds_in_child(lambda: can_write(lock) and can_read(lock))
    finally:
        stop.set()
    busy.result(_LONG_S)


def test_disallow_and_allow_are_idempotent_and_for_any_thread() -> None:
    lock = StateLock(timeout=timedelta(0))
    lock.allow()
    elsewhere(lock.disallow)
    assert not lock.is_read_allowed
    lock.disallow()
    assert not can_read(lock)
    lock.allow()
    lock.allow()
    assert lock.is_read_allowed
    assert can_read(lock)


def test_failed_disallow_changes_nothing() -> None:
    lock = StateLock(timeout=_SOON)
    reader = elsewhere(lambda: lock.acquire_read("copy"))
    with pytest.raises(LockTimeoutError, match="'copy'"):
        lock.disallow()
    assert lock.is_read_allowed
    lock.allow()
    assert not can_write(lock)
    reader.release()
    assert can_write(lock)


def test_disallow_nests_in_a_write_section(lock: StateLock) -> None:
    with lock.write("step"):
        lock.disallow()
    assert not can_read(lock)
    with lock.write("step"):
        lock.allow()
        assert not can_read(lock)
    assert can_read(lock)


def test_two_disallows_at_once_both_return_when_the_lock_is_held(lock: StateLock) -> None:
    # Many times, so that both wait at some.
    for _ in range(20):
        reader = lock.acquire_read("copy", detached=True)
        started = threading.Barrier(3)

        def disallow(started: threading.Barrier = started) -> bool:
            started.wait(_LONG_S)
            lock.disallow()
            return can_read(lock)

        futures = [_in_thread(disallow) for _ in range(2)]
        started.wait(_LONG_S)
        while can_read(lock):
            pass
        assert not any(future.done() for future in futures)
        assert lock.is_read_allowed
        reader.release()
        assert [future.result(_LONG_S) for future in futures] == [False, False]
        assert len(lock.holders()) == 1
        lock.allow()
        assert can_write(lock)


def test_sections_since_a_mark_are_closed_and_no_others(lock: StateLock) -> None:
    outer = lock.acquire_write("outer")
    mark = lock.mark()
    inner = lock.acquire_write("inner")
    lock.disallow()
    lock.close_sections_opened_since(mark)
    assert [holder.what for holder in lock.holders()] == ["outer"]
    assert lock.is_read_allowed
    assert not inner.is_open
    lock.disallow()
    lock.close_sections_opened_since(lock.mark())
    assert not lock.is_read_allowed
    lock.allow()
    outer.release()
    mark = lock.mark()
    detached = lock.acquire_read("copy", detached=True)
    attached = lock.acquire_read("look")
    lock.close_sections_opened_since(mark)
    assert (detached.is_open, attached.is_open) == (True, False)
    detached.release()


def test_holders_tell_who_holds_what(lock: StateLock) -> None:
    assert lock.holders() == ()
    start_s = time.monotonic()
    with lock.write("step"):
        (holder,) = lock.holders()
    assert holder.kind == "write"
    assert holder.what == "step"
    assert holder.thread_name == threading.current_thread().name
    assert holder.thread_id == threading.get_ident()
    assert 0 <= holder.age_s <= time.monotonic() - start_s


def test_writer_is_not_starved_by_overlapping_readers(lock: StateLock) -> None:
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            with lock.read("r"):
                stop.wait(0.002)

    readers = [_in_thread(read) for _ in range(4)]
    try:
        for _ in range(20):
            lock.acquire_write("w", timedelta(seconds=5)).release()
    finally:
        stop.set()
    for reader in readers:
        reader.result(_LONG_S)


def test_many_threads_keep_the_state_consistent(lock: StateLock) -> None:
    state = [0, 0]

    def work(index: int) -> None:
        for turn in range(150):
            if (index + turn) % 3:
                with lock.read("r"), lock.read("nested"):
                    assert state[0] == state[1]
            else:
                with lock.write("w"), lock.write("nested"):
                    state[0] += 1
                    state[1] += 1

    for future in [_in_thread(lambda index=index: work(index)) for index in range(6)]:
        future.result(_LONG_S)
    assert state[0] == state[1] == 6 * 150 // 3


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_lock_cannot_be_copied(lock: StateLock, copied: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copied(lock)


_HOLDER = LockHolder(kind="read", what="copy", thread_name="t", thread_id=1, age_s=2.0)


@pytest.mark.parametrize(
    "error",
    [
        ManagerError("plain"),
        LockTimeoutError(wanted="write ('x')", waited_s=1.5, holders=(_HOLDER,)),
        LockOrderError(wanted="write ('x')", holders=(_HOLDER,)),
        LockNotHeldError(kind="read", what="x"),
        RegistryError("two of 'a'", keys=("a",)),
        StateTornError(step=7, reason="the source died"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_pickling(error: ManagerError) -> None:
    for twin in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)
    assert str(error)


def test_who_opens_a_write_section_is_announced_before_he_changes_anything() -> None:
    announced: list[tuple[str, int]] = []
    lock = StateLock(
        timeout=timedelta(seconds=_LONG_S),
        before_change=lambda change: announced.append((change, len(lock.holders()))),
    )
    with lock.write("outer"), lock.write("inner"):
        pass
    lock.acquire_write("step", stepping=object()).release()
    lock.disallow()
    lock.disallow()
    lock.allow()
    with lock.read("reading"):
        pass
    assert announced == [("other", 1), ("other", 2), ("step", 1), ("disallow", 1)]


@pytest.mark.parametrize(
    "open_section",
    [
        lambda lock: lock.write("change").__enter__(),
        lambda lock: lock.acquire_write("change"),
        lambda lock: lock.disallow(),
    ],
    ids=["with", "acquire", "disallow"],
)
def test_a_writer_whose_announcement_fails_holds_nothing(open_section: Callable[[StateLock], object]) -> None:
    def fail(_change: str) -> None:
        raise MemoryError

    lock = StateLock(timeout=timedelta(seconds=_LONG_S), before_change=fail)
    # What is caught keeps the section from being dropped, which would close it, too.
    with pytest.raises(MemoryError) as caught:
        open_section(lock)
    assert not lock.holders()
    assert lock.is_read_allowed
    assert can_read(lock)
    del caught
