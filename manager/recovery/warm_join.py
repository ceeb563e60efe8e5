"""Prepares a newcomer before its first quorum, while the other replicas train.

In a quorum all replicas wait for one that heals. Work before the quorum costs the others nothing:

- If much of the state seldom changes (frozen weights, or DiLoCo's synchronised ones), the newcomer receives it from a
  running replica, at a rate that the replica hardly notices. In the quorum it receives only the changes since.
- If every step changes all of the state, an early copy would be outdated at once and would cost the other replica
  memory and time. Then the newcomer only makes the memory for the state resident.

The Lighthouse's status page, which is not authenticated, names the running replicas. With a job token the answering
replica proves the token; without one the page is as trustworthy as a quorum. The received state is a whole, verified
state of one step: in the quorum the newcomer is like any replica that is some steps behind.
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
from manager.snapshots.boundary_copy import BoundaryCopier
from manager.state.optimizer_states import Memory, memory_at, memory_of_optimizers, tensors_in
from manager.state.replica_state import ReplicaState

logger = logging.getLogger(__name__)

_LEAST_LASTING_SHARE: Final = 0.5
"""Receive early only if at least this share of the state seldom changes."""
_MAX_SOURCES: Final = 2
_PROBE_S: Final = 0.2
_SHARE_OF_CALL: Final = 0.5
"""Maximum share of the caller's remaining time in ``start_quorum``."""
_PATIENCE: Final = 2.0
"""A transfer may take this many times as long as its rate limit implies."""
_BYTES_PER_S: Final = 4e8

_STAND_IN_SHAPE: Final = (64, 64)

_own_random = random.Random()
"""Separate from the process's generator, which the trainer uses."""


class WarmJoin:
    """Prepares a newcomer. For the training thread alone.

    Args:
        config: Whether to prepare, the rate limit and timeouts.
        state: This replica's state.
        peers: Receives and loads a peer's state.
        copier: Identifies memory that only write sections change.
        watch: Reports long waits.
    """

    def __init__(
        self,
        config: ManagerConfig,
        *,
        state: ReplicaState,
        peers: PeerRecovery,
        copier: BoundaryCopier,
        watch: StallWatch,
    ) -> None:
        self._config = config
        self._state = state
        self._peers = peers
        self._copier = copier
        self._watch = watch
        self._is_over = not config.warm_join

    def run(
        self, running: Callable[[], Sequence[ToldMember]], *, group_rank: int, name: str, deadline: Deadline
    ) -> None:
        """Prepare, once, if other replicas train and this one is behind. Failures are logged; the quorum heals anyway.

        Args:
            running: Returns the running replicas.
            group_rank: The rank of theirs to ask.
            name: This replica's name for the log.
            deadline: The caller's deadline; at most half of the remaining time is used.
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
        """Return addresses with the newest state, in random order so that newcomers spread over them."""
        state = self._state
        if not members:
            return []
        own_step = state.step if state.partial is None else 0
        # The step of the majority, so that a single false report cannot mislead newcomers.
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
        """Return the bytes of the state, and of the part that neither optimizer steps nor ``forward`` change."""
        stepped = memory_of_optimizers(self._state.optimizers())
        lasting = self._copier.stable(content) - stepped
        memories = set(filter(None, map(memory_at, tensors_in(content))))
        return sum(map(_length, memories)), sum(map(_length, memories & lasting))

    def _recover(self, sources: Sequence[str], num_bytes: int, name: str, deadline: Deadline) -> None:
        # Under DiLoCo the next snapshot comes with the next synchronisation.
        timeout_s = max(self._config.timeout, self._config.quorum_timeout).total_seconds()
        bytes_per_s = _BYTES_PER_S
        if self._config.world_size not in (None, 1):
            # The other ranks wait up to ``timeout``.
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
    """Return the future size of the states of optimizers that have not stepped yet; torch's own classes only."""
    num_bytes = 0.0
    for optimizer in optimizers:
        if optimizer.state or not type(optimizer).__module__.startswith("torch.optim"):
            continue
        for group in optimizer.param_groups:
            num_bytes += _state_share(optimizer, group) * sum(map(_length, map(memory_at, group["params"])))
    return int(num_bytes)


def copied_bytes(content: object) -> int:
    """Return the size of tensors that cannot receive in place: on a device, or not row-major."""
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
    """Return the bytes of state for each byte of a parameter, from a trial with a small one."""
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
