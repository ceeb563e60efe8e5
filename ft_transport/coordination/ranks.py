"""The ranks of a group, and the signed messages with which they agree through a key-value store.

All agreement between ranks uses this module. Each rank posts messages under its own keys. An answer to all ranks is set
once and never changes. A message is signed together with its key, because any process that reaches the store can write
to it. A nonce distinguishes the messages of this process from those of an earlier run. A wait ends at a deadline, or
when the missing ranks show no heartbeat any more.

`rendezvous` makes sure that all members are present before they begin a wait that cannot be interrupted.
"""

from __future__ import annotations

import math
import secrets
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # exported, undeclared

from ft_transport.coordination.runs import RunStore
from ft_transport.coordination.store import AT_ONCE, DirectStore, StoreChannel, nobody_listens
from ft_transport.credentials import TOKEN_VARIABLE, Keys
from ft_transport.errors import (
    ConfigurationError,
    DeadlineExceededError,
    PeerProtocolError,
    RankGoneError,
)
from ft_transport.runtime.deadline import Backoff, Deadline
from ft_transport.runtime.decoding import DECODE_ERRORS

T = TypeVar("T")

_PURPOSE: Final = "message between ranks"
_END: Final = b" "
_LONGEST_BEAT_S: Final = 1.0
"""The longest pause after which a rank shows a heartbeat, and checks the heartbeats of the other ranks."""
_MAX_SHOWN: Final = 100
_PROBE_AFTER: Final = timedelta(milliseconds=200)
_PROBE_TIMEOUT: Final = timedelta(seconds=1)

_num_groups: dict[str, int] = {}
_runs: weakref.WeakKeyDictionary[Any, dict[str, RunStore]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """A group of ranks that includes this one, and a part of its key-value store that nothing else uses.

    Attributes:
        rank: This rank within the group.
        size: Number of ranks.
        global_ranks: The ranks of the members in ``torch.distributed``, by rank in the group.
        shared: The part of the key-value store, or a function that returns it within a timeout; ``None`` without
            ``torch.distributed``.
        keys: Keys of the job token, which sign all messages; ``None`` without a token.
    """

    rank: int = 0
    size: int = 1
    global_ranks: tuple[int, ...] = (0,)
    shared: Any = None
    keys: Keys | None = None

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None, *, keys: Keys | None = None) -> RankGroup:
        """Return the ranks of a process group. This runs no collective.

        All ranks must call it equally often for the same process group, because the calls are numbered.

        Args:
            process_group: The process group; ``None`` for all ranks of ``torch.distributed``, or for this process alone
                if ``torch.distributed`` is not initialised.
            keys: Keys of the job token; ``None`` for the keys of the token in the environment, if any.

        Raises:
            ConfigurationError: This rank is no member of the group, or the token in the environment is invalid.
        """
        if process_group is None and not dist.is_initialized():
            return cls()
        rank = dist.get_rank(process_group)
        if rank < 0:
            raise ConfigurationError("expected a process group that includes this rank, got one without it")
        size = dist.get_world_size(process_group)
        group = process_group if process_group is not None else dist.group.WORLD
        global_ranks = tuple(dist.get_process_group_ranks(group))
        name = group.group_name if group is not None else ""
        number = _num_groups[name] = _num_groups.get(name, 0) + 1
        # torch has no public access to a group's store; other libraries use this function for the default group's.
        default: Any = dist.distributed_c10d._get_default_store()
        ranks = "-".join(map(str, global_ranks)) if size <= 64 else name
        keys = keys if keys is not None else Keys.from_environment()
        shared: Any = PrefixStore(f"ft_transport/{name}/{ranks}", default)
        if size > 1:
            runs = _runs.setdefault(default, {})
            if name not in runs:
                # Weakly: the store of a destroyed process group must end.
                runs[name] = RunStore(shared, rank, size, weakref.ref(default))
            shared = partial(runs[name].store, str(number))
        return cls(rank=rank, size=size, global_ranks=global_ranks, shared=shared, keys=keys)

    def store(self, prefix: str, timeout: timedelta) -> Any:
        """Return the part of the key-value store with this prefix; ``None`` for a single rank.

        Raises:
            RankGoneError: Rank 0 has not called `of` in time, or the store does not answer.
        """
        shared = self.shared(timeout) if callable(self.shared) else self.shared
        return PrefixStore(prefix, shared) if shared is not None else None

    def channel(self, prefix: str, timeout: timedelta) -> StoreChannel:
        """Return access to the part of the key-value store with this prefix. Its calls raise the errors of `store`."""
        return StoreChannel(DirectStore.opened_by(partial(self.store, prefix, timeout)))

    def messages(self, purpose: str, timeout: timedelta) -> RankMessages | None:
        """Return an object that sends messages between these ranks; ``None`` for a single rank.

        Args:
            purpose: Distinguishes these messages from others of the same group.
            timeout: If a rank shows no heartbeat for this time, the other ranks stop waiting for it.
        """
        if self.size == 1:
            return None
        channel = self.channel(purpose, timeout)
        return RankMessages(channel, self.keys, purpose, *map(str, self.global_ranks), rank=self.rank, timeout=timeout)


