"""Lists which tensors of a replica's state a step boundary copies (`BoundaryPlan`), and copies them.

An entry of the registry is one of three kinds of part, which a boundary treats differently:

- `ModulePart`, a plain module: the boundary copies its tensors that are not guarded, up to 16 MiB.
- `OptimizerPart`, a plain attached optimizer: the boundary copies the values of its parameter groups. Its states are
  guarded by the optimizer's step, and are not copied.
- `CalledPart`, any other entry: the boundary calls the state function and copies the result, but no guarded tensors.
  More than 64 tensors or 16 MiB are too much.

If a part cannot be copied, the plan is refused, and a newcomer waits for the next boundary
(`manager.snapshots.boundary_copy` explains *guarded*, and when a boundary copies).
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from manager.state.optimizer_states import (
    Memory,
    memory_at,
    memory_of,
    memory_of_optimizers,
    parameters_of,
    storage_of,
    tensors_in,
)
from manager.state.registry import StateEntry, StateRegistry, listed

logger = logging.getLogger(__name__)

MAX_COPIED_BYTES: Final = 16 << 20
"""Maximum bytes of one part that every boundary copies, for a snapshot that may never be needed: about 2 ms."""
_MAX_CALLED_TENSORS: Final = 64
"""Maximum number of tensors in the result of a state function that every boundary calls."""
_NUM_LOSSES: Final = 2
"""Boundaries at which an optimizer's first state must have lost tensors before its steps count as replacing them."""
_ATOMS: Final = (bool, int, float, complex, str, bytes, type(None))


class Slot(NamedTuple):
    """The position of a tensor in a module. The module may put another tensor there.

    Attributes:
        name: Name of the tensor in the module's state.
        tensors: The dict of parameters or of buffers of a submodule.
        key: Key of the tensor in ``tensors``.
    """

    name: str
    tensors: dict[str, Any]
    key: str

    @property
    def tensor(self) -> Any:
        """The tensor in this position now."""
        return self.tensors[self.key]


