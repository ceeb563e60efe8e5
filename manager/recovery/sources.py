"""Where a replica without a quorum recovers from: addresses, and the one step that all of its ranks receive."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from ft_transport import TransportError
from manager.errors import ManagerError

if TYPE_CHECKING:
    from ft_transport import HTTPTransport

_MAX_SHOWN_CHARACTERS: Final = 500


def checked_addresses(metadata: str | Sequence[str], own: str) -> list[str]:
    """Return the addresses that a caller named.

    Args:
        metadata: One, or several.
        own: This rank's, which is none to recover from.

    Raises:
        TypeError: They are no addresses.
        ManagerError: One of them is this rank's own.
    """
    addresses: Any = [metadata] if isinstance(metadata, str) else metadata
    if not isinstance(addresses, Sequence) or not addresses or not all(isinstance(each, str) for each in addresses):
        raise TypeError(f"expected the address that a peer's metadata() returned, got {metadata!r}")
    if own.rstrip("/") in (address.rstrip("/") for address in addresses):
        raise ManagerError(f"expected the address of another replica to recover from, got this one's own {own}")
    return list(addresses)


def agree_on_step(
    transport: HTTPTransport[Any],
    addresses: Sequence[str],
    process_group: dist.ProcessGroup,
    *,
    timeout: timedelta,
    unreachable_timeout: timedelta | None,
) -> int:
    """Have all sources take a snapshot of one step, and return it on every rank of a replica. Runs two collectives.

    Args:
        transport: Asks, on the group's first rank.
        addresses: Those that this rank will recover from; they need not be the same on all.
        process_group: All ranks that recover together.
        timeout: For asking.
        unreachable_timeout: How long a source may be out of reach.

    Raises:
        TransportError: It failed; the same error on all ranks.
    """
    named: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(named, list(addresses), group=process_group)
    outcome: list[Any] = [None]
    if dist.get_rank(process_group) == 0:
        everywhere = list(dict.fromkeys(address for each in named for address in each))
        try:
            outcome[0] = transport.common_step(everywhere, timeout=timeout, unreachable_timeout=unreachable_timeout)
        except TransportError as error:
            outcome[0] = error
    dist.broadcast_object_list(outcome, group_src=0, group=process_group)
    if isinstance(outcome[0], TransportError):
        raise outcome[0]
    return int(outcome[0])


def failures_elsewhere(process_group: dist.ProcessGroup, error: BaseException | None) -> list[str]:
    """Tell the other ranks how it went here, and return what went wrong on them. Runs a collective.

    Args:
        process_group: All ranks that recover together.
        error: What went wrong here.
    """
    outcomes: list[Any] = [None] * dist.get_world_size(process_group)
    own = f"{type(error).__name__}: {error}"[:_MAX_SHOWN_CHARACTERS] if error is not None else None
    dist.all_gather_object(outcomes, own, group=process_group)
    here = dist.get_rank(process_group)
    return [f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes) if outcome is not None and rank != here]
