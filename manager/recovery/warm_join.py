"""A newcomer gets ready before it asks for its first quorum, while the others train.

In a quorum everybody waits for a replica that heals. What can be done before costs nobody anything:

- Where much of the state seldom changes (frozen weights, what DiLoCo synchronises), the newcomer recovers from a
  replica that trains, at a pace that this hardly notices. In the quorum it gets what has changed since.
- Where every step changes all of it, what it would get is old at once, and the copy would cost the other replica
  memory and time. Then the newcomer only makes the memory resident that the state will be received into.

Whom to ask is told by the Lighthouse's status page, which nobody has signed. With a job token the replica that answers
proves that it knows it; without one the page is believed as much as a quorum is. What has been received is a whole,
compared state of one step: in the quorum the newcomer is like any replica that is behind by some steps.
"""

from __future__ import annotations

import inspect
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
from torch.optim import Optimizer

from ft_transport import TransportError
from ft_transport.coordination.rendezvous import nobody_listens
from ft_transport.runtime.deadline import Deadline
from manager.config import ManagerConfig
from manager.errors import ManagerError
from manager.quorum.lighthouse_status import ToldMember
from manager.quorum.stall_watch import StallWatch
from manager.recovery.peers import PeerRecovery
from manager.recovery.values import PeerOptions
from manager.snapshots.boundary_keeper import BoundaryKeeper
from manager.state.guarded_memory import Memory, memory_at, memory_of_optimizers, tensors_in
from manager.state.replica_state import ReplicaState

logger = logging.getLogger(__name__)

_LEAST_LASTING_SHARE: Final = 0.5
"""Of the state: where less of it seldom changes, there is little to gain in the quorum."""
_MAX_SOURCES: Final = 2
_PROBE_S: Final = 0.2
_SHARE_OF_CALL: Final = 0.5
"""Of the time that the caller of ``start_quorum`` gives."""
_PATIENCE: Final = 2.0
"""So many times as long as the pace takes may a transfer last."""

_STAND_IN_SHAPE: Final = (64, 64)

_own_random = random.Random()
"""Not the process's generator, which the trainer draws from."""


