"""The parts of a replica's state: finds those that are known without calling their functions, and copies the others."""

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
from manager.state.registry import StateEntry, listed

logger = logging.getLogger(__name__)

MAX_COPIED_BYTES: Final = 16 << 20
"""Maximum bytes copied at every boundary for a snapshot that may never be needed: about 2 ms."""
_MAX_CALLED_TENSORS: Final = 64
"""Maximum tensors that a function may return which is called at every boundary."""
_NUM_LOSSES: Final = 2
_ATOMS: Final = (bool, int, float, complex, str, bytes, type(None))


class Slot(NamedTuple):
    """The place where a module stores a tensor, which it may replace.

    Attributes:
        name: Name of the tensor in the module's state.
        tensors: The parameters or buffers of a submodule.
        key: Name of the tensor in the submodule.
    """

    name: str
    tensors: dict[str, Any]
    key: str

    @property
    def tensor(self) -> Any:
        """The present tensor."""
        return self.tensors[self.key]


class NotCopyableError(Exception):
    """A boundary of this state cannot be kept; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePart:
    """A module whose state is its parameters and buffers; those in ``slots`` are copied at the boundary."""

    entry: StateEntry
    slots: Sequence[Slot]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerPart:
    """An attached optimizer: its states wait for its step, its parameter groups are noted."""

    entry: StateEntry
    optimizer: Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledPart:
    """A state function that is called at the boundary, because its result is unknown."""

    entry: StateEntry


Part: TypeAlias = ModulePart | OptimizerPart | CalledPart


class ReplacedTensors:
    """The parts of a state whose tensors steps replace, instead of changing them in place.

    At every boundary one state of each optimizer is checked; replaced tensors elsewhere show when a boundary could not
    be kept.
    """

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._samples: dict[str, list[weakref.ref[torch.Tensor]]] = {}
        self._num_losses: Counter[str] = Counter()

    def found(self, key: str) -> None:
        """Note that a step has replaced tensors of a part."""
        self._keys.add(key)

    def is_in_module(self, parts: Sequence[Part]) -> bool:
        """Return whether steps give parameters other memory (``parameter.data = …``).

        Each boundary needs a new plan then.
        """
        return any(isinstance(part, ModulePart) and part.entry.key in self._keys for part in parts)

    def references(self, parts: Sequence[Part]) -> dict[str, list[torch.Tensor]]:
        """Return the tensors in the states of optimizers that replace them; a reference keeps them unchanged.

        Args:
            parts: Parts of the state.
        """
        found: dict[str, list[torch.Tensor]] = {}
        for part in parts:
            if isinstance(part, OptimizerPart):
                key, state = part.entry.key, part.optimizer.state
                if key in self._keys or self._shows_loss(key, state):
                    found[key] = _tensors_of_states(state.values())
        return found

    def _shows_loss(self, key: str, state: Mapping[Any, object]) -> bool:
        """Return whether the first state has lost tensors twice.

        Some steps replace them seldom, and a load does so once.
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
class Budget:
    """The memory and tensors that one function's state has taken at a boundary."""

    num_tensors: int = 0
    num_bytes: int = 0

    def take(self, tensor: torch.Tensor, *, is_copied: bool) -> None:
        """Count one tensor.

        Raises:
            NotCopyableError: The budget is exhausted.
        """
        self.num_tensors += 1
        self.num_bytes += tensor.nbytes if is_copied else 0
        if self.num_tensors > _MAX_CALLED_TENSORS or self.num_bytes > MAX_COPIED_BYTES:
            raise NotCopyableError(
                f"a state function returns more than {_MAX_CALLED_TENSORS} tensors, or {MAX_COPIED_BYTES} bytes that "
                "no attached optimizer guards; register modules and optimizers themselves"
            )


def _kind_of(entry: StateEntry, optimizers: Sequence[Optimizer]) -> nn.Module | Optimizer | None:
    """Return the object behind an entry, if its state is known without calling it."""
    holder = entry.holder
    if entry.on_training_thread or getattr(entry.state_dict, "__self__", None) is not holder:
        return None
    if isinstance(holder, Optimizer) and any(holder is attached for attached in optimizers):
        is_plain = type(holder).state_dict is Optimizer.state_dict and not (
            holder._optimizer_state_dict_pre_hooks or holder._optimizer_state_dict_post_hooks
        )
        return holder if is_plain else None
    if isinstance(holder, nn.Module) and all(map(_is_plain_module, holder.modules())):
        return holder
    return None


def _is_plain_module(module: nn.Module) -> bool:
    kind = type(module)
    return (
        kind.state_dict is nn.Module.state_dict
        and kind._save_to_state_dict is nn.Module._save_to_state_dict
        and kind.get_extra_state is nn.Module.get_extra_state
        and not module._state_dict_hooks
        and not module._state_dict_pre_hooks
    )


