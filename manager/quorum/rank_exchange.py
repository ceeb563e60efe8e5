"""Exchanges between the ranks of one replica, through their launcher's store (torch's TCPStore).

Group rank 0 represents the replica: it asks the Lighthouse, and passes the answer on. A step is committed by all ranks
or by none. Each exchange has its own number, and its keys are removed once all ranks have reached a later one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import Enum
from typing import Final

import msgspec

from ft_transport.coordination.ranks import RankMessages, from_json
from ft_transport.coordination.store import StoreChannel
from ft_transport.errors import TransportError
from ft_transport.keys import Keys
from ft_transport.runtime.deadline import Deadline
from manager.errors import QuorumError, QuorumTimeoutError, quorum_errors
from manager.quorum.reports import RankReport

_LONGEST: Final = timedelta(days=1)
_PARTING: Final = timedelta(milliseconds=200)
"""Timeout of messages after the actual timeout, or to a rank that may have exited."""


class Exchange(Enum):
    """The kinds of exchange between the ranks of a replica, and their meaning for ranks that came for another kind."""

    QUORUM = "quorum"
    """Before a step. Absent ranks give their step up, and then come; so this exchange is repeated."""
    HEAL = "heal"
    """After receiving a state: a vote. A rank that comes for another exchange has not healed."""
    COMMIT = "commit"
    """After a step: a vote. A rank that comes for another exchange has given the step up."""


class _Sent(msgspec.Struct, frozen=True):
    """A rank's report, the kind of exchange, the number of its attempt at this exchange, and its nonce.

    The rank's process draws the nonce, so that no signed answer of another run applies to this rank.
    """

    kind: Exchange
    report: RankReport
    attempt: int
    nonce: str


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's answer to all ranks, published once for each exchange.

    Attributes:
        kind: The common kind of all ranks; ``None`` if kinds differ, or a rank is missing.
        result: The result, for ranks that came for this kind.
        attempts: The answered attempt of each rank.
        nonces: The nonces of the ranks.
        error: Why there is no result.
        is_at_odds: Whether the ranks came for different kinds.
        is_timeout: Whether a rank did not come in time.
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
    """Ranks of one replica came for different exchanges."""


class RankExchange:
    """The ranks of one replica. Every rank makes the same exchanges in the same order; none from two threads at once.

    A rank may miss its turn: a signal handler raises while it waits, or it comes too late. So an exchange that a rank
    has begun stays open until it has the answer; the rank's next exchange uses the same number. Ranks that meet there
    for different kinds find that out without waiting for a timeout.

    Args:
        store: Shared by the ranks; ``None`` for a replica of one rank, which agrees with itself.
        prefix: Prefix of the keys in it; never used before.
        rank: Rank within the replica.
        world_size: Number of ranks.
        keys: Keys of the job token, which sign the messages between ranks.
    """

    def __init__(
        self, store: StoreChannel | None, prefix: str, rank: int, world_size: int, keys: Keys | None = None
    ) -> None:
        assert store is not None or world_size == 1, "ranks need a store to agree"
        self._messages = (
            RankMessages(store, keys, "ranks of a replica", rank=rank, timeout=_LONGEST) if store is not None else None
        )
        self._prefix = prefix
        self.rank = rank
        self.world_size = world_size
        # Number of the open or next exchange, and how often this rank has begun it. One value, so that a handler that
        # raises leaves both of one exchange.
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
        """Send every rank's report to group rank 0, and its answer to every rank.

        Args:
            kind: The kind of exchange.
            report: This rank's.
            answer: Makes the answer, in JSON, from all reports in the order of ranks. Called on group rank 0 alone.
            gathering: How long rank 0 waits for the others.
            answering: How long the others wait for rank 0.

        Raises:
            QuorumError: A rank did not come in time, or rank 0 has no answer; then all ranks that wait raise it.
        """
        messages = self._messages
        if messages is None:
            return answer((report,))
        deadline = Deadline.after(gathering if self.rank == 0 else answering)
        while True:
            try:
                if self.rank == 0:
                    return self._lead(messages, kind, report, answer, deadline=deadline, publishing=gathering)
                return self._follow(messages, kind, report, deadline)
            except _AtOddsError:
                if kind is not Exchange.QUORUM or deadline.is_over():
                    raise

    def agree(
        self, kind: Exchange, refusals: tuple[str, ...], *, gathering: timedelta, answering: timedelta
    ) -> tuple[str, ...]:
        """Return every rank's reasons not to commit, the same for all ranks. Empty if the replica commits.

        Args:
            kind: ``HEAL`` or ``COMMIT``.
            refusals: This rank's.
            gathering: See `exchange`.
            answering: See `exchange`.

        Raises:
            QuorumError: A rank did not answer in time.
        """
        if self._messages is None:
            return refusals
        try:
            agreed = self.exchange(
                kind, RankReport(refusals=refusals), _refusals, gathering=gathering, answering=answering
            )
        except _AtOddsError as error:
            return (str(error),)
        with quorum_errors():
            return from_json(agreed, _refusals_decoder)

    def close(self) -> None:
        """End the waits of other ranks for this one, if the store still answers."""
        if self._messages is not None:
            with contextlib.suppress(TransportError):
                self._messages.channel.set(self._left_key(self.rank), "", _PARTING)

    def _lead(
        self,
        messages: RankMessages,
        kind: Exchange,
        report: RankReport,
        answer: Callable[[tuple[RankReport, ...]], bytes],
        *,
        deadline: Deadline,
        publishing: timedelta,
    ) -> bytes:
        """Run group rank 0's part of one exchange."""
        number, num_begun = self._current
        with quorum_errors():
            key = self._key(number, "answer")
            is_answered = bool(num_begun) and not messages.channel.missing([key], deadline.cap(_LONGEST))
        if is_answered:
            # Rank 0 was interrupted after it had answered: the others have that answer.
            answered = self._answer(messages, number, deadline)
            self._current = number, num_begun = number + 1, 0
            if answered.kind is kind is not Exchange.QUORUM:
                return bytes(answered.result)
        sent = _Sent(kind, report, num_begun + 1, messages.nonce)
        self._current = (number, sent.attempt)
        keys = {self._key(number, rank): rank for rank in range(1, self.world_size)}
        try:
            found = self._await(messages, keys, deadline.cap(_LONGEST))
            with quorum_errors():
                all_sent = (sent, *(from_json(each, _sent_decoder) for each in found))
            if len({each.kind for each in all_sent}) > 1:
                came = ", ".join(f"rank {rank} for {each.kind.value}" for rank, each in enumerate(all_sent))
                raise _AtOddsError(f"the ranks of this replica came for different things: {came}")
            result = answer(tuple(each.report for each in all_sent))
        except QuorumError as error:
            with contextlib.suppress(QuorumError):
                self._publish(messages, number, _failure(error), _PARTING)
            raise
        attempts = tuple(each.attempt for each in all_sent)
        # A rank that comes to this exchange has the answers of all earlier ones.
        old, self._old_keys = self._old_keys, []
        nonces = tuple(each.nonce for each in all_sent)
        answer_to_all = _Answer(kind=kind, result=msgspec.Raw(result), attempts=attempts, nonces=nonces)
        published = self._publish(messages, number, answer_to_all, publishing, remove=old)
        if published.error:
            raise QuorumError(f"rank 0 of this replica has already told the others: {published.error}")
        self._refuse_foreign(messages, published)
        return bytes(published.result)

    def _follow(self, messages: RankMessages, kind: Exchange, report: RankReport, deadline: Deadline) -> bytes:
        """Run another rank's part of one exchange."""
        number, num_begun = self._current
        sent = _Sent(kind, report, num_begun + 1, messages.nonce)
        self._current = (number, sent.attempt)
        with quorum_errors():
            key = self._key(number, self.rank)
            messages.channel.set(key, messages.signed(key, msgspec.json.encode(sent)), deadline.cap(_LONGEST))
        answer = self._answer(messages, number, deadline)
        self._current = (number + 1, 0)
        if answer.error:
            error_type = QuorumTimeoutError if answer.is_timeout else _AtOddsError if answer.is_at_odds else QuorumError
            raise error_type(f"rank 0 of this replica: {answer.error}")
        self._refuse_foreign(messages, answer)
        is_to_this = answer.kind is kind and answer.attempts[self.rank : self.rank + 1] == (sent.attempt,)
        # A vote counts as it was cast, even if this rank has decided otherwise meanwhile.
        if is_to_this or answer.kind is kind is not Exchange.QUORUM:
            return bytes(answer.result)
        raise _AtOddsError(f"rank 0 of this replica has answered rank {self.rank} before it was interrupted")

    def _refuse_foreign(self, messages: RankMessages, answer: _Answer) -> None:
        if answer.nonces[self.rank : self.rank + 1] != (messages.nonce,):
            raise QuorumError(
                f"rank {self.rank}: expected an answer to what this rank has said, got one to another rank"
            )

    def _answer(self, messages: RankMessages, number: int, deadline: Deadline) -> _Answer:
        (found,) = self._await(messages, {self._key(number, "answer"): 0}, deadline.cap(_LONGEST))
        with quorum_errors():
            return from_json(found, _answer_decoder)

    def _publish(
        self, messages: RankMessages, number: int, answer: _Answer, timeout: timedelta, *, remove: Sequence[str] = ()
    ) -> _Answer:
        """Publish the answer. Returns the answer that the others read: an earlier one, if it exists."""
        key = self._key(number, "answer")
        with quorum_errors():
            signed = messages.signed(key, msgspec.json.encode(answer)).decode()
            stored = messages.channel.set_once(key, signed, timeout, remove=remove)
        self._current = (number + 1, 0)
        self._old_keys += [key, *(self._key(number, rank) for rank in range(1, self.world_size))]
        with quorum_errors():
            return from_json(messages.opened(key, stored), _answer_decoder)

    def _await(self, messages: RankMessages, keys: dict[str, int], timeout: timedelta) -> list[bytes]:
        """Wait for the values of other ranks; ``keys`` maps each key to its rank."""
        store = messages.channel
        missing, reason = list(keys), ""
        left = {self._left_key(rank): rank for rank in keys.values()}
        try:
            with quorum_errors():
                if (values := store.get(missing, timeout, unless=list(left))) is not None:
                    return [messages.opened(key, value) for key, value in zip(missing, values, strict=True)]
                gone = set(left) - set(store.missing(list(left), _PARTING))
                missing = store.missing(missing, _PARTING)
            if gone:
                ranks = sorted(left[key] for key in gone)
                raise QuorumError(f"expected all ranks of this replica, and of ranks {ranks} the manager was shut down")
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