class NotCopyableError(Exception):
    """A boundary cannot copy this state, or a snapshot cannot use the copy; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePart:
    """A module whose state is its parameters and buffers; the boundary copies the tensors in ``slots``."""

    entry: StateEntry
    slots: Sequence[Slot]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerPart:
    """An attached optimizer: the boundary copies the values of its parameter groups, but not its states."""

    entry: StateEntry
    optimizer: Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledPart:
    """An entry whose state function the boundary calls, because its state cannot be known without a call."""

    entry: StateEntry


Part: TypeAlias = ModulePart | OptimizerPart | CalledPart


class ReplacedTensors:
    """Records the parts of a state in which steps replace tensors, instead of changing the tensors in place.

    At every boundary, `references` checks one state of each optimizer. Snapshots report other replaced tensors to
    `found`.
    """

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._samples: dict[str, list[weakref.ref[torch.Tensor]]] = {}
        self._num_losses: Counter[str] = Counter()

    def found(self, key: str) -> None:
        """Record that a step has replaced tensors of the part ``key``."""
        self._keys.add(key)

    def is_in_module(self, parts: Sequence[Part]) -> bool:
        """Return whether steps have replaced tensors of a module. If so, each boundary needs a new plan."""
        return any(isinstance(part, ModulePart) and part.entry.key in self._keys for part in parts)

    def references(self, parts: Sequence[Part]) -> dict[str, list[torch.Tensor]]:
        """Return the state tensors of those optimizers whose steps replace these tensors, by key of the part.

        While a reference exists, a replaced tensor keeps its memory and so its value.
        """
        found: dict[str, list[torch.Tensor]] = {}
        for part in parts:
            if isinstance(part, OptimizerPart):
                key, state = part.entry.key, part.optimizer.state
                if key in self._keys or self._has_lost_tensors(key, state):
                    found[key] = _tensors_of_states(state.values())
        return found

    def _has_lost_tensors(self, key: str, state: Mapping[Any, object]) -> bool:
        """Return whether tensors of an optimizer's first state were replaced between boundaries, at least twice.

        Once is not enough: a load also replaces the tensors.
        """
        before = self._samples.get(key, [])
        self._samples[key] = [weakref.ref(tensor) for tensor in _tensors_of_states(islice(state.values(), 1))]
        is_lost = any(reference() is None for reference in before)
        self._num_losses[key] += is_lost
        if self._num_losses[key] >= _NUM_LOSSES:
            self._keys.add(key)
        return key in self._keys


def _tensors_of_states(states: Iterable[object]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for values in states:
        for value in values.values() if type(values) is dict else (values,):
            if type(value) is torch.Tensor:
                found.append(value)
            else:
                found.extend(tensors_in(value))
    return found


@dataclass(slots=True)
class _Budget:
    """Counts the tensors and the copied bytes in the result of one state function, and limits both."""

    num_tensors: int = 0
    num_bytes: int = 0

    def add(self, tensor: torch.Tensor, *, is_copied: bool) -> None:
        """Count one tensor; raise ``NotCopyableError`` if the result has too many tensors or bytes to copy."""
        self.num_tensors += 1
        self.num_bytes += tensor.nbytes if is_copied else 0
        if self.num_tensors > _MAX_CALLED_TENSORS or self.num_bytes > MAX_COPIED_BYTES:
            raise NotCopyableError(
                f"a state function returns more than {_MAX_CALLED_TENSORS} tensors, or more than {MAX_COPIED_BYTES} "
                "bytes outside of attached optimizers; register the modules and optimizers themselves"
            )


def _kind_of(entry: StateEntry, optimizers: Sequence[Optimizer]) -> nn.Module | Optimizer | None:
    """Return the module or optimizer of an entry whose state is known without a call; ``None`` for other entries."""
    holder = entry.holder
    if entry.on_training_thread or getattr(entry.state_dict, "__self__", None) is not holder:
        return None
    if isinstance(holder, Optimizer) and any(holder is attached for attached in optimizers):
        is_plain = type(holder).state_dict is Optimizer.state_dict and not (
            holder._optimizer_state_dict_pre_hooks or holder._optimizer_state_dict_post_hooks
        )
        return holder if is_plain else None
    if isinstance(holder, nn.Module) and all(map(is_plain_module, holder.modules())):
        return holder
    return None


def is_plain_module(module: nn.Module) -> bool:
    """Return whether the state of a module, without its children, is its live tensors and nothing else."""
    return has_torch_state(module) and not (module._state_dict_hooks or module._state_dict_pre_hooks)


def has_torch_state(module: nn.Module) -> bool:
    """Return whether the state of a module, without its children, is that of torch: no functions of a user make it.

    FSDP2's hooks, which exist after the first ``forward``, only put the sharded parameters into their places.
    """
    kind = type(module)
    hooks = (*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values())
    return (
        kind.state_dict is nn.Module.state_dict
        and kind._save_to_state_dict is nn.Module._save_to_state_dict
        and kind.get_extra_state is nn.Module.get_extra_state
        and all(str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp") for hook in hooks)
    )


def _slots_of(module: nn.Module) -> list[Slot]:
    """Return the positions of the tensors in a plain module's state, as ``Module._save_to_state_dict`` lists them."""
    return [
        Slot(f"{prefix}.{name}" if prefix else name, tensors, name)
        for prefix, part in module.named_modules(remove_duplicate=False)
        for tensors in (part._parameters, part._buffers)
        for name, tensor in tensors.items()
        if tensor is not None and not (tensors is part._buffers and name in part._non_persistent_buffers_set)
    ]


def renormalised_memory(modules: Iterable[nn.Module]) -> set[Memory]:
    """Return the memory of embedding weights that torch renormalizes in ``forward`` (``max_norm``)."""
    weights = [
        module.weight
        for holder in modules
        for module in holder.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
    ]
    return memory_of(weights)


