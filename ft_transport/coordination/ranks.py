"""The ranks of a group, and the signed messages with which they agree through a key-value store.

All agreement between ranks uses this core. A rank puts messages under its own keys, and an answer for all is set once.
Each message is signed for its key, because any process that reaches the store can write to it. A nonce distinguishes
this process's messages from those of an earlier run. A wait ends at a deadline, or when a rank shows no heartbeat.

`rendezvous` makes sure that all members are present before a wait that cannot be interrupted.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

import msgspec
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # exported, undeclared

from ft_transport.coordination.store import AT_ONCE, DirectStore, StoreChannel, nobody_listens
from ft_transport.errors import (
    ConfigurationError,
    DeadlineExceededError,
    PeerProtocolError,
    RankGoneError,
)
from ft_transport.keys import TOKEN_VARIABLE, Keys
from ft_transport.runtime.deadline import Backoff, Deadline
from ft_transport.runtime.decoding import DECODE_ERRORS

_PURPOSE: Final = "told among ranks"
_END: Final = b" "
_LONGEST_BEAT_S: Final = 1.0
"""How often a rank shows a heartbeat, and checks the heartbeats of the others."""

_num_groups: dict[str, int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Ranks that include this one, and a part of their key-value store that nothing else uses.

    Attributes:
        rank: This rank's place in the group.
        size: Number of ranks.
        global_ranks: The ranks' numbers in all of ``torch.distributed``.
        shared: The part of the store; ``None`` for a single rank.
        keys: Keys of the job token; they sign all messages of an agreement.
    """

    rank: int = 0
    size: int = 1
    global_ranks: tuple[int, ...] = (0,)
    shared: Any = None
    keys: Keys | None = None

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None, *, keys: Keys | None = None) -> RankGroup:
        """Return the ranks of a process group. Called on all of them, in the same order as for others of that group.

        Args:
            process_group: ``None`` stands for all of ``torch.distributed``, or for this process alone where that is not
                initialised. No collective of the group runs.
            keys: Keys of the job token; ``None`` for the environment's.

        Raises:
            ConfigurationError: This rank is no member of the group, or the environment names no job token.
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
        # The group's own store is not public. The default group's store is not public either, but libraries use it.
        default: Any = dist.distributed_c10d._get_default_store()
        ranks = "-".join(map(str, global_ranks)) if size <= 64 else name
        shared = PrefixStore(f"ft_transport/{name}/{ranks}/{number}", default)
        keys = keys if keys is not None else Keys.from_environment()
        return cls(rank=rank, size=size, global_ranks=global_ranks, shared=shared, keys=keys)

    def store(self, prefix: str) -> Any:
        """Return a part of the store, for one purpose; ``None`` for a single rank."""
        return PrefixStore(prefix, self.shared) if self.shared is not None else None

    def messages(self, purpose: str, timeout: timedelta) -> RankMessages | None:
        """Return the messages between these ranks, for one purpose; ``None`` for a single rank.

        Args:
            purpose: Distinguishes the messages of one group.
            timeout: How long a rank may go without a heartbeat before the others give it up.
        """
        if self.size == 1:
            return None
        channel = StoreChannel(DirectStore(self.store(purpose)))
        return RankMessages(channel, self.keys, purpose, *map(str, self.global_ranks), rank=self.rank, timeout=timeout)


class RankMessages:
    """Signed messages and heartbeats of one rank. Any thread may call it. Without keys nothing is signed.

    All methods raise `RankGoneError` if the store does not answer.

    Args:
        channel: Reaches a part of the store that nothing else uses.
        keys: Keys of the job token, if there is one.
        context: Subject of all messages, part of every signature; the same on all ranks.
        rank: This rank.
        timeout: How long a rank may go without a heartbeat before a wait gives it up.

    Attributes:
        channel: As the argument.
        is_signed: Whether messages are signed.
        beat_s: The pause between two heartbeats, in seconds.
        nonce: Identifies this process: no message of another run has it.
    """

    def __init__(self, channel: StoreChannel, keys: Keys | None, *context: str, rank: int, timeout: timedelta) -> None:
        self.channel: Final = channel
        self.is_signed: Final = keys is not None
        self.beat_s: Final = min(_LONGEST_BEAT_S, timeout.total_seconds() / 4)
        self.nonce: Final = secrets.token_hex(8)
        self._keys = keys
        self._context = tuple(part.encode() for part in context)
        self._rank = rank
        self._timeout = timeout
        self._num_beats = 0
        self._beaten_s = 0.0

    def signed(self, key: str, message: bytes) -> bytes:
        """Return the message with its signature for this key; it is not valid under another key."""
        if self._keys is None:
            return message
        return self._keys.sign(_PURPOSE, *self._context, key.encode(), message).encode() + _END + message

    def opened(self, key: str, signed: bytes) -> bytes:
        """Verify a signed message, and return the message.

        Raises:
            PeerProtocolError: No rank of this job has put this message under this key.
        """
        if self._keys is None:
            return signed
        signature, end, message = signed.partition(_END)
        parts = (*self._context, key.encode(), message)
        if not end or not self._keys.verifies(signature.decode("ascii", "replace"), _PURPOSE, *parts):
            raise PeerProtocolError(
                f"expected {key} to be signed with the job token ({TOKEN_VARIABLE}): another one is used, "
                "or somebody else writes to the store"
            )
        return message

    def post(self, key: str, message: bytes) -> None:
        """Put a message under a key of this rank."""
        self.channel.post(key, self.signed(key, message), self._timeout)

    def settle(self, key: str, answer: bytes, *, remove: Sequence[str] = ()) -> bytes:
        """Make ``answer`` the answer for all ranks, unless one exists already. Return the answer that counts.

        Raises:
            PeerProtocolError: See `opened`.
        """
        proposed = self.signed(key, answer).decode()
        return self.opened(key, self.channel.set_once(key, proposed, self._timeout, remove=remove))

    def beat(self) -> None:
        """Show that this rank is alive. A heartbeat too soon after the last one is skipped."""
        now_s = time.monotonic()
        if now_s > self._beaten_s + self.beat_s:
            self._beaten_s = now_s
            self._num_beats += 1
            self.channel.post(f"alive/{self._rank}", str(self._num_beats), self._timeout)

    def wait(
        self, keys: Mapping[int, str], *, deadline_s: float = math.inf, backoff: Backoff | None = None
    ) -> list[bytes | None]:
        """Wait for a key of each rank, as long as these ranks show heartbeats; this rank shows its own meanwhile.

        Args:
            keys: By rank.
            deadline_s: When the wait ends, by the monotonic clock.
            backoff: How often the wait polls.

        Returns:
            The signed messages; ``None`` for a rank that has put no message there.
        """
        backoff = backoff if backoff is not None else Backoff()
        wanted = list(keys.values())
        looked_s = time.monotonic()
        beats: dict[int, bytes] = {}
        seen_s = dict.fromkeys(keys, looked_s)
        while (found := self.channel.get(wanted, AT_ONCE)) is None:
            now_s = time.monotonic()
            if now_s > looked_s + self.beat_s or now_s > deadline_s:
                looked_s = now_s
                self.beat()
                unset = self.channel.missing(wanted, self._timeout)
                missing = [rank for rank, key in keys.items() if key in unset]
                for rank in missing:
                    (number,) = self.channel.get([f"alive/{rank}"], AT_ONCE) or [b""]
                    if number != beats.setdefault(rank, number):
                        beats[rank], seen_s[rank] = number, now_s
                is_over = now_s > deadline_s
                if missing and all(is_over or now_s > seen_s[rank] + self._timeout.total_seconds() for rank in missing):
                    return [self._found(key) if rank not in missing else None for rank, key in keys.items()]
            backoff.pause(max(0.0, min(self.beat_s, deadline_s - now_s)))
        return list(found)

    def _found(self, key: str) -> bytes | None:
        found = self.channel.get([key], AT_ONCE)
        return found[0] if found is not None else None


T = TypeVar("T")

_MAX_SHOWN = 100


def from_json(encoded: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Return a value of the decoder's kind.

    Raises:
        PeerProtocolError: The text is no such value.
    """
    return _decoded(encoded, decoder)


