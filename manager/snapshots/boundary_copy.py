"""Copies, at each step boundary (before ``forward``), the part of the state that a later snapshot could no longer read.

With an asynchronous quorum, a replica learns during ``forward`` that a newcomer needs the state of the boundary. By
then ``forward`` may have changed buffers. So, in a quorum, `BoundaryCopier.copy` runs at every boundary:

- It copies the tensors of modules that something besides an attached optimizer may change: as a rule, a few buffers.
- It copies the values in the parameter groups of attached optimizers, such as learning rates.
- It calls the state functions of all other entries, and copies the results.
- It copies no guarded tensor. *Guarded* are the parameters and states of attached optimizers, and the tensors of
  entries that were registered as stable: only an optimizer's step or a write section changes them, and both wait for
  the snapshot.

`manager.snapshots.state_parts` lists the tensors to copy, once for many boundaries. If a request arrives, the state is
compared with that list: a tensor that is neither guarded nor copied makes the snapshot fail. If a request is open when
the boundary begins, one of the ``capture`` methods describes the present state instead.

So the cost of a boundary hardly depends on the number of parameters. For each parameter, a boundary reads its version
(0.1 to 0.5 µs, `manager.state.optimizer_states.VersionWatch`). If steps replace the tensors of optimizer states, it
also stores a reference to each (0.2 µs).
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
    CalledPart,
    ModulePart,
    NotCopyableError,
    OptimizerPart,
    ReplacedTensors,
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
"""Maximum bytes to copy at a boundary, as a fraction of the bytes served from live memory.

