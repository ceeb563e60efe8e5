"""What a caller holds of a save that goes on, and what he is told of the writers."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from datetime import timedelta

from ft_transport.errors import DeadlineExceededError
from ft_transport.settings import check_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHealth:
    """What `CheckpointStore.check_health` has found; the same on every rank.

    Attributes:
        dead_writers: Ranks whose writer process is dead, and is being replaced.
        num_failed_saves: How many saves have failed in a row.
    """

    dead_writers: tuple[int, ...]
    num_failed_saves: int

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong."""
        return not self.dead_writers and not self.num_failed_saves


class SaveHandle:
    """A save that goes on behind the training. Thread-safe.

    Attributes:
        step: Its step.
        is_skipped: Whether nothing is saved, because the save before was not finished.
    """

    def __init__(self, step: int, *, is_skipped: bool = False) -> None:
        self.step = step
        self.is_skipped = is_skipped
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()
        if is_skipped:
            self.future.set_result(None)

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.future.done()

    def result(self, timeout: timedelta | None = None) -> None:
        """Waits until the checkpoint is complete.

        Args:
            timeout: ``None`` waits as long as the ranks show heartbeats.

        Raises:
            TransportError: It could not be saved; the same error on every rank.
            DeadlineExceededError: It is still going on.
        """
        if timeout is not None:
            check_duration("timeout", timeout, at_least=timedelta(0))
        try:
            self.future.result(None if timeout is None else timeout.total_seconds())
        except FutureTimeoutError:
            if self.future.done():
                raise  # It is the save's own error.
            raise DeadlineExceededError(f"expected the checkpoint within {timeout}", step=self.step) from None

    def exception(self) -> BaseException | None:
        """Waits, and returns why it failed, ``None`` if it did not."""
        return self.future.exception()
