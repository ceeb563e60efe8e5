"""What is logged of snapshots that could not be taken: each trouble once, although it comes again at every step."""

from __future__ import annotations

import logging

from ft_transport import UnsupportedLeafError
from manager.errors import LockTimeoutError, RegistryError

logger = logging.getLogger(__name__)


class FailureLog:
    """Belongs to one scheduler. Its methods but `taken` are called while the error is handled."""

    def __init__(self) -> None:
        self._is_postponed = False
        self._last_failure = ""

    def not_taken(self, step: int, error: Exception) -> bool:
        """Log why no snapshot was begun at a boundary at which one was wanted.

        Args:
            step: The committed step.
            error: Why.

        Returns:
            Whether it may work at the next boundary.
        """
        if isinstance(error, LockTimeoutError) or getattr(error, "retryable", False):
            # Once, and not at every step for as long as a slow receiver holds the places.
            level = logging.DEBUG if self._is_postponed else logging.WARNING
            logger.log(level, "step %d: no snapshot yet for those who asked for one: %s", step, error)
            self._is_postponed = True
            return True
        # The same trouble may come at every step: once with its traceback is enough.
        is_new = str(error) != self._last_failure
        self._last_failure = str(error)
        logger.error(
            "step %d: no snapshot could be taken for those who asked for one: %s", step, error, exc_info=is_new
        )
        return False

    def held_not_taken(self, step: int, error: BaseException) -> None:
        """Log why no snapshot was begun of a state that was held."""
        level = logging.DEBUG if self._is_postponed else logging.WARNING
        logger.log(level, "step %d: no snapshot for those who asked for one: %s", step, error)
        self._is_postponed = bool(getattr(error, "retryable", False))

    def taken(self) -> None:
        """Note that a snapshot was begun at a boundary."""
        self._is_postponed = False


def is_final(error: BaseException) -> bool:
    """Whether no snapshot of this state can be taken, at no boundary: a leaf or a state function is what fails."""
    return isinstance(error, (UnsupportedLeafError, RegistryError))
