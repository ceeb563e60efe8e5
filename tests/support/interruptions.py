"""Raises where a signal handler could, one place after the other."""

from __future__ import annotations

import dis
import itertools
import sys
import threading
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any, Final

INTERRUPTIBLE: Final = (
    "manager.", "ft_transport.", "concurrent.futures", "threading", "contextlib", "readerwriterlock"
)  # fmt: skip

_RUNS_HANDLERS: Final = {
    *(name for name in dis.opname if name.startswith("CALL") and "INTRINSIC" not in name),
    "RESUME",
    "JUMP_BACKWARD",
    "JUMP_ABSOLUTE",
}


# From 3.13 on a jump runs handlers before it is made: what is raised there is raised where the loop ends.
_RUNS_HANDLERS_FIRST: Final = {"JUMP_BACKWARD"} if sys.version_info >= (3, 13) else set()


class HandlerError(Exception):
    """Raised in the place of a handler."""


class Interruption:
    """Raises at the n-th place where the calling thread could run a handler in code of these packages and under them.

    CPython runs handlers after calls, at the start of functions and at the end of loops (``CHECK_EVAL_BREAKER`` in
    Python/ceval.c), and nowhere else: not between taking the lock of a ``with`` and its body, for one.

    Python 3.10 and 3.11 report instructions to ``sys.settrace``. From 3.12 on, ``sys.settrace`` misses the instructions
    of a function's first run, and ``sys.monitoring`` reports them.

    Attributes:
        num_passed: The places that the thread has reached. A run that reaches none fails: nothing was tested.
    """

    def __init__(self, at: int, modules: tuple[str, ...] = INTERRUPTIBLE) -> None:
        self.num_passed = 0
        self.was_raised = False
        self._at = at
        self._modules = modules
        self._last: dict[FrameType, tuple[str, int]] = {}
        self._tracer = _Monitoring(self) if sys.version_info >= (3, 12) else _Tracing(self)

    def __enter__(self) -> Interruption:
        self._tracer.begin()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._tracer.end()
        self._last.clear()
        assert self.num_passed, f"expected places in {', '.join(self._modules)}, the interpreter reported none"

    def concerns(self, frame: FrameType) -> bool:
        """Whether the frame runs code of the packages."""
        return bool(frame.f_globals.get("__name__", "").startswith(self._modules))

    def instruction(self, frame: FrameType, offset: int) -> None:
        """Count a place if the frame's last instruction runs handlers; called before each instruction."""
        name = dis.opname[_code_of(frame.f_code)[offset]]
        (last, last_offset), self._last[frame] = self._last.get(frame, ("", offset)), (name, offset)
        is_after = last in _RUNS_HANDLERS and last not in _RUNS_HANDLERS_FIRST
        if is_after and _cleanup_of(frame.f_code, last_offset) != _cleanup_of(frame.f_code, offset):
            # What a handler raises is raised by the last instruction. Here it would be raised by this one, behind the
            # end of a ``with`` or ``try`` that covers the last one: that cannot happen.
            return
        if name in _RUNS_HANDLERS_FIRST or is_after:
            self.num_passed += 1
            if self.num_passed == self._at:
                self.was_raised = True
                self._tracer.end()
                self._last.clear()
                raise HandlerError

    def entered(self, frame: FrameType) -> None:
        """Note the instruction at the start of a function, which the interpreter does not report as one."""
        self._last[frame] = ("RESUME", 0)

    def left(self, frame: FrameType) -> None:
        """Forget the frame's last instruction: the frame returned, or the instruction raised and ran no handler."""
        self._last.pop(frame, None)


def at_every_place(
    call: Callable[[], object],
    check: Callable[[], object] = lambda: None,
    *,
    at_least: int,
    every: int = 1,
    modules: tuple[str, ...] = INTERRUPTIBLE,
    errors: tuple[type[Exception], ...] = (HandlerError,),
) -> int:
    """Interrupt a call at each of its places, or at each n-th one, and check after each interruption.

    Args:
        call: Interrupted.
        check: Called after each interruption.
        at_least: The call has so many places, or the test shows nothing.
        every: The distance of the places.
        modules: See `Interruption`.
        errors: What the call may raise.

    Returns:
        The number of places.
    """
    for place in itertools.count(1, every):
        interruption = Interruption(place, modules)
        try:
            with interruption:
                call()
        except errors:
            assert interruption.was_raised
        check()
        if not interruption.was_raised:
            break
    assert interruption.num_passed >= at_least, f"expected {at_least} places, the call has {interruption.num_passed}"
    return interruption.num_passed


