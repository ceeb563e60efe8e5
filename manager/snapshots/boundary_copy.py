"""Copies at every step boundary what would otherwise be lost, so that a later request can still snapshot the boundary.

With an asynchronous quorum a replica learns during ``forward`` that a newcomer needs the state of the boundary before
it. Parameters and optimizer states wait for the optimizer; all else may have changed by then. A plan, made once, lists
the tensors that something besides an attached optimizer may change: buffers as a rule, and few. A boundary copies
these, notes the values in parameter groups, and calls the functions whose results are unknown. Everything else is
checked only when a request comes: a tensor that then turns out to be neither guarded nor copied refuses the snapshot.

So a boundary costs the same whatever the number of parameters, but for 0.1 to 0.5 µs a parameter for its version
(`manager.state.optimizer_states.VersionWatch`). If steps replace the tensors of optimizer states, a boundary also takes
references to them: 0.2 µs a parameter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ft_transport import SnapshotError, StateMovedError
from ft_transport.state.snapshot import Taking
from manager.snapshots.state_parts import (
    BoundaryPlan,
    Budget,
    CalledPart,
    ModulePart,
    NotCopyableError,
    OptimizerPart,
    ReplacedTensors,
    frozen,
    names_of,
    renormalised_memory,
)
from manager.state.optimizer_guard import often_stepping
from manager.state.optimizer_states import (
    Memory,
    VersionWatch,
    belongs_to,
    memory_at,
    memory_of,
    memory_of_optimizers,
    parameters_of,
    storage_of,
    storages_of_optimizers,
    tensors_in,
)
from manager.state.parameter_order import MANAGER_KEY, USER_KEY, own_part
from manager.state.replica_state import ReplicaState

logger = logging.getLogger(__name__)

_MAX_HELD_BYTES: Final = 16 << 20
"""Maximum bytes copied for a snapshot that is otherwise served from live memory."""
_MOST_COPIED_SHARE: Final = 0.25
"""Maximum copied fraction of the lasting bytes: if steps change more, a copy in the background costs the boundary
less."""
_NUM_LEARNING_STEPS: Final = 3
"""Steps of a plan after which the parameters that ``forward`` changes are known, before any request."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoundaryCopy:
    """The copies and notes of one boundary. One thread at a time owns it: first the trainer's, then the snapshot's.

    Attributes:
        copier: The copier that made it.
        plan: The plan that the boundary followed.
        optimizers: The attached optimizers.
        copies: Copies of the tensors that something besides the optimizers may change.
        values: Values of parameter groups, and results of the called functions, by key.
        references: The tensors of optimizer states that steps replace, by key.
        counters: The manager's own part of the state.
        check: Raises if a tensor that was not copied has changed since, outside of an optimizer's step.
    """

    copier: BoundaryCopier
    plan: BoundaryPlan
    optimizers: Sequence[Optimizer]
    copies: list[torch.Tensor]
    values: Mapping[str, object]
    references: Mapping[str, Sequence[torch.Tensor]]
    counters: Mapping[str, object]
    check: Callable[[], None]

    def state(self) -> dict[str, object]:
        """Return the replica's state at the boundary. Called once; the read section of the boundary is still open.

        Raises:
            SnapshotError: A tensor has been replaced since, or changed without the optimizer.
        """
        try:
            user = self._user_part()
        except NotCopyableError as error:
            self.copier.forget()
            raise SnapshotError(f"expected the state of the step boundary, and {error}") from None
        self.check()
        return {USER_KEY: user, MANAGER_KEY: own_part(self.counters, self.copier.registry)}

    def recycle(self) -> None:
        """Give the buffers to the next boundary."""
        self.plan.spare = self.copies

    def _user_part(self) -> dict[str, object]:
        user: dict[str, object] = {}
        copies = iter(self.copies)
        stable: list[object] = []
        for part in self.plan.parts:
            key = part.entry.key
            match part:
                case ModulePart():
                    state: Any = part.entry.state_dict()
                    copied = {slot.name for slot in part.slots}
                    for slot in part.slots:
                        if slot.name not in state:
                            raise NotCopyableError(f"{key}.{slot.name} is missing")
                        state[slot.name] = next(copies)
                    self._check_known(key, [tensor for name, tensor in state.items() if name not in copied])
                case OptimizerPart():
                    state = part.entry.state_dict()
                    groups: Any = self.values[key]
                    if len(state["param_groups"]) != len(groups):
                        raise NotCopyableError(f"the parameter groups of {key!r} have changed")
                    for group, values in zip(state["param_groups"], groups, strict=True):
                        indices = group["params"]
                        group.clear()
                        group.update(values, params=indices)
                    self._check_known(key, state["state"], self.references.get(key, ()))
                case CalledPart():
                    state = self.values[key]
            if part.entry.is_stable:
                stable.append(state)
            user[key] = state
        present = memory_of_optimizers(self.optimizers) | memory_of(stable)
        for part in self.plan.parts:
            for tensor in tensors_in(user[part.entry.key]):
                memory = memory_at(tensor)
                if memory in self.plan.guarded and memory not in present:
                    raise NotCopyableError(f"a tensor of {part.entry.key!r} is no longer an attached optimizer's")
        return user

    def _check_known(self, key: str, live: object, references: Sequence[torch.Tensor] = ()) -> None:
        known = set(map(id, references))
        for tensor in tensors_in(live):
            if id(tensor) not in known and memory_at(tensor) not in self.plan.guarded:
                # The next boundary expects steps that replace tensors.
                self.copier.replaced.found(key)
                raise NotCopyableError(
                    f"{key!r} has a tensor {list(tensor.shape)} that it did not have at the boundary"
                )