If more bytes have to be copied, a copy in the background delays the boundary less."""
_NUM_LEARNING_STEPS: Final = 3
"""Number of steps, after a new plan, in which the copier looks for parameters that ``forward`` changes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoundaryCopy:
    """The copied part of the state at one boundary.

    The training thread makes this object, and then passes it to the thread that takes the snapshot.

    Attributes:
        copier: The copier that made this object.
        plan: The list of what to copy at this boundary.
        optimizers: The attached optimizers.
        copies: Copies of the tensors that something besides the optimizers may change.
        values: Copied values of parameter groups, and copied results of state functions, by key of the entry.
        references: By key of the entry, tensors of optimizer states. Steps replace these tensors and never change them.
        counters: The committed step and the manager's other counters.
        check: Function that raises ``StateMovedError`` if something besides an optimizer's step has changed a tensor
            that was not copied.
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
        """Return the replica's state at the boundary.

        Call this once, while the boundary's read section is open.

        Raises:
            SnapshotError: Since the boundary, a tensor was replaced, or changed outside of an optimizer's step.
        """
        try:
            user = self._user_part()
        except NotCopyableError as error:
            self.copier.forget()
            raise SnapshotError(f"expected the state as it was at the step boundary, but {error}") from None
        self.check()
        return {USER_KEY: user, MANAGER_KEY: own_part(self.counters, self.copier.registry)}

    def recycle(self) -> None:
        """Let the next boundary reuse the memory of the copies."""
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
                            raise NotCopyableError(f"{key}.{slot.name} is missing from the module's state now")
                        state[slot.name] = next(copies)
                    self._check_known(key, [tensor for name, tensor in state.items() if name not in copied])
                case OptimizerPart():
                    state = part.entry.state_dict()
                    groups: Any = self.values[key]
                    if len(state["param_groups"]) != len(groups):
                        raise NotCopyableError(
                            f"the optimizer {key!r} had {len(groups)} parameter groups and has "
                            f"{len(state['param_groups'])} now"
                        )
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
                    raise NotCopyableError(f"a tensor of {part.entry.key!r} no longer belongs to an attached optimizer")
        return user

    def _check_known(self, key: str, live: object, references: Sequence[torch.Tensor] = ()) -> None:
        known = set(map(id, references))
        for tensor in tensors_in(live):
            if id(tensor) not in known and memory_at(tensor) not in self.plan.guarded:
                # From the next boundary on, the copier expects steps to replace tensors of this part.
                self.copier.replaced.found(key)
                raise NotCopyableError(
                    f"{key!r} has a tensor of shape {list(tensor.shape)} that it did not have at the boundary"
                )


class BoundaryCopier:
    """Copies, at each step boundary, the part of a replica's state that is not guarded.

    *Guarded* memory is memory that only an optimizer's step or a write section changes. Only the training thread may
    call the methods, except `capture_copy`.

    Attributes:
        registry: The replica's state functions.
        replaced: Records the parts of the state in which steps replace tensors.
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
        """Return the optimizers' memory, without the tensors that ``forward`` or a hook is known to change."""
        return memory_of_optimizers(optimizers) - self._unguarded()

    def stable(self, state: object) -> set[Memory]:
        """Return the memory of a replica's stable entries, which only write sections change."""
        whole = cast("Mapping[str, Mapping[str, object]]", state)
        parts = [whole[USER_KEY][entry.key] for entry in self.registry.entries("replicated") if entry.is_stable]
        return memory_of(parts) - self._unguarded() if parts else set()

    def values(self, state: object) -> dict[str, object]:
        """Return the values of parameter groups and schedulers in a replica's state, by key of the entry."""
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

        If a tensor has changed, later boundaries copy that tensor.
        """
        watch = VersionWatch(tensors)

        def check() -> None:
            moved = watch.moved()
            if moved:
                self._moving |= memory_of(moved)
                self.forget()
                names = names_of(self.registry.holders(nn.Module), moved)
                raise StateMovedError(
                    "expected tensors that only an optimizer's step or a write section changes, but "
                    f"{names} changed in place since the step boundary (a forward with max_norm, a "
                    "clipping hook?); later boundaries copy these tensors"
                )

        return check

    def forget(self) -> None:
        """Discard the plan; the next boundary makes a new one."""
        self._plan = None

    def copy(self) -> BoundaryCopy | None:
        """Copy the tensors and values that are not guarded. The caller holds the read lock.

        Returns:
            The copies, from which a snapshot of this boundary can be taken later; ``None`` if they would be too large.

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
            values, watched = plan.copied_values(self.registry, self._moving)
            references = self.replaced.references(plan.parts)
            copies = plan.copied()
        except NotCopyableError as error:
            plan.refuse(str(error))
            return None
        # Without further tensors, the plan's own list: a copy of the list would touch every tensor once more.
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
        """Stop looking for changes by ``forward`` in this step: a write section is about to change the state."""
        self._check_after_forward = None

    def learn_changes(self) -> None:
        """In the first steps of a plan, detect the tensors that ``forward`` has changed since the boundary.

        Call this before an optimizer steps.
        """
        check, self._check_after_forward = self._check_after_forward, None
        if check is not None:
            try:
                check()
            except StateMovedError as error:
                logger.info("%s", error)

    def capture(self, *, may_defer: bool, may_share: bool) -> Taking:
        """Describe a snapshot of the present state: what to copy now, what to copy later, and what to share.

        Args:
            may_defer: Whether a thread may copy the optimizers' memory later, under the caller's read section.
            may_share: Whether stable tensors may be served from live memory; ignored without ``may_defer``.
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
        """Describe a snapshot of the present state. It serves guarded tensors in place, and copies the others."""
        live, optimizers = self._state.content(), self._state.optimizers()
        stable = self.stable(live)
        guarded = self.guarded(optimizers) | stable
        parameters = parameters_of(optimizers)
        # Watches the parameters themselves rather than the state's views of them.
        own = memory_of(parameters)
        others = (each for each in tensors_in(live) if memory_at(each) not in own)
        check = self.watch([each for each in (*parameters, *others) if memory_at(each) in guarded])
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
        """Describe a snapshot of the present state. It serves stable tensors from live memory, and copies the others.

        The other tensors are small as a rule. A copy of the whole state would need an arena of the state's size.

        Returns:
            The description; ``None`` if the state has no stable tensors.
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
        """Describe a snapshot of a boundary that `copy` has copied. Any thread may call this."""
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
        """Return values that are cheap to compare. If they differ from those of a plan, the plan is outdated.

        A plan may be outdated for rarer reasons, too. A snapshot detects these.
        """
        found: list[object] = [self.registry.num_changes]
        for optimizer in optimizers:
            found += (id(optimizer), len(optimizer.state))
            for group in optimizer.param_groups:
                params = group["params"]
                found += (id(params), len(params), id(params[0]) if params else 0)
        return tuple(found)


def _lasting(stable: Set[Memory], optimizers: Sequence[Optimizer]) -> Callable[[torch.Tensor], bool]:
    """Return a predicate of a tensor: whether it is large and stable, and shares no storage with the optimizers."""
    is_stable, stepped = belongs_to(stable), storages_of_optimizers(optimizers)
    return lambda tensor: is_stable(tensor) and storage_of(tensor) not in stepped
