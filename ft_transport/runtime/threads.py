"""Threads that the system may refuse."""

from __future__ import annotations

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