class BoundaryCopier:
    """Knows which memory of a replica's state is guarded, and copies the rest. Owned by the training thread.

    Args:
        state: The replica's state.

    Attributes:
        registry: The replica's state functions.
        replaced: Knows the parts whose tensors steps replace.
    """

    def __init__(self, state: ReplicaState) -> None:
        self._state = state
        self.registry = state.registry
        self._plan: BoundaryPlan | None = None
        self._moving: set[Memory] = set()
        self._num_steps_to_learn = 0
        self._check_after_forward: Callable[[], None] | None = None
        self.replaced = ReplacedTensors()

    def guarded(self, optimizers: Iterable[Optimizer]) -> set[Memory]:
        """Return the memory that waits for the optimizers' steps, without what is known to change otherwise."""
        return memory_of_optimizers(optimizers) - self._unguarded()

    def stable(self, state: object) -> set[Memory]:
        """Return the memory of a replica's state that only write sections change."""
        whole = cast("Mapping[str, Mapping[str, object]]", state)
        parts = [whole[USER_KEY][entry.key] for entry in self.registry.entries("replicated") if entry.is_stable]
        return memory_of(parts) - self._unguarded() if parts else set()

    def values(self, state: object) -> dict[str, object]:
        """Return the values of parameter groups and schedulers in a state, by key; they are replicated, too."""
        whole = cast("Mapping[str, Mapping[str, Any]]", state)[USER_KEY]
        found: dict[str, object] = {}
        for entry in self.registry.entries("replicated"):
            if isinstance(entry.holder, LRScheduler):
                found[entry.key] = whole[entry.key]
            elif isinstance(entry.holder, Optimizer):
                groups = whole[entry.key].get("param_groups", ())
                found[entry.key] = [{name: group[name] for name in group if name != "params"} for group in groups]
        return found

    def watch(self, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Return a function that raises ``StateMovedError`` if one of the tensors has changed since this call.

        From then on, boundaries copy the tensors that have changed.
        """
        watch = VersionWatch(tensors)

        def check() -> None:
            moved = watch.moved()
            if moved:
                self._moving |= memory_of(moved)
                self.forget()
                names = names_of(self.registry.holders(nn.Module), moved)
                raise StateMovedError(
                    "expected tensors that only an optimizer's step or a write section changes, and "
                    f"{names} changed in place since the step boundary (a forward with max_norm, a "
                    "clipping hook?); from now on they are copied at the boundary"
                )

        return check

    def forget(self) -> None:
        """Make a new plan at the next boundary."""
        self._plan = None

    def copy(self) -> BoundaryCopy | None:
        """Copy everything that the optimizers' steps do not guard. The caller holds the read lock.

        Returns:
            The copies, from which a snapshot can still be taken; ``None`` if too much would have to be copied.

        Raises:
            RegistryError: A state function failed.
        """
        self._check_after_forward = None
        optimizers = self._state.optimizers()
        signature = self._signature(optimizers)
        plan = self._plan
        if plan is None or plan.signature != signature or self.replaced.is_in_module(plan.parts):
            if plan is not None or not self._moving:
                self._num_steps_to_learn = _NUM_LEARNING_STEPS
            entries = self.registry.entries("replicated")
            plan = self._plan = BoundaryPlan.make(signature, entries, optimizers, self._unguarded())
        if plan.refusal:
            return None
        try:
            # A copy of the plan's list would touch every tensor once more.
            watched: list[torch.Tensor] = []
            noted = (part for part in plan.parts if not isinstance(part, ModulePart))
            values = {part.entry.key: self._note(part, plan, watched) for part in noted}
            references = self.replaced.references(plan.parts)
            copies = plan.copied()
        except NotCopyableError as error:
            plan.refuse(str(error))
            return None
        check = self.watch([*plan.watched, *watched] if watched else plan.watched)
        if self._num_steps_to_learn > 0:
            self._num_steps_to_learn -= 1
            self._check_after_forward = check
        return BoundaryCopy(
            copier=self,
            plan=plan,
            optimizers=optimizers,
            copies=copies,
            values=values,
            references=references,
            counters=self._state.counters(),
            check=check,
        )

    def expect_changes(self) -> None:
        """Stop watching for changes by ``forward``: a write section changes the state from here on."""
        self._check_after_forward = None

    def learn_changes(self) -> None:
        """Find what ``forward`` has changed since the boundary, in a few steps; called before the optimizers step."""
        check, self._check_after_forward = self._check_after_forward, None
        if check is not None:
            try:
                check()
            except StateMovedError as error:
                logger.info("%s", error)

    def capture(self, *, may_defer: bool, may_share: bool) -> Taking:
        """Capture the present state.

        Args:
            may_defer: Whether memory that optimizers guard may be copied later, under the caller's section.
            may_share: Whether stable tensors may be served from live memory; only with ``may_defer``.
        """
        live, optimizers = self._state.content(), self._state.optimizers()
        if not may_defer:
            return Taking(step=self._state.step, state=live)
        guarded = self.guarded(optimizers)
        stable = self.stable(live) if may_share else set()
        lasting = _lasting(stable, optimizers) if stable else None
        return Taking(
            step=self._state.step,
            state=live,
            deferrable=belongs_to(guarded),
            lasting=lasting,
            check_deferred=self.watch([each for each in parameters_of(optimizers) if memory_at(each) in guarded]),
            check_shared=self.watch([each for each in tensors_in(live) if lasting is not None and lasting(each)]),
        )

    def capture_in_place(self) -> Taking:
        """Capture the present state to serve it from live memory; other parts are copied."""
        live, optimizers = self._state.content(), self._state.optimizers()
        stable = self.stable(live)
        guarded = self.guarded(optimizers) | stable
        check = self.watch(_versioned_tensors(live, optimizers, guarded))
        return Taking(
            step=self._state.step,
            state=live,
            deferrable=belongs_to(guarded, at_least_bytes=0),
            lasting=_lasting(stable, often_stepping(optimizers)),
            check_deferred=check,
            check_shared=check,
            max_held_bytes=_MAX_HELD_BYTES,
        )

    def capture_stable(self) -> Taking | None:
        """Capture the present state to serve the tensors that outlast steps from live memory; ``None`` without any.

        Steps change little else, which is copied. An arena for the whole state would have to be made resident.
        """
        live = self._state.content()
        stable = self.stable(live)
        if not stable:
            return None
        is_lasting = _lasting(stable, often_stepping(self._state.optimizers()))
        lasting = [each for each in tensors_in(live) if is_lasting(each)]
        num_bytes = sum({memory_at(each): each.nbytes for each in lasting}.values())
        check = self.watch(lasting)
        return Taking(
            step=self._state.step,
            state=live,
            deferrable=is_lasting,
            lasting=is_lasting,
            check_deferred=check,
            check_shared=check,
            max_held_bytes=int(num_bytes * _MOST_COPIED_SHARE),
        )

    def capture_copy(self, step: int, copied: BoundaryCopy) -> Taking:
        """Capture a copied boundary. On any thread."""
        live = copied.state()
        return Taking(
            step=step,
            state=live,
            deferrable=lambda _: True,
            lasting=_lasting(self.stable(live), often_stepping(copied.optimizers)),
            check_deferred=copied.check,
            check_shared=copied.check,
        )

    def _unguarded(self) -> set[Memory]:
        return self._moving | renormalised_memory(self.registry.holders(nn.Module).values())

    def _signature(self, optimizers: Sequence[Optimizer]) -> tuple[object, ...]:
        """Return the cheap inputs of a plan; other changes are found when the state is taken."""
        found: list[object] = [self.registry.num_changes]
        for optimizer in optimizers:
            found += (id(optimizer), len(optimizer.state))
            for group in optimizer.param_groups:
                params = group["params"]
                found += (id(params), len(params), id(params[0]) if params else 0)
        return tuple(found)

    def _note(self, part: OptimizerPart | CalledPart, plan: BoundaryPlan, watched: list[torch.Tensor]) -> object:
        budget = Budget()
        if isinstance(part, OptimizerPart):
            return [
                {name: frozen(value, plan.guarded, budget) for name, value in group.items() if name != "params"}
                for group in part.optimizer.param_groups
            ]
        value = self.registry.call(part.entry)
        guarded: Set[Memory] = plan.guarded
        if part.entry.is_stable:
            stable = list(tensors_in(value))
            watched += stable
            guarded = guarded | (memory_of(stable) - self._moving)
        return frozen(value, guarded, budget)


def _versioned_tensors(state: object, optimizers: Sequence[Optimizer], guarded: Set[Memory]) -> list[torch.Tensor]:
    """Return the guarded tensors that count their changes: the optimizers' own parameters, and stable tensors."""
    parameters = parameters_of(optimizers)
    own = {memory_at(parameter) for parameter in parameters}
    return [
        tensor
        for tensor in (*parameters, *(each for each in tensors_in(state) if memory_at(each) not in own))
        if memory_at(tensor) in guarded
    ]


def _lasting(stable: Set[Memory], optimizers: Sequence[Optimizer]) -> Callable[[torch.Tensor], bool]:
    """Return a check that a tensor is large, stable, and shares no memory with tensors that optimizer steps change."""
    is_stable, stepped = belongs_to(stable), storages_of_optimizers(optimizers)
    return lambda tensor: is_stable(tensor) and storage_of(tensor) not in stepped
