"""The ranks of a group acting as one: each phase ends in a vote of all, on success too, and in one outcome for all.

Votes go through the key-value store of ``torch.distributed``, not through a collective: a rank that is missing can then
be named, the others learn of it, and nothing is broken afterwards. gloo ends all connections of a group when one of its
operations times out. Data goes through a gloo group (``coordination.exchange``).
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

import msgspec
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # exported, undeclared

from ft_transport.coordination.heartbeat import Heartbeat, HeartbeatWatch
from ft_transport.coordination.plain_values import from_msgpack
from ft_transport.coordination.seal import Seal
from ft_transport.coordination.store_channel import AT_ONCE, DirectStore, Pacing, StoreChannel
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
from ft_transport.errors import ConfigurationError, PeerProtocolError, RankGoneError, TransportError
from ft_transport.keys import Keys
from ft_transport.runtime.handler_safety import SafeEvent, SafeThread

T = TypeVar("T")

_FIRST_PATIENCE: Final = 10
"""So many timeouts may the first rank take to delete what is in its way; the others are shown that it is alive."""

_LONGEST_BEAT_S: Final = 1.0
"""How often a rank shows that it is alive, and looks at whether others are."""


_MAX_VERDICTS: Final = 16
"""A rank that was interrupted has not heard the last ones."""
_VERDICT_DIGITS: Final = 16

_num_groups: dict[str, int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Some ranks, this one among them, and a part of their key-value store that nothing else uses.

    Attributes:
        rank: This rank's place among them.
        size: How many they are.
        global_ranks: Their ranks in all of ``torch.distributed``.
        shared: The part of the store; ``None`` where there is one rank.
        keys: Of the job token: what the ranks agree on is signed with them.
    """

    rank: int = 0
    size: int = 1
    global_ranks: tuple[int, ...] = (0,)
    shared: Any = None
    keys: Keys | None = None

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None, *, keys: Keys | None = None) -> RankGroup:
        """Returns the ranks of a process group. Called on all of them, in the same order as for others of that group.

        Args:
            process_group: ``None`` stands for all of ``torch.distributed``, or for this process alone where that is not
                initialised. No collective of it runs.
            keys: Of the job token; ``None`` for the environment's.

        Raises:
            ConfigurationError: This rank does not belong to it, or the environment names no job token.
        """
        if process_group is None and not dist.is_initialized():
            return cls()
        rank = dist.get_rank(process_group)
        if rank < 0:
            raise ConfigurationError("expected a process group that this rank belongs to")
        size = dist.get_world_size(process_group)
        group = process_group if process_group is not None else dist.group.WORLD
        global_ranks = tuple(dist.get_process_group_ranks(group))
        name = group.group_name if group is not None else ""
        number = _num_groups[name] = _num_groups.get(name, 0) + 1
        # The group's own store is not public; that of the default group is not either, and is what libraries use.
        default: Any = dist.distributed_c10d._get_default_store()
        ranks = "-".join(map(str, global_ranks)) if size <= 64 else name
        shared = PrefixStore(f"ft_transport/{name}/{ranks}/{number}", default)
        keys = keys if keys is not None else Keys.from_environment()
        return cls(rank=rank, size=size, global_ranks=global_ranks, shared=shared, keys=keys)

    def store(self, prefix: str) -> Any:
        """A part of the store, for one purpose; ``None`` where there is one rank."""
        return PrefixStore(prefix, self.shared) if self.shared is not None else None

    def channel(self, prefix: str) -> StoreChannel | None:
        """As `store`, to agree through."""
        store = self.store(prefix)
        return StoreChannel(DirectStore(store)) if store is not None else None