class _Tracing:
    """Instructions as ``sys.settrace`` reports them."""

    def __init__(self, interruption: Interruption) -> None:
        self._interruption = interruption

    def begin(self) -> None:
        sys.settrace(self._enter_frame)

    def end(self) -> None:
        sys.settrace(None)

    def _enter_frame(self, frame: FrameType, _event: str, _argument: object) -> Any:
        if not self._interruption.concerns(frame):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        self._interruption.entered(frame)
        return self._in_frame

    def _in_frame(self, frame: FrameType, event: str, _argument: object) -> Any:
        if event == "opcode":
            self._interruption.instruction(frame, frame.f_lasti)
        elif event in ("return", "exception"):
            self._interruption.left(frame)
        return self._in_frame


class _Monitoring:
    """Instructions as ``sys.monitoring`` reports them."""

    def __init__(self, interruption: Interruption) -> None:
        self._interruption = interruption
        self._thread = threading.get_ident()
        self._monitoring: Any = vars(sys)["monitoring"]
        self._tool = self._monitoring.DEBUGGER_ID
        events = self._monitoring.events
        self._callbacks: dict[int, Callable[..., object]] = {
            events.INSTRUCTION: self._instruction,
            **dict.fromkeys((events.PY_START, events.PY_RESUME), self._entered),
            **dict.fromkeys((events.PY_RETURN, events.PY_YIELD, events.PY_UNWIND, events.RAISE), self._left),
        }

    def begin(self) -> None:
        self._thread = threading.get_ident()
        self._monitoring.use_tool_id(self._tool, "interruptions")
        self._register(self._callbacks.items())
        self._monitoring.set_events(self._tool, sum(self._callbacks))
        self._monitoring.restart_events()

    def end(self) -> None:
        if self._monitoring.get_tool(self._tool) is None:
            return
        self._monitoring.set_events(self._tool, 0)
        self._register((event, None) for event in self._callbacks)
        self._monitoring.free_tool_id(self._tool)

    def _register(self, callbacks: Iterable[tuple[int, Callable[..., object] | None]]) -> None:
        for event, callback in callbacks:
            self._monitoring.register_callback(self._tool, event, callback)

    def _instruction(self, _code: CodeType, offset: int) -> object:
        frame = sys._getframe(1)
        if not self._interruption.concerns(frame):
            return self._monitoring.DISABLE
        if threading.get_ident() == self._thread:
            self._interruption.instruction(frame, offset)
        return None

    def _entered(self, _code: CodeType, _offset: int) -> object:
        frame = sys._getframe(1)
        if not self._interruption.concerns(frame):
            return self._monitoring.DISABLE
        if threading.get_ident() == self._thread:
            self._interruption.entered(frame)
        return None

    def _left(self, *_arguments: object) -> None:
        if threading.get_ident() == self._thread:
            self._interruption.left(sys._getframe(1))


_codes: dict[CodeType, bytes] = {}
_cleanups: dict[CodeType, list[tuple[int, int, int]]] = {}


def _code_of(code: CodeType) -> bytes:
    """The instructions; from 3.11 on, ``co_code`` makes a copy at each use."""
    return _codes.setdefault(code, code.co_code) if code not in _codes else _codes[code]


def _cleanup_of(code: CodeType, offset: int) -> int | None:
    """Where the code continues if the instruction raises; ``None`` if it leaves the function, and before 3.11."""
    if code not in _cleanups:
        parse: Callable[[CodeType], list[Any]] = getattr(dis, "_parse_exception_table", lambda _code: [])
        _cleanups[code] = [(entry.start, entry.end, entry.target) for entry in parse(code)]
    return next((target for start, end, target in _cleanups[code] if start <= offset < end), None)
