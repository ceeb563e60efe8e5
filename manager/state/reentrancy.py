"""Whether a call comes from a signal handler that has interrupted another call of ours."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Final

_OURS: Final = ("manager.", "ft_transport.")
_PROGRAMS: Final = ("manager.demo",)
"""Programs of ours that call the packages as a user does."""


def interrupts_own_call() -> bool:
    """Whether the caller of the calling function runs on top of code of these packages.

    A handler runs on the main thread, wherever that is at the moment. Locks that the interrupted code holds are free
    only when the handler has returned: to wait for another thread that needs one of them would be a deadlock.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    frame: FrameType | None = sys._getframe(1).f_back
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_OURS) and not name.startswith(_PROGRAMS):
            return True
        frame = frame.f_back
    return False
