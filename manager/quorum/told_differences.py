"""What replicas tell each other of states that differ, through the store of a replica that holds the common one."""

from __future__ import annotations

import logging
from contextlib import suppress
from datetime import timedelta
from typing import Final

import msgspec

from ft_transport.coordination.plain_values import from_json
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


class ToldDifferences:
    """Tells the others what this rank's state looks like, and asks what theirs do. For messages alone.

    Args:
        stores: Connections to the stores of all replicas.
        group_rank: Of this rank; the ranks of one number compare.
    """

    def __init__(self, stores: StoreConnections, group_rank: int) -> None:
        self._stores = stores
        self._group_rank = group_rank

    def tell_tables(self, store_address: str, tables: Tables) -> None:
        """Tell replicas that do not fit what the state looks like that everybody holds."""
        with suppress(TransportError):
            self._stores.at_address(store_address).set(self._tables_key(), msgspec.json.encode(tables), _TELLING)

    def told_tables(self, store_address: str) -> Tables | None:
        """Return what a holder of the state has published with `tell_tables`; ``None`` if it has not."""
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
        prefix = f"{_PREFIX}/diverged/{error.step}/{self._group_rank}"
        try:
            store = self._stores.at_address(error.store_address)
            store.set(f"{prefix}/{replica_id}", msgspec.json.encode(table), timeout)
            told = store.get([f"{prefix}/{replica}" for replica in error.replicas], timeout)
            tables = [from_json(each, _digests_decoder) for each in told or ()]
        except TransportError as unanswered:
            logger.warning("replica %s: which tensors differ is not known: %s", replica_id, unanswered)
            return ()
        paths = dict.fromkeys(path for each in tables for path in each)
        return tuple(path for path in paths if len({each.get(path) for each in tables}) > 1)

    def _tables_key(self) -> str:
        return f"{_PREFIX}/structure/{self._group_rank}"
