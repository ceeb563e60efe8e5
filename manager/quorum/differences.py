"""Compares the structures of the replicas' states in every quorum, and finds out in detail how states differ.

The details are for error messages only. Each rank exchanges them with the same rank of each other replica, through the
replicas' key-value stores.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, TypeVar

import msgspec
import torch

from ft_transport.coordination.ranks import decode_message
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
    """Describes the structure of this replica's state for the quorum, and logs replicas whose state does not fit.

    Only the training thread may call it, or the quorum thread while the training thread waits.

    Args:
        participant: This replica and its quorum.
        executor: Publishes the description on the quorum thread, for error messages of other replicas.

    Attributes:
        checked: Signature of the optimizers and their parameters at the last check. It is a new object after a change,
            so an identity comparison detects the change.
    """

    def __init__(self, participant: Participant, executor: SafeExecutor) -> None:
        self._participant = participant
        self._executor = executor
        self.checked: tuple[int, ...] = ()
        self._averaged_checked: tuple[int, ...] = ()
        self._tables: Tables = {}
        self._known_unfit: set[str] = set()
        self._is_doubted = False
        self._published: Tables = {}
        self._glance = ModuleGlance(())
        self._structure: Structure = ()
        self._num_changes = 0

    @property
    def structure(self) -> Structure:
        """The structure of the present state, as digests that the quorum compares."""
        # A heal may have changed the order of parameters.
        if self._structure and self._num_changes != self._participant.state.registry.num_changes:
            self.refresh()
        return self._structure

    def check_registered(self) -> None:
        """Check that all trained state is registered and can be served.

        The check runs before the first step, and again after a change of optimizers or registrations.

        Raises:
            RegistryError: A part of the state is not registered, or cannot be stored in a snapshot.
        """
        state = self._participant.state
        optimizers = state.optimizers()
        self._participant.replica.encodings.check(optimizers)
        signature = (
            state.registry.num_changes,
            *(number for each in optimizers for number in (id(each), *map(_num_parameters, each.param_groups))),
        )
        if signature != self.checked:
            check_registered(state.registry, optimizers)
            self.refresh()
            self.checked = signature
        elif self._is_doubted or self._glance.shows_change():
            self.refresh()
        self._is_doubted = False
        if self._published != self._tables:
            self._published = self._tables
            self._executor.submit(_publish_tables, self._participant.membership, self._tables)

    def check_averaged(self, tensors: Sequence[torch.Tensor]) -> None:
        """Check that averaged gradients belong to registered parameters.

        The check runs in the first step, and again after a change of optimizers or registrations.

        Args:
            tensors: The averaged tensors. Tensors that are not gradients are ignored.

        Raises:
            RegistryError: A gradient's parameter is not registered, and no attached optimizer has that parameter.
        """
        if self._averaged_checked != self.checked and tensors:
            self._averaged_checked = self.checked
            state = self._participant.state
            check_averaged(state.registry, state.optimizers(), tensors)

    def refresh(self) -> None:
        """Update the description of the structure to the present state."""
        registry = self._participant.state.registry
        self._glance = ModuleGlance(entry.holder for entry in registry.entries("replicated"))
        self._num_changes = registry.num_changes
        tables: dict[str, Mapping[str, str]] = dict(tables_of(registry))
        for key, names, may_change in orders_of(registry):
            tables.update(order_tables(key, names, may_change=may_change))
        self._tables = tables
        self._structure = structure_of(tables)

    def log_unfit(self, decision: Decision) -> None:
        """Log the replicas whose state does not fit.

        If there are any, `check_registered` updates this replica's structure next time, because it may be outdated.
        """
        own = self._participant.membership.replica_id
        unknown = set(decision.unfit) - self._known_unfit
        if decision.unfit and own not in decision.unfit:
            self._is_doubted = True
        self._known_unfit = set(decision.unfit)
        if unknown and own not in unknown:
            logger.warning(
                "%s: the state of %s differs from the state of this replica in keys, dtypes or shapes; they take no "
                "part until that changes",
                self._participant.name,
                sorted(unknown),
            )

    def error(self, decision: Decision, role: DoesNotFit) -> HealFailedError:
        """Return the error, with the differences, that ends this replica because its state does not fit.

        Args:
            decision: The decision of the quorum.
            role: The role of this replica in that quorum.
        """
        membership = self._participant.membership
        published = _published_tables(membership, role.holder.store_address)
        differing = describe(role.parts, self._tables, published)
        holder = f"{role.holder.replica_id} at {role.holder.addresses[membership.group_rank]}"
        reason = f"no further attempt can succeed: the state of {holder} differs from this replica's: {differing}"
        return HealFailedError(step=decision.step, reasons=(reason,))


def _num_parameters(group: dict[str, Any]) -> int:
    return len(group["params"])


def _publish_tables(membership: Membership, tables: Tables) -> None:
    """Publish the structure of this replica's state in its store. Replicas whose state does not fit read it there."""
    with suppress(TransportError):
        membership.store.set(_tables_key(membership), msgspec.json.encode(tables), _PUBLISHING)