def from_msgpack(encoded: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Return a value of the decoder's kind, from msgpack; raises as `from_json`."""
    return _decoded(encoded, decoder)


def _decoded(encoded: bytes, decoder: msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T]) -> T:
    try:
        return decoder.decode(encoded)
    except DECODE_ERRORS as error:
        kind = decoder.type
        raise PeerProtocolError(
            f"expected a {getattr(kind, '__name__', kind)} of another rank, got {encoded[:_MAX_SHOWN]!r}: {error}"
        ) from error


_PROBE_AFTER: Final = timedelta(milliseconds=200)
_PROBE_TIMEOUT: Final = timedelta(seconds=1)


def rendezvous(
    *,
    store: StoreChannel,
    prefix: str,
    rank: int,
    names: Sequence[str],
    addresses: Sequence[str],
    timeout: timedelta,
) -> None:
    """Wait until all members have called this.

    The Lighthouse may count a replica that was killed a moment ago: its request for the quorum was still pending, and
    its last heartbeat is fresh. Configuring a process group with it waits for the whole timeout. So the members
    announce themselves in the store first, and each probes the address at which a missing member serves its state. If
    no process listens there any more, the replica is dead. A member that gives up before it arrives says so
    (`decline`), which ends the wait.

    Args:
        store: Holds the keys of the members.
        prefix: Prefix of the keys; never used before.
        rank: This member's rank.
        names: The members, by rank; for messages.
        addresses: Where each serves its state.
        timeout: For the whole call.

    Raises:
        RankGoneError: A member is dead or has given up, or the store does not answer.
        DeadlineExceededError: A member did not arrive in time, or the store did not answer in time.
    """
    deadline = Deadline.after(timeout)
    keys = {other: f"{prefix}/{other}" for other in range(len(names)) if other != rank}
    missing = list(keys)
    # A missing member may host the store.
    _refuse_dead(missing, names, addresses, deadline)
    store.set(f"{prefix}/{rank}", names[rank], deadline.cap(timeout))
    given_up = _given_up_key(prefix)
    while missing and not store.get(
        [keys[other] for other in missing],
        deadline.cap(_PROBE_AFTER),
        unless=[given_up],
        answer_timeout=max(_PROBE_AFTER, deadline.cap(timeout)),
    ):
        reason = store.get([given_up], AT_ONCE, answer_timeout=deadline.cap(timeout))
        if reason is not None:
            raise RankGoneError(reason[0].decode(errors="replace"))
        unset = store.missing([keys[other] for other in missing], deadline.cap(timeout))
        missing = [other for other in missing if keys[other] in unset]
        _refuse_dead(missing, names, addresses, deadline)
        if missing and deadline.is_over():
            raise DeadlineExceededError(
                f"expected {[names[other] for other in missing]} to come within {timeout.total_seconds():g} s"
            )


def decline(*, store: StoreChannel, prefix: str, name: str, reason: str, timeout: timedelta) -> None:
    """End the rendezvous of the other members, because this member will not arrive.

    Args:
        store: See `rendezvous`.
        prefix: See `rendezvous`.
        name: This member's name.
        reason: Why it does not arrive.
        timeout: For the store to answer.

    Raises:
        RankGoneError: The store does not answer.
        DeadlineExceededError: The store did not answer in time.
    """
    store.set(_given_up_key(prefix), f"{name} has given up before the members met: {reason}", timeout)


def _given_up_key(prefix: str) -> str:
    return f"{prefix}/given up"


def _refuse_dead(others: Sequence[int], names: Sequence[str], addresses: Sequence[str], deadline: Deadline) -> None:
    for other in others:
        if deadline.is_over():
            return
        if nobody_listens(addresses[other], deadline.cap(_PROBE_TIMEOUT).total_seconds()):
            raise RankGoneError(f"{names[other]} is dead: nobody listens at {addresses[other]}", ranks=(other,))
