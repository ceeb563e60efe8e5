"""The structure of this replica's state, which every quorum compares."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ft_transport.runtime.handler_safety import SafeExecutor
from manager.errors import HealFailedError
from manager.quorum.decision import Decision, DoesNotFit
from manager.quorum.reports import Structure, Tables, describe, order_tables, structure_of
from manager.quorum.round import Participant
from manager.state.compatibility import ModuleGlance, tables_of
from manager.state.parameter_order import orders_of
from manager.state.registration_check import EncodingCheck, check_averaged, check_registered

logger = logging.getLogger(__name__)


class StructureWatch:
    """Describes the state for comparison, and names replicas whose state does not fit.

    For the training thread, or the quorum thread while the training thread waits.

    Args:
        participant: This replica in its quorum.
        executor: The quorum thread, which publishes the description.
        encodings: Checks that snapshots can hold the state.

    Attributes:
        checked: Signature of the last check; a new object after a change of optimizers or their parameters.
    """

    def __init__(self, participant: Participant, executor: SafeExecutor, encodings: EncodingCheck) -> None:
        self._participant = participant
        self._encodings = encodings
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
        self._encodings.check()
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
            self._executor.submit(self._participant.membership.differences.tell_tables, self._tables)

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
        differing = describe(role.parts, self._tables, membership.differences.told_tables(role.holder.store_address))
        holder = f"{role.holder.replica_id} at {role.holder.addresses[membership.group_rank]}"
        reason = f"no further attempt can succeed: the state of {holder} differs from this replica's: {differing}"
        return HealFailedError(step=decision.step, reasons=(reason,))


def _num_parameters(group: dict[str, Any]) -> int:
    return len(group["params"])
