"""Differences between the states of replicas: their structures, which every quorum compares, and details of others."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, TypeVar

import msgspec
import torch

from ft_transport.coordination.ranks import from_json
from ft_transport.errors import TransportError
from ft_transport.runtime.threads import SafeExecutor
from manager.errors import HealFailedError, StatesDivergedError
from manager.quorum.decision import Decision, DoesNotFit
from manager.quorum.membership import Membership
from manager.quorum.quorum_round import Participant
from manager.quorum.reports import Structure, Tables, describe, order_tables, structure_of
from manager.state.compatibility import ModuleGlance, tables_of
from manager.state.parameter_order import orders_of
from manager.state.registration_check import check_averaged, check_registered

T = TypeVar("T")

logger = logging.getLogger(__name__)
_PREFIX: Final = "ft_transport"
_PUBLISHING: Final = timedelta(seconds=1)
_ASKING: Final = timedelta(milliseconds=200)

_tables_decoder: Final = msgspec.json.Decoder(dict[str, dict[str, str]])
_digests_decoder: Final = msgspec.json.Decoder(dict[str, int])
_values_decoder: Final = msgspec.json.Decoder(dict[str, str])


class StructureWatch:
    """Describes the state for comparison, and names replicas whose state does not fit.

    For the training thread, or the quorum thread while the training thread waits.

    Args:
        participant: This replica in its quorum.
        differences: Exchanges the descriptions.
        executor: The quorum thread, which publishes the description.

    Attributes:
        checked: Signature of the last check; a new object after a change of optimizers or their parameters.
    """

    def __init__(self, participant: Participant, differences: DifferenceExchange, executor: SafeExecutor) -> None:
        self._participant = participant
        self._differences = differences
        self._executor = executor
        self.checked: tuple[int, ...] = ()
        self._averaged_checked: tuple[int, ...] = ()
        self._tables: Tables = {}
        self._known_unfit: set[str] = set()
        self._is_doubted = False
        self._published: Tables = {}
        self._glance = ModuleGlance(())
        self._structure: Structure = ()
        self._looked_at = 0

    @property
    def structure(self) -> Structure:
        """Digests of the structure, computed again after a heal that changed the order of parameters."""
        if self._structure and self._looked_at != self._participant.state.registry.num_changes:
            self.look()
        return self._structure

    def check_registered(self) -> None:
        """Before the first step, and after each change, make sure that trained state is registered and can be served.

        Raises:
            RegistryError: A part is not registered, or no snapshot can hold it.
        """
        self._participant.replica.encodings.check()
        state = self._participant.state
        optimizers = state.optimizers()
        signature = (
            state.registry.num_changes,
            *(number for each in optimizers for number in (id(each), *map(_num_parameters, each.param_groups))),
        )
        if signature != self.checked:
            check_registered(state.registry, optimizers)
            self.look()
            self.checked = signature
        elif self._is_doubted or self._glance.shows_change():
            self.look()
        self._is_doubted = False
        if self._published != self._tables:
            self._published = self._tables
            self._executor.submit(self._differences.publish_tables, self._tables)

    def check_averaged(self, tensors: Sequence[torch.Tensor]) -> None:
        """In the first step, and after each change, make sure that averaged gradients belong to registered parameters.

        Args:
            tensors: The averaged tensors; some may be no gradients.

        Raises:
            RegistryError: A gradient's parameter is neither registered nor attached.
        """
        if self._averaged_checked != self.checked and tensors:
            self._averaged_checked = self.checked
            state = self._participant.state
            check_averaged(state.registry, state.optimizers(), tensors)

    def look(self) -> None:
        """Describe the present state."""
        registry = self._participant.state.registry
        self._glance = ModuleGlance(entry.holder for entry in registry.entries("replicated"))
        self._looked_at = registry.num_changes
        tables: dict[str, Mapping[str, str]] = dict(tables_of(registry))
        for key, names, may_change in orders_of(registry):
            tables.update(order_tables(key, names, may_change=may_change))
        self._tables = tables
        self._structure = structure_of(tables)

    def note(self, decision: Decision) -> None:
        """Log the replicas whose state does not fit; describe this replica's state again, since it may have changed."""
        own = self._participant.membership.replica_id
        unknown = set(decision.unfit) - self._known_unfit
        if decision.unfit and own not in decision.unfit:
            self._is_doubted = True
        self._known_unfit = set(decision.unfit)
        if unknown and own not in unknown:
            logger.warning(
                "%s: the state of %s differs from this one's in keys, dtypes or shapes; unless it changes, they "
                "take no part",
                self._participant.name,
                sorted(unknown),
            )

    def error(self, decision: Decision, role: DoesNotFit) -> HealFailedError:
        """Return an error with the differences, for a replica whose own state does not fit."""
        membership = self._participant.membership
        differing = describe(role.parts, self._tables, self._differences.tables_of(role.holder.store_address))
        holder = f"{role.holder.replica_id} at {role.holder.addresses[membership.group_rank]}"
        reason = f"no further attempt can succeed: the state of {holder} differs from this replica's: {differing}"
        return HealFailedError(step=decision.step, reasons=(reason,))


