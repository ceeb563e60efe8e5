"""Copies at every step boundary what would otherwise be lost, so that a later request can still snapshot the boundary.

With an asynchronous quorum a replica learns during ``forward`` that a newcomer needs the state of the boundary before
it. Parameters and optimizer states wait for the optimizer; all else may have changed by then. A plan, made once, lists
the tensors that something besides an attached optimizer may change: buffers as a rule, and few. A boundary copies
these, notes the values in parameter groups, and calls the functions whose results are unknown. Everything else is
checked only when a request comes: a tensor that then turns out to be neither guarded nor copied refuses the snapshot.

So a boundary costs the same whatever the number of parameters, but for 0.1 to 0.5 µs a parameter for its version
(`manager.state.guarded_memory.VersionWatch`). If steps replace the tensors of optimizer states, a boundary also takes
references to them: 0.2 µs a parameter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ft_transport import SnapshotError, StateMovedError
from manager.snapshots.state_parts import (
    Budget,
    CalledPart,
    ModulePart,
    NotKeepableError,
    OptimizerPart,
    Part,
    ReplacedTensors,
    check_copyable,
    frozen,
    kind_of,
    names_of,
    renormalised_memory,
    tensors_of_module,
    tensors_of_stable_modules,
)
from manager.state.guarded_memory import (
    Memory,
    VersionWatch,
    memory_at,
    memory_of,
    memory_of_optimizers,
    parameters_of,
    tensors_in,
)
from manager.state.parameter_order import MANAGER_KEY, USER_KEY, own_part
from manager.state.registry import StateEntry, StateRegistry

logger = logging.getLogger(__name__)

_NUM_LEARNING_STEPS: Final = 3
"""Steps of a plan after which the parameters that ``forward`` changes are known, before any request."""


@dataclass(slots=True, kw_only=True)
class _Plan:
    """The plan of a boundary.

    Attributes:
        signature: Signature of the state that the plan was made for.
        parts: Parts of the state, in the order of registration.
        guarded: Memory that waits for an optimizer's step or a write section.
        watched: Tensors in it that count their changes.
        refusal: Why no boundary can be kept; empty if one can.
        spare: Buffers of the last boundary, if no snapshot took them.
    """

    signature: tuple[object, ...]
    parts: list[Part] = field(default_factory=list)
    guarded: frozenset[Memory] = frozenset()
    watched: list[torch.Tensor] = field(default_factory=list)
    refusal: str = ""
    spare: list[torch.Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptBoundary:
    """The copies and notes of one boundary. One thread at a time owns it: first the trainer's, then the snapshot's.

    Attributes:
        keeper: The keeper that made it.
        plan: The plan that the boundary followed.
        optimizers: The attached optimizers.
        copies: Copies of the tensors that something besides the optimizers may change.
        values: Values of parameter groups, and results of the called functions, by key.
        references: The tensors of optimizer states that steps replace, by key.
        counters: The manager's own part of the state.
        check: Raises if a tensor that was not copied has changed since, outside of an optimizer's step.
    """

    keeper: BoundaryKeeper
    plan: _Plan
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
        except NotKeepableError as error:
            self.keeper.forget()
            raise SnapshotError(f"expected the state of the step boundary, and {error}") from None
        self.check()
        return {USER_KEY: user, MANAGER_KEY: own_part(self.counters, self.keeper.registry)}

    def let_go(self) -> None:
        """Return the buffers for the next boundary."""
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
                    for name in part.names:
                        if name not in state:
                            raise NotKeepableError(f"{key}.{name} is gone")
                        state[name] = next(copies)
                    copied = set(part.names)
                    self._check_known(key, [tensor for name, tensor in state.items() if name not in copied])
                case OptimizerPart():
                    state = part.entry.state_dict()
                    groups: Any = self.values[key]
                    if len(state["param_groups"]) != len(groups):
                        raise NotKeepableError(f"the parameter groups of {key!r} have changed")
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
                    raise NotKeepableError(f"a tensor of {part.entry.key!r} is no longer an attached optimizer's")
        return user

    def _check_known(self, key: str, live: object, references: Sequence[torch.Tensor] = ()) -> None:
        known = set(map(id, references))
        for tensor in tensors_in(live):
            if id(tensor) not in known and memory_at(tensor) not in self.plan.guarded:
                # The next boundary expects steps that replace tensors.
                self.keeper.replaced.found(key)
                raise NotKeepableError(f"{key!r} has a tensor {list(tensor.shape)} that it did not have there")


class BoundaryKeeper:
    """Knows which memory of a replica's state is guarded, and copies the rest. Owned by the training thread.

    Args:
        registry: The replica's state functions.
        counters: Returns the manager's own part of the state.

    Attributes:
        registry: See the argument.
        replaced: Knows the parts whose tensors steps replace.
    """

    def __init__(self, registry: StateRegistry, counters: Callable[[], Mapping[str, object]]) -> None:
        self.registry = registry
        self._counters = counters
        self._plan: _Plan | None = None
        self._moving: set[Memory] = set()
        self._num_steps_to_learn = 0
        self._lesson: Callable[[], None] | None = None
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
                self.note_moving(moved)
                names = names_of(self.registry.entries("replicated"), moved)
                raise StateMovedError(
                    "expected tensors that only an optimizer's step or a write section changes, and "
                    f"{names} changed in place since the step boundary (a forward with max_norm, a "
                    "clipping hook?); from now on they are copied at the boundary"
                )

        return check

    def note_moving(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy these tensors at each boundary from now on: something besides their optimizer changes them."""
        self._moving |= memory_of(list(tensors))
        self.forget()

    def forget(self) -> None:
        """Make a new plan at the next boundary."""
        self._plan = None

    def keep(self, optimizers: Sequence[Optimizer]) -> KeptBoundary | None:
        """Copy everything that the optimizers' steps do not guard. The caller holds the read lock.

        Args:
            optimizers: The attached optimizers.

        Returns:
            The copies, from which the state of this boundary can be taken; ``None`` if too much would have to be
            copied.

        Raises:
            RegistryError: A state function failed.
        """
        self._lesson = None
        signature = self._signature(optimizers)
        plan = self._plan
        if plan is None or plan.signature != signature or self.replaced.is_in_module(plan.parts):
            if plan is not None or not self._moving:
                self._num_steps_to_learn = _NUM_LEARNING_STEPS
            plan = self._plan = self._make_plan(signature, optimizers)
        if plan.refusal:
            return None
        try:
            # A copy of the plan's list would touch every tensor once more.
            watched: list[torch.Tensor] = []
            noted = (part for part in plan.parts if not isinstance(part, ModulePart))
            values = {part.entry.key: self._note(part, plan, watched) for part in noted}
            references = self.replaced.references(plan.parts)
            copies = _copied(plan)
        except NotKeepableError as error:
            self._refuse(plan, str(error))
            return None
        counters = dict(self._counters())
        check = self.watch([*plan.watched, *watched] if watched else plan.watched)
        if self._num_steps_to_learn > 0:
            self._num_steps_to_learn -= 1
            self._lesson = check
        return KeptBoundary(
            keeper=self,
            plan=plan,
            optimizers=optimizers,
            copies=copies,
            values=values,
            references=references,
            counters=counters,
            check=check,
        )

    def forget_lesson(self) -> None:
        """Stop watching for changes by ``forward``: a write section changes the state from here on."""
        self._lesson = None

    def learn(self) -> None:
        """Find what ``forward`` has changed since the boundary, in a few steps; called before the optimizers step."""
        lesson, self._lesson = self._lesson, None
        if lesson is not None:
            try:
                lesson()
            except StateMovedError as error:
                logger.info("%s", error)

    # --------------------------------------------------------------------------------------------------------- inside

    def _unguarded(self) -> set[Memory]:
        return self._moving | renormalised_memory(self.registry.entries("replicated"))

    def _signature(self, optimizers: Sequence[Optimizer]) -> tuple[object, ...]:
        """Return the cheap inputs of a plan; other changes are found when the state is taken."""
        found: list[object] = [self.registry.num_changes]
        for optimizer in optimizers:
            found += (id(optimizer), len(optimizer.state))
            for group in optimizer.param_groups:
                params = group["params"]
                found += (id(params), len(params), id(params[0]) if params else 0)
        return tuple(found)

    def _make_plan(self, signature: tuple[object, ...], optimizers: Sequence[Optimizer]) -> _Plan:
        plan = _Plan(signature=signature)
        entries = self.registry.entries("replicated")
        kinds = {entry.key: kind_of(entry, optimizers) for entry in entries}
        stable = [entry.state_dict() for entry in entries if entry.is_stable and kinds[entry.key] is not None]
        plan.guarded = frozenset((memory_of_optimizers(optimizers) | memory_of(stable)) - self._unguarded())
        plan.watched = [
            tensor
            for tensor in [*parameters_of(optimizers), *tensors_of_stable_modules(entries)]
            if memory_at(tensor) in plan.guarded
        ]
        try:
            plan.parts = [self._part_of(entry, kinds[entry.key], plan) for entry in entries]
        except NotKeepableError as error:
            self._refuse(plan, str(error))
        return plan

    def _part_of(self, entry: StateEntry, kind: nn.Module | Optimizer | None, plan: _Plan) -> Part:
        match kind:
            case nn.Module():
                found = [
                    (name, location)
                    for name, location in tensors_of_module(kind)
                    if memory_at(location[0][location[1]]) not in plan.guarded
                ]
                tensors = [location[0][location[1]] for _, location in found]
                check_copyable(entry.key, tensors, kind)
                return ModulePart(
                    entry=entry,
                    names=tuple(name for name, _ in found),
                    locations=tuple(location for _, location in found),
                )
            case Optimizer():
                return OptimizerPart(entry=entry, optimizer=kind)
            case None:
                return CalledPart(entry=entry)

    def _note(self, part: OptimizerPart | CalledPart, plan: _Plan, watched: list[torch.Tensor]) -> object:
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

    @staticmethod
    def _refuse(plan: _Plan, reason: str) -> None:
        plan.refusal = reason
        logger.debug("a newcomer waits for one step, because the state of a boundary cannot be kept: %s", reason)


def _copied(plan: _Plan) -> list[torch.Tensor]:
    sources = [
        location[0][location[1]] for part in plan.parts if isinstance(part, ModulePart) for location in part.locations
    ]
    if any(source is None for source in sources):
        raise NotKeepableError("a buffer is gone")
    spare, plan.spare = plan.spare, None
    had_gradients = torch.is_grad_enabled()
    try:
        # Not ``torch.no_grad``: a signal handler that raises in its functions may leave gradients turned off.
        torch._C._set_grad_enabled(False)
        if spare is not None and all(
            copy_.shape == source.shape and copy_.dtype is source.dtype and copy_.device == source.device
            for copy_, source in zip(spare, sources, strict=True)
        ):
            if spare:
                torch._foreach_copy_(spare, sources)
            return spare
        made: dict[Memory | None, torch.Tensor] = {}
        # Shared tensors stay shared.
        return [made.setdefault(memory_at(source), source.detach().clone()) for source in sources]
    finally:
        torch._C._set_grad_enabled(had_gradients)
