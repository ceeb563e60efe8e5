"""Exchanges between the ranks of one replica, through the key-value store of their launcher (torch's ``TCPStore``).

Rank 0 represents the replica: it asks the Lighthouse, and sends the answer to the other ranks. Votes make sure that
all ranks commit a step, or none. Each exchange has its own number. Its keys are removed after all ranks have reached a
later exchange.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import Enum
from typing import Final

import msgspec

from ft_transport.coordination.ranks import RankMessages, decode_message
from ft_transport.coordination.store import StoreChannel
from ft_transport.credentials import Keys
from ft_transport.errors import TransportError
from ft_transport.runtime.deadline import Deadline
from manager.errors import QuorumError, QuorumTimeoutError, quorum_errors
from manager.quorum.reports import RankReport

_LONGEST: Final = timedelta(days=1)
_PARTING: Final = timedelta(milliseconds=200)
"""Timeout of a message that is sent after the caller's timeout, or to a rank that may have exited."""


class Exchange(Enum):
    """The kinds of exchange, each with what happens if another rank takes part with a different kind."""

    QUORUM = "quorum"
    """A request for a quorum, before a step. It is repeated: the other rank gives its step up, and then takes part."""
    HEAL = "heal"
    """A vote, after receiving a state. It fails, because the other rank has not healed."""
    COMMIT = "commit"
    """A vote, after a step. It fails, because the other rank has given the step up."""