def names_of(modules: Mapping[str, nn.Module], tensors: Sequence[torch.Tensor]) -> str:
    """Return the names of tensors in registered modules as one text, for a message."""
    wanted = {id(tensor) for tensor in tensors}
    names = [
        f"{key}.{name}"
        for key, module in modules.items()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        if id(tensor) in wanted
    ]
    unnamed = len(tensors) - len(names)
    return listed(names + ([f"{unnamed} tensors without a name"] if unnamed > 0 else []))


def _check_copyable(key: str, tensors: Sequence[torch.Tensor], module: nn.Module) -> None:
    """Raise ``NotCopyableError`` unless a module's tensors are small, dense, and share no memory with other tensors."""
    if sum(tensor.nbytes for tensor in tensors) > MAX_COPIED_BYTES:
        raise NotCopyableError(f"{key!r} has more than {MAX_COPIED_BYTES} bytes outside of attached optimizers")
    copied = {memory_at(tensor) for tensor in tensors}
    storages = {storage_of(tensor) for tensor in tensors if tensor.nbytes}
    others = {memory_at(slot.tensor) for slot in _slots_of(module) if storage_of(slot.tensor) in storages}
    if others - copied or any(
        type(tensor) not in (torch.Tensor, nn.Parameter)
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or not tensor.is_contiguous()
        or tensor.is_neg()
        or tensor.is_conj()
        for tensor in tensors
    ):
        raise NotCopyableError(f"{key!r} has buffers that share memory, or that are not dense and row-major")


def _frozen(value: object, guarded: Set[Memory], budget: _Budget) -> Any:
    """Return a deep copy of ``value``, but with the guarded tensors themselves instead of copies of them."""
    match value:
        case torch.Tensor():
            is_guarded = memory_at(value) in guarded
            budget.add(value, is_copied=not is_guarded)
            if is_guarded:
                return value
            # The clone of a DTensor would run collectives.
            if hasattr(value, "_local_tensor"):
                raise NotCopyableError("a state function returns a DTensor that belongs to no attached optimizer")
            return value.detach().clone().requires_grad_(value.requires_grad)
        case dict() if type(value) is dict:
            return {key: _frozen(item, guarded, budget) for key, item in value.items()}
        case list() if type(value) is list:
            return [_frozen(item, guarded, budget) for item in value]
        case tuple() if type(value) is tuple:
            if all(type(item) in _ATOMS for item in value):
                return value
            return tuple(_frozen(item, guarded, budget) for item in value)
        case _ if type(value) in _ATOMS:
            return value
        case Mapping():
            result = copy.copy(value)
            for key, item in value.items():
                result[key] = _frozen(item, guarded, budget)  # type: ignore[index]
            return result
        case _:
            return copy.deepcopy(value)