def _published_tables(membership: Membership, store_address: str) -> Tables | None:
    """Return the structure that a replica has published in its store; ``None`` if it is not available."""
    with suppress(TransportError):
        found = membership.stores.at(store_address).get([_tables_key(membership)], _ASKING)
        if found is not None:
            return decode_message(found[0], _tables_decoder)
    return None


def differing_tensors(
    membership: Membership, error: StatesDivergedError, table: dict[str, int], timeout: timedelta
) -> tuple[str, ...]:
    """Exchange the digest of each tensor, and return the paths of tensors that differ; empty after a timeout.

    Args:
        membership: The membership of this rank.
        error: The error that names the compared replicas. All of them call this function at the same time.
        table: This rank's digests, by path of the tensor.
        timeout: Limit of the exchange.
    """
    tables = _exchange(membership, error, "tensors", table, _digests_decoder, timeout=timeout)
    paths = dict.fromkeys(path for each in tables for path in each)
    return tuple(path for path in paths if len({each.get(path) for each in tables}) > 1)


def differing_values(
    membership: Membership, error: StatesDivergedError, table: dict[str, str], timeout: timedelta
) -> tuple[str, ...]:
    """Exchange the hyperparameters, and describe the differing ones with their values; empty after a timeout.

    Args:
        membership: The membership of this rank.
        error: The error that names the compared replicas. All of them call this function at the same time.
        table: This rank's hyperparameters as text, by path.
        timeout: Limit of the exchange.
    """
    tables = _exchange(membership, error, "hyperparameters", table, _values_decoder, timeout=timeout)
    differing = []
    for path in dict.fromkeys(path for each in tables for path in each):
        replicas: dict[str, list[str]] = {}
        for replica, each in zip(error.replicas, tables, strict=False):
            replicas.setdefault(each.get(path, "missing"), []).append(replica)
        if len(replicas) > 1:
            values = [f"{value} on {', '.join(ids)}" for value, ids in replicas.items()]
            differing.append(f"{path} is {' and '.join(values)}")
    return tuple(differing)


def _exchange(
    membership: Membership,
    error: StatesDivergedError,
    what: str,
    table: dict[str, T],
    decoder: msgspec.json.Decoder[dict[str, T]],
    *,
    timeout: timedelta,
) -> list[dict[str, T]]:
    """Publish this rank's table, and return those of all compared replicas, in the order of ``error.replicas``.

    If a table does not arrive in time, the result is empty.
    """
    prefix = f"{_PREFIX}/differing/{what}/{error.step}/{membership.group_rank}"
    try:
        store = membership.stores.at(error.store_address)
        store.set(f"{prefix}/{membership.replica_id}", msgspec.json.encode(table), timeout)
        found = store.get([f"{prefix}/{replica}" for replica in error.replicas], timeout) or []
        return [decode_message(each, decoder) for each in found]
    except TransportError as unanswered:
        logger.warning("replica %s: could not find out which %s differ: %s", membership.replica_id, what, unanswered)
        return []


def _tables_key(membership: Membership) -> str:
    return f"{_PREFIX}/structure/{membership.group_rank}"
