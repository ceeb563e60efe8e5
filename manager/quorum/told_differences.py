"""Exchanges details of differing states, through the store of a replica with the common state."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Final

import msgspec

from ft_transport.coordination.plain_values import from_json
from ft_transport.coordination.store_channel import StoreChannel
from ft_transport.coordination.store_connections import StoreConnections
from ft_transport.errors import TransportError
from manager.errors import StatesDivergedError
from manager.quorum.reports import Tables

logger = logging.getLogger(__name__)

_PREFIX: Final = "ft_transport"
_TELLING: Final = timedelta(seconds=1)
_ASKING: Final = timedelta(milliseconds=200)

_tables_decoder: Final = msgspec.json.Decoder(dict[str, dict[str, str]])
_digests_decoder: Final = msgspec.json.Decoder(dict[str, int])
_values_decoder: Final = msgspec.json.Decoder(dict[str, str])


class ToldDifferences:
    """Publishes details of this rank's state, and reads those of others. For messages alone.

    Args:
        stores: Connections to the stores of all replicas.
        own: The store of this rank's replica.
        group_rank: This rank's number; ranks with the same number compare.
    """

    def __init__(self, stores: StoreConnections, own: StoreChannel, group_rank: int) -> None:
        self._stores = stores
        self._own = own
        self._group_rank = group_rank

    def tell_tables(self, tables: Tables) -> None:
        """Publish the structure of this replica's state in its own store, for replicas that do not fit."""
        with suppress(TransportError):
            self._own.set(self._tables_key(), msgspec.json.encode(tables), _TELLING)

    def told_tables(self, store_address: str) -> Tables | None:
        """Return the tables that the replica of this store has published; ``None`` if it has not."""
        with suppress(TransportError):
            told = self._stores.at_address(store_address).get([self._tables_key()], _ASKING)
            if told is not None:
                return from_json(told[0], _tables_decoder)
        return None

    def differing_tensors(
        self, error: StatesDivergedError, table: dict[str, int], *, replica_id: str, timeout: timedelta
    ) -> tuple[str, ...]:
        """Exchange the digest of each tensor, and return the paths of tensors that differ.

        Args:
            error: Names the replicas that differ; all of them call this.
            table: This rank's digests by path.
            replica_id: This replica's id.
            timeout: Limit of the exchange.
        """
        try:
            told = self._exchange(error, f"diverged/{error.step}", table, replica_id=replica_id, timeout=timeout)
            tables = [from_json(each, _digests_decoder) for each in told]
        except TransportError as unanswered:
            logger.warning("replica %s: which tensors differ is not known: %s", replica_id, unanswered)
            return ()
        paths = dict.fromkeys(path for each in tables for path in each)
        return tuple(path for path in paths if len({each.get(path) for each in tables}) > 1)

    def differing_values(
        self, error: StatesDivergedError, table: dict[str, str], *, replica_id: str, timeout: timedelta
    ) -> tuple[str, ...]:
        """Exchange the hyperparameters, and describe those that differ with all their values.

        Args:
            error: See `differing_tensors`.
            table: This rank's values by path.
            replica_id: See `differing_tensors`.
            timeout: See `differing_tensors`.
        """
        try:
            told = self._exchange(error, f"settings/{error.step}", table, replica_id=replica_id, timeout=timeout)
            tables = [from_json(each, _values_decoder) for each in told]
        except TransportError as unanswered:
            logger.warning("replica %s: which hyperparameters differ is not known: %s", replica_id, unanswered)
            return ()
        differing = []
        for path in dict.fromkeys(path for each in tables for path in each):
            replicas: dict[str, list[str]] = {}
            for replica, each in zip(error.replicas, tables, strict=False):
                replicas.setdefault(each.get(path, "missing"), []).append(replica)
            if len(replicas) > 1:
                values = [f"{value} on {', '.join(having)}" for value, having in replicas.items()]
                differing.append(f"{path} is {' and '.join(values)}")
        return tuple(differing)

    def _exchange(
        self, error: StatesDivergedError, name: str, table: Mapping[str, object], *, replica_id: str, timeout: timedelta
    ) -> list[bytes]:
        prefix = f"{_PREFIX}/{name}/{self._group_rank}"
        store = self._stores.at_address(error.store_address)
        store.set(f"{prefix}/{replica_id}", msgspec.json.encode(table), timeout)
        return store.get([f"{prefix}/{replica}" for replica in error.replicas], timeout) or []

    def _tables_key(self) -> str:
        return f"{_PREFIX}/structure/{self._group_rank}"