@dataclass(slots=True, kw_only=True)
class BoundaryPlan:
    """The tensors to copy at a boundary. One plan serves many boundaries.

    Attributes:
        signature: Cheap description of the registered objects. When it changes, a new plan is needed.
        parts: Parts of the state, in the order of registration.
        guarded: Memory that only an optimizer's step or a write section changes.
        watched: Tensors in guarded memory. Their versions show if other code has changed them.
        refusal: Why a boundary cannot copy this state; empty if it can.
        spare: Copies of the last boundary, to overwrite at the next one; ``None`` if a snapshot uses them.
    """

    signature: tuple[object, ...]
    parts: list[Part] = field(default_factory=list)
    guarded: frozenset[Memory] = frozenset()
    watched: list[torch.Tensor] = field(default_factory=list)
    refusal: str = ""
    spare: list[torch.Tensor] | None = None

    @classmethod
    def make(
        cls,
        signature: tuple[object, ...],
        entries: Sequence[StateEntry],
        optimizers: Sequence[Optimizer],
        unguarded: Set[Memory],
    ) -> BoundaryPlan:
        """Make a plan for registered entries; ``unguarded`` is memory that also changes outside of optimizer steps."""
        plan = cls(signature=signature)
        kinds = {entry.key: _kind_of(entry, optimizers) for entry in entries}
        stable = [entry.state_dict() for entry in entries if entry.is_stable and kinds[entry.key] is not None]
        plan.guarded = frozenset((memory_of_optimizers(optimizers) | memory_of(stable)) - unguarded)
        modules = [entry.holder for entry in entries if entry.is_stable and isinstance(entry.holder, nn.Module)]
        in_modules = [slot.tensor for module in modules for slot in _slots_of(module)]
        # A module and its optimizer list the same parameters. Each listed parameter costs a boundary 0.1 to 0.5 µs.
        trained = {id(each): each for each in [*parameters_of(optimizers), *in_modules]}
        plan.watched = [each for each in trained.values() if memory_at(each) in plan.guarded]
        try:
            plan.parts = [plan._part_of(entry, kinds[entry.key]) for entry in entries]
        except NotCopyableError as error:
            plan.refuse(str(error))
        return plan

    def _part_of(self, entry: StateEntry, kind: nn.Module | Optimizer | None) -> Part:
        match kind:
            case nn.Module():
                slots = [slot for slot in _slots_of(kind) if memory_at(slot.tensor) not in self.guarded]
                _check_copyable(entry.key, [slot.tensor for slot in slots], kind)
                return ModulePart(entry=entry, slots=slots)
            case Optimizer():
                return OptimizerPart(entry=entry, optimizer=kind)
            case None:
                return CalledPart(entry=entry)

    def refuse(self, reason: str) -> None:
        """Disable this plan: step boundaries that use it copy nothing. ``reason`` says why."""
        self.refusal = reason
        logger.debug("a newcomer has to wait for the next step, because this boundary cannot be copied: %s", reason)

    def copied_values(
        self, registry: StateRegistry, moving: Set[Memory]
    ) -> tuple[dict[str, object], list[torch.Tensor]]:
        """Copy the values of parameter groups, and the results of the state functions that a boundary calls.

        ``moving`` is memory that was expected to be stable, but changed outside of write sections.

        Returns:
            The copies, by key of the entry; and the stable tensors in the functions' results.
        """
        copied: dict[str, object] = {}
        watched: list[torch.Tensor] = []
        for part in self.parts:
            key, guarded, budget = part.entry.key, self.guarded, _Budget()
            if isinstance(part, OptimizerPart):
                copied[key] = [
                    {name: _frozen(value, guarded, budget) for name, value in group.items() if name != "params"}
                    for group in part.optimizer.param_groups
                ]
            elif isinstance(part, CalledPart):
                value = registry.call(part.entry)
                if part.entry.is_stable:
                    stable = list(tensors_in(value))
                    watched += stable
                    guarded |= memory_of(stable) - moving
                copied[key] = _frozen(value, guarded, budget)
        return copied, watched

    def copied(self) -> list[torch.Tensor]:
        """Copy the modules' tensors that are not guarded, into the memory of the last boundary's copies if possible."""
        sources = [slot.tensor for part in self.parts if isinstance(part, ModulePart) for slot in part.slots]
        if any(source is None for source in sources):
            raise NotCopyableError("a module has replaced a buffer by None")
        spare, self.spare = self.spare, None
        had_gradients = torch.is_grad_enabled()
        try:
            # Not ``torch.no_grad``: if a signal handler raises inside it, gradients may stay turned off.
            torch._C._set_grad_enabled(False)
            if spare is not None and all(
                copy_.shape == source.shape and copy_.dtype is source.dtype and copy_.device == source.device
                for copy_, source in zip(spare, sources, strict=True)
            ):
                if spare:
                    torch._foreach_copy_(spare, sources)
                return spare
            made: dict[Memory | None, torch.Tensor] = {}
            # Tensors that share memory share one copy.
            return [made.setdefault(memory_at(source), source.detach().clone()) for source in sources]
        finally:
            torch._C._set_grad_enabled(had_gradients)