class Agreement:
    """Runs phases on all ranks, each with one outcome for all. One thread at a time, the same calls on every rank.

    Args:
        group: The ranks.
        channel: Tells several agreements of one group apart.
        timeout: How long a rank may go without a heartbeat before the others give it up.

    Attributes:
        step: What is being worked on, for errors.
        may_try_again: Whether the failure that was raised last may pass; the same on all ranks.
        sequence: Counts the phases; the same on all ranks.
    """

    def __init__(self, group: RankGroup, channel: str, timeout: timedelta) -> None:
        self.rank, self.size = group.rank, group.size
        self._channel = group.channel(channel) if group.size > 1 else None
        self._seal = Seal(group.keys, channel, *map(str, group.global_ranks))
        # Of this agreement, so that nobody can tell it what another one was told.
        self._nonce = secrets.token_hex(8)
        # As `Vote.heard` names them, the last one last. They hold nonces of this run: no other has them.
        self._is_signed = group.keys is not None
        self._verdicts: deque[str] = deque(maxlen=_MAX_VERDICTS)
        self._timeout = timeout
        self._beat_s = min(_LONGEST_BEAT_S, timeout.total_seconds() / 4)
        self._heartbeat = (
            Heartbeat(self._channel, f"alive/{group.rank}", interval_s=self._beat_s, timeout=timeout)
            if self._channel is not None
            else None
        )
        self.sequence = 0
        self.step: int | str | None = None
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
        outcome = self._outcome(phase, action)
        self.may_try_again = isinstance(outcome, TryAgain)
        match outcome:
            case GoOn(payloads):
                return payloads
            case TryAgain(error) | GiveUp(error):
                raise error

    def on_first(self, phase: str, action: Callable[[], bytes | None]) -> bytes:
        """Runs ``action`` on the first rank alone, and returns on all what it returned, or raises what it raised.

        Raises:
            TransportError: As for `run_on_all_ranks`.
        """
        patience_s = _FIRST_PATIENCE * self._timeout.total_seconds()
        return self.run_on_all_ranks(
            phase, (lambda: self.showing_life(action, patience_s)) if self.is_first else lambda: None
        )[0]

    def value_of_first(self, phase: str, action: Callable[[], T], decoder: msgspec.msgpack.Decoder[T]) -> T:
        """As `on_first`, with a value of a kind that msgpack has in place of bytes."""
        return from_msgpack(self.on_first(phase, lambda: msgspec.msgpack.encode(action())), decoder)

    def values_of_all(self, phase: str, action: Callable[[], T], decoder: msgspec.msgpack.Decoder[T]) -> list[T]:
        """As `run_on_all_ranks`, with values of a kind that msgpack has in place of bytes."""
        encoded = self.run_on_all_ranks(phase, lambda: msgspec.msgpack.encode(action()))
        return [from_msgpack(each, decoder) for each in encoded]

    def _outcome(self, phase: str, action: Callable[[], bytes | None]) -> Verdict:
        self.sequence += 1
        self._beat()
        try:
            payload = action() or b""
            heard = self._verdicts[-1] if self._verdicts else ""
            vote = Vote(phase=phase, payload=payload, nonce=self._nonce, heard=heard)
        except Exception as error:
            vote = Vote(phase=phase, failure=describe(error))
            self._announce()
        except BaseException as error:
            # The others are told, and this rank does what it was told to.
            vote = Vote(phase=phase, failure=describe(error))
            self._announce()
            self._cast(vote)
            raise
        try:
            votes = self._checked(self._exchange(vote), vote)
        except TransportError as error:
            error.step = self.step
            return GiveUp(error)
        return tally(votes, step=self.step)

    def check_others(self) -> None:
        """Shows that this rank is at work, and gives its part up if another has failed; called during long parts.

        Raises:
            AbandonedError: Another rank has failed in this phase.
        """
        self._beat()
        if self._channel is not None and not self._channel.missing([f"failed/{self.sequence}"], self._timeout):
            raise AbandonedError("gave up because another rank has failed")

    def showing_life(self, action: Callable[[], T], timeout_s: float) -> T:
        """Runs ``action``, and shows the others that this rank is at work, for ``timeout_s`` at most."""
        if self._channel is None:
            return action()
        is_over = SafeEvent()
        deadline_s = time.monotonic() + timeout_s

        def beat() -> None:
            while not is_over.wait(self._beat_s) and time.monotonic() < deadline_s:
                with suppress(RankGoneError):
                    self._beat()

        thread = SafeThread(target=beat, name="ft-transport-alive", daemon=True)
        try:
            thread.start()
            return action()
        finally:
            is_over.set()
            thread.join()

    def _beat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.beat()

    def _announce(self) -> None:
        if self._channel is not None:
            self._channel.post(f"failed/{self.sequence}", "1", self._timeout)

    def _cast(self, vote: Vote) -> None:
        if self._channel is None:
            return
        if self.is_first:
            # It does not wait for the others, which may go on at once.
            others = Vote(phase=vote.phase, failure=describe(AbandonedError("gave up because rank 0 has")))
            self._settle(self._channel, [vote, *[others] * (self.size - 1)])
        else:
            key = f"vote/{self.sequence}/{self.rank}"
            self._channel.post(key, self._seal.sealed(encode(vote), key), self._timeout)

    def _exchange(self, vote: Vote) -> list[Vote | None]:
        if self._channel is None:
            return [vote]
        number = self.sequence
        if not self.is_first:
            self._cast(vote)
            (verdict,) = self._await(self._channel, {0: f"verdict/{number}"})
            if verdict is not None:
                return self._opened(verdict)
            return self._settle(self._channel, [None, *[vote] * (self.size - 1)])
        found = self._await(self._channel, {rank: f"vote/{number}/{rank}" for rank in range(1, self.size)})
        votes = [vote, *(self._vote_of(rank, each, vote.phase) for rank, each in enumerate(found, start=1))]
        if None in votes or any(vote is not None and _may_be_forged(vote) for vote in votes):
            return self._settle(self._channel, votes)
        # All ranks have read the verdict before the last one.
        old = [f"vote/{number - 1}/{rank}" for rank in range(1, self.size)]
        return self._settle(self._channel, votes, remove=[f"verdict/{number - 1}", f"failed/{number - 1}", *old])

    def _settle(
        self, channel: StoreChannel, votes: Sequence[Vote | None], *, remove: Sequence[str] = ()
    ) -> list[Vote | None]:
        """Makes ``votes`` the verdict, unless there is one already. Returns what it is for all."""
        key = f"verdict/{self.sequence}"
        proposed = self._seal.sealed(encode_all(votes), key)
        return self._opened(channel.set_once(key, proposed.decode(), self._timeout, remove=remove))

    def _opened(self, verdict: bytes) -> list[Vote | None]:
        votes = decode_all(self._seal.opened(verdict, f"verdict/{self.sequence}"), self.size)
        if self._is_signed:
            self._verdicts.append(hashlib.sha256(verdict).hexdigest()[:_VERDICT_DIGITS])
        return votes

    def _checked(self, votes: list[Vote | None], own: Vote) -> list[Vote | None]:
        """Makes sure that a success of all ranks is one of this rank's own vote, and not of an earlier run."""
        succeeded = all(vote is not None and vote.failure is None for vote in votes)
        if succeeded and votes[self.rank] != own:
            raise PeerProtocolError(
                f"expected the verdict of {own.phase!r} to have this rank's own vote, it has another"
            )
        return votes

    def _vote_of(self, rank: int, encoded: bytes | None, phase: str) -> Vote | None:
        if encoded is None:
            return None
        try:
            vote = decode(self._seal.opened(encoded, f"vote/{self.sequence}/{rank}"))
            # A rank that has heard none was interrupted in the first phase, or this is it.
            if vote.failure is None and vote.heard and vote.heard not in self._verdicts:
                raise PeerProtocolError(
                    f"expected rank {rank} to follow a verdict of this run; its vote is of an earlier run, or it has "
                    "missed this rank in the last phase"
                )
            return vote
        except PeerProtocolError as error:
            return Vote(phase=phase, failure=describe(error))

    def _await(self, channel: StoreChannel, keys: Mapping[int, str]) -> list[bytes | None]:
        """Waits for a key of each rank, for as long as it shows heartbeats. Returns ``None`` for ranks given up."""
        looked_s = time.monotonic()
        watch = HeartbeatWatch({rank: f"alive/{rank}" for rank in keys}, channel, looked_s)
        pacing = Pacing()
        wanted = list(keys.values())
        while (found := channel.get(wanted, AT_ONCE)) is None:
            pacing.pause(self._beat_s)
            now_s = time.monotonic()
            if now_s < looked_s + self._beat_s:
                continue
            looked_s = now_s
            self._beat()
            unset = channel.missing(wanted, self._timeout)
            missing = [rank for rank, key in keys.items() if key in unset]
            gone = watch.silent(missing, self._timeout.total_seconds(), now_s)
            if gone and len(gone) == len(missing):
                came = {rank: channel.get([key], AT_ONCE) for rank, key in keys.items() if rank not in gone}
                return [each[0] if (each := came.get(rank)) else None for rank in keys]
        return list(found)


def _may_be_forged(vote: Vote) -> bool:
    """Whether it stands in place of one that was not believed: that rank may not have read the last verdict yet."""
    return vote.failure is not None and vote.failure.kind == PeerProtocolError.__name__