class _Sent(msgspec.Struct, frozen=True):
    """The message of one rank to rank 0.

    Attributes:
        kind: The kind of exchange that the rank takes part in.
        report: The rank's report.
        attempt: How often the rank has begun this exchange.
        nonce: Random text of the rank's process. The answer repeats it, so that no signed answer of another run counts.
    """

    kind: Exchange
    report: RankReport
    attempt: int
    nonce: str


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of rank 0 to all ranks, which it publishes once for each exchange.

    Attributes:
        kind: The kind of the exchange; ``None`` if the ranks' kinds differ, or if a rank is missing.
        result: The result, in JSON.
        attempts: The attempts of the answered messages, by rank.
        nonces: The nonces of the answered messages, by rank.
        error: Why there is no result; empty with a result.
        is_at_odds: Whether the error is that the ranks' kinds differ.
        is_timeout: Whether the error is that a rank did not take part in time.
    """

    kind: Exchange | None = None
    result: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))
    attempts: tuple[int, ...] = ()
    nonces: tuple[str, ...] = ()
    error: str = ""
    is_at_odds: bool = False
    is_timeout: bool = False


_sent_decoder: Final = msgspec.json.Decoder(_Sent)
_answer_decoder: Final = msgspec.json.Decoder(_Answer)
_refusals_decoder: Final = msgspec.json.Decoder(tuple[str, ...])


class _AtOddsError(QuorumError):
    """The ranks of one replica took part in the same exchange with different kinds."""


class RankExchange:
    """Runs the exchanges of one rank. All ranks make them in the same order. Only one thread at a time may call it.

    A rank may fail to read an answer, because a signal handler raises or because the answer is late. Then the exchange
    stays open: the rank's next call takes part in the exchange with the same number. So ranks that are out of step meet
    in one exchange, with different kinds. They notice this at once, without waiting for a timeout.

    Args:
        store: The key-value store that the ranks share.
        prefix: Prefix of all keys in the store, which no earlier `RankExchange` may have used.
        rank: This rank within the replica.
        world_size: Number of ranks of the replica, at least two.
        keys: The keys of the job token, which sign the messages between ranks; ``None`` without a token.
    """

    def __init__(self, store: StoreChannel, prefix: str, rank: int, world_size: int, keys: Keys | None = None) -> None:
        self._messages = RankMessages(store, keys, "ranks of a replica", rank=rank, timeout=_LONGEST)
        self._prefix = prefix
        self.rank = rank
        self.world_size = world_size
        # The number of the open or next exchange, and how often this rank has begun it. Both are set in one operation,
        # so that they stay consistent if a signal handler raises.
        self._current = (1, 0)
        self._old_keys: list[str] = []

    def exchange(
        self,
        kind: Exchange,
        report: RankReport,
        answer: Callable[[tuple[RankReport, ...]], bytes],
        *,
        gathering: timedelta,
        answering: timedelta,
    ) -> bytes:
        """Send the reports of all ranks to rank 0, and return its answer on every rank, in JSON.

        Args:
            kind: The kind of exchange.
            report: The report of this rank.
            answer: Makes the answer from the reports, which are in the order of the ranks. Called on rank 0 only.
            gathering: How long rank 0 waits for the reports of the other ranks.
            answering: How long the other ranks wait for the answer.

        Raises:
            QuorumError: A rank did not take part in time, or ``answer`` failed. All waiting ranks raise this error.
        """
        deadline = Deadline.after(gathering if self.rank == 0 else answering)
        while True:
            try:
                if self.rank == 0:
                    return self._lead(kind, report, answer, deadline=deadline, publishing=gathering)
                return self._follow(kind, report, deadline)
            except _AtOddsError:
                if kind is not Exchange.QUORUM or deadline.is_over():
                    raise

    def agree(
        self, kind: Exchange, refusals: tuple[str, ...], *, gathering: timedelta, answering: timedelta
    ) -> tuple[str, ...]:
        """Vote on a heal or a commit. On every rank, return the reasons of all ranks against it; empty if all agree.

        Args:
            kind: ``HEAL`` or ``COMMIT``.
            refusals: The reasons of this rank to vote against it; empty to agree.
            gathering: How long rank 0 waits for the votes of the other ranks.
            answering: How long the other ranks wait for the result.

        Raises:
            QuorumError: A rank did not vote in time.
        """
        try:
            agreed = self.exchange(
                kind, RankReport(refusals=refusals), _refusals, gathering=gathering, answering=answering
            )
        except _AtOddsError as error:
            return (str(error),)
        with quorum_errors():
            return decode_message(agreed, _refusals_decoder)

    def close(self) -> None:
        """If the store still answers, mark this rank as shut down, so that other ranks stop waiting for it."""
        with contextlib.suppress(TransportError):
            self._messages.channel.set(self._left_key(self.rank), "", _PARTING)

    def _lead(
        self,
        kind: Exchange,
        report: RankReport,
        answer: Callable[[tuple[RankReport, ...]], bytes],
        *,
        deadline: Deadline,
        publishing: timedelta,
    ) -> bytes:
        """Run one exchange on rank 0."""
        number, num_begun = self._current
        with quorum_errors():
            key = self._key(number, "answer")
            is_answered = bool(num_begun) and not self._messages.channel.missing([key], deadline.cap(_LONGEST))
        if is_answered:
            # A signal handler interrupted rank 0 after it had answered, and the other ranks use that answer.
            published = self._answer(number, deadline)
            self._current = number, num_begun = number + 1, 0
            if published.kind is kind is not Exchange.QUORUM:
                return bytes(published.result)
        sent = _Sent(kind, report, num_begun + 1, self._messages.nonce)
        self._current = (number, sent.attempt)
        keys = {self._key(number, rank): rank for rank in range(1, self.world_size)}
        try:
            found = self._await(keys, deadline.cap(_LONGEST))
            with quorum_errors():
                all_sent = (sent, *(decode_message(each, _sent_decoder) for each in found))
            if len({each.kind for each in all_sent}) > 1:
                kinds = ", ".join(f"rank {rank} for {each.kind.value}" for rank, each in enumerate(all_sent))
                raise _AtOddsError(f"expected the ranks of this replica in the same kind of exchange, got {kinds}")
            result = answer(tuple(each.report for each in all_sent))
        except QuorumError as error:
            with contextlib.suppress(QuorumError):
                self._publish(number, _failure(error), _PARTING)
            raise
        attempts = tuple(each.attempt for each in all_sent)
        # All ranks that take part in this exchange have read the answers of the earlier ones.
        old, self._old_keys = self._old_keys, []
        nonces = tuple(each.nonce for each in all_sent)
        answer_to_all = _Answer(kind=kind, result=msgspec.Raw(result), attempts=attempts, nonces=nonces)
        published = self._publish(number, answer_to_all, publishing, remove=old)
        if published.error:
            raise QuorumError(f"rank 0 of this replica has already answered the other ranks: {published.error}")
        self._refuse_foreign(published)
        return bytes(published.result)

    def _follow(self, kind: Exchange, report: RankReport, deadline: Deadline) -> bytes:
        """Run one exchange on a rank other than 0."""
        number, num_begun = self._current
        sent = _Sent(kind, report, num_begun + 1, self._messages.nonce)
        self._current = (number, sent.attempt)
        with quorum_errors():
            key = self._key(number, self.rank)
            signed = self._messages.signed(key, msgspec.json.encode(sent))
            self._messages.channel.set(key, signed, deadline.cap(_LONGEST))
        answer = self._answer(number, deadline)
        self._current = (number + 1, 0)
        if answer.error:
            error_type = QuorumTimeoutError if answer.is_timeout else _AtOddsError if answer.is_at_odds else QuorumError
            raise error_type(f"rank 0 of this replica: {answer.error}")
        self._refuse_foreign(answer)
        is_current = answer.kind is kind and answer.attempts[self.rank : self.rank + 1] == (sent.attempt,)
        # The result of a vote counts even if rank 0 has counted an earlier vote of this rank.
        if is_current or answer.kind is kind is not Exchange.QUORUM:
            return bytes(answer.result)
        raise _AtOddsError(f"rank 0 of this replica has answered an earlier message of rank {self.rank}")

    def _refuse_foreign(self, answer: _Answer) -> None:
        if answer.nonces[self.rank : self.rank + 1] != (self._messages.nonce,):
            raise QuorumError(
                f"rank {self.rank}: expected an answer to this rank's message, got one to a message of another process"
            )

    def _answer(self, number: int, deadline: Deadline) -> _Answer:
        (found,) = self._await({self._key(number, "answer"): 0}, deadline.cap(_LONGEST))
        with quorum_errors():
            return decode_message(found, _answer_decoder)

    def _publish(self, number: int, answer: _Answer, timeout: timedelta, *, remove: Sequence[str] = ()) -> _Answer:
        """Publish an answer, unless this exchange has one already. Return the answer that the other ranks read."""
        key = self._key(number, "answer")
        with quorum_errors():
            signed = self._messages.signed(key, msgspec.json.encode(answer)).decode()
            stored = self._messages.channel.set_once(key, signed, timeout, remove=remove)
        self._current = (number + 1, 0)
        self._old_keys += [key, *(self._key(number, rank) for rank in range(1, self.world_size))]
        with quorum_errors():
            return decode_message(self._messages.opened(key, stored), _answer_decoder)

    def _await(self, keys: dict[str, int], timeout: timedelta) -> list[bytes]:
        """Wait for messages of other ranks; return them in the order of ``keys``, which maps each key to its rank."""
        messages, store = self._messages, self._messages.channel
        missing, reason = list(keys), ""
        left = {self._left_key(rank): rank for rank in keys.values()}
        try:
            with quorum_errors():
                if (values := store.get(missing, timeout, unless=list(left))) is not None:
                    return [messages.opened(key, value) for key, value in zip(missing, values, strict=True)]
                closed = set(left) - set(store.missing(list(left), _PARTING))
                missing = store.missing(missing, _PARTING)
            if closed:
                ranks = sorted(left[key] for key in closed)
                raise QuorumError(f"expected all ranks of this replica to take part, but ranks {ranks} have shut down")
        except QuorumTimeoutError as error:
            reason = f" ({error})"
        raise QuorumTimeoutError(
            f"rank {self.rank}: expected {', '.join(f'rank {keys[key]}' for key in missing)} of this replica within "
            f"{timeout.total_seconds():.3g} s{reason}"
        )

    def _key(self, number: int, name: int | str) -> str:
        return f"{self._prefix}/{number}/{name}"

    def _left_key(self, rank: int) -> str:
        return f"{self._prefix}/left/{rank}"


def _failure(error: QuorumError) -> _Answer:
    return _Answer(
        error=str(error),
        is_at_odds=isinstance(error, _AtOddsError),
        is_timeout=isinstance(error, QuorumTimeoutError),
    )


def _refusals(reports: Sequence[RankReport]) -> bytes:
    return msgspec.json.encode(
        [f"rank {rank}: {reason}" for rank, each in enumerate(reports) for reason in each.refusals]
    )
