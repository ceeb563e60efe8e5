"""The ranks of a group acting as one: each phase ends in a vote of all, on success too, and in one outcome for all.

Votes go through the key-value store of ``torch.distributed`` (``ranks``), not through a collective: a rank that is
missing can then be named, the others learn of it, and nothing is broken afterwards. gloo ends all connections of a
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

from ft_transport.coordination.exchange import Exchange
from ft_transport.coordination.plain_values import from_msgpack
from ft_transport.coordination.ranks import RankGroup, RankMessages
from ft_transport.coordination.store_channel import AT_ONCE
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
from ft_transport.runtime.handler_safety import SafeEvent, SafeThread

T = TypeVar("T")

_FIRST_PATIENCE: Final = 10
"""So many timeouts may the first rank take, to delete old files for instance; it shows heartbeats meanwhile."""

_MAX_VERDICTS: Final = 16
"""An interrupted rank has not read the last ones."""
_VERDICT_DIGITS: Final = 16


class Agreement:
    """Runs phases on all ranks, each with one outcome for all. One thread at a time, the same calls on every rank.

    An exchange of data is a phase by itself, which begins only after all ranks have got there: so no rank waits in gloo
    for one that has failed before.

    Args:
        group: The ranks.
        channel: Tells several agreements of one group apart.
        timeout: How long a rank may go without a heartbeat before the others give it up.

    Attributes:
        rank: This rank's place in the group.
        size: Number of ranks.
        exchange: Carries data between the ranks.
        step: The step in work, for errors.
        about: Follows the name of each phase, in errors.
        may_try_again: Whether the failure that was raised last may pass; the same on all ranks.
        sequence: Counts the phases; the same on all ranks.
    """

    def __init__(self, group: RankGroup, channel: str, timeout: timedelta) -> None:
        self.rank, self.size = group.rank, group.size
        self.exchange: Final = Exchange(group, channel, timeout)
        self._messages = group.messages(channel, timeout)
        # As `Vote.heard` names them, the last one last. They hold nonces of this run: no other has them.
        self._verdicts: deque[str] = deque(maxlen=_MAX_VERDICTS)
        self._timeout = timeout
        self.sequence = 0
        self.step: int | str | None = None
        self.about = ""
        self.may_try_again = False

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that decides."""
        return self.rank == 0

    def run_on_all_ranks(self, phase: str, action: Callable[[], bytes | None]) -> tuple[bytes, ...]:
        """Runs ``action`` on every rank, and returns what they returned, by rank.

        Args:
            phase: What it is, for errors; the same on all ranks.
            action: This rank's part. What it returns is small.

        Raises:
            TransportError: A rank failed, or is gone: the same error on all. `may_try_again` says whether all may.
        """
        outcome = self._outcome(phase + self.about, action)
        self.may_try_again = isinstance(outcome, TryAgain)
        match outcome:
            case GoOn(payloads):
                return payloads
            case TryAgain(error) | GiveUp(error):
                raise error

    def run(self, phase: str, action: Callable[[], T]) -> T:
        """As `run_on_all_ranks`, and returns what ``action`` returned on this rank."""
        results: list[T] = []
        self.run_on_all_ranks(phase, lambda: results.append(action()))
        return results[0]

    def on_first(self, phase: str, action: Callable[[], T]) -> T | None:
        """Runs ``action`` on the first rank alone. Returns there what it returned, and ``None`` on the others.

        Raises:
            TransportError: What it raised; the same error on all ranks.
        """
        return self.run(phase, lambda: self._by_first(action))

    def gather(self, phase: str, data: bytes) -> list[bytes]:
        """Brings the data of every rank to the first rank, by rank; the others get an empty list."""
        return self.run(phase, self.exchange.ending_on_failure(lambda: self.exchange.gather(data))) or []

    def scatter(self, phase: str, data: Sequence[bytes] | None) -> bytes:
        """Gives each rank its part of the first rank's data."""
        return self.run(phase, self.exchange.ending_on_failure(lambda: self.exchange.scatter(data)))

    def broadcast(self, phase: str, data: bytes | None) -> bytes:
        """Gives all ranks the first rank's data."""
        return self.run(phase, self.exchange.ending_on_failure(lambda: self.exchange.broadcast(data)))

    def value_of_first(self, phase: str, action: Callable[[], T], decoder: msgspec.msgpack.Decoder[T]) -> T:
        """As `on_first`, and returns on all ranks what ``action`` returned: a value of a kind that msgpack has."""
        encoded = self.run_on_all_ranks(phase, lambda: self._by_first(lambda: msgspec.msgpack.encode(action())))
        return from_msgpack(encoded[0], decoder)

    def values_of_all(self, phase: str, action: Callable[[], T], decoder: msgspec.msgpack.Decoder[T]) -> list[T]:
        """As `run_on_all_ranks`, with values of a kind that msgpack has in place of bytes."""
        encoded = self.run_on_all_ranks(phase, lambda: msgspec.msgpack.encode(action()))
        return [from_msgpack(each, decoder) for each in encoded]

    def _by_first(self, action: Callable[[], T]) -> T | None:
        patience_s = _FIRST_PATIENCE * self._timeout.total_seconds()
        return self.showing_life(action, patience_s) if self.is_first else None

    def reconnect(self) -> None:
        """Drops the connections over which data goes; called on all ranks, after a phase that failed on all."""
        self.exchange.reset(self.sequence)

    def close(self) -> None:
        """Ends the connections over which data goes."""
        self.exchange.close()

    def check_others(self) -> None:
        """Shows that this rank is at work, and gives its part up if another has failed; called during long parts.

        Raises:
            AbandonedError: Another rank has failed in this phase.
        """
        if self._messages is not None:
            self._messages.beat()
            if self._messages.channel.get([f"failed/{self.sequence}"], AT_ONCE) is not None:
                raise AbandonedError("gave up because another rank has failed")

    def showing_life(self, action: Callable[[], T], timeout_s: float) -> T:
        """Runs ``action``, and shows the others that this rank is at work, for ``timeout_s`` at most."""
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
                # The others learn of it, and this rank does as the signal says.
                if messages is not None:
                    self._cast(messages, vote)
                raise
        if messages is None:
            return tally([vote], step=self.step)
        try:
            votes = self._vote(messages, vote)
            # A success of all ranks is one of this rank's own vote, and not of an earlier run.
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
            # It does not wait for the others, which may go on at once.
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
        """Makes ``votes`` the verdict, unless there is one already. Returns the verdict for all ranks."""
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
            # A rank that has heard none was interrupted in the first phase, or this is it.
            if vote.failure is None and vote.heard and vote.heard not in self._verdicts:
                raise PeerProtocolError(
                    f"expected rank {rank} to follow a verdict of this run; its vote is of an earlier run, or it has "
                    "missed this rank in the last phase"
                )
            return vote
        except PeerProtocolError as error:
            return Vote(phase=own.phase, failure=describe(error))


def _may_be_forged(vote: Vote) -> bool:
    """Whether it stands in place of one that was not believed: that rank may not have read the last verdict yet."""
    return vote.failure is not None and vote.failure.kind == PeerProtocolError.__name__
