"""The garbage collector is paused as long as anybody needs that, and is left as it was found."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Iterator
from types import FrameType

import pytest
from state_tools import file_of_state, receive

from ft_transport import register_encoding
from ft_transport.runtime.decoding import collector_paused
from ft_transport.state import encodings


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_it_is_paused_until_the_last_one_ends() -> None:
    with collector_paused():
        assert not gc.isenabled()
        with pytest.raises(KeyError), collector_paused():
            raise KeyError
        assert not gc.isenabled()
    assert gc.isenabled()


def test_who_has_disabled_it_finds_it_disabled() -> None:
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()


class _InterruptedError(Exception):
    """Raised by a signal handler."""


class _Noting:
    """A leaf whose encoding notes whether the collector runs."""


def test_it_is_paused_while_a_state_is_taken_apart_and_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encodings, "_by_type", {})
    monkeypatch.setattr(encodings, "_by_name", {})
    was_enabled: list[bool] = []

    def note(_value: object) -> object:
        was_enabled.append(gc.isenabled())
        return _Noting() if len(was_enabled) == 2 else None

    register_encoding(_Noting, name="test_collector.Noting", encode=note, decode=note)
    receive(file_of_state({"a": _Noting()}))
    assert was_enabled == [False, False]
    assert gc.isenabled()


def test_a_signal_handler_that_raises_leaves_the_collector_running() -> None:
    def handle(_signum: int, frame: FrameType | None) -> None:
        # Elsewhere Python might swallow it.
        if frame is not None and frame.f_globals.get("__name__") == collector_paused.__module__:
            raise _InterruptedError

    previous = signal.signal(signal.SIGALRM, handle)
    num_raised = 0
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
        until_s = time.monotonic() + 1
        while time.monotonic() < until_s:
            try:
                with collector_paused():
                    pass
            except _InterruptedError:
                num_raised += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert num_raised
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
