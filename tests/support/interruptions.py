"""Raises where a signal handler could, one place after the other."""

from __future__ import annotations

import dis
import sys
from types import FrameType
from typing import Any, Final

INTERRUPTIBLE: Final = (
    "manager.", "ft_transport.", "concurrent.futures", "threading", "contextlib", "readerwriterlock"
)  # fmt: skip


class HandlerError(Exception):
    """Raised in the place of a handler."""


class Interruption:
    """Raises at the n-th place where the calling thread could run a handler in code of these packages and under them.

    CPython runs handlers after calls, at the start of functions and at the end of loops (``CHECK_EVAL_BREAKER`` in
    Python/ceval.c), and nowhere else: not between taking the lock of a ``with`` and its body, for one.

    Attributes:
        left: How many such places are still to be passed.
    """

    def __init__(self, at: int, modules: tuple[str, ...] = INTERRUPTIBLE) -> None:
        self.left = at
        self._modules = modules
        self._last: dict[FrameType, str] = {}
        self.was_raised = False

    def __enter__(self) -> Interruption:
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_exc_info: object) -> None:
        sys.settrace(None)
        self._last.clear()

    def _enter_frame(self, frame: FrameType, _event: str, _argument: object) -> Any:
        if not frame.f_globals.get("__name__", "").startswith(self._modules):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._pass

    def _pass(self, frame: FrameType, event: str, _argument: object) -> Any:
        if event == "return":
            self._last.pop(frame, None)
        if event != "opcode":
            return self._pass
        last, self._last[frame] = self._last.get(frame, ""), dis.opname[frame.f_code.co_code[frame.f_lasti]]
        if last.startswith(("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")):
            self.left -= 1
            if self.left == 0:
                self.was_raised = True
                sys.settrace(None)
                self._last.clear()
                raise HandlerError
        return self._pass
