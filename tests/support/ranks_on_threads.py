"""The ranks of a group on threads of this process, over a store in its memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch.distributed import HashStore

from ft_transport.coordination.ranks import RankGroup
from ft_transport.credentials import Keys

T = TypeVar("T")

_LONG_S = 60.0


def groups_of(size: int, store: HashStore | None = None, token: str | None = None) -> list[RankGroup]:
    """The same group as each of its ranks sees it."""
    shared = store if store is not None else HashStore()
    keys = Keys.of(token) if token is not None else None
    ranks = tuple(range(size))
    return [RankGroup(rank=rank, size=size, global_ranks=ranks, shared=shared, keys=keys) for rank in ranks]


def run_ranks(*ranks: Callable[[], T]) -> list[T]:
    """Runs each on a thread, and returns what they returned."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [future.result(_LONG_S) for future in [pool.submit(rank) for rank in ranks]]
