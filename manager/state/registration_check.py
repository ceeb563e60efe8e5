"""Checks that all trained state is registered, that snapshots can hold it, and that gradients did not overflow.

Otherwise replicas would train with different parameters, or fail hours later when one of them needs the state.

A scaler looks for infinities while it unscales, and skips a step if it finds one. In averaged gradients the scalers of
all replicas find the same. If a loop unscales gradients before it averages them, an overflow on one replica becomes an
infinity on all of them, but only that replica's scaler has seen it: the others step, and their weights become NaN.
"""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ft_transport import SnapshotError, check_encodable
from manager.errors import ManagerError, RegistryError
from manager.state.optimizer_guard import local_updates_of
from manager.state.optimizer_states import parameters_of, storage_of, tensors_in
from manager.state.registry import Scope, StateEntry, StateRegistry, listed

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SCALER_MODULE: Final = GradScaler.__module__
PLAIN: Final = (nn.Module, Optimizer, LRScheduler, GradScaler)
"""Classes whose state dicts have a known form."""


class EncodingCheck:
    """Finds leaves of the registered states that no snapshot can hold, before the first request for one.

    For the training thread, at a step boundary.

    Args:
        registry: The registered states.
        optimizers: Returns the attached optimizers.
        scopes: The scopes that are served or saved.
    """

    def __init__(
        self, registry: StateRegistry, optimizers: Callable[[], Sequence[Optimizer]], scopes: Sequence[Scope]
    ) -> None:
        self._registry = registry
        self._optimizers = optimizers
        self._scopes = scopes
        self._checked: tuple[int, ...] = ()
        self._num_boundaries = 0

    def check(self) -> None:
        """Check the states in the first two boundaries, after each registration, and when an optimizer's state grows.

        Tensors are checked from the second boundary on: the first step may allocate their memory. Raises a
        ``RegistryError`` that names the path of a leaf without an encoding.
        """
        self._num_boundaries += 1
        optimizers = self._optimizers()
        signature = (
            min(self._num_boundaries, 2),
            self._registry.num_changes,
            # If states appear one by one, a check at each doubling keeps the sum at twice the last check.
            *(number for each in optimizers for number in (id(each), len(each.state).bit_length())),
        )
        if signature == self._checked:
            return
        for entry in (each for scope in self._scopes for each in self._registry.entries(scope)):
            self._check(entry, with_tensors=self._num_boundaries > 1)
        self._checked = signature

    def _check(self, entry: StateEntry, *, with_tensors: bool) -> None:
        try:
            state = self._registry.call(entry)
        except RegistryError as error:
            logger.debug("the state of %r cannot be looked at: %s", entry.key, error)
            return
        try:
            check_encodable(state, with_tensors=with_tensors)
        except SnapshotError as error:
            path = error.path if error.path not in (None, "(root)") else ""
            raise RegistryError(
                f"expected a state that can be served to other replicas and saved; {entry.key}{'.' if path else ''}"
                f"{path}: {error.message}",
                keys=(entry.key,),
            ) from error


