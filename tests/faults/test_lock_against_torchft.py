"""Faults that the lock of torchft has, each shown on torchft's own code and then absent here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch

from manager.errors import LockTimeoutError
from manager.state.lock import StateLock
from manager.state.optimizer_guard import StateObserver, attach_optimizers

pytest.importorskip("torchft")
from torchft.checkpointing._rwlock import RWLock
from torchft.manager import Manager

_LONG_S = 20.0


class _TorchftState:
    """As much of torchft's Manager as its two methods touch."""

    disallow = Manager.disallow_state_dict_read
    allow = Manager.allow_state_dict_read

    def __init__(self, timeout_s: float) -> None:
        self._state_dict_lock = RWLock(timeout=timeout_s)
        self._is_state_dict_read_allowed = True

    def acquire_read(self, what: str) -> None:
        self._state_dict_lock.r_acquire()

    def can_read(self) -> bool:
        return _elsewhere(self._state_dict_lock.r_acquire)

    def can_write(self) -> bool:
        return _elsewhere(self._state_dict_lock.w_acquire)


class _OurState(StateLock):
    def can_read(self) -> bool:
        return _elsewhere(lambda: self.acquire_read("probe", timedelta(milliseconds=100)).release())

    def can_write(self) -> bool:
        return _elsewhere(lambda: self.acquire_write("probe", timedelta(milliseconds=100)).release())


def _elsewhere(function: Callable[[], object]) -> bool:
    """Whether the function, on a thread of its own, got the lock."""
    outcome: list[bool] = []

    def run() -> None:
        try:
            function()
        except TimeoutError:
            outcome.append(False)
        else:
            outcome.append(True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_LONG_S)
    return outcome == [True]


def _make(kind: str) -> Any:
    return _TorchftState(0.1) if kind == "torchft" else _OurState(timeout=timedelta(milliseconds=100))


@contextmanager
def _overlapping_readers(read: Callable[[Callable[[], None]], None], num_readers: int) -> Iterator[None]:
    """Keep at least one reader in at any time, as far as the lock lets them."""
    stop = threading.Event()
    all_have_read = threading.Barrier(num_readers + 1)

    def work(index: int) -> None:
        # Different lengths, so that the readers do not fall into step.
        hold_s = 0.01 + 0.002 * index
        read(lambda: all_have_read.wait(_LONG_S) and None)
        while not stop.is_set():
            try:
                read(lambda: stop.wait(hold_s) and None)
            except TimeoutError:
                continue

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(num_readers)]
    for thread in threads:
        thread.start()
    try:
        all_have_read.wait(_LONG_S)
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(_LONG_S)


def _count_writes(write: Callable[[], None], seconds: float) -> int:
    num_writes = 0
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        try:
            write()
        except TimeoutError:
            continue
        num_writes += 1
    return num_writes


def test_writer_among_eight_overlapping_readers() -> None:
    theirs = RWLock(timeout=0.4)

    def read_theirs(body: Callable[[], None]) -> None:
        with theirs.r_lock():
            body()

    def write_theirs() -> None:
        theirs.w_acquire()
        theirs.w_release()

    with _overlapping_readers(read_theirs, 8):
        num_theirs = _count_writes(write_theirs, 1.2)

    ours = StateLock(timeout=timedelta(seconds=5))

    def read_ours(body: Callable[[], None]) -> None:
        with ours.read("snapshot"):
            body()

    with _overlapping_readers(read_ours, 8):
        num_ours = _count_writes(lambda: ours.acquire_write("optimizer step").release(), 1.2)

    assert num_theirs <= 1
    assert num_ours >= 10


@pytest.mark.parametrize("kind", ["torchft", "ours"])
def test_allow_after_a_disallow_that_timed_out(kind: str) -> None:
    state = _make(kind)
    # Another thread reads for longer than the deadline of the trainer.
    assert _elsewhere(lambda: setattr(state, "section", state.acquire_read("slow copy")))
    with pytest.raises(TimeoutError):
        state.disallow()
    state.allow()
    # The reader has not finished: nobody may write into what it copies.
    assert state.can_write() == (kind == "torchft")


@pytest.mark.parametrize("kind", ["torchft", "ours"])
def test_optimizer_step_that_raises(kind: str) -> None:
    state = _make(kind)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    if kind == "ours":
        attach_optimizers(state, [optimizer], StateObserver())
    # What LocalSGD and DiLoCo register.
    optimizer.register_step_pre_hook(lambda *_: state.disallow())
    optimizer.register_step_post_hook(lambda *_: state.allow())

    def fail() -> float:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(fail)
    assert state.can_read() == (kind == "ours")


def test_end_of_a_nested_write_section() -> None:
    theirs = _make("torchft")
    theirs.disallow()
    theirs.disallow()
    theirs.allow()
    assert theirs.can_read()

    ours = _make("ours")
    with ours.write("outer optimizer"):
        with ours.write("inner optimizer"):
            pass
        assert not ours.can_read()
    assert ours.can_read()


def test_timeout_says_who_holds_the_lock() -> None:
    theirs = _make("torchft")
    theirs.acquire_read("slow copy")
    with pytest.raises(TimeoutError) as caught:
        theirs.disallow()
    assert "slow copy" not in str(caught.value)

    ours = _make("ours")
    section = ours.acquire_read("slow copy", detached=True)
    with pytest.raises(LockTimeoutError, match="slow copy"):
        ours.disallow()
    section.release()
