"""Threads that the system may refuse."""

from __future__ import annotations

import threading

from ft_transport.errors import TransportError


def start(thread: threading.Thread) -> None:
    """Starts a thread.

    Raises:
        TransportError: The system has no further one.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise TransportError(f"expected a further thread ({thread.name}): {error}") from error