class RankMessages:
    """Sends the messages and heartbeats of one rank, and reads those of the other ranks. Any thread may call it.

    All methods raise `RankGoneError` if the key-value store does not answer.

    Args:
        channel: Reaches a part of the key-value store that nothing else uses.
        keys: Keys of the job token, which sign the messages; ``None`` without a token.
        context: Texts that every signature covers, such as the purpose of the messages; the same on all ranks.
        rank: This rank.
        timeout: `wait` stops waiting for a rank that has shown no heartbeat for this time.

    Attributes:
        channel: The part of the key-value store.
        is_signed: Whether messages are signed.
        beat_s: The pause between two heartbeats, in seconds.
        nonce: Random text that identifies this process. No message of another run contains it.
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
        """Add a signature that is valid only under this key. Without a token, return the message unchanged."""
        if self._keys is None:
            return message
        return self._keys.sign(_PURPOSE, *self._context, key.encode(), message).encode() + _END + message

    def opened(self, key: str, signed: bytes) -> bytes:
        """Verify the signature of a message, and return the message without it.

        Args:
            key: The key under which the message was found.
            signed: The result of `signed`.

        Raises:
            PeerProtocolError: The signature is not that of a rank of this job for this key.
        """
        if self._keys is None:
            return signed
        signature, end, message = signed.partition(_END)
        parts = (*self._context, key.encode(), message)
        if not end or not self._keys.verifies(signature.decode("ascii", "replace"), _PURPOSE, *parts):
            raise PeerProtocolError(
                f"expected {key} to be signed with the job token ({TOKEN_VARIABLE}), but it is not: a rank has "
                "another token, or another process writes to the store"
            )
        return message

    def post(self, key: str, message: bytes) -> None:
        """Sign a message, and store it under a key of this rank."""
        self.channel.post(key, self.signed(key, message), self._timeout)

    def settle(self, key: str, answer: bytes, *, remove: Sequence[str] = ()) -> bytes:
        """Store an answer to all ranks, unless the key has one already. Return the answer that is stored.

        Args:
            key: The key of the answer.
            answer: The answer, without a signature.
            remove: Keys to delete afterwards.

        Raises:
            PeerProtocolError: The stored answer has no valid signature.
        """
        proposed = self.signed(key, answer).decode()
        return self.opened(key, self.channel.set_once(key, proposed, self._timeout, remove=remove))

    def beat(self) -> None:
        """Show a heartbeat of this rank, unless it has shown one less than ``beat_s`` ago."""
        now_s = time.monotonic()
        if now_s > self._beaten_s + self.beat_s:
            self._beaten_s = now_s
            self._num_beats += 1
            self.channel.post(f"alive/{self._rank}", str(self._num_beats), self._timeout)

    def wait(
        self, keys: Mapping[int, str], *, deadline_s: float = math.inf, backoff: Backoff | None = None
    ) -> list[bytes | None]:
        """Wait for messages of several ranks, as long as at least one of the missing ranks shows heartbeats.

        This rank shows its own heartbeats meanwhile.

        Args:
            keys: The key of the awaited message, by rank.
            deadline_s: Time at which the wait ends, in seconds of the monotonic clock.
            backoff: The pauses between polls.

        Returns:
            The signed messages, in the order of ``keys``; ``None`` for each message that did not arrive.
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


def decode_message(encoded: bytes, decoder: msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T]) -> T:
    """Decode a message of another rank.

    Args:
        encoded: The message, without a signature.
        decoder: Decodes values of the expected type.

    Raises:
        PeerProtocolError: The message contains no value of that type.
    """
    try:
        return decoder.decode(encoded)
    except DECODE_ERRORS as error:
        kind = decoder.type
        raise PeerProtocolError(
            f"expected a {getattr(kind, '__name__', kind)} of another rank, got {encoded[:_MAX_SHOWN]!r}: {error}"
        ) from error


def rendezvous(
    *,
    store: StoreChannel,
    prefix: str,
    rank: int,
    names: Sequence[str],
    addresses: Sequence[str],
    timeout: timedelta,
) -> None:
    """Wait until all members of a process group have called this function.

    A quorum may include a replica that was killed a moment ago, because its last request and heartbeat are recent. To
    set up a process group with it would take the whole timeout. So each member first announces itself in the store, and
    probes the addresses at which missing members serve their state. A missing member is dead if no process listens at
    its address. A member that will not arrive calls `decline`, which ends the wait of the other members.

    Args:
        store: The key-value store that all members use.
        prefix: Prefix of the keys; no earlier rendezvous may have used it.
        rank: This member's rank.
        names: The names of the members by rank, for messages.
        addresses: The addresses at which the members serve their state, by rank.
        timeout: Limit of the whole call.

    Raises:
        RankGoneError: A member is dead or has declined, or the store does not answer.
        DeadlineExceededError: A member did not arrive in time, or the store did not answer in time.
    """
    deadline = Deadline.after(timeout)
    keys = {other: f"{prefix}/{other}" for other in range(len(names)) if other != rank}
    missing = list(keys)
    # Probe before the first call of the store, because a dead member may have hosted it.
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
                f"expected {[names[other] for other in missing]} to set up the process group within "
                f"{timeout.total_seconds():g} s"
            )


def decline(*, store: StoreChannel, prefix: str, name: str, reason: str, timeout: timedelta) -> None:
    """End the rendezvous of the other members, because this member will not arrive.

    Args:
        store: The key-value store of the rendezvous.
        prefix: Prefix of the keys of the rendezvous.
        name: The name of this member.
        reason: Why this member does not arrive, for messages of the other members.
        timeout: Limit of the call of the store.

    Raises:
        RankGoneError: The store does not answer.
        DeadlineExceededError: The store did not answer in time.
    """
    store.set(_given_up_key(prefix), f"{name} does not set up the process group: {reason}", timeout)


def _given_up_key(prefix: str) -> str:
    return f"{prefix}/given up"


def _refuse_dead(others: Sequence[int], names: Sequence[str], addresses: Sequence[str], deadline: Deadline) -> None:
    for other in others:
        if deadline.is_over():
            return
        if nobody_listens(addresses[other], deadline.cap(_PROBE_TIMEOUT).total_seconds()):
            raise RankGoneError(f"{names[other]} is dead: no process listens at {addresses[other]}", ranks=(other,))
