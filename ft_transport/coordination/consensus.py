"""The ranks of a group acting as one: each phase ends in a vote of all, on success too, and in one outcome for all.

Votes go through the key-value store of ``torch.distributed``, not through a collective: a rank that is missing can then
be named, the others learn of it, and nothing is broken afterwards. gloo ends all connections of a group when one of its
operations times out. Data goes through a gloo group (``coordination.exchange``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # exported, undeclared

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

T = TypeVar("T")

_FIRST_PATIENCE: Final = 10
"""So many timeouts may the first rank take to delete what is in its way; the others are shown that it is alive."""

_FIRST_PAUSE_S: Final = 0.0005
_LONGEST_PAUSE_S: Final = 0.02
_LONGEST_TICK_S: Final = 1.0
"""How often a rank shows that it is alive, and looks at whether others are."""


class Store(Protocol):
    """What is needed of ``torch.distributed.Store``; no call of these waits for another rank."""

    def set(self, key: str, value: bytes) -> None:
        """Sets a key."""

    def get(self, key: str) -> bytes:
        """Returns the value of a key that is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Sets a key that is not there yet, and returns what it is then."""

    def delete_key(self, key: str) -> bool:
        """Forgets a key."""


_num_groups: dict[str, int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Some ranks, this one among them, and a part of their key-value store that nothing else uses.

    Attributes:
        rank: This rank's place among them.
        size: How many they are.
        global_ranks: Their ranks in all of ``torch.distributed``.
        shared: The part of the store; ``None`` where there is one rank.
    """

    rank: int = 0
    size: int = 1
    global_ranks: tuple[int, ...] = (0,)
    shared: Any = None

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None) -> RankGroup:
        """Returns the ranks of a process group. Called on all of them, in the same order as for others of that group.

        Args:
            process_group: ``None`` stands for all of ``torch.distributed``, or for this process alone where that is not
                initialised. No collective of it runs.

        Raises:
            ConfigurationError: This rank does not belong to it.
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
        return cls(rank=rank, size=size, global_ranks=global_ranks, shared=shared)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that decides."""
        return self.rank == 0

    def store(self, prefix: str) -> Any:
        """A part of the store, for one purpose; ``None`` where there is one rank."""
        return PrefixStore(prefix, self.shared) if self.shared is not None else None


