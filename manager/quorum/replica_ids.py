"""Names of replicas: the configured one and a random part, which a later manager of the process may take over.

The Lighthouse knows a replica for ``heartbeat_timeout`` after its last heartbeat, and asks for a majority of those
whom it knows: the next manager of the process would have to wait for so long. Under the name of one that has been shut
down it need not. What a name must never do again, is to set up the same process group, so the number of those that
were begun goes with it.
"""

from __future__ import annotations

import os
import threading
import uuid
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaId:
    """Who a replica is for the others.

    Attributes:
        lighthouse: Where it is known.
        name: The configured part.
        replica_id: The whole.
        num_groups: How many process groups have been begun under it.
    """

    lighthouse: str
    name: str
    replica_id: str
    num_groups: int


_free: Final[dict[tuple[int, str, str], ReplicaId]] = {}
_mutex: Final = threading.Lock()


def take_id(lighthouse: str, name: str) -> ReplicaId:
    """Return the name of a manager of this process that was shut down, or else a new one."""
    with _mutex:
        # A forked child has a copy of what its parent may use.
        free = _free.pop((os.getpid(), lighthouse, name), None)
    if free is not None:
        return free
    return ReplicaId(lighthouse=lighthouse, name=name, replica_id=f"{name}:{uuid.uuid4()}", num_groups=0)


def give_back_id(own: ReplicaId) -> None:
    """Let the next manager take the name; nobody may use it any more."""
    with _mutex:
        _free[os.getpid(), own.lighthouse, own.name] = own
