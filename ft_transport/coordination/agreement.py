"""Phases that all ranks of a group run together: each ends in a vote, on success too, and in one outcome for all.

Votes go through the key-value store of ``torch.distributed`` (``ranks``), not through a collective: an error can then
name a missing rank, the other ranks learn of the failure, and no connection breaks. gloo closes all connections of a
group when one of its operations times out. Data goes through a gloo group (``exchange``).
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Final, TypeVar

import msgspec

from ft_transport.coordination.gloo_exchange import GlooExchange
from ft_transport.coordination.ranks import RankGroup, RankMessages, from_msgpack
from ft_transport.coordination.store import AT_ONCE
from ft_transport.coordination.votes import (
    AbandonedError,
    GiveUp,
    GoOn,
    TryAgain,
    Verdict,
    Vote,
    decode,
    decode_all,
    describe,
    encode,
    encode_all,
    tally,
)
from ft_transport.errors import PeerProtocolError, RankGoneError, TransportError
from ft_transport.runtime.signal_safe import SafeEvent, SafeThread

T = TypeVar("T")

_FIRST_PATIENCE: Final = 10
"""Number of timeouts that the first rank may take, for example to delete old files; it shows heartbeats meanwhile."""

_MAX_VERDICTS: Final = 16
"""Several, because an interrupted rank has not read the latest verdicts."""
_VERDICT_DIGITS: Final = 16


class Agreement:
    """Runs phases on all ranks, each with one outcome for all. One thread at a time, the same calls on every rank.

    A data exchange is a phase of its own, and starts only after all ranks have reached it: so no rank waits in gloo for
    a rank that failed before.

    Args:
        group: The ranks.
        channel: Distinguishes several agreements of one group.
        timeout: How long a rank may go without a heartbeat before the others give it up.

    Attributes:
        rank: This rank's place in the group.
        size: Number of ranks.
        exchange: Carries data between the ranks.
        step: The current step, for errors.
        about: Suffix of the name of each phase, in errors.
        may_try_again: Whether a retry of the latest failure may succeed; the same on all ranks.
        sequence: Number of phases so far; the same on all ranks.
    """

    def __init__(self, group: RankGroup, channel: str, timeout: timedelta) -> None:
        self.rank, self.size = group.rank, group.size
        self.exchange: Final = GlooExchange(group, channel, timeout)
        self._messages = group.messages(channel, timeout)
        # In the form of `Vote.heard`, the latest last. They contain nonces of this run, so no other run has them.
        self._verdicts: deque[str] = deque(maxlen=_MAX_VERDICTS)
        self._timeout = timeout
        self.sequence = 0
        self.step: int | str | None = None
        self.about = ""
        self.may_try_again = False

    @property
    def is_first(self) -> bool:
        """Whether this rank decides for the group."""
        return self.rank == 0

    def run_on_all_ranks(self, phase: str, action: Callable[[], bytes | None]) -> tuple[bytes, ...]:
        """Run ``action`` on every rank, and return the results of all ranks, by rank.

        Args:
            phase: Name of the phase, for errors; the same on all ranks.
            action: This rank's part. Its result is small.

        Raises:
            TransportError: A rank failed or died: the same error on all. `may_try_again` says whether all may retry.
        """
        outcome = self._outcome(phase + self.about, action)
        self.may_try_again = isinstance(outcome, TryAgain)
        match outcome:
            case GoOn(payloads):
                return payloads
            case TryAgain(error) | GiveUp(error):
                raise error

    def run(self, phase: str, action: Callable[[], T]) -> T:
        """Run ``action`` as `run_on_all_ranks` does, and return its result on this rank."""
        results: list[T] = []
        self.run_on_all_ranks(phase, lambda: results.append(action()))
        return results[0]

    def on_first(self, phase: str, action: Callable[[], T]) -> T | None:
        """Run ``action`` on the first rank only. Return its result there, and ``None`` on the other ranks.

        Raises:
            TransportError: ``action`` failed; the same error on all ranks.
        """
        return self.run(phase, lambda: self._by_first(action))

    def gather(self, phase: str, data: bytes) -> list[bytes]:
        """Send the data of every rank to the first rank, which gets it by rank; the others get an empty list."""
        return self.run(phase, self.exchange.ending_on_failure(lambda: self.exchange.gather(data))) or []

    def scatter(self, phase: str, data: Sequence[bytes] | None) -> bytes:
        """Send each rank its part of the first rank's data."""
        return self.run(phase, self.exchange.ending_on_failure(lambda: self.exchange.scatter(data)))

    def broadcast(self, phase: str, data: bytes | None) -> bytes:
        """Send the first rank's data to all ranks."""
        return self.run(phase, self.exchange.ending_on_failure(lambda: self.exchange.broadcast(data)))

    def value_of_first(self, phase: str, action: Callable[[], T], decoder: msgspec.msgpack.Decoder[T]) -> T:
        """Run ``action`` as `on_first` does, and return its result on all ranks: a value that msgpack can encode."""
        encoded = self.run_on_all_ranks(phase, lambda: self._by_first(lambda: msgspec.msgpack.encode(action())))
        return from_msgpack(encoded[0], decoder)

    def values_of_all(self, phase: str, action: Callable[[], T], decoder: msgspec.msgpack.Decoder[T]) -> list[T]:
        """Run ``action`` as `run_on_all_ranks` does, with values that msgpack can encode in place of bytes."""
        encoded = self.run_on_all_ranks(phase, lambda: msgspec.msgpack.encode(action()))
        return [from_msgpack(each, decoder) for each in encoded]

    def _by_first(self, action: Callable[[], T]) -> T | None:
        patience_s = _FIRST_PATIENCE * self._timeout.total_seconds()
        return self.showing_life(action, patience_s) if self.is_first else None

    def reconnect(self) -> None:
        """Drop the data connections; called on all ranks, after a phase that failed on all."""
        self.exchange.reset(self.sequence)

    def close(self) -> None:
        """Close the data connections."""
        self.exchange.close()

    def check_others(self) -> None:
        """Show a heartbeat, and abort this rank's part if another rank has failed; called during long parts.

        Raises:
            AbandonedError: Another rank has failed in this phase.
        """
        if self._messages is not None:
            self._messages.beat()
            if self._messages.channel.get([f"failed/{self.sequence}"], AT_ONCE) is not None:
                raise AbandonedError("gave up because another rank has failed")

    def showing_life(self, action: Callable[[], T], timeout_s: float) -> T:
        """Run ``action``, and show heartbeats to the other ranks meanwhile, for at most ``timeout_s``."""
        messages = self._messages
        if messages is None:
            return action()
        is_over = SafeEvent()
        deadline_s = time.monotonic() + timeout_s

        def beat() -> None:
            while not is_over.wait(messages.beat_s) and time.monotonic() < deadline_s:
                with suppress(RankGoneError):
                    messages.beat()

        thread = SafeThread(target=beat, name="ft-transport-alive", daemon=True)
        try:
            thread.start()
            return action()
        finally:
            is_over.set()
            thread.join()

    def _outcome(self, phase: str, action: Callable[[], bytes | None]) -> Verdict:
        self.sequence += 1
        messages = self._messages
        if messages is not None:
            messages.beat()
        try:
            payload = action() or b""
            heard = self._verdicts[-1] if self._verdicts else ""
            vote = Vote(phase=phase, payload=payload, nonce=messages.nonce if messages is not None else "", heard=heard)
        except BaseException as error:
            vote = Vote(phase=phase, failure=describe(error))
            if messages is not None:
                messages.channel.post(f"failed/{self.sequence}", "1", self._timeout)
            if not isinstance(error, Exception):
                # The other ranks learn of the failure, and this rank does as the signal says.
                if messages is not None:
                    self._cast(messages, vote)
                raise
        if messages is None:
            return tally([vote], step=self.step)
        try:
            votes = self._vote(messages, vote)
            # If all ranks succeeded, this rank's entry must be its own vote, and not one of an earlier run.
            if all(each is not None and each.failure is None for each in votes) and votes[self.rank] != vote:
                raise PeerProtocolError(
                    f"expected the verdict of {phase!r} to have this rank's own vote, it has another"
                )
        except TransportError as error:
            error.step = self.step
            return GiveUp(error)
        return tally(votes, step=self.step)

    def _cast(self, messages: RankMessages, vote: Vote) -> None:
        if self.is_first:
            # Rank 0 does not wait for the other ranks, which may go on at once.
            others = Vote(phase=vote.phase, failure=describe(AbandonedError("gave up because rank 0 has")))
            self._settle(messages, [vote, *[others] * (self.size - 1)])
        else:
            messages.post(f"vote/{self.sequence}/{self.rank}", encode(vote))

    def _vote(self, messages: RankMessages, vote: Vote) -> list[Vote | None]:
        number = self.sequence
        if not self.is_first:
            self._cast(messages, vote)
            key = f"verdict/{number}"
            (verdict,) = messages.wait({0: key})
            if verdict is not None:
                return self._heard(messages.opened(key, verdict))
            return self._settle(messages, [None, *[vote] * (self.size - 1)])
        found = messages.wait({rank: f"vote/{number}/{rank}" for rank in range(1, self.size)})
        votes = [vote, *(self._vote_of(messages, rank, each, vote) for rank, each in enumerate(found, start=1))]
        if None in votes or any(each is not None and _may_be_forged(each) for each in votes):
            return self._settle(messages, votes)
        # All ranks have read the verdict before the last one.
        old = [f"vote/{number - 1}/{rank}" for rank in range(1, self.size)]
        return self._settle(messages, votes, remove=[f"verdict/{number - 1}", f"failed/{number - 1}", *old])

    def _settle(
        self, messages: RankMessages, votes: Sequence[Vote | None], *, remove: Sequence[str] = ()
    ) -> list[Vote | None]:
        """Make ``votes`` the verdict, unless one exists already. Return the verdict for all ranks."""
        return self._heard(messages.settle(f"verdict/{self.sequence}", encode_all(votes), remove=remove))

    def _heard(self, verdict: bytes) -> list[Vote | None]:
        votes = decode_all(verdict, self.size)
        if self._messages is not None and self._messages.is_signed:
            self._verdicts.append(hashlib.sha256(verdict).hexdigest()[:_VERDICT_DIGITS])
        return votes

    def _vote_of(self, messages: RankMessages, rank: int, signed: bytes | None, own: Vote) -> Vote | None:
        if signed is None:
            return None
        try:
            vote = decode(messages.opened(f"vote/{self.sequence}/{rank}", signed))
            # A vote without ``heard`` comes from a rank that was interrupted in the first phase, or this is the first
            # phase.
            if vote.failure is None and vote.heard and vote.heard not in self._verdicts:
                raise PeerProtocolError(
                    f"expected rank {rank} to follow a verdict of this run; its vote is of an earlier run, or it has "
                    "missed this rank in the last phase"
                )
            return vote
        except PeerProtocolError as error:
            return Vote(phase=own.phase, failure=describe(error))


def _may_be_forged(vote: Vote) -> bool:
    """Return whether a vote replaces an unverified one: that rank may not have read the last verdict yet."""
    return vote.failure is not None and vote.failure.kind == PeerProtocolError.__name__