class Agreement:
    """Runs phases on all ranks, each with one outcome for all. One thread at a time, the same calls on every rank.

    Args:
        group: The ranks.
        channel: Tells several agreements of one group apart.
        timeout: How long a rank may go without a sign of life before the others give it up.

    Attributes:
        step: What is being worked on, for errors.
        may_try_again: Whether the failure that was raised last may pass; the same on all ranks.
        sequence: Counts the phases; the same on all ranks.
    """

    def __init__(self, group: RankGroup, channel: str, timeout: timedelta) -> None:
        self.rank, self.size = group.rank, group.size
        self._store: Store | None = group.store(channel)
        self._timeout_s = timeout.total_seconds()
        self._tick_s = min(_LONGEST_TICK_S, self._timeout_s / 4)
        self.sequence = 0
        self._num_ticks = 0
        self._ticked_s = 0.0
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
        patience_s = _FIRST_PATIENCE * self._timeout_s
        return self.run_on_all_ranks(
            phase, (lambda: self.showing_life(action, patience_s)) if self.is_first else lambda: None
        )[0]

    def _outcome(self, phase: str, action: Callable[[], bytes | None]) -> Verdict:
        self.sequence += 1
        self._tick()
        try:
            vote = Vote(phase=phase, payload=action() or b"")
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
            votes = self._exchange(vote)
        except TransportError as error:
            return GiveUp(error)
        return tally(votes, step=self.step)

    def check_others(self) -> None:
        """Shows that this rank is at work, and gives its part up if another has failed; called during long parts.

        Raises:
            AbandonedError: Another rank has failed in this phase.
        """
        self._tick()
        if self._store is not None and self._asked(lambda store: store.check([f"failed/{self.sequence}"])):
            raise AbandonedError("gave up because another rank has failed")

    def showing_life(self, action: Callable[[], T], timeout_s: float) -> T:
        """Runs ``action``, and shows the others that this rank is at work, for ``timeout_s`` at most."""
        if self._store is None:
            return action()
        is_over = threading.Event()
        deadline_s = time.monotonic() + timeout_s

        def tick() -> None:
            while not is_over.wait(self._tick_s) and time.monotonic() < deadline_s:
                with suppress(RankGoneError):
                    self._tick()

        thread = threading.Thread(target=tick, name="ft-transport-alive", daemon=True)
        thread.start()
        try:
            return action()
        finally:
            is_over.set()
            thread.join()

    def _tick(self) -> None:
        now_s = time.monotonic()
        if self._store is not None and now_s > self._ticked_s + self._tick_s:
            self._ticked_s = now_s
            self._num_ticks += 1
            value = str(self._num_ticks).encode()
            self._asked(lambda store: store.set(f"alive/{self.rank}", value))

    def _announce(self) -> None:
        if self._store is not None:
            self._asked(lambda store: store.set(f"failed/{self.sequence}", b"1"))

    def _cast(self, vote: Vote) -> None:
        if self._store is None:
            return
        if self.is_first:
            # It does not wait for the others, who may go on at once.
            others = Vote(phase=vote.phase, failure=describe(AbandonedError("gave up because rank 0 has")))
            self._settle([vote, *[others] * (self.size - 1)])
        else:
            self._asked(lambda store: store.set(f"vote/{self.sequence}/{self.rank}", encode(vote)))

    def _exchange(self, vote: Vote) -> list[Vote | None]:
        if self._store is None or self.size == 1:
            return [vote]
        number = self.sequence
        if not self.is_first:
            self._cast(vote)
            if self._wait({0: f"verdict/{number}"}):
                return self._settle([None, *[vote] * (self.size - 1)])
            return decode_all(self._get(f"verdict/{number}"), self.size)
        keys = {rank: f"vote/{number}/{rank}" for rank in range(1, self.size)}
        missing = self._wait(keys)
        votes = self._settle(
            [vote, *(None if rank in missing else self._vote(vote.phase, self._get(key)) for rank, key in keys.items())]
        )
        if not missing:
            # Everybody has read the verdict before the last one.
            for key in [f"{kind}/{number - 1}" for kind in ("verdict", "failed")]:
                self._delete(key)
            for rank in keys:
                self._delete(f"vote/{number - 1}/{rank}")
        return votes

    def _settle(self, votes: list[Vote | None]) -> list[Vote | None]:
        """Makes ``votes`` the verdict, unless there is one already. Returns what it is for all."""
        key, text = f"verdict/{self.sequence}", encode_all(votes)
        return decode_all(self._asked(lambda store: store.compare_set(key, "", text)), self.size)

    def _vote(self, phase: str, encoded: bytes) -> Vote:
        try:
            return decode(encoded)
        except PeerProtocolError as error:
            return Vote(phase=phase, failure=describe(error))

    def _wait(self, keys: Mapping[int, str]) -> list[int]:
        """Waits for a key of each rank, for as long as it shows that it is alive. Returns the ranks that were given up.

        Polls: a wait of the store's own keeps the trainer's thread from using it.
        """
        pause_s = _FIRST_PAUSE_S
        signs: dict[int, bytes] = {}
        seen_s = dict.fromkeys(keys, time.monotonic())
        looked_s = time.monotonic()
        while not self._asked(lambda store: store.check(list(keys.values()))):
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
            now_s = time.monotonic()
            if now_s < looked_s + self._tick_s:
                continue
            looked_s = now_s
            self._tick()
            missing = [rank for rank, key in keys.items() if not self._has(key)]
            for rank in missing:
                sign = self._get(f"alive/{rank}") if self._has(f"alive/{rank}") else b""
                if sign != signs.setdefault(rank, sign):
                    signs[rank] = sign
                    seen_s[rank] = now_s
            gone = [rank for rank in missing if now_s > seen_s[rank] + self._timeout_s]
            if gone and len(gone) == len(missing):
                return gone
        return []

    def _has(self, key: str) -> bool:
        return self._asked(lambda store: store.check([key]))

    def _get(self, key: str) -> bytes:
        return self._asked(lambda store: store.get(key))

    def _delete(self, key: str) -> None:
        self._asked(lambda store: store.delete_key(key))

    def _asked(self, ask: Callable[[Store], T]) -> T:
        assert self._store is not None, "there is one where there are several ranks"
        try:
            return ask(self._store)
        except RuntimeError as error:  # DistError and its like
            raise RankGoneError(
                f"expected the key-value store of torch.distributed to answer: {error}", step=self.step
            ) from error
