"""Decides, for each kept step, whether all ranks of a replica have kept it. All ranks get the same answer.

A rank reports a step under a key of its own in the group's key-value store. A rank that sees the reports of all ranks
proposes "yes", a rank that cannot wait any longer proposes "no", and the first proposal is the decision: the store sets
that key once. So no rank can forget a decision that another rank has acted on.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Final

from ft_transport import TransportError
from ft_transport.coordination.ranks import RankGroup
from ft_transport.coordination.store import AT_ONCE, DirectStore, StoreChannel
from ft_transport.runtime.signal_safe import SafeEvent

_PURPOSE: Final = "kept steps"
_FIRST_POLL_S: Final = 0.01
_LONGEST_POLL_S: Final = 1.0


class KeptSteps:
    """The reports and decisions about kept steps. One thread at a time calls the methods.

    All methods raise ``TransportError`` if the store does not answer.

    Args:
        group: The ranks of the replica.
        timeout: Deadline of each call of the store.
    """

    def __init__(self, group: RankGroup, timeout: timedelta) -> None:
        self._rank, self._size = group.rank, group.size
        self._channel = StoreChannel(DirectStore(group.store(_PURPOSE))) if group.size > 1 else None
        self._timeout = timeout
        self._history = 0
        self._decided: list[str] = []

    def begin_history(self) -> None:
        """Forget all steps: the state was replaced, and the same numbers may follow. All ranks call this alike."""
        self._history += 1

    def report(self, step: int, stop: SafeEvent) -> bool | None:
        """Report that this rank has kept a step, and wait for the decision.

        Returns:
            Whether all ranks have kept the step; ``None`` if ``stop`` was set before the decision.
        """
        if self._channel is None:
            return True
        self._channel.set(self._report_key(step, self._rank), "1", self._timeout)
        reports, pause_s = [self._report_key(step, rank) for rank in range(self._size)], _FIRST_POLL_S
        while True:
            for proposal, keys in (("no", [self._decision_key(step)]), ("yes", reports)):
                # If there is a decision, it stands, whatever is proposed.
                if self._channel.get(keys, AT_ONCE, answer_timeout=self._timeout) is not None:
                    return self._decide(step, proposal)
            if stop.wait(pause_s):
                return None
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)

    def give_up(self, step: int) -> bool:
        """Wait no longer for the other ranks. Return whether all ranks have kept the step nevertheless."""
        return self._channel is None or self._decide(step, "no")

    def _decide(self, step: int, proposal: str) -> bool:
        channel = self._channel
        assert channel is not None, "alone, a rank decides without the store"
        key = self._decision_key(step)
        is_kept = channel.set_once(key, proposal, self._timeout) == b"yes"
        if is_kept:
            # All ranks have reported this step, so all know the earlier decisions.
            earlier, self._decided = [old for old in self._decided if old != key], []
            with suppress(TransportError):
                for old in earlier:
                    channel.remove(f"{old}/{self._rank}", self._timeout)
                    if self._rank == 0:
                        channel.remove(old, self._timeout)
        self._decided.append(key)
        return is_kept

    def _decision_key(self, step: int) -> str:
        return f"{self._history}/{step}"

    def _report_key(self, step: int, rank: int) -> str:
        return f"{self._decision_key(step)}/{rank}"
