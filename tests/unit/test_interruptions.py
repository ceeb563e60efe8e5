"""The harness that raises where a signal handler could, on each version of Python."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from interruptions import HandlerError, Interruption, at_every_place


def _harness_sees(source: str) -> tuple[list[object], Callable[[], None]]:
    """Code of a module of the package that no run has executed before; returns what it notes, and the function."""
    noted: list[object] = []
    scope = {"__name__": "manager.new", "noted": noted, "lock": threading.Lock()}
    exec(source, scope)
    function = scope["function"]
    assert callable(function)
    return noted, function


def test_the_first_run_of_a_function_has_its_places() -> None:
    noted, function = _harness_sees("def function():\n    noted.append(1)\n    noted.append(2)\n    noted.append(3)")
    with pytest.raises(HandlerError), Interruption(3):
        function()
    assert noted == [1, 2]


def test_every_place_is_reached_once() -> None:
    """At the start, after each call and at the end of each pass of the loop."""
    noted, function = _harness_sees("def function():\n    for each in range(3):\n        noted.append(each)")
    assert at_every_place(function, at_least=8) == 8
    # At the start and after `range` none; then, of each pass, after its call and at its end; and all in the last run.
    assert noted == [0, 0, 0, 1, 0, 1, 0, 1, 2, 0, 1, 2, 0, 1, 2]


def test_a_lock_is_never_left_taken_by_a_with() -> None:
    """Neither between taking it and the body, nor where the body raises, nor where it returns what a call returned."""
    _, function = _harness_sees(
        "def function():\n    try:\n        with lock: int('x')\n    except ValueError:\n        return returned()\n"
        "def returned():\n    with lock: return noted.append(1)"
    )
    lock = function.__globals__["lock"]
    at_every_place(function, lambda: None if not lock.locked() else pytest.fail("the lock is taken"), at_least=2)


def test_another_thread_is_not_interrupted() -> None:
    noted, function = _harness_sees("def function():\n    for each in range(100):\n        noted.append(each)")
    _, own = _harness_sees("def function():\n    noted.append(1)")
    with Interruption(50, ("manager.",)):
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()
        own()
    assert noted == list(range(100))


def test_a_run_without_places_fails() -> None:
    with pytest.raises(AssertionError, match="the interpreter reported none"), Interruption(1, ("elsewhere.",)):
        int("3")


def test_a_call_with_fewer_places_than_expected_fails() -> None:
    _, function = _harness_sees("def function():\n    noted.append(1)")
    with pytest.raises(AssertionError, match="expected 20 places, the call has 2"):
        at_every_place(function, at_least=20)
