"""Finds a part of the key-value store that no earlier run of a job has used.

torchrun starts the ranks of a job again after a failure, and by default with the same store (pytorch#135712). The keys
of the earlier run are still there: its votes, its decisions, its announcements. So the first rank of a group chooses a
new prefix for each run, and gives it to each other rank that asks under a random key of its own. A rank that reads the
answer to its own key cannot mistake the prefix of an earlier run for its own.
"""

from __future__ import annotations

import secrets
import threading
from datetime import timedelta
from typing import Any, Final

from torch.distributed import PrefixStore  # type: ignore[attr-defined] # exported, undeclared

from ft_transport.errors import RankGoneError
from ft_transport.runtime.deadline import Backoff, Deadline
from ft_transport.runtime.signal_safe import SafeThread

_NONCE_BYTES: Final = 8
_LONGEST_PAUSE_S: Final = 1.0


class RunStore:
    """The part of a key-value store that only this run of a group uses. Thread-safe.

    Args:
        shared: The part of the store that all runs of the group use.
        rank: This rank within the group.
        size: Number of ranks.
    """

    def __init__(self, shared: Any, rank: int, size: int) -> None:
        self._shared = shared
        self._rank = rank
        self._mutex = threading.Lock()
        self._prefix: str | None = None
        if rank == 0:
            self._prefix = secrets.token_hex(_NONCE_BYTES)
            answering = SafeThread(target=self._answer, args=(range(1, size),), name="ft-transport-run", daemon=True)
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
        self._shared.set(f"asks/{self._rank}", nonce)
        while not self._shared.check([f"answer/{nonce}"]):
            if deadline.is_over():
                raise RankGoneError(
                    f"expected rank 0 of this group to begin within {timeout.total_seconds():g} s; it is dead, stuck, "
                    "or elsewhere in the program"
                )
            backoff.pause(deadline.cap(timeout).total_seconds())
        prefix = bytes(self._shared.get(f"answer/{nonce}")).decode()
        self._shared.set(f"heard/{nonce}", prefix)
        return prefix

    def _answer(self, ranks: range) -> None:
        """Answer the other ranks of this run, until all have heard the prefix. Ranks of an earlier run do not hear."""
        waiting = dict.fromkeys(ranks, "")
        backoff = Backoff(_LONGEST_PAUSE_S)
        while waiting:
            try:
                for rank, answered in list(waiting.items()):
                    key = f"asks/{rank}"
                    nonce = bytes(self._shared.get(key)).decode() if self._shared.check([key]) else ""
                    if nonce and nonce != answered:
                        self._shared.set(f"answer/{nonce}", self._prefix)
                        waiting[rank] = nonce
                    elif nonce and self._has_heard(nonce):
                        del waiting[rank]
            except RuntimeError:  # The store has ended, and with it the run.
                return
            backoff.pause(_LONGEST_PAUSE_S)

    def _has_heard(self, nonce: str) -> bool:
        """Return whether a rank has heard this run's prefix. A rank of an earlier run has heard that run's."""
        key = f"heard/{nonce}"
        return self._shared.check([key]) and bytes(self._shared.get(key)).decode() == self._prefix
