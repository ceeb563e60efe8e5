"""Threads that the system may refuse."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from queue import SimpleQueue

from ft_transport.errors import TransportError
from ft_transport.runtime.handler_safety import SafeThread, ThreadRefusedError


def start(thread: SafeThread) -> None:
    """Start a thread.

    Raises:
        TransportError: The system has no further thread.
    """
    try:
        thread.start()
    except ThreadRefusedError as error:
        raise TransportError(f"expected a further thread ({thread.name}): {error}") from error


def run_on_threads(
    work: Callable[[int], None],
    num_threads: int,
    *,
    name: str,
    failed: Callable[[BaseException], None],
    needs_all: bool,
) -> None:
    """Run ``work`` on this thread, with 0, and on further threads, each with its number.

    Returns only when no thread works any more, even if signal handlers raise meanwhile.

    Args:
        work: The work of one thread.
        num_threads: Number of threads, this one included.
        name: Name of the further threads, before their number.
        failed: Called with each error of ``work`` and of signal handlers, on the thread that raised it.
        needs_all: Whether it is an error if the system has no further thread; otherwise the others do its part.
    """
    ended: set[int] = set()
    ends: SimpleQueue[None] = SimpleQueue()

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failed(error)
        finally:
            ended.add(number)
            ends.put(None)

    threads = [
        SafeThread(target=run, args=(number,), name=f"{name}-{number}", daemon=True) for number in range(1, num_threads)
    ]
    try:
        for thread in threads:
            if needs_all:
                start(thread)
            else:
                with contextlib.suppress(ThreadRefusedError):
                    thread.start()
        work(0)
    except BaseException as error:
        failed(error)
    # Not Thread.join: after a signal handler raises in it, it takes a running thread for an ended one. Starts are not
    # counted: such a handler may come before the count. A thread that begins only now finds that the work has ended.
    while len(ended) < sum(thread.ident is not None for thread in threads):
        try:
            ends.get()
        except BaseException as error:
            failed(error)
    for thread in threads:
        if thread.ident is not None:
            with contextlib.suppress(RuntimeError):  # The thread begins only now.
                thread.join()