def _num_parameters(group: dict[str, Any]) -> int:
    return len(group["params"])


class DifferenceExchange:
    """Publishes details of this rank's state, and reads those of ranks with the same number. For messages alone.

    Args:
        membership: This rank's membership, whose stores carry the details.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def publish_tables(self, tables: Tables) -> None:
        """Publish the structure of this replica's state in its own store, for replicas that do not fit."""
        with suppress(TransportError):
            self._membership.store.set(self._tables_key(), msgspec.json.encode(tables), _PUBLISHING)

    def tables_of(self, store_address: str) -> Tables | None:
        """Return the tables that the replica of this store has published; ``None`` if it has not."""
        with suppress(TransportError):
            found = self._membership.stores.at_address(store_address).get([self._tables_key()], _ASKING)
            if found is not None:
                return from_json(found[0], _tables_decoder)
        return None

    def differing_tensors(
        self, error: StatesDivergedError, table: dict[str, int], timeout: timedelta
    ) -> tuple[str, ...]:
        """Exchange the digest of each tensor, and return the paths of tensors that differ.

        Args:
            error: Names the replicas that differ; all of them call this.
            table: This rank's digests by path.
            timeout: Limit of the exchange.
        """
        tables = self._exchange(error, "tensors", table, _digests_decoder, timeout)
        paths = dict.fromkeys(path for each in tables for path in each)
        return tuple(path for path in paths if len({each.get(path) for each in tables}) > 1)

    def differing_values(
        self, error: StatesDivergedError, table: dict[str, str], timeout: timedelta
    ) -> tuple[str, ...]:
        """Exchange the hyperparameters, and describe those that differ with all their values.

        Args:
            error: See `differing_tensors`.
            table: This rank's values by path.
            timeout: See `differing_tensors`.
        """
        tables = self._exchange(error, "hyperparameters", table, _values_decoder, timeout)
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
        self,
        error: StatesDivergedError,
        what: str,
        table: dict[str, T],
        decoder: msgspec.json.Decoder[dict[str, T]],
        timeout: timedelta,
    ) -> list[dict[str, T]]:
        """Return the tables of all compared replicas, in their order; empty if one of them does not answer."""
        membership = self._membership
        prefix = f"{_PREFIX}/differing/{what}/{error.step}/{membership.group_rank}"
        try:
            store = membership.stores.at_address(error.store_address)
            store.set(f"{prefix}/{membership.replica_id}", msgspec.json.encode(table), timeout)
            found = store.get([f"{prefix}/{replica}" for replica in error.replicas], timeout) or []
            return [from_json(each, decoder) for each in found]
        except TransportError as unanswered:
            logger.warning("replica %s: which %s differ is not known: %s", membership.replica_id, what, unanswered)
            return []

    def _tables_key(self) -> str:
        return f"{_PREFIX}/structure/{self._membership.group_rank}"
