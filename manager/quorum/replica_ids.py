"""Replica ids: the configured name and a random part, which a later manager of the process may reuse.

The Lighthouse remembers a replica for ``heartbeat_timeout`` after its last heartbeat, and requires a majority of the
replicas that it remembers. So the next manager of a process would wait that long, unless it reuses the id of one that
has been shut down. An id must never set up the same process group twice, so the number of groups travels with it.
"""

from __future__ import annotations

import os
import threading
import uuid
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaId:
    """The id of a replica.

    Attributes:
        lighthouse: Address of its Lighthouse.
        name: The configured part.
        replica_id: The whole id.
        num_groups: Number of process groups begun under it.
    """

    lighthouse: str
    name: str
    replica_id: str
    num_groups: int


_free: Final[dict[tuple[int, str, str], ReplicaId]] = {}
_mutex: Final = threading.Lock()


def take_id(lighthouse: str, name: str) -> ReplicaId:
    """Return the id of a manager of this process that was shut down, or a new one."""
    with _mutex:
        # By process: a forked child has a copy of its parent's free ids.
        free = _free.pop((os.getpid(), lighthouse, name), None)
    if free is not None:
        return free
    return ReplicaId(lighthouse=lighthouse, name=name, replica_id=f"{name}:{uuid.uuid4()}", num_groups=0)


def give_back_id(own: ReplicaId) -> None:
    """Free the id for the next manager; the caller must not use it any more."""
    with _mutex:
        _free[os.getpid(), own.lighthouse, own.name] = own
