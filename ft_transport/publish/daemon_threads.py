"""Calls on threads that a process does not wait for when it exits: a call that hangs must not block the exit."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from ft_transport.runtime.at_exit import at_exit
from ft_transport.runtime.handler_safety import SafeThread

T = TypeVar("T")

_EXIT_S: Final = 10.0
"""How long an exiting process waits for running calls, which may only be slow."""

_running: set[SafeThread] = set()
_mutex = threading.Lock()


async def in_daemon_thread(function: Callable[..., T], *arguments: object) -> T:
    """Call a function as ``asyncio.to_thread`` does, without its wait at exit (``concurrent.futures.thread``).

    Args:
        function: The function to call. It goes on if the caller's wait is cancelled.
        *arguments: Its arguments.

    Returns:
        The function's result.

    Raises:
        Exception: The function's error.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # type: ignore[arg-type] # the function's result

    def run() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = function(*arguments)
        except BaseException as error:
            failure = error
        with _mutex:
            _running.discard(threading.current_thread())
        # The loop may be closed by now; then no caller waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, failure)

    thread = SafeThread(target=run, name="ft-transport-deltas", daemon=True)
    with _mutex:
        _running.add(thread)
    thread.start()
    return await answer


@at_exit
def _wait_for_all() -> None:
    deadline_s = time.monotonic() + _EXIT_S
    with _mutex:
        threads = list(_running)
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