class WarmJoin:
    """See the module. Belongs to the training thread.

    Args:
        config: Whether, how fast, and how long.
        state: This replica's state.
        peers: Receives it and loads it.
        keeper: Knows what only write sections change.
        watch: Looks after the waits.
    """

    def __init__(
        self,
        config: ManagerConfig,
        *,
        state: ReplicaState,
        peers: PeerRecovery,
        keeper: BoundaryKeeper,
        watch: StallWatch,
    ) -> None:
        self._config = config
        self._state = state
        self._peers = peers
        self._keeper = keeper
        self._watch = watch
        self._is_over = not config.warm_join

    def run(
        self, running: Callable[[], Sequence[ToldMember]], *, group_rank: int, name: str, deadline: Deadline
    ) -> None:
        """Get ready, once, if others train and this replica is behind. What fails is logged; the quorum heals anyway.

        Args:
            running: Tells who trains.
            group_rank: Which of their ranks is asked.
            name: Who joins, for the log.
            deadline: Of the caller's; half of what is left is used at most.
        """
        if self._is_over:
            return
        self._is_over = True
        sources = self._sources(running(), group_rank)
        if not sources:
            return
        began_s = time.monotonic()
        try:
            with self._watch.waiting(f"{name}: getting ready while the others train"):
                self._get_ready(sources, name, deadline)
        except (TransportError, ManagerError) as error:
            logger.warning(
                "%s: joins without what it could have got before, after %.1f s: %s: %s",
                name,
                time.monotonic() - began_s,
                type(error).__name__,
                error,
            )

    def _sources(self, members: Sequence[ToldMember], group_rank: int) -> list[str]:
        """The addresses to ask: of the newest state, in an order of chance, so that newcomers spread over them."""
        state = self._state
        if not members:
            return []
        own_step = state.step if state.partial is None else 0
        # What most have: who trains has it, and somebody who only says so cannot lead newcomers astray.
        newest = max(Counter(member.step for member in members).items(), key=lambda each: (each[1], each[0]))[0]
        if newest <= own_step:
            return []
        found = [
            member.addresses[group_rank]
            for member in members
            if member.step == newest and len(member.addresses) > group_rank
        ]
        _own_random.shuffle(found)
        listening = [address for address in found[: 2 * _MAX_SOURCES] if not nobody_listens(address, _PROBE_S)]
        return listening[:_MAX_SOURCES]

    def _get_ready(self, sources: Sequence[str], name: str, deadline: Deadline) -> None:
        with self._state.lock.read("size of the state"):
            content = self._state.content()
            num_bytes, num_lasting_bytes = self._sizes(content)
        if num_lasting_bytes < _LEAST_LASTING_SHARE * num_bytes:
            num_missing_bytes = missing_bytes(self._state.optimizers()) + copied_bytes(content)
            self._peers.prefault(num_missing_bytes)
            logger.info(
                "%s: every step changes most of the state, which is received in the quorum; %d bytes are made ready",
                name,
                num_missing_bytes,
            )
            return
        self._recover(sources, num_bytes, name, deadline)

    def _sizes(self, content: Mapping[str, object]) -> tuple[int, int]:
        """The bytes of the state, and of what neither a step of an optimizer nor ``forward`` changes."""
        stepped = memory_of_optimizers(self._state.optimizers())
        lasting = self._keeper.stable(content) - stepped
        memories = set(filter(None, map(memory_at, tensors_in(content))))
        return sum(map(_length, memories)), sum(map(_length, memories & lasting))

    def _recover(self, sources: Sequence[str], num_bytes: int, name: str, deadline: Deadline) -> None:
        # Under DiLoCo a snapshot comes with the next sync.
        timeout_s = max(self._config.timeout, self._config.quorum_timeout).total_seconds()
        bytes_per_s = float(self._config.warm_join_bytes_per_s)
        if self._config.world_size not in (None, 1):
            # The other ranks wait for as long as `timeout`.
            longest = self._config.timeout
            bytes_per_s = max(bytes_per_s, 2 * _PATIENCE * num_bytes / longest.total_seconds())
        else:
            longest = timedelta(seconds=timeout_s + _PATIENCE * num_bytes / bytes_per_s)
        left = deadline.left()
        end_s = time.monotonic() + min(longest, left * _SHARE_OF_CALL if left is not None else longest).total_seconds()
        for number, address in enumerate(sources):
            began_s = time.monotonic()
            try:
                recovery = self._peers.recover(
                    address,
                    "latest",
                    PeerOptions(
                        timeout=timedelta(seconds=max(0.0, end_s - began_s)),
                        unreachable_timeout=self._config.connect_timeout,
                        progress_timeout=timedelta(seconds=timeout_s),
                        is_warm=True,
                        max_bytes_per_s=bytes_per_s,
                    ),
                )
            except TransportError:
                if number + 1 == len(sources) or time.monotonic() >= end_s:
                    raise
                continue
            logger.info(
                "%s: has got step %d from %s in %.1f s, while the others trained",
                name,
                recovery.step,
                address,
                time.monotonic() - began_s,
            )
            return


def missing_bytes(optimizers: Iterable[Optimizer]) -> int:
    """How large the states will be of optimizers that have not stepped yet, as far as torch's own classes tell."""
    num_bytes = 0.0
    for optimizer in optimizers:
        if optimizer.state or not type(optimizer).__module__.startswith("torch.optim"):
            continue
        for group in optimizer.param_groups:
            num_bytes += _state_share(optimizer, group) * sum(map(_length, map(memory_at, group["params"])))
    return int(num_bytes)


def copied_bytes(content: object) -> int:
    """The bytes of tensors that are copied to, because nothing is received there: on a device, or not row-major."""
    local = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors_in(content))
    memories = {
        memory_at(tensor)
        for tensor in local
        if tensor.layout is torch.strided and not tensor.is_meta and not (tensor.is_cpu and tensor.is_contiguous())
    }
    return sum(map(_length, memories))


def _length(memory: Memory | None) -> int:
    return memory[2] if memory is not None else 0


def _state_share(optimizer: Optimizer, group: Mapping[str, Any]) -> float:
    """The bytes of state for each byte of a parameter: tried with a small one."""
    if not group["params"]:
        return 0.0
    try:
        stand_in = torch.nn.Parameter(torch.zeros(_STAND_IN_SHAPE, dtype=group["params"][0].dtype))
        made: Any = type(optimizer)
        taken = inspect.signature(made).parameters
        tried = made([stand_in], **{name: value for name, value in group.items() if name in taken and name != "params"})
        stand_in.grad = torch.zeros_like(stand_in)
        tried.step()
    except Exception as error:
        logger.debug("the state of %s is not known before its first step: %s", type(optimizer).__name__, error)
        return 0.0
    return sum(tensor.nbytes for tensor in tensors_in(list(tried.state.values()))) / stand_in.nbytes
