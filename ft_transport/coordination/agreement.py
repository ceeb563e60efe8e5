"""Runs phases on all ranks of a group. Each phase ends in a vote, which gives it one outcome on all ranks.

Votes travel through the key-value store of ``torch.distributed`` (``ranks``), not through a collective. So an error can
name a missing rank, all other ranks learn of the failure, and no connection breaks: gloo would close all connections of
a group after one timeout. Bulk data travels over a gloo group (``gloo_exchange``).
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
from ft_transport.coordination.ranks import RankGroup, RankMessages, decode_message
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
"""Number of timeouts that an action of rank 0 may take, for example to delete old files, while heartbeats continue."""

_MAX_VERDICTS: Final = 16
"""Number of verdicts that are remembered; several, because an interrupted rank has not read the latest ones."""
_VERDICT_DIGITS: Final = 16


class Agreement:
    """Runs phases, each with one outcome on all ranks. All ranks make the same calls, from one thread at a time.

    An exchange of bulk data is a phase of its own. It starts only after all ranks have ended the previous phase. So no
    rank waits in gloo for a rank that has failed.

    Args:
        group: The ranks.
        channel: Distinguishes several agreements of one group.
        timeout: If a rank shows no heartbeat for this time, the other ranks stop waiting for it.

    Attributes:
        rank: This rank within the group.
        size: Number of ranks.
        exchange: Exchanges bulk data between the ranks.
        step: The current step, for errors.
        about: Text that is appended to the name of each phase, for errors.
        may_try_again: Whether the last phase failed in a way that a retry may cure; the same on all ranks.
        sequence: Number of phases so far; the same on all ranks.
    """

    def __init__(self, group: RankGroup, channel: str, timeout: timedelta) -> None:
        self.rank, self.size = group.rank, group.size
        self.exchange: Final = GlooExchange(group, channel, timeout)
        self._messages = group.messages(channel, timeout)
        # Digests of verdicts, as in `Vote.last_verdict`; the newest last. A verdict contains nonces of this run, so no
        # other run has the same digests.
        self._verdicts: deque[str] = deque(maxlen=_MAX_VERDICTS)
        self._timeout = timeout
        self.sequence = 0
        self.step: int | str | None = None
        self.about = ""
        self.may_try_again = False

    @property
    def is_first(self) -> bool:
        """True on rank 0, which decides for the group."""
        return self.rank == 0

    def run_on_all_ranks(self, phase: str, action: Callable[[], bytes | None]) -> tuple[bytes, ...]:
        """Run a phase: call ``action`` on every rank, and return the results of all ranks, by rank.

        Args:
            phase: Name of the phase, for errors; the same on all ranks.
            action: This rank's part. Its result must be small.

        Raises:
            TransportError: A rank failed or died. All ranks raise the same error, and `may_try_again` is the same too.
        """
        outcome = self._outcome(phase + self.about, action)
        self.may_try_again = isinstance(outcome, TryAgain)
        match outcome:
            case GoOn(payloads):
                return payloads
            case TryAgain(error) | GiveUp(error):
                raise error

    def run(self, phase: str, action: Callable[[], T]) -> T:
        """Run a phase as `run_on_all_ranks` does, but return the result of this rank's ``action``, of any type."""
        results: list[T] = []
        self.run_on_all_ranks(phase, lambda: results.append(action()))
        return results[0]

    def on_first(self, phase: str, action: Callable[[], T]) -> T | None:
        """Run a phase with ``action`` on rank 0 only. Return its result on rank 0, and ``None`` on the other ranks.

        Raises:
            TransportError: ``action`` failed. All ranks raise the same error.
        """
        return self.run(phase, lambda: self._by_first(action))

    def gather(self, phase: str, data: bytes) -> list[bytes]:
        """Send the data of every rank to rank 0. Return the data by rank there, and an empty list on other ranks."""
        return self.run(phase, self.exchange.ending_on_failure(lambda: self.exchange.gather(data))) or []

    def scatter(self, phase: str, data: Sequence[bytes] | None) -> bytes:
        """Send to each rank its part of the data of rank 0, and return this rank's part.

        Args:
            phase: Name of the phase, for errors; the same on all ranks.
            data: On rank 0, the parts by rank; ``None`` on the other ranks.
        """
        return self.run(phase, self.exchange.ending_on_failure(lambda: self.exchange.scatter(data)))

    def broadcast(self, phase: str, data: bytes | None) -> bytes:
        """Send the data of rank 0 to all ranks, and return it. The other ranks pass ``None``."""
        return self.run(phase, self.exchange.ending_on_failure(lambda: self.exchange.broadcast(data)))

    def value_of_first(self, phase: str, action: Callable[[], T], decoder: msgspec.msgpack.Decoder[T]) -> T:
        """Run ``action`` on rank 0, as `on_first` does, and return its result on all ranks.

        Args:
            phase: Name of the phase, for errors; the same on all ranks.
            action: Returns a value that msgpack can encode.
            decoder: Decodes that value.
        """
        encoded = self.run_on_all_ranks(phase, lambda: self._by_first(lambda: msgspec.msgpack.encode(action())))
        return decode_message(encoded[0], decoder)

    def values_of_all(self, phase: str, action: Callable[[], T], decoder: msgspec.msgpack.Decoder[T]) -> list[T]:
        """Run ``action`` on every rank, and return all results, by rank. msgpack must be able to encode them."""
        encoded = self.run_on_all_ranks(phase, lambda: msgspec.msgpack.encode(action()))
        return [decode_message(each, decoder) for each in encoded]

    def _by_first(self, action: Callable[[], T]) -> T | None:
        patience_s = _FIRST_PATIENCE * self._timeout.total_seconds()
        return self.showing_life(action, patience_s) if self.is_first else None

    def reconnect(self) -> None:
        """Make the next exchange of data connect again. All ranks call this after the same failed phase."""
        self.exchange.reset(self.sequence)

    def close(self) -> None:
        """Close the connections for data."""
        self.exchange.close()

    def check_others(self) -> None:
        """Show a heartbeat, and raise an error if another rank has failed. Called repeatedly during a long action.

        Raises:
            AbandonedError: Another rank has failed in this phase.
        """
        if self._messages is not None:
            self._messages.beat()
            if self._messages.channel.get([f"failed/{self.sequence}"], AT_ONCE) is not None:
                raise AbandonedError("gave up because another rank has failed")

    def showing_life(self, action: Callable[[], T], timeout_s: float) -> T:
        """Run ``action``, and show heartbeats to the other ranks meanwhile, for at most ``timeout_s`` seconds."""
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
            try:
                messages.beat()
            except TransportError as error:
                error.step = self.step
                return GiveUp(error)
        try:
            payload = action() or b""
            last_verdict = self._verdicts[-1] if self._verdicts else ""
            nonce = messages.nonce if messages is not None else ""
            vote = Vote(phase=phase, payload=payload, nonce=nonce, last_verdict=last_verdict)
        except BaseException as error:
            vote = Vote(phase=phase, failure=describe(error))
            if messages is not None:
                with suppress(TransportError):  # The error below says more.
                    messages.channel.post(f"failed/{self.sequence}", "1", self._timeout)
            if not isinstance(error, Exception):
                # A signal handler has raised: report the failure to the other ranks, and let the exception pass.
                if messages is not None:
                    self._cast(messages, vote)
                raise
        if messages is None:
            return tally([vote], step=self.step)
        try:
            votes = self._vote(messages, vote)
            # A success counts only if the verdict contains this rank's vote, and not a vote of an earlier run.
            if all(each is not None and each.failure is None for each in votes) and votes[self.rank] != vote:
                raise PeerProtocolError(
                    f"expected the verdict on {phase!r} to contain this rank's own vote, got one with another vote"
                )
        except TransportError as error:
            error.step = self.step
            return GiveUp(error)
        return tally(votes, step=self.step)

    def _cast(self, messages: RankMessages, vote: Vote) -> None:
        if self.is_first:
            # The phase has failed. Rank 0 ends it without the other ranks' votes, so that they do not wait.
            others = Vote(phase=vote.phase, failure=describe(AbandonedError("gave up because rank 0 has failed")))
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
                return self._read(messages.opened(key, verdict))
            return self._settle(messages, [None, *[vote] * (self.size - 1)])
        found = messages.wait({rank: f"vote/{number}/{rank}" for rank in range(1, self.size)})
        votes = [vote, *(self._vote_of(messages, rank, each, vote) for rank, each in enumerate(found, start=1))]
        if None in votes or any(each is not None and _may_be_forged(each) for each in votes):
            return self._settle(messages, votes)
        # Every rank has voted in this phase, so it has read the verdict of the phase before, which may be removed.
        old = [f"vote/{number - 1}/{rank}" for rank in range(1, self.size)]
        return self._settle(messages, votes, remove=[f"verdict/{number - 1}", f"failed/{number - 1}", *old])

    def _settle(
        self, messages: RankMessages, votes: Sequence[Vote | None], *, remove: Sequence[str] = ()
    ) -> list[Vote | None]:
        """Publish ``votes`` as the verdict, unless this phase has one. Return the verdict that all ranks read."""
        return self._read(messages.settle(f"verdict/{self.sequence}", encode_all(votes), remove=remove))

    def _read(self, verdict: bytes) -> list[Vote | None]:
        """Decode a verdict, and remember its digest."""
        votes = decode_all(verdict, self.size)
        if self._messages is not None and self._messages.is_signed:
            self._verdicts.append(hashlib.sha256(verdict).hexdigest()[:_VERDICT_DIGITS])
        return votes

    def _vote_of(self, messages: RankMessages, rank: int, signed: bytes | None, own: Vote) -> Vote | None:
        if signed is None:
            return None
        try:
            vote = decode(messages.opened(f"vote/{self.sequence}/{rank}", signed))
            # A vote without a last verdict is one of the first phase, or of a rank that was interrupted in it.
            if vote.failure is None and vote.last_verdict and vote.last_verdict not in self._verdicts:
                raise PeerProtocolError(
                    f"expected a vote of rank {rank} after a verdict of this run; the vote is from an earlier run, or "
                    "that rank ended the last phase without this rank"
                )
            return vote
        except PeerProtocolError as error:
            return Vote(phase=own.phase, failure=describe(error))


def _may_be_forged(vote: Vote) -> bool:
    """Return whether the vote of a rank was replaced because it failed the check of its signature or its run.

    Such a rank may not have read the last verdict, which therefore must not be removed yet.
    """
    return vote.failure is not None and vote.failure.kind == PeerProtocolError.__name__
