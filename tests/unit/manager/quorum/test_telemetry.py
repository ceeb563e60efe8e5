from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from manager.quorum.telemetry import StallWatch

LONG_S = 20.0


class Told(logging.Handler):
    """Opens when something was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.event = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self.event.set()


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_long_wait_is_told_once_with_whom_it_waits_for_and_the_stack_of_its_thread(told: Told) -> None:
    logger = logging.getLogger("manager.quorum.telemetry")
    logger.addHandler(told)
    watch = StallWatch(0.05)
    try:
        with watch.waiting("replica a step 3: waiting for b", missing=lambda: "b is asleep"):
            assert told.event.wait(LONG_S)
            told.event.clear()
            assert not told.event.wait(0.3)
    finally:
        watch.close()
        logger.removeHandler(told)
    (text,) = told.texts
    assert re.match(r"replica a step 3: waiting for b for more than 0\.[01] s", text)
    assert " s; b is asleep; thread 'MainThread' is at:" in text
    assert text.count("thread '") == 1
    assert "test_a_long_wait_is_told_once" in text


def test_short_waits_are_not_told(told: Told) -> None:
    logger = logging.getLogger("manager.quorum.telemetry")
    logger.addHandler(told)
    watch = StallWatch(LONG_S)
    with watch.waiting("a"), watch.waiting("b"):
        pass
    watch.close()
    logger.removeHandler(told)
    assert not told.texts
    # After the end it watches no more, and does not fail either.
    with watch.waiting("c"):
        pass


class _HandlerError(Exception): ...


def _raise_at(place: int, enter: Callable[[], None]) -> bool:
    """Run ``enter``, and raise before the n-th bytecode of it that the watch runs, as a signal handler may."""
    left = place

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal left
        if frame.f_globals.get("__name__") not in ("manager.quorum.telemetry", "threading"):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise _HandlerError
        return trace

    sys.settrace(trace)
    try:
        enter()
    except _HandlerError:
        return True
    finally:
        sys.settrace(None)
    return False


def test_a_handler_that_raises_at_the_beginning_of_a_wait_keeps_no_other_thread_from_waiting() -> None:
    watch = StallWatch(100.0)

    def wait() -> None:
        with watch.waiting("anything"):
            pass

    _raise_at(1 << 30, wait)  # Python 3.12.1 traces no bytecode the first time
    place = 1
    while _raise_at(place, wait):
        place += 1
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(10)
        assert not waiting.is_alive(), f"interrupted before bytecode {place - 1}"
    assert place > 20
    watch.close()
