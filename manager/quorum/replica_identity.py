"""The identity of one replica: its key-value store, its id, and the incarnation that its ranks share.

The Lighthouse remembers a replica for ``heartbeat_timeout`` after its last heartbeat, and requires a majority of the
replicas that it remembers. So the next manager of a process would wait that long, unless it reuses the id of one that
has been shut down. An id must never set up the same process group twice, so the number of groups travels with it.
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

logger = logging.getLogger(__name__)

_NUM_PORTS: Final = 3
"""Attempts to start a store: among thousands, one was seen whose own connection failed for its whole timeout."""
_free: Final[dict[tuple[int, str, str], ReplicaId]] = {}
_mutex: Final = threading.Lock()
_RESTART_ENV: Final = "TORCHELASTIC_RESTART_COUNT"
_RUN_ENV: Final = "TORCHELASTIC_RUN_ID"
_NO_NAME: Final = ""
_LOOK_AGAIN_S: Final = 0.02
_PARTING: Final = timedelta(milliseconds=200)
"""Timeout of a message to a rank that may have exited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStore:
    """The store through which a replica's ranks agree, and in which process groups may meet.

    Attributes:
        channel: A channel to the store.
        address: ``host:port`` for peers.
        store: The store if it runs in this process; it ends with the last reference.
    """

    channel: StoreChannel
    address: str
    store: TCPStore | None = None


def find_store(config: ManagerConfig, connections: StoreConnections, *, state_address: str) -> ReplicaStore:
    """Return the store that the launcher gave, or make one.

    Args:
        config: The configuration, completed from the environment.
        connections: Owns the connection.
        state_address: The address at which this rank serves its state to peers.

    Raises:
        QuorumError: The store cannot be reached.
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
        return ReplicaStore(channel=channel, address=_join(host, config.store_port))
    store = own_store(config.connect_timeout)
    # Peers reach this host at the address where they fetch its state.
    host, port = own_host or "localhost", store.port
    try:
        _probe(host, port, config.connect_timeout)
    except OSError as error:
        raise QuorumError(
            f"expected peers to reach this replica's own store at {host}:{port}, where they fetch its state: "
            f"{error}; set hostname"
        ) from error
    return ReplicaStore(channel=connections.own(host, port, store), address=_join(host, port), store=store)


def own_store(timeout: timedelta) -> TCPStore:
    """Start a store inside this process, for a replica of one rank without a launcher.

    Raises:
        QuorumError: No store answers within ``timeout`` at any of several ports.
    """
    for _ in range(_NUM_PORTS):
        try:
            return TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        except DistError as error:
            failure = error
            logger.warning("this replica's own store does not answer, another port is tried: %s", _first_line(error))
    raise QuorumError(
        f"expected this replica's own store to answer on localhost within {timeout.total_seconds():g} s, "
        f"{_NUM_PORTS} times: {_first_line(failure)}"
    ) from failure


def _first_line(error: Exception) -> str:
    """Return the message without the C++ frames that torch adds."""
    return str(error).partition("\n")[0]


def _host_for_peers(host: str, port: int, own_host: str | None, timeout: timedelta) -> str:
    """Return a host for peers: a launcher may give its store's loopback address, useless on other machines."""
    own = own_host or host
    if not (host == "localhost" or host.startswith("127.") or host == "::1") or own == host:
        return host
    try:
        _probe(own, port, timeout)
    except OSError as error:
        logger.warning("replicas on other machines will not find the store at %s:%d: %s", host, port, error)
        return host
    return own


def _probe(host: str, port: int, timeout: timedelta) -> None:
    """Raise OSError if nothing listens there. A client of the store would resolve names first, maybe for seconds."""
    socket.create_connection((host, port), timeout.total_seconds()).close()


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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


class Incarnation:
    """The shared identity of a replica's ranks while one manager of rank 0 exists.

    A launcher's store outlives its workers, and a process may make several managers in turn: entries of an earlier
    manager must not be mistaken for answers of this one. So rank 0 publishes a new name for itself, and each other rank
    claims a name that this rank, in any process, has not claimed before.

    Args:
        store: Shared by the ranks.
        rank: Rank within the replica.
        replica_id: Id of this start of the replica, on rank 0; the others receive it.
        timeout: Longest wait for rank 0's name.

    Attributes:
        prefix: Prefix of all keys that the ranks exchange.
        replica_id: The id that rank 0 published.

    Raises:
        QuorumError: Rank 0 did not come in time, or the store does not answer.
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
        """Mark this incarnation as ended. Called by rank 0, if the store still answers."""
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
            + (f", found only what it left when it started before: {sorted(earlier)}" if earlier else "")
        )
