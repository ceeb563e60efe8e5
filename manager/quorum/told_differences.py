"""What replicas tell each other of states that differ, through the store of a replica that holds the common one."""

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
from manager.quorum.structure import Tables

logger = logging.getLogger(__name__)

_PREFIX: Final = "ft_transport"
_TELLING: Final = timedelta(seconds=1)
_ASKING: Final = timedelta(milliseconds=200)

_tables_decoder: Final = msgspec.json.Decoder(dict[str, dict[str, str]])
_digests_decoder: Final = msgspec.json.Decoder(dict[str, int])
_values_decoder: Final = msgspec.json.Decoder(dict[str, str])


class ToldDifferences:
    """Tells the others what this rank's state looks like, and asks what theirs do. For messages alone.

    Args:
        stores: Connections to the stores of all replicas.
        own: The store of this rank's replica.
        group_rank: Of this rank; the ranks of one number compare.
    """

    def __init__(self, stores: StoreConnections, own: StoreChannel, group_rank: int) -> None:
        self._stores = stores
        self._own = own
        self._group_rank = group_rank

    def tell_tables(self, tables: Tables) -> None:
        """Publish in this replica's own store what its state looks like, for replicas that do not fit."""
        with suppress(TransportError):
            self._own.set(self._tables_key(), msgspec.json.encode(tables), _TELLING)

    def told_tables(self, store_address: str) -> Tables | None:
        """Return what the replica of this store has published with `tell_tables`; ``None`` if it has not."""
        with suppress(TransportError):
            told = self._stores.at_address(store_address).get([self._tables_key()], _ASKING)
            if told is not None:
                return from_json(told[0], _tables_decoder)
        return None

    def differing_tensors(
        self, error: StatesDivergedError, table: dict[str, int], *, replica_id: str, timeout: timedelta
    ) -> tuple[str, ...]:
        """Tell the other replicas the digest of each tensor, and return the paths of those that differ.

        Args:
            error: Which replicas differ; all of them call this.
            table: Digests by path, of this rank.
            replica_id: Of this replica.
            timeout: For telling, and for the others.
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
        """Tell the other replicas each hyperparameter, and return those that differ with all values.

        Args:
            error: As in `differing_tensors`, as for what follows.
            table: Values by path, of this rank.
            replica_id: See above.
            timeout: See above.
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
