"""Decides, for each kept step, whether all ranks of a replica have kept it. All ranks get the same answer.

A rank reports a step under a key of its own in the group's key-value store. A rank that sees the reports of all ranks
proposes "yes", a rank that cannot wait any longer proposes "no", and the first proposal is the decision: the store sets
that key once. So no rank can forget a decision that another rank has acted on.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from ft_transport import ConfigurationError, TransportError
from ft_transport.coordination.ranks import RankGroup
from ft_transport.coordination.store import AT_ONCE
from ft_transport.runtime.signal_safe import SafeEvent
from ft_transport.settings import check_number

_PURPOSE: Final = "kept steps"
_FIRST_POLL_S: Final = 0.01
_LONGEST_POLL_S: Final = 1.0
_NONCE_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSettings:
    """How often a state is kept beyond the death of its process, and where.

    Attributes:
        every: Interval of the snapshots, in steps; ``None`` for no snapshots.
        copies: Number of failure domains that hold the state of each rank.
        domain: Failure domain of this process; ``None`` for the name of its host.
    """

    every: int | None = None
    copies: int = 1
    domain: str | None = None

    def __post_init__(self) -> None:
        check_number("copies", self.copies, at_least=1)
        domain: object = self.domain
        if not isinstance(domain, (str, type(None))) or domain == "":
            raise ConfigurationError(f"expected a name as failure_domain, got {domain!r}")
        if self.every is None and (self.copies > 1 or self.domain is not None):
            raise ConfigurationError("expected keep_every with copies and failure_domain, got none")


NOT_KEPT: Final = KeepSettings()


class KeptSteps:
    """The reports and decisions about kept steps. Unless stated otherwise, one thread at a time calls the methods.

    All methods raise ``TransportError`` if the store does not answer.

    Args:
        group: The ranks of the replica.
        timeout: Deadline of each call of the store.
    """

    def __init__(self, group: RankGroup, timeout: timedelta) -> None:
        self._rank, self._size = group.rank, group.size
        self._channel = group.channel(_PURPOSE, timeout) if group.size > 1 else None
        self._timeout = timeout
        self._history = 0
        self._decided: list[str] = []
        self._declined: deque[int] = deque()

    def begin_history(self) -> None:
        """Forget all steps: the state was replaced, and the same numbers may follow. All ranks call this alike."""
        self._history += 1
        self._declined.clear()

    def history_name(self) -> str:
        """Return a random name of the present history, the same on all ranks and different from all others."""
        name = secrets.token_hex(_NONCE_BYTES)
        if self._channel is None:
            return name
        return self._channel.set_once(f"{self._history}/name", name, self._timeout).decode(errors="replace")

    def decline(self, step: int) -> None:
        """Note that this rank does not keep a step, so that no rank waits for it. Any thread may call this.

        The next call of another method posts it, and so does a call that is waiting now.
        """
        if self._channel is not None:
            self._declined.append(step)

    def post_declined(self) -> None:
        """Post the steps that this rank has declined."""
        with suppress(IndexError):
            while True:
                step = self._declined[0]
                self._decide(step, "no")
                self._declined.popleft()

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
            self.post_declined()
            if _is_over(stop, pause_s):
                return None
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)

    def exchange(self, step: int, value: bytes, ranks: Sequence[int], stop: SafeEvent) -> list[bytes] | None:
        """Post a value about a step, and return those of some ranks, in their order.

        Returns:
            The values; ``None`` if ``stop`` was set, or if there is a decision: then a rank has given the step up.
        """
        channel = self._channel
        if channel is None:
            return None
        channel.set(self._value_key(step, self._rank), value, self._timeout)
        keys, pause_s = [self._value_key(step, rank) for rank in ranks], _FIRST_POLL_S
        while True:
            found = channel.get(keys, AT_ONCE, answer_timeout=self._timeout)
            if found is not None:
                return found
            is_decided = channel.get([self._decision_key(step)], AT_ONCE, answer_timeout=self._timeout) is not None
            self.post_declined()
            if is_decided or _is_over(stop, pause_s):
                return None
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)

    def give_up(self, step: int) -> bool:
        """Wait no longer for the other ranks. Return whether all ranks have reported the step nevertheless."""
        return self._channel is not None and self._decide(step, "no")

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
                    for own in (f"{old}/{self._rank}", f"{old}/value/{self._rank}"):
                        channel.remove(own, self._timeout)
                    if self._rank == 0:
                        channel.remove(old, self._timeout)
        self._decided.append(key)
        return is_kept

    def _decision_key(self, step: int) -> str:
        return f"{self._history}/{step}"

    def _report_key(self, step: int, rank: int) -> str:
        return f"{self._decision_key(step)}/{rank}"

    def _value_key(self, step: int, rank: int) -> str:
        return f"{self._decision_key(step)}/value/{rank}"


def _is_over(stop: SafeEvent, pause_s: float) -> bool:
    """Pause. Return whether ``stop`` is set, or the interpreter ends, which waits for the threads of pools."""
    return stop.wait(pause_s) or not threading.main_thread().is_alive()