def check_registered(registry: StateRegistry, optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers, parameters and schedulers that no registered state contains.

    This covers attached and registered optimizers, other optimizers of parameters of a registered module that none of
    these has, and schedulers that have marked one of these. The search through all objects of the process (0.1 s for
    300,000) runs only if one of them seems to be missing.

    A user's own state functions may return copies, or an optimizer's state in another form. If there are any, a missing
    part causes a warning instead.

    Raises:
        RegistryError: Nothing is registered, or a trained part is not; the message names it.
    """
    entries = registry.entries("replicated")
    if not entries:
        raise RegistryError(
            "expected a registered state to keep equal on all replicas, got none; call "
            "manager.register('model', model) and manager.register('optimizer', optimizer) before start_quorum"
        )
    registered = registry.holders(Optimizer).values()
    try:
        state = {**registry.state_dict("local"), **registry.state_dict("replicated")}
    except RegistryError as error:
        logger.debug("what is registered cannot be compared with what is trained: %s", error)
        return
    known = {**dict.fromkeys(registered, "registered"), **dict.fromkeys(optimizers, "attached")}
    refuse_unregistered(
        registry,
        [
            *_missing_optimizers(registry, state, optimizers),
            *_missing_parameters(state, known),
            *_forgotten_optimizers(registry, state, known),
            *_forgotten_schedulers(registry, state, known),
        ],
    )


def check_averaged(registry: StateRegistry, optimizers: Sequence[Optimizer], tensors: Sequence[torch.Tensor]) -> None:
    """Refuse reduced tensors that are gradients of parameters neither registered nor an attached optimizer's.

    The search for such parameters runs only if a tensor is not the gradient of a known parameter.

    Raises:
        RegistryError: The message names the shapes of the parameters.
    """
    known = {id(each.grad) for each in [*registry.parameters(), *parameters_of(optimizers)]}
    unknown = {id(each): each.shape for each in tensors if id(each) not in known}
    if not unknown:
        return
    # Another thread may run backward, and reading a gradient that it replaces may crash the process: so this reads
    # parameters of these shapes alone, and none that another replica in this process has registered.
    others = {id(parameter) for other in _living(StateRegistry) for parameter in other.parameters()}
    # Leaves only: other tensors warn when their gradient is read.
    leaves = (each for each in _living(torch.Tensor) if each.requires_grad and each.is_leaf and id(each) not in others)
    candidates = (each for each in leaves if _has_shape_of(each, unknown.values()))
    parameters = {id(each.grad): each for each in candidates if id(each.grad) in unknown}
    found = [parameters[id(each)] for each in tensors if id(each) in parameters]
    if found:
        held = {storage_of(tensor) for tensor in tensors_in(registry.state_dict("replicated"))}
        missing = [f"a parameter {list(each.shape)}" for each in found if storage_of(each) not in held]
        refuse_unregistered(registry, [f"{each}, whose gradient is averaged" for each in missing])


def refuse_unregistered(registry: StateRegistry, missing: Sequence[str]) -> None:
    """Raise an error for missing parts, or warn if a registered function may return them.

    Raises:
        RegistryError: A part is missing, and no registered object can contain it.
    """
    if not missing:
        return
    entries = registry.entries("replicated")
    message = (
        f"expected everything that takes part in training to be registered, and this is not: "
        f"{listed(missing, '; ')}; without manager.register(key, object) replicas train on with different values"
    )
    if all(isinstance(entry.holder, PLAIN) for entry in entries):
        raise RegistryError(message, keys=tuple(entry.key for entry in entries))
    logger.warning("%s (a registered function may return it as a copy)", message)


def _missing_optimizers(
    registry: StateRegistry, state: Mapping[str, object], optimizers: Sequence[Optimizer]
) -> Iterator[str]:
    registered = {id(entry.holder) for entry in registry.entries()}
    attached = {id(optimizer) for optimizer in optimizers}
    # The state of a user's own function or of a wrapper may contain an optimizer's state.
    others = [state[entry.key] for entry in registry.entries() if id(entry.holder) not in attached]
    nested = [len(groups) for groups in _parameter_groups_in(others)]
    for index, optimizer in enumerate(dict.fromkeys(optimizers)):
        if id(optimizer) not in registered and len(optimizer.param_groups) not in nested:
            yield f"the attached optimizer {index} ({type(optimizer).__name__})"


def _mappings_in(value: object) -> Iterator[Mapping[str, object]]:
    """Yield a state and the mappings nested in it."""
    if isinstance(value, Mapping):
        yield value
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _mappings_in(item)


def _parameter_groups_in(value: object) -> Iterator[Sequence[object]]:
    yield from (groups for each in _mappings_in(value) if isinstance(groups := each.get("param_groups"), list))


def _missing_parameters(state: Mapping[str, object], optimizers: Mapping[Optimizer, str]) -> Iterator[str]:
    held = {storage_of(tensor) for tensor in tensors_in(state)}
    for optimizer, role in optimizers.items():
        for group_index, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter.numel() and storage_of(parameter) not in held:
                    name = f"parameter {index} of group {group_index} {list(parameter.shape)}"
                    yield f"{name} of the {role} {type(optimizer).__name__}"


def _forgotten_optimizers(
    registry: StateRegistry, state: Mapping[str, object], known: Mapping[Optimizer, str]
) -> Iterator[str]:
    """Yield optimizers of registered modules' parameters that are neither attached nor registered."""
    local = registry.holders(Optimizer, "local").values()
    stepped = {id(parameter) for parameter in parameters_of([*known, *local, *_wrapped(registry, Optimizer)])}
    unstepped = {
        id(parameter): key
        for key, module in registry.holders(nn.Module).items()
        for parameter in module.parameters()
        if parameter.requires_grad and id(parameter) not in stepped
    }
    if not unstepped or any(_parameter_groups_in(_of_unknown(registry, state))):
        return
    for optimizer in _living(Optimizer):
        groups = getattr(optimizer, "param_groups", ())
        keys = [unstepped[id(each)] for group in groups for each in group["params"] if id(each) in unstepped]
        # Between two synchronisations of LocalSGD or DiLoCo each replica has its own momentum.
        if keys and not any(local_updates_of(optimizer)):
            what = f"an optimizer of {len(keys)} parameters of {keys[0]!r} (drop it if it is not used)"
            yield f"{type(optimizer).__name__}, {what}"


def _forgotten_schedulers(
    registry: StateRegistry, state: Mapping[str, object], known: Mapping[Optimizer, str]
) -> Iterator[str]:
    """Yield unregistered schedulers of these optimizers. Schedulers mark ``step`` and add ``initial_lr`` to groups."""
    registered = [*registry.holders(LRScheduler, None).values(), *_wrapped(registry, LRScheduler)]
    marked = [
        optimizer
        for optimizer in known
        if (hasattr(optimizer.step, "_wrapped_by_lr_sched") or any("initial_lr" in g for g in optimizer.param_groups))
        and not any(_schedules(scheduler, optimizer) for scheduler in registered)
    ]
    if not marked or any("last_epoch" in each for each in _mappings_in(_of_unknown(registry, state))):
        return
    # Marks outlive their scheduler, and arrive with a received state.
    living = _living(LRScheduler)
    for optimizer in marked:
        kinds = sorted({type(scheduler).__name__ for scheduler in living if _schedules(scheduler, optimizer)})
        if kinds:
            scheduled = f"the {known[optimizer]} {type(optimizer).__name__}"
            yield f"{' and '.join(kinds)}, which sets the learning rates of {scheduled}"


def _schedules(scheduler: LRScheduler, optimizer: Optimizer) -> bool:
    scheduled = getattr(scheduler, "optimizer", None)
    # A wrapping optimizer shares the groups of the wrapped one.
    return scheduled is optimizer or getattr(scheduled, "param_groups", None) is optimizer.param_groups


def _of_unknown(registry: StateRegistry, state: Mapping[str, object]) -> list[object]:
    """Return the states of plain functions, and of objects that wrap neither an optimizer nor a scheduler."""
    return [
        state[entry.key]
        for entry in registry.entries()
        if not isinstance(entry.holder, PLAIN) and not any(_parts_of(entry.holder, (Optimizer, LRScheduler)))
    ]


def _wrapped(registry: StateRegistry, kind: type[T]) -> list[T]:
    """Return the optimizers or schedulers inside registered objects of other classes."""
    return [part for entry in registry.entries() for part in _parts_of(entry.holder, (kind,))]


def _parts_of(holder: object, kinds: tuple[type[T], ...]) -> Iterator[T]:
    """Yield an unknown object's attributes of these classes, also from lists and dicts."""
    if holder is None or isinstance(holder, PLAIN):
        return
    for value in getattr(holder, "__dict__", {}).values():
        inner = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
        yield from (each for each in inner if issubclass(type(each), kinds))


def _has_shape_of(tensor: torch.Tensor, shapes: Collection[torch.Size]) -> bool:
    try:
        return tensor.shape in shapes
    except RuntimeError:  # lazy parameters and nested tensors
        return False


def _living(kind: type[T]) -> list[T]:
    # Garbage may still wait for the collector on one replica and not on another.
    gc.collect()
    # `isinstance` would read ``__class__``, which runs the code of lazy modules.
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


class Scalers:
    """The scalers of a replica: registered ones, and those that have stepped one of its optimizers.

    For the training thread alone.
    """

    def __init__(self, registry: StateRegistry) -> None:
        self._registry = registry
        self._seen: weakref.WeakSet[GradScaler] = weakref.WeakSet()
        self._known_in_step: list[GradScaler] = []

    def known(self) -> list[GradScaler]:
        """Return them."""
        return [*self._registry.holders(GradScaler).values(), *self._seen]

    def check_stepping(self, optimizer: Optimizer) -> None:
        """Make sure that a scaler that is about to step this optimizer is registered. Takes some µs.

        Raises:
            RegistryError: It is not: its scale would differ on a replica that healed.
        """
        scaler = _calling_scaler()
        if scaler is None or not scaler.is_enabled() or scaler in self.known():
            return
        self._seen.add(scaler)
        entries = [entry for entry in self._registry.entries("replicated") if not isinstance(entry.holder, PLAIN)]
        if not any("growth_factor" in each for each in _mappings_in(list(map(self._registry.call, entries)))):
            missing = f"{type(scaler).__name__}, which steps {type(optimizer).__name__}: register('scaler', scaler)"
            refuse_unregistered(self._registry, [missing])

    def look(self) -> None:
        """Note the scalers for `refuse_unscaled`, once for the thousand tensors that a step may reduce one by one."""
        self._known_in_step = self.known()

    def refuse_unscaled(
        self, tensors: Sequence[torch.Tensor], optimizers: Callable[[], Iterable[Optimizer]], *, is_first: bool
    ) -> None:
        """Make sure that gradients are averaged before they are unscaled.

        Args:
            tensors: Tensors about to be averaged.
            optimizers: Returns those that are attached.
            is_first: Whether a tensor is the first of its step; it may be a bucket of gradients. Later ones may be no
                gradients.

        Raises:
            ManagerError: A scaler has unscaled one of them, or before the first reduction of a step any gradients.
        """
        for scaler in self._known_in_step:
            # A disabled scaler has no such attribute.
            for key, state in getattr(scaler, "_per_optimizer_states", {}).items():
                if state["stage"] is not OptState.UNSCALED:
                    continue
                optimizer = next((each for each in optimizers() if id(each) == key), None)
                unscaled = {id(each.grad) for each in parameters_of([optimizer] if optimizer is not None else [])}
                if is_first or any(id(tensor) in unscaled for tensor in tensors):
                    raise ManagerError(
                        "expected gradients that are still scaled, got some that scaler.unscale_ has unscaled already: "
                        "an overflow on one replica would be an infinity on all, and its scaler alone would skip the "
                        "step; average them first, and call scaler.unscale_, clipping, scaler.step and scaler.update "
                        "inside `if manager.should_commit():`"
                    )


def nonfinite_parameters(registry: StateRegistry, optimizers: Iterable[Optimizer]) -> list[str]:
    """Name the optimizers' parameters that have a NaN or an infinity. Reads all parameters: 0.05 s for each GiB."""
    names = {
        id(parameter): f"{key}.{name}"
        for key, module in registry.holders(nn.Module).items()
        for name, parameter in module.named_parameters()
    }
    parameters = {id(each): each for each in parameters_of([*registry.holders(Optimizer).values(), *optimizers])}
    return [
        names.get(key, f"a parameter {list(each.shape)}") for key, each in parameters.items() if not _is_finite(each)
    ]


def _is_finite(parameter: torch.Tensor) -> bool:
    local: torch.Tensor = getattr(parameter, "_local_tensor", parameter).detach()
    if not local.is_floating_point() or not local.numel():
        return True
    try:
        # A NaN makes both NaN. This allocates no tensor as large as the parameter.
        return all(bool(extreme.isfinite()) for extreme in torch.aminmax(local))
    except (NotImplementedError, RuntimeError):  # 8 bits, sparse tensors and other wrappers
        return True


def _calling_scaler() -> GradScaler | None:
    """Return the scaler in whose ``step`` this runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _SCALER_MODULE:
            caller: Any = frame.f_locals.get("self")
            return caller if isinstance(caller, GradScaler) else None
        frame = frame.f_back
    return None
