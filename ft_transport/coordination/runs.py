"""Finds a part of the key-value store that no earlier run of a job has used.

torchrun starts the ranks of a job again after a failure, and by default with the same store (pytorch#135712). The keys
of the earlier run are still there: its votes, its decisions, its announcements. So the first rank of a group chooses a
new prefix for each run, and gives it to each other rank that asks under a random key of its own. A rank that reads the
answer to its own key cannot mistake the prefix of an earlier run for its own.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from torch.distributed import PrefixStore  # type: ignore[attr-defined] # exported, undeclared

from ft_transport.errors import RankGoneError
from ft_transport.runtime.deadline import Backoff, Deadline
from ft_transport.runtime.signal_safe import SafeThread

_NONCE_BYTES: Final = 8
_LONGEST_PAUSE_S: Final = 1.0
_MAX_FAILURES: Final = 5


class RunStore:
    """The part of a key-value store that only this run of a group uses. Thread-safe.

    Args:
        shared: The part of the store that all runs of the group use.
        rank: This rank within the group.
        size: Number of ranks.
        owner: Returns ``None`` once the process group of the store has been destroyed.
    """

    def __init__(self, shared: Any, rank: int, size: int, owner: Callable[[], object]) -> None:
        self._shared = shared
        self._owner = owner
        self._mutex = threading.Lock()
        self._prefix: str | None = None
        if rank == 0:
            self._prefix = secrets.token_hex(_NONCE_BYTES)
            answering = SafeThread(target=self._answer, args=(size - 1,), name="ft-transport-run", daemon=True)
            answering.start()

    def store(self, prefix: str, timeout: timedelta) -> Any:
        """Return the part with a prefix. On other ranks than the first, the first call waits for the first rank.

        Raises:
            RankGoneError: The first rank has not answered in time, or the store does not answer.
        """
        with self._mutex:
            if self._prefix is None:
                try:
                    self._prefix = self._ask(timeout)
                except RuntimeError as error:  # the base class of torch's DistError
                    message = f"expected the key-value store of torch.distributed to answer: {error}"
                    raise RankGoneError(message) from error
        return PrefixStore(f"{self._prefix}/{prefix}", self._shared)

    def _ask(self, timeout: timedelta) -> str:
        deadline, backoff = Deadline.after(timeout), Backoff()
        nonce = secrets.token_hex(_NONCE_BYTES)
        self._shared.set(f"asks/{self._shared.add('asks', 1)}", nonce)
        while not self._shared.check([f"answer/{nonce}"]):
            if deadline.is_over():
                raise RankGoneError(
                    f"expected rank 0 of this group to begin within {timeout.total_seconds():g} s; it is dead, stuck, "
                    "or elsewhere in the program"
                )
            backoff.pause(deadline.cap(timeout).total_seconds())
        prefix = bytes(self._shared.get(f"answer/{nonce}")).decode()
        self._shared.add(f"heard/{prefix}", 1)
        return prefix

    def _answer(self, num_others: int) -> None:
        """Answer each rank that asks, those of earlier runs as well, until all ranks of this run have heard."""
        backoff, num_asked, num_failures = Backoff(_LONGEST_PAUSE_S), 0, 0
        waiting: set[int] = set()
        while self._owner() is not None and threading.main_thread().is_alive():
            try:
                earlier, num_asked = num_asked, self._shared.add("asks", 0)
                waiting.update(range(earlier + 1, num_asked + 1))
                # A rank that was killed in between has taken a number and set no key.
                for number in [each for each in waiting if self._shared.check([f"asks/{each}"])]:
                    nonce = bytes(self._shared.get(f"asks/{number}")).decode(errors="replace")
                    self._shared.set(f"answer/{nonce}", self._prefix)
                    waiting.remove(number)
                if self._shared.add(f"heard/{self._prefix}", 0) >= num_others:
                    return
                num_failures = 0
            except RuntimeError:  # The store has ended, and with it the run; or a call has failed.
                num_failures += 1
                if num_failures > _MAX_FAILURES:
                    return
            backoff.pause(_LONGEST_PAUSE_S)
