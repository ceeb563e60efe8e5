"""The key-value store of one replica: its launcher's or its own, and the address for peers."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Final
from urllib.parse import urlsplit

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined] # exported, undeclared

from ft_transport.coordination.store_channel import StoreChannel
from ft_transport.coordination.store_connections import StoreConnections
from manager.config import ManagerConfig
from manager.errors import QuorumError

logger = logging.getLogger(__name__)

_NUM_PORTS: Final = 3
"""Attempts to start a store: among thousands, one was seen whose own connection failed for its whole timeout."""


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
