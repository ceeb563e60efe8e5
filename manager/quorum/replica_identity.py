"""The identity of one replica: its key-value store, its id, and the incarnation that its ranks share.

A process reuses the id of a manager that it has shut down, or of the replica's dead process (`take_id`). The Lighthouse
remembers a replica for ``heartbeat_timeout`` after its last heartbeat, and requires a majority of the remembered
replicas for a quorum. With a new id, the next manager would wait until the Lighthouse forgets the old id. The keys of
process groups contain the id and a number that must never repeat, so the number of process groups is stored together
with the id.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Final
from urllib.parse import urlsplit

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined] # exported, undeclared

from ft_transport.coordination.store import StoreChannel, StoreConnections
from ft_transport.errors import TransportError
from ft_transport.runtime.deadline import Deadline
from manager.config import ManagerConfig
from manager.errors import QuorumError, QuorumTimeoutError, quorum_errors
from manager.quorum.stand_in import AbsentPredecessor

logger = logging.getLogger(__name__)

_NUM_PORTS: Final = 3
"""Number of attempts to start a store. One store in thousands does not answer, not even to its own process."""
_free: Final[dict[tuple[int, str, str], ReplicaId]] = {}
_mutex: Final = threading.Lock()
_RESTART_ENV: Final = "TORCHELASTIC_RESTART_COUNT"
_RUN_ENV: Final = "TORCHELASTIC_RUN_ID"
_NO_NAME: Final = ""
_LOOK_AGAIN_S: Final = 0.02
_PARTING: Final = timedelta(milliseconds=200)
"""Timeout of a call to a store whose process may have exited."""


def find_store(
    config: ManagerConfig, connections: StoreConnections, *, state_address: str
) -> tuple[StoreChannel, str, TCPStore | None]:
    """Return the store of the launcher; without a launcher, start a store in this process.

    Args:
        config: The configuration, completed from the environment.
        connections: Owns the connection to the store.
        state_address: The address at which this rank serves its state to peers.

    Returns:
        The channel to the store; the ``host:port`` at which other replicas reach it; and the store itself, if this
        process hosts it. A hosted store closes with the last reference to it.

    Raises:
        QuorumError: The store does not answer.
    """
    own_host = config.hostname or urlsplit(state_address).hostname
    if config.store_addr is not None and config.store_port is not None:
        try:
            _probe(config.store_addr, config.store_port, config.connect_timeout)
        except OSError as error:
            raise QuorumError(
                f"expected a store at {config.store_addr}:{config.store_port} (store_addr and store_port of the "
                f"configuration, or MASTER_ADDR and MASTER_PORT): {error}"
            ) from error
        host = _host_for_peers(config.store_addr, config.store_port, own_host, config.connect_timeout)
        channel = connections.own(config.store_addr, config.store_port)
        return channel, _join(host, config.store_port), None
    store = own_store(config.connect_timeout)
    # Peers can reach this host at the address at which it serves its state.
    host, port = own_host or "localhost", store.port
    try:
        _probe(host, port, config.connect_timeout)
    except OSError as error:
        raise QuorumError(
            f"expected peers to reach this replica's own store at {host}:{port} (the host that serves its "
            f"state): {error}; set hostname to a name or address of this host"
        ) from error
    return connections.own(host, port, store), _join(host, port), store


def own_store(timeout: timedelta) -> TCPStore:
    """Start a store in this process, for a replica of one rank without a launcher.

    Args:
        timeout: Limit of one attempt; each attempt uses another port.

    Raises:
        QuorumError: No attempt succeeded.
    """
    for _ in range(_NUM_PORTS):
        try:
            return TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        except DistError as error:
            failure = error
            logger.warning("this replica's own store does not answer; trying another port: %s", _first_line(error))
    raise QuorumError(
        f"expected this replica's own store to answer on localhost within {timeout.total_seconds():g} s, "
        f"{_NUM_PORTS} times: {_first_line(failure)}"
    ) from failure


def _first_line(error: Exception) -> str:
    """Return the message of an error without the C++ stack trace that torch appends."""
    return str(error).partition("\n")[0]


def _host_for_peers(host: str, port: int, own_host: str | None, timeout: timedelta) -> str:
    """Return the host at which other replicas reach a launcher's store.

    A launcher may give a loopback address, which is useless on other machines. Then the result is ``own_host``, if the
    store answers there.
    """
    own = own_host or host
    if not (host == "localhost" or host.startswith("127.") or host == "::1") or own == host:
        return host
    try:
        _probe(own, port, timeout)
    except OSError as error:
        logger.warning("replicas on other machines cannot reach the store at %s:%d: %s", host, port, error)
        return host
    return own


def _probe(host: str, port: int, timeout: timedelta) -> None:
    """Raise OSError if no process listens at the address.

    Torch's client of the store is not used, because it may spend seconds on name resolution.
    """
    socket.create_connection((host, port), timeout.total_seconds()).close()


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaId:
    """The id of a replica, and the values that the next manager needs to reuse it.

    Attributes:
        lighthouse: Address of the Lighthouse that knows the id.
        name: The configured name, which is the first part of the id.
        replica_id: The id: the name, a colon and a random part.
        num_groups: Number of process groups that were begun under the id.
    """

    lighthouse: str
    name: str
    replica_id: str
    num_groups: int


def take_id(lighthouse: str, name: str, predecessor: AbsentPredecessor | None = None) -> ReplicaId:
    """Return the id of a manager that was shut down in this process, of the replica's dead process, or else a new id.

    Args:
        lighthouse: Address of the Lighthouse.
        name: The configured name of the replica.
        predecessor: The keeper of the replica's dead process; ``None`` without one.
    """
    with _mutex:
        # By process id, because a forked child has a copy of its parent's free ids.
        free = _free.pop((os.getpid(), lighthouse, name), None)
    if free is not None:
        return free
    if predecessor is not None:
        absence = predecessor.absence
        return ReplicaId(lighthouse=lighthouse, name=name, replica_id=absence.replica_id, num_groups=absence.num_groups)
    return ReplicaId(lighthouse=lighthouse, name=name, replica_id=f"{name}:{uuid.uuid4()}", num_groups=0)


def give_back_id(own: ReplicaId) -> None:
    """Free an id for the next manager in this process. The caller must not use the id afterwards."""
    with _mutex:
        _free[os.getpid(), own.lighthouse, own.name] = own


class Incarnation:
    """One lifetime of a replica: from the construction of rank 0's manager to its shutdown.

    A launcher's store outlives its workers, and a process may construct several managers one after the other. No rank
    may read the entries of an earlier manager as answers of the present one. So rank 0 publishes a new, unique name of
    the incarnation. Each other rank claims a published name that the same rank has not claimed before, in any process.

    Args:
        store: The key-value store that the ranks share.
        rank: This rank within the replica.
        replica_id: The replica's id. Only the argument of rank 0 counts; the other ranks receive it.
        timeout: How long the other ranks wait for rank 0.

    Attributes:
        prefix: Prefix of all keys through which the ranks exchange messages.
        replica_id: The replica's id, as rank 0 published it.

    Raises:
        QuorumError: Rank 0 did not start in time, or the store does not answer.
    """

    def __init__(self, store: StoreChannel, rank: int, replica_id: str, timeout: timedelta) -> None:
        run = f"{os.environ.get(_RUN_ENV, '')}/{os.environ.get(_RESTART_ENV, '0')}"
        self._base = f"ft_transport/{run}"
        self._key = f"{self._base}/current"
        self._store = store
        self._published = ""
        if rank == 0:
            self._published = f"{uuid.uuid4()} {replica_id}"
            with quorum_errors():
                store.set(self._key, self._published, timeout)
            name = self._published
        else:
            with quorum_errors():
                name = self._claim(rank, timeout)
        unique, _, self.replica_id = name.partition(" ")
        self.prefix = f"{self._base}/{unique}"

    def close(self) -> None:
        """On rank 0, mark this incarnation as ended, if the store still answers."""
        if self._published:
            with contextlib.suppress(TransportError):
                self._store.replace(self._key, self._published, _NO_NAME, _PARTING)

    def _claim(self, rank: int, timeout: timedelta) -> str:
        deadline = Deadline.after(timeout)
        earlier: set[str] = set()
        while not deadline.is_over():
            found = self._store.get([self._key], deadline.cap(timeout))
            name = found[0].decode() if found else _NO_NAME
            if name != _NO_NAME and name not in earlier:
                claim = f"{self._base}/{name.partition(' ')[0]}/claims/{rank}"
                if self._store.add(claim, 1, deadline.cap(timeout)) == 1:
                    return name
                earlier.add(name)
            time.sleep(min(_LOOK_AGAIN_S, deadline.cap(timeout).total_seconds()))
        raise QuorumTimeoutError(
            f"rank {rank}: expected rank 0 of this replica to start within {timeout.total_seconds():g} s"
            + (f", found only entries of earlier starts: {sorted(earlier)}" if earlier else "")
        )
