"""What has to be finished before a process ends, while there still are threads to do it."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable


def at_exit(function: Callable[[], None]) -> Callable[[], None]:
    """Has ``function`` called when the main thread has ended, before thread pools stop taking work; for decorating.

    ``atexit`` comes after that: a pool, and with it asyncio, refuses then. ``concurrent.futures`` registers itself in
    the same way (Lib/concurrent/futures/thread.py), and what was registered last is called first.
    """
    register = getattr(threading, "_register_atexit", atexit.register)
    register(function)
    return function