def _slots_of(module: nn.Module) -> list[Slot]:
    """Return the tensors in the state of a plain module (``torch.nn.Module._save_to_state_dict``)."""
    return [
        Slot(f"{prefix}.{name}" if prefix else name, tensors, name)
        for prefix, part in module.named_modules(remove_duplicate=False)
        for tensors in (part._parameters, part._buffers)
        for name, tensor in tensors.items()
        if tensor is not None and not (tensors is part._buffers and name in part._non_persistent_buffers_set)
    ]


def renormalised_memory(modules: Iterable[nn.Module]) -> set[Memory]:
    """Return the memory of weights that torch's own modules change in ``forward``."""
    weights = [
        module.weight
        for holder in modules
        for module in holder.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
    ]
    return memory_of(weights)


def names_of(modules: Mapping[str, nn.Module], tensors: Sequence[torch.Tensor]) -> str:
    """Name tensors by their places in registered modules, for a message."""
    wanted = {id(tensor) for tensor in tensors}
    names = [
        f"{key}.{name}"
        for key, module in modules.items()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        if id(tensor) in wanted
    ]
    unnamed = len(tensors) - len(names)
    return listed(names + ([f"{unnamed} without a name"] if unnamed > 0 else []))


def _check_copyable(key: str, tensors: Sequence[torch.Tensor], module: nn.Module) -> None:
    """Check that copies equal the state: the tensors are plain, small, and have memory of their own."""
    if sum(tensor.nbytes for tensor in tensors) > MAX_COPIED_BYTES:
        raise NotCopyableError(f"{key!r} has more than {MAX_COPIED_BYTES} bytes that no attached optimizer guards")
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
        raise NotCopyableError(f"{key!r} has buffers that share memory, or are not dense and row-major")


def frozen(value: object, guarded: Set[Memory], budget: Budget) -> Any:
    """Return a copy that nothing changes any more; guarded tensors are returned themselves."""
    match value:
        case torch.Tensor():
            is_guarded = memory_at(value) in guarded
            budget.take(value, is_copied=not is_guarded)
            # A DTensor's own clone dispatches collectively.
            if is_guarded:
                return value
            if hasattr(value, "_local_tensor"):
                raise NotCopyableError("a state function returns a DTensor that no attached optimizer guards")
            return value.detach().clone().requires_grad_(value.requires_grad)
        case dict() if type(value) is dict:
            return {key: frozen(item, guarded, budget) for key, item in value.items()}
        case list() if type(value) is list:
            return [frozen(item, guarded, budget) for item in value]
        case tuple() if type(value) is tuple:
            if all(type(item) in _ATOMS for item in value):
                return value
            return tuple(frozen(item, guarded, budget) for item in value)
        case _ if type(value) in _ATOMS:
            return value
        case Mapping():
            result = copy.copy(value)
            for key, item in value.items():
                result[key] = frozen(item, guarded, budget)  # type: ignore[index]
            return result
        case _:
            return copy.deepcopy(value)


@dataclass(slots=True, kw_only=True)
class BoundaryPlan:
    """The plan of a boundary: lists the tensors to copy, made once for many boundaries.

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

    @classmethod
    def make(
        cls,
        signature: tuple[object, ...],
        entries: Sequence[StateEntry],
        optimizers: Sequence[Optimizer],
        unguarded: Set[Memory],
    ) -> BoundaryPlan:
        """Make a plan for the registered states; ``unguarded`` is memory that changes without an optimizer's step."""
        plan = cls(signature=signature)
        kinds = {entry.key: _kind_of(entry, optimizers) for entry in entries}
        stable = [entry.state_dict() for entry in entries if entry.is_stable and kinds[entry.key] is not None]
        plan.guarded = frozenset((memory_of_optimizers(optimizers) | memory_of(stable)) - unguarded)
        modules = [entry.holder for entry in entries if entry.is_stable and isinstance(entry.holder, nn.Module)]
        in_modules = [slot.tensor for module in modules for slot in _slots_of(module)]
        # A module and its optimizer list the same parameters, and each takes 0.1 to 0.5 µs at a boundary.
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
        """Copy no boundary with this plan."""
        self.refusal = reason
        logger.debug("a newcomer waits for one step, because a boundary cannot be copied: %s", reason)

    def copied(self) -> list[torch.Tensor]:
        """Copy the tensors that something besides the optimizers may change; reuse the last boundary's buffers."""
        sources = [slot.tensor for part in self.parts if isinstance(part, ModulePart) for slot in part.slots]
        if any(source is None for source in sources):
            raise NotCopyableError("a buffer is gone")
        spare, self.spare = self.spare, None
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
