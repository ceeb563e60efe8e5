from __future__ import annotations

import logging
import threading

import pytest

from manager.stall_watch import StallWatch

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
    logger = logging.getLogger("manager.stall_watch")
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
    assert text.startswith("replica a step 3: waiting for b: nothing for 0.1 s") or "nothing for 0.0 s" in text
    assert " s; b is asleep; thread 'MainThread' is at:" in text
    assert text.count("thread '") == 1
    assert "test_a_long_wait_is_told_once" in text


def test_short_waits_are_not_told(told: Told) -> None:
    logger = logging.getLogger("manager.stall_watch")
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
