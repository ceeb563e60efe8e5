"""Runs functions at the end of a process, while it still has threads."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable


def at_exit(function: Callable[[], None]) -> Callable[[], None]:
    """Decorator: call ``function`` after the main thread ends, before thread pools stop accepting work.

    ``atexit`` runs later, when pools, and with them asyncio, already refuse work. ``concurrent.futures`` registers
    itself in the same way (Lib/concurrent/futures/thread.py); the last registration runs first.
    """
    register = getattr(threading, "_register_atexit", atexit.register)
    register(function)
    return function
